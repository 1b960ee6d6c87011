"""Attention of one rank's receivers along a graph whose tokens are spread over several ranks.

Its own senders are heard while others travel; the results, over disjoint in-edges, are merged by log-sum-exp (``edges.merge``).
"halo": only senders that are heard travel, in one all-to-all. "gather": all senders come at once. "ring": the senders of each
rank are handed on from rank to rank, and heard while the next ones come.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import distributed, nn

from gnn_attention import edges
from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Bool, Float, Tensor
from gnn_attention.attend import attended
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.backends.call import Call
from gnn_attention.backends.dispatch import choose
from gnn_attention.backends.dropout import dropped
from gnn_attention.distributed import subgraphs
from gnn_attention.distributed.collectives import Flight, agree, finish, from_first, moved, start, tied
from gnn_attention.distributed.halo_sets import halo_sizes
from gnn_attention.distributed.partition import Partition
from gnn_attention.distributed.planner import plan
from gnn_attention.distributed.rank_graph import RankGraph
from gnn_attention.distributed.subgraphs import Piece, Travel
from gnn_attention.graph import TokenGraph, kept
from gnn_attention.score_mods import ScoreMod

__all__ = ["EXCHANGES", "check_backend", "choice", "in_parts", "placed", "run", "tell_trouble", "with_bias"]

EXCHANGES = ("auto", "halo", "ring", "gather")
TOLD_POSITIONS = ("dense", "tiles", "rows", "reference")  # backends that ask the call which edges are dropped
PROBES = 4096  # pairs at which ranks compare their rules
WORDS = ("graph", "partition", "exchange", "backend", "q, k and v", "gradients", "options")  # what all ranks must give alike

Result = tuple[Tensor, Tensor]  # out in float32 or better, lse


@not_compiled
def run(call: Call, backend: str | Backend) -> Result:
    """``out [B, Hq, own dst, Dv]`` in the dtype of q and ``lse`` of a call on a :class:`RankGraph`. A collective.

    ``torch.compile`` breaks its graph here, and compiles nothing inside: what ranks tell each other is no part of a program.
    """
    eager: Any = _run
    if "torch._dynamo" in sys.modules:  # else there is no compiler
        eager = torch.compiler.disable(_run)  # type: ignore[no-untyped-call]
    result: Result = eager(call, backend)
    return result


def _run(call: Call, backend: str | Backend) -> Result:
    graph: Any = call.graph
    assert isinstance(graph, RankGraph)
    check_backend(backend)
    dtype, way = call.q.dtype, choice(call) if graph.exchange == "auto" else graph.exchange
    _agree(call, graph, way, backend)
    call = _with_first_seed(in_parts(call), graph.group)
    out, lse = (_ring if way == "ring" else _at_once)(call, graph, way, backend, dtype)
    if call.sink_logits is not None:
        out, lse = edges.add_sinks(out, lse, call.sink_logits, _heard(graph, way).to(out.device))
    return out.to(dtype), lse


def in_parts(call: Call) -> Call:
    """The call in the dtype of parts, which are merged: float32 for halves on a CPU, where kernels compute in it anyway.

    On CUDA halves stay halves, and each part is rounded to them, for the sake of their matrix units.
    """
    if call.q.device.type != "cpu":
        return call
    wide = edges.accumulation_dtype(call.q.dtype)
    return replace(call, q=call.q.to(wide), k=call.k.to(wide), v=call.v.to(wide))


def choice(call: Call) -> str:
    """What "auto" takes: the way of the least estimated time, as :func:`plan` tells; the same on every rank, without a word."""
    graph: Any = call.graph
    batch, heads, _, dim = call.q.shape
    setting = (heads, dim, call.k.shape[1], call.v.shape[3], batch, call.k.dtype, call.q.device.type)
    way: str = kept(_chosen, graph.whole, graph.partition, *setting)
    return way


def _chosen(
    graph: TokenGraph,
    partition: Partition,
    heads: int,
    dim: int,
    kv_heads: int,
    value_dim: int,
    batch: int,
    dtype: torch.dtype,
    kind: str,
) -> str:
    device, link = ("cpu", "loopback") if kind == "cpu" else ("H200", "infiniband-ndr")
    sizes: dict[str, Any] = {"kv_heads": kv_heads, "value_dim": value_dim, "batch": batch, "dtype": dtype}
    return plan(graph, partition.world_size, heads, dim, link, device=device, partition=partition, **sizes).exchange


# -- the ways ---------------------------------------------------------------------------------------------------------


def _at_once(call: Call, graph: RankGraph, way: str, backend: str | Backend, dtype: torch.dtype) -> Result:
    """Own senders while the others travel, in ``dtype``, then those that arrived."""
    own, other = subgraphs.own_and(graph.whole, graph.partition, graph.rank, way)
    travel = _travel(graph, call.q.device) if way == "halo" else subgraphs.to_everyone(graph.partition.src.sizes, graph.rank)
    flight = Flight(travel, graph.group, way == "gather", dtype)
    rows = _packed(call.k, call.v)
    under_way = start(flight, rows)
    first = _part(call, graph, own, call.k, call.v, backend)
    arrived = finish(flight, under_way).to(rows.dtype)
    second = _part(call, graph, other, *_unpacked(arrived, call.k, call.v), backend)
    return _tied(_merged(first, second), call, arrived)


def _ring(call: Call, graph: RankGraph, way: str, backend: str | Backend, dtype: torch.dtype) -> Result:
    """The senders of each rank, from the own ones backwards, each handed on while it is heard."""
    pieces = subgraphs.own_and(graph.whole, graph.partition, graph.rank, way)
    sizes, world, total = graph.partition.src.sizes, len(pieces), None
    rows = _packed(call.k, call.v)
    for step, found in enumerate(pieces):
        flight = Flight(subgraphs.handing_on(sizes, graph.rank, step), graph.group, dtype=dtype)
        under_way = start(flight, rows) if step < world - 1 else rows
        part = _part(call, graph, found, *_unpacked(rows, call.k, call.v), backend)
        total = part if total is None else _merged(total, part)
        rows = finish(flight, under_way).to(rows.dtype) if step < world - 1 else rows
    assert total is not None
    return _tied(total, call, rows)


def with_bias(call: Call, bias: Tensor | None) -> Call:
    """The call on a :class:`RankGraph` with a number for each in-edge of its receivers; checked as any call's."""
    if bias is None:
        return call
    graph: Any = call.graph
    rows = subgraphs.rows_of(graph.whole, graph.partition, graph.rank)
    k, v = (x.new_zeros(()).expand(*x.shape[:2], rows.num_src, x.shape[3]) for x in (call.k, call.v))
    return replace(call, bias=Call.checked(call.q, k, v, rows, bias=bias).bias)


# -- one piece --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _PlacedCall(Call):
    """A call whose receivers and senders stand where tables say: dropout is keyed by those positions."""

    dst_at: Tensor | None = None
    src_at: Tensor | None = None

    def dropped(self, weights: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        """``weights [B, Hq, ...]`` after dropout, at rows dst and src."""
        ends = _looked_up(self.dst_at, dst + self.graph.dst_offset), _looked_up(self.src_at, src + self.graph.src_offset)
        return dropped(weights, self.seed, self.dropout, *ends, self.first_sample, self.first_head)


@dataclass(frozen=True, eq=False)
class _AtPositions:
    """A score_mod that is told positions where rows are not in their order."""

    mod: ScoreMod
    dst_at: Tensor | None
    src_at: Tensor | None

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        """The score_mod at the positions of rows dst and src."""
        return self.mod(score, b, h, _looked_up(self.dst_at, dst), _looked_up(self.src_at, src))


def _looked_up(table: Tensor | None, row: Tensor) -> Tensor:
    return row if table is None else table.to(row.device)[row]


def _part(call: Call, graph: RankGraph, found: Piece, k: Tensor, v: Tensor, backend: str | Backend) -> Result:
    """What the receivers hear along one piece."""
    if not len(found.dst) or not len(found.src) or not found.graph.num_edges:
        return _nothing(call)
    part = _call_of(call, graph, found, k, v)
    if part.dropout and found.is_placed and backend == "auto" and choose(part).name not in TOLD_POSITIONS:
        backend = "rows"
    out, lse = attended(part, backend)
    wide = edges.accumulation_dtype(call.q.dtype)
    return out.to(wide), lse.to(wide)


def _call_of(call: Call, graph: RankGraph, found: Piece, k: Tensor, v: Tensor) -> Call:
    """The call on a piece, without sinks, which come once, after all pieces."""
    bias = call.bias
    if bias is not None:
        bias = bias[..., kept(_places, graph.whole, graph.partition, graph.rank, found).to(bias.device)]
    part = replace(call, graph=found.graph, k=k, v=v, bias=bias, sink_logits=None, with_lse=True)
    return placed(part, found) if found.is_placed else part


def placed(call: Call, found: Piece) -> Call:
    """The call on a piece, told where its rows stand."""
    if call.score_mod is not None:
        call = replace(call, score_mod=_AtPositions(call.score_mod, found.dst_at, found.src_at))
    values = {field.name: getattr(call, field.name) for field in fields(call)}
    return _PlacedCall(**values, dst_at=found.dst_at, src_at=found.src_at)


def _places(graph: TokenGraph, partition: Partition, rank: int, found: Piece) -> Tensor:
    return subgraphs.places(found, graph, partition, rank)


def _nothing(call: Call) -> Result:
    wide = edges.accumulation_dtype(call.q.dtype)
    out = call.q.new_zeros(*call.q.shape[:3], call.v.shape[3], dtype=wide)
    return out, out.new_full(out.shape[:3], -torch.inf)


def _merged(first: Result, second: Result) -> Result:
    return edges.merge(*first, *second)


def _tied(total: Result, call: Call, arrived: Tensor) -> Result:
    """On every rank the backward pass comes by q, by the journey of k and v and by what is learned, whoever is heard."""
    learned: list[Tensor] = list(call.score_mod.parameters()) if isinstance(call.score_mod, nn.Module) else []
    learned += [] if call.bias is None else [call.bias]
    out, lse = (tied(x, call.q, arrived, *learned) for x in total)
    return out, lse


def _packed(k: Tensor, v: Tensor) -> Float[Tensor, "own channels"]:
    """A row for each sender: its keys and values of all samples and heads."""
    return torch.cat([k.permute(2, 0, 1, 3).flatten(1), v.permute(2, 0, 1, 3).flatten(1)], dim=1)


def _unpacked(rows: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """``k [B, Hkv, src, D]`` and ``v [B, Hkv, src, Dv]`` of the rows; k and v give the sizes."""
    keys = k.shape[0] * k.shape[1] * k.shape[3]
    some = rows[:, :keys].view(len(rows), *k.shape[:2], k.shape[3]), rows[:, keys:].view(len(rows), *v.shape[:2], v.shape[3])
    return some[0].permute(1, 2, 0, 3), some[1].permute(1, 2, 0, 3)


def _heard(graph: RankGraph, way: str) -> Bool[Tensor, "..."]:
    """Own receivers with in-edges from anywhere."""
    pieces = subgraphs.own_and(graph.whole, graph.partition, graph.rank, way)
    found: Tensor = torch.stack([part.graph.in_degree() > 0 for part in pieces]).any(0)
    return found


# -- what ranks tell each other ---------------------------------------------------------------------------------------


def _travel(graph: RankGraph, device: torch.device) -> Travel:
    """Who gives what to whom in a halo exchange: worked out once, by telling each other who is heard. A collective that time."""
    travel: Travel = kept(_told, graph.whole, graph.partition, graph.rank, graph.group, device)
    return travel


def _told(graph: TokenGraph, partition: Partition, rank: int, group: Any, device: torch.device) -> Travel:
    senders, heard = subgraphs.arriving(graph, partition, rank), halo_sizes(graph, partition)
    take, give = tuple(heard[rank].tolist()), tuple(heard[:, rank].tolist())
    wanted = partition.src.place(torch.cat(senders))
    places, work = moved(wanted.to(device), take, give, group, "control")
    work.wait()
    return Travel(places, give, take)


def _agree(call: Call, graph: RankGraph, way: str, backend: str | Backend) -> None:
    """ValueError, the same on every rank, where calls differ in what must be alike, or a backend refuses on any of them.

    Over gloo at every call; elsewhere, where to ask would hold up the device, at the first call of each kind.
    """
    said = (
        *kept(_in_words, graph.whole, graph.partition),
        graph.exchange,
        _named(backend),
        f"[B, Hq, Hkv, D, Dv] = {[*call.q.shape[:2], *call.k.shape[1::2], call.v.shape[3]]} in {call.k.dtype}",
        "wanted" if torch.is_grad_enabled() and (call.k.requires_grad or call.v.requires_grad) else "not wanted",
        _options(call),
    )
    agreed = graph.whole._memo.setdefault((_agree, graph.group), set())
    if said in agreed and distributed.get_backend(graph.group) != "gloo":
        return
    agree(WORDS, said, "", graph.group, call.q.device)
    if backend != "auto":
        agree((), (), _refusals(call, graph, way, backend), graph.group, call.q.device)
    agreed.add(said)


def _options(call: Call) -> str:
    """The numbers among the options, and which of the others there are."""
    given = {"score_mod": call.score_mod, "bias": call.bias, "sink_logits": call.sink_logits}
    there = ", ".join(name for name, value in given.items() if value is not None)
    return f"scale {call.scale:.9g}, dropout {call.dropout:.9g}, {there or 'nothing else'}"


def tell_trouble(trouble: str, group: Any, device: torch.device, words: Sequence[str] = WORDS) -> None:
    """Tell all others, who are at the start of the same call, that this rank cannot take part: ValueError on every rank."""
    agree(words, [""] * len(words), trouble, group, device)


def check_backend(backend: str | Backend) -> None:
    """TypeError for what is no backend; names are looked up where all ranks can be told."""
    if not isinstance(backend, (str, Backend)):
        raise TypeError(f"backend must be a name or a gnn_attention.backends.Backend, got {type(backend).__name__}")


def _refusals(call: Call, graph: RankGraph, way: str, backend: str | Backend) -> str:
    """Why a backend that was asked for by name does not hold some piece of this rank; empty if it holds all."""
    call = in_parts(call)
    for found in subgraphs.own_and(graph.whole, graph.partition, graph.rank, way):
        k, v = (x.new_zeros(()).expand(*x.shape[:2], len(found.src), x.shape[3]) for x in (call.k, call.v))
        reason = _refusal(_call_of(call, graph, found, k, v), found, backend)
        if reason is not None:
            return f"backend {_named(backend)!r} cannot hold {found.graph!r}: {reason}"
    return ""


def _refusal(part: Call, found: Piece, backend: str | Backend) -> str | None:
    if isinstance(backend, str) and backend not in BACKENDS:
        return f"it is none of {', '.join(BACKENDS)}"
    if part.dropout and found.is_placed and _named(backend) not in TOLD_POSITIONS:
        return f"its dropout needs tokens in a row; use a contiguous partition, or backend={TOLD_POSITIONS[0]!r}"
    return (BACKENDS[backend] if isinstance(backend, str) else backend).refusal(part)


def _named(backend: str | Backend) -> str:
    return backend if isinstance(backend, str) else backend.name


def _in_words(graph: TokenGraph, partition: Partition) -> tuple[str, str]:
    """What tells a graph and a partition from others."""
    runs = (shares._key[2].hex()[:8] for shares in (partition.dst, partition.src))
    return f"{graph!r} with edges {_fingerprint(graph)}", f"{partition!r} with runs {', '.join(runs)}"


def _fingerprint(graph: TokenGraph) -> str:
    """Of the edges: of a list all of them, of a rule its answers at pairs drawn once for all ranks."""
    if graph._listed is not None:
        found = graph.edge_index
    else:
        draw = torch.Generator().manual_seed(0)
        dst, src, near = (torch.randint(2**31, (PROBES,), generator=draw) for _ in range(3))
        dst, src = dst % max(graph.num_dst, 1), src % max(graph.num_src, 1)
        src[::2] = (dst - near % 64).clamp(0, max(graph.num_src, 1) - 1)[::2]
        b, h = (near % (size or 1) for size in (graph.batch, graph.heads))
        found = graph.rule(b, h, dst, src) if graph.num_dst and graph.num_src else dst[:0]
    return hashlib.sha256(found.to(torch.int64).contiguous().numpy().tobytes()).hexdigest()[:12]


def _with_first_seed(call: Call, group: Any) -> Call:
    """The seed of dropout that the first rank drew."""
    return call if call.seed is None else replace(call, seed=from_first(call.seed, group))
