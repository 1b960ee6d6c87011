"""Attention of one rank's receivers along a graph whose tokens are spread over several ranks.

It attends to its own senders while others travel; results over disjoint in-edges are merged by log-sum-exp.
"halo": only senders that are attended to travel, in one all-to-all. "gather": all senders come at once.
"ring": the senders of each rank go from rank to rank, each block in use while the next one comes.
"""

import hashlib
import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import distributed, nn

from gnn_attention import edge_softmax
from gnn_attention._support.checks import described
from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attended
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.dispatch import choose
from gnn_attention.backends.dropout import dropped
from gnn_attention.distributed import collectives, rank_plan, subgraphs
from gnn_attention.distributed.collectives import PendingExchange, check_agreement, finish, start
from gnn_attention.distributed.halo_sets import halo, halo_sizes
from gnn_attention.distributed.merge_lse import in_merge_dtype
from gnn_attention.distributed.partition import Partition
from gnn_attention.distributed.rank_graph import RankGraph
from gnn_attention.distributed.subgraphs import RowTransfer, Subgraph
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.score_mods import ScoreMod

EXCHANGES = ("auto", *rank_plan.EXCHANGES)
DROP_AT_POSITIONS = ("dense", "tiles", "rows", "reference")  # backends that take dropout from the call
PROBES = 4096  # pairs at which ranks compare their rules

BackendLike = str | Backend
Result = tuple[Tensor, Tensor]  # out in float32 or better, lse


@not_compiled
def run(call: AttentionCall, backend: BackendLike) -> Result:
    """``out [B, Hq, own dst, Dv]`` in the dtype of q, and ``lse``, along a :class:`RankGraph`. A collective.

    ``torch.compile`` breaks its graph here and compiles nothing inside.
    """
    eager: Any = _run
    if "torch._dynamo" in sys.modules:  # else there is no compiler
        eager = torch.compiler.disable(_run)  # type: ignore[no-untyped-call]
    result: Result = eager(call, backend)
    return result


def _run(call: AttentionCall, backend: BackendLike) -> Result:
    graph: Any = call.graph
    assert isinstance(graph, RankGraph)
    check_backend(backend)
    exchange = graph.exchange
    if exchange == "auto":
        # the same on every rank without communication
        exchange = memoized(rank_plan.choose_exchange, graph.whole, graph.partition)
    _check_agreement(call, graph, exchange, backend)
    dtype, call = call.q.dtype, in_merge_dtype(call)
    if call.seed is not None:
        call = replace(call, seed=collectives.broadcast_first(call.seed, graph.group))
    out, lse = _exchanged(call, graph, exchange, backend, dtype)
    if call.sink_logits is not None:
        # from any rank
        parts = subgraphs.rank_subgraphs(*graph.share, exchange)
        has_in_edges = torch.stack([part.graph.in_degree() > 0 for part in parts]).any(0)
        out, lse = edge_softmax.add_sinks(out, lse, call.sink_logits, has_in_edges.to(out.device))
    return out.to(dtype), lse


def in_accumulation_dtype(call: AttentionCall, *tensors: Tensor) -> tuple[Tensor, ...]:
    wide = edge_softmax.accumulation_dtype(call.q.dtype)
    return tuple(x.to(wide) for x in tensors)


def check_backend(backend: BackendLike) -> None:
    """TypeError for what is no backend; names are looked up where all ranks can raise."""
    if not isinstance(backend, (str, Backend)):
        raise TypeError(f"backend must be a name or a Backend, got {described(backend)}")


def with_bias(call: AttentionCall, bias: Tensor | None) -> AttentionCall:
    """The call on a :class:`RankGraph` with a number for each in-edge of its receivers, checked."""
    if bias is None:
        return call
    graph: Any = call.graph
    rows = subgraphs.rank_rows(*graph.share)
    k, v = (_placeholder(x, rows.num_src) for x in (call.k, call.v))
    return replace(call, bias=AttentionCall.checked(call.q, k, v, rows, bias=bias).bias)


def _exchanged(
    call: AttentionCall, graph: RankGraph, exchange: str, backend: BackendLike, dtype: torch.dtype
) -> Result:
    """Own senders first; the next ones, if any, travel in ``dtype`` while these are in use."""
    parts = subgraphs.rank_subgraphs(*graph.share, exchange)
    k, v, total = call.k, call.v, no_result(call)
    # one for each sender, with keys and values of all samples and heads
    rows = torch.cat([x.permute(2, 0, 1, 3).flatten(1) for x in (k, v)], dim=1)
    for step, part in enumerate(parts):
        others_come = step < len(parts) - 1
        if others_come:
            pending = PendingExchange(_transfer(call, graph, exchange, step), graph.group, dtype)
            buffer = start(pending, rows)
        result = _attend_part(call, graph, part, k, v, backend)
        total = edge_softmax.merge(*total, *result) if step else result
        if others_come:
            rows = finish(pending, buffer).to(rows.dtype)
            k, v = _keys_and_values(rows, call.k, call.v)
    return _with_collectives(total, call, rows)


def _transfer(call: AttentionCall, graph: RankGraph, exchange: str, step: int) -> RowTransfer:
    if exchange == "halo":
        # a collective the first time: ranks send the numbers of their halo's senders
        return memoized(_halo_transfer, *graph.share, graph.group, call.q.device)
    if exchange == "ring":
        return subgraphs.ring_step(graph.partition.src.sizes, graph.rank, step)
    return subgraphs.to_all_ranks(graph.partition.src.sizes, graph.rank, call.q.device)


def _with_collectives(total: Result, call: AttentionCall, arrived: Tensor) -> Result:
    """On every rank the backward pass reaches q, the exchange of k and v, and all learned tensors."""
    learned: list[Tensor] = list(call.score_mod.parameters()) if isinstance(call.score_mod, nn.Module) else []
    learned += [] if call.bias is None else [call.bias]
    out, lse = (collectives.keep_in_graph(x, call.q, arrived, *learned) for x in total)
    return out, lse


def _keys_and_values(rows: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """``k [B, Hkv, src, D]`` and ``v [B, Hkv, src, Dv]`` of the rows; k and v give the sizes."""
    size = k.shape[0] * k.shape[1] * k.shape[3]
    keys = rows[:, :size].view(len(rows), *k.shape[:2], k.shape[3])
    values = rows[:, size:].view(len(rows), *v.shape[:2], v.shape[3])
    return keys.permute(1, 2, 0, 3), values.permute(1, 2, 0, 3)


@dataclass(eq=False)
class _CallAtPositions(AttentionCall):
    # over a subgraph with gaps: dropout is keyed by the positions in the tables

    dst_at: Tensor | None = None
    src_at: Tensor | None = None

    def dropped(self, weights: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        dst = _looked_up(self.dst_at, dst + self.graph.dst_offset)
        src = _looked_up(self.src_at, src + self.graph.src_offset)
        return dropped(weights, self.seed, self.dropout, dst, src, self.first_sample, self.first_head)


def _score_at_positions(
    mod: ScoreMod, at: tuple[Tensor | None, ...], score: Tensor, b: Tensor, h: Tensor, *ends: Tensor
) -> Tensor:
    return mod(score, b, h, *map(_looked_up, at, ends))


def _looked_up(table: Tensor | None, row: Tensor) -> Tensor:
    return row if table is None else table.to(row.device)[row]


def at_positions(call: AttentionCall, part: Subgraph) -> AttentionCall:
    """The call on a subgraph with score_mod and dropout at absolute positions."""
    if not part.has_gaps:
        return call
    if call.score_mod is not None:
        mod = partial(_score_at_positions, call.score_mod, (part.dst_at, part.src_at))
        call = replace(call, score_mod=mod)
    values = {field.name: getattr(call, field.name) for field in fields(call) if field.init}
    return _CallAtPositions(**values, dst_at=part.dst_at, src_at=part.src_at)


def _attend_part(
    call: AttentionCall, graph: RankGraph, part: Subgraph, k: Tensor, v: Tensor, backend: BackendLike
) -> Result:
    if not len(part.dst) or not len(part.src) or not part.graph.num_edges:
        return no_result(call)
    call = _part_call(call, graph, part, k, v)
    if call.dropout and part.has_gaps and backend == "auto" and choose(call).name not in DROP_AT_POSITIONS:
        backend = "rows"
    out, lse = in_accumulation_dtype(call, *attended(call, backend))
    return out, lse


def no_result(call: AttentionCall) -> Result:
    """Of receivers without in-edges: 0 and -inf."""
    wide = edge_softmax.accumulation_dtype(call.q.dtype)
    out = call.q.new_zeros(*call.q.shape[:3], call.v.shape[3], dtype=wide)
    return out, out.new_full(out.shape[:3], -torch.inf)


def _part_call(call: AttentionCall, graph: RankGraph, part: Subgraph, k: Tensor, v: Tensor) -> AttentionCall:
    """The call on a subgraph, without sinks, which are added once, after all parts."""
    bias = call.bias
    if bias is not None:
        index = memoized(subgraphs.edge_positions, *graph.share, part)
        bias = bias[..., index.to(bias.device)]
    call = replace(call, graph=part.graph, k=k, v=v, bias=bias, sink_logits=None, with_lse=True)
    return at_positions(call, part)


def _placeholder(x: Tensor, count: int) -> Tensor:
    """A tensor like ``x`` with ``count`` tokens and no memory, for checks."""
    return x.new_zeros(()).expand(*x.shape[:2], count, x.shape[3])


def _halo_transfer(
    graph: TokenGraph, partition: Partition, rank: int, group: Any, device: torch.device
) -> RowTransfer:
    senders, sizes = memoized(halo, graph, partition, rank), halo_sizes(graph, partition)
    receive, send = tuple(sizes[rank].tolist()), tuple(sizes[:, rank].tolist())
    wanted = partition.src.place(torch.cat(senders)).to(device)
    rows, work = collectives.all_to_all(wanted, receive, send, group, "control")
    work.wait()
    return RowTransfer(rows, send, receive)


def _check_agreement(call: AttentionCall, graph: RankGraph, exchange: str, backend: BackendLike) -> None:
    """ValueError, the same on every rank, where calls differ or a backend does not support any rank's part.

    Over gloo at every call; elsewhere, where it would synchronise the device, at the first call of each kind.
    """
    sizes = [*call.q.shape[:2], *call.k.shape[1::2], call.v.shape[3]]
    grad = torch.is_grad_enabled() and (call.k.requires_grad or call.v.requires_grad)
    optional = {"score_mod": call.score_mod, "bias": call.bias, "sink_logits": call.sink_logits}
    others = ", ".join(name for name, value in optional.items() if value is not None) or "nothing else"
    values = memoized(_described, graph.whole, graph.partition) | {
        "exchange": graph.exchange,
        "backend": _name(backend),
        "q, k and v": f"[B, Hq, Hkv, D, Dv] = {sizes} in {call.k.dtype}",
        "gradients": "wanted" if grad else "not wanted",
        "options": f"scale {call.scale:.9g}, dropout {call.dropout:.9g}, {others}",
    }
    agreed = graph.whole._memo.setdefault((_check_agreement, graph.group), set())
    key = tuple(values.values())
    if key in agreed and distributed.get_backend(graph.group) != "gloo":
        return
    check_agreement(values, "", graph.group, call.q.device)
    if backend != "auto":
        check_agreement({}, _unsupported(call, graph, exchange, backend), graph.group, call.q.device)
    agreed.add(key)


def _unsupported(call: AttentionCall, graph: RankGraph, exchange: str, backend: BackendLike) -> str:
    """Why a named backend does not support some subgraph of this rank; empty if it supports all."""
    call = in_merge_dtype(call)
    for part in subgraphs.rank_subgraphs(*graph.share, exchange):
        k, v = (_placeholder(x, len(part.src)) for x in (call.k, call.v))
        reason = _unsupported_reason(_part_call(call, graph, part, k, v), part, backend)
        if reason is not None:
            return f"backend {_name(backend)!r} cannot hold {part.graph!r}: {reason}"
    return ""


def _unsupported_reason(call: AttentionCall, part: Subgraph, backend: BackendLike) -> str | None:
    if isinstance(backend, str) and backend not in BACKENDS:
        return f"it is none of {', '.join(BACKENDS)}"
    if call.dropout and part.has_gaps and _name(backend) not in DROP_AT_POSITIONS:
        return "its dropout needs tokens in a row; use a contiguous partition, or backend='dense'"
    return (BACKENDS[backend] if isinstance(backend, str) else backend).unsupported_reason(call)


def _name(backend: BackendLike) -> str:
    return backend if isinstance(backend, str) else backend.name


def _described(graph: TokenGraph, partition: Partition) -> dict[str, str]:
    runs = ", ".join(shares._key[2].hex()[:8] for shares in (partition.dst, partition.src))
    graph_text = f"{graph!r} with edges {_fingerprint(graph)}"
    return {"graph": graph_text, "partition": f"{partition!r} with runs {runs}"}


def _fingerprint(graph: TokenGraph) -> str:
    """A hash of all edges of a list, or of a rule's values at pairs drawn with one seed on all ranks."""
    found = graph.edge_index if graph._listed is not None else _probed(graph)
    return hashlib.sha256(found.to(torch.int64).contiguous().numpy().tobytes()).hexdigest()[:12]


def _probed(graph: TokenGraph) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    dst, src, near = (torch.randint(2**31, (PROBES,), generator=draw) for _ in range(3))
    if not graph.num_dst or not graph.num_src:
        return dst[:0]
    dst, src = dst % graph.num_dst, src % graph.num_src
    src[::2] = (dst - near % 64).clamp(0, graph.num_src - 1)[::2]
    b, h = (near % (size or 1) for size in (graph.batch, graph.heads))
    return graph.rule(b, h, dst, src)
