"""Attention of one rank's receivers: it fetches the senders of their halo, and then is that of one process.

The senders of a rank and of its halo, in order, are the senders of an ordinary graph, along which the
receivers attend in one call of ``gnn_attention.attend``. One all-to-all brings the keys and values, and
another one takes their gradients back.
"""

import hashlib
import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import distributed, nn

from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.attend import checked_backend, run_attention
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.dropout import drop_weights
from gnn_attention.distributed import collectives
from gnn_attention.distributed.halo_sets import halo, remote_senders
from gnn_attention.distributed.partition import Partition
from gnn_attention.distributed.rank_graph import RankGraph, subgraph
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.score_mods import ScoreMod

DROP_AT_POSITIONS = ("dense", "tiles", "rows", "reference")  # backends that take dropout from the call

BackendLike = str | Backend
Result = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class Neighbourhood:
    """The receivers of a rank over its own senders and those of its halo, and how the latter come.

    ``send[r]``: which of the own senders go to rank r. ``receive[r]``: how many come from it. ``order``: the
    own senders and those that come, sorted by position. ``dst_at``, ``src_at``: absolute positions, None
    where the graph's offsets give them.
    """

    graph: TokenGraph
    dst_at: Int[Tensor, " dst"] | None
    src_at: Int[Tensor, " senders"] | None
    send: tuple[Int[Tensor, " sent"], ...]
    receive: tuple[int, ...]
    order: Int[Tensor, " senders"]

    @property
    def has_gaps(self) -> bool:
        """True if the positions of its rows must be looked up."""
        return self.dst_at is not None or self.src_at is not None


def neighbourhood(mine: RankGraph, device: torch.device) -> Neighbourhood:
    """The :class:`Neighbourhood` of a rank, with indices on a device. No collective."""
    graph, partition, rank = mine.whole, mine.partition, mine.rank
    own, arriving = partition.src.tokens(rank), halo(graph, partition, rank)
    senders, order = torch.cat([own, *arriving]).sort()
    wanted = (remote_senders(graph, partition, other)[own] for other in range(partition.world_size))
    send = tuple(rows.nonzero().flatten().to(device) for rows in wanted)
    part, at = subgraph(graph, partition.dst.tokens(rank), senders)
    return Neighbourhood(part, *at, send, tuple(map(len, arriving)), order.to(device))


@not_compiled
def run(call: AttentionCall, backend: BackendLike) -> Result:
    """``out [B, Hq, own dst, Dv]`` and ``lse``, or None, along a :class:`RankGraph`. A collective.

    ``torch.compile`` breaks its graph here and compiles nothing inside.
    """
    eager: Any = _run
    if "torch._dynamo" in sys.modules:  # else there is no compiler
        eager = torch.compiler.disable(_run)  # type: ignore[no-untyped-call]
    result: Result = eager(call, backend)
    return result


def _run(call: AttentionCall, backend: BackendLike) -> Result:
    graph: Any = call.graph
    checked_backend(backend)
    _check_agreement(call, graph, backend)
    if call.seed is not None:
        distributed.broadcast(call.seed, group=graph.group, group_src=0)
    near: Neighbourhood = memoized(neighbourhood, graph, call.q.device)
    # a row for each sender, with keys and values of all samples and heads
    rows = torch.cat([x.permute(2, 0, 1, 3).flatten(1) for x in (call.k, call.v)], dim=1)
    rows = collectives.exchange(rows, near.send, near.receive, graph.group)
    # sorted by position, k [B, Hkv, src, D] and v [B, Hkv, src, Dv]
    batch, kv_heads, _, dim = call.k.shape
    parts = rows.index_select(0, near.order).tensor_split([batch * kv_heads * dim], dim=1)
    sizes = (batch, kv_heads, dim), (batch, kv_heads, call.v.shape[3])
    k, v = (x.view(len(x), *size).permute(1, 2, 0, 3) for x, size in zip(parts, sizes, strict=True))
    whole = _at_positions(replace(call, graph=near.graph, k=k, v=v), near)
    if call.dropout and near.has_gaps and backend == "auto":
        backend = "rows"
    learned = list(call.score_mod.parameters()) if isinstance(call.score_mod, nn.Module) else []
    others = [x for x in (call.q, rows, call.sink_logits, *learned) if x is not None]
    out, lse = run_attention(whole, backend)
    lse = None if lse is None else collectives.keep_in_graph(lse, *others)
    return collectives.keep_in_graph(out, *others), lse


@dataclass(eq=False)
class _CallAtPositions(AttentionCall):
    # over a subgraph with gaps: dropout is keyed by the positions in the tables

    dst_at: Tensor | None = None
    src_at: Tensor | None = None

    def apply_dropout(self, weights: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        dst = _looked_up(self.dst_at, dst + self.graph.dst_offset)
        src = _looked_up(self.src_at, src + self.graph.src_offset)
        return drop_weights(weights, self.seed, self.dropout, dst, src, self.first_sample, self.first_head)


def _score_at_positions(
    mod: ScoreMod, at: tuple[Tensor | None, ...], score: Tensor, b: Tensor, h: Tensor, *ends: Tensor
) -> Tensor:
    return mod(score, b, h, *map(_looked_up, at, ends))


def _looked_up(table: Tensor | None, row: Tensor) -> Tensor:
    return row if table is None else table.to(row.device)[row]


def _at_positions(call: AttentionCall, near: Neighbourhood) -> AttentionCall:
    """The call with score_mod and dropout at absolute positions."""
    if not near.has_gaps:
        return call
    values = {field.name: getattr(call, field.name) for field in fields(call) if field.init}
    if call.score_mod is not None:
        values["score_mod"] = partial(_score_at_positions, call.score_mod, (near.dst_at, near.src_at))
    return _CallAtPositions(**values, dst_at=near.dst_at, src_at=near.src_at)


def _check_agreement(call: AttentionCall, graph: RankGraph, backend: BackendLike) -> None:
    """ValueError, the same on every rank, where calls differ or a backend does not support any rank's part.

    Over gloo at every call; elsewhere, where it would synchronise the device, at the first call of each kind.
    """
    sizes = [*call.q.shape[:2], *call.k.shape[1::2], call.v.shape[3]]
    grad = torch.is_grad_enabled() and (call.k.requires_grad or call.v.requires_grad)
    optional = {"score_mod": call.score_mod, "sink_logits": call.sink_logits}
    others = ", ".join(name for name, value in optional.items() if value is not None) or "nothing else"
    values = memoized(_describe_shards, graph.whole, graph.partition) | {
        "backend": backend if isinstance(backend, str) else backend.name,
        "q, k and v": f"[B, Hq, Hkv, D, Dv] = {sizes} in {call.k.dtype}",
        "gradients": "wanted" if grad else "not wanted",
        "options": f"scale {call.scale:.9g}, dropout {call.dropout:.9g}, {others}",
    }
    agreed = graph.whole._memo.setdefault((_check_agreement, graph.group), set())
    key = tuple(values.values())
    if key in agreed and distributed.get_backend(graph.group) != "gloo":
        return
    # all have the same graph and partition: what each rank's part is may be looked at now
    collectives.check_agreement(values, "", graph.group, call.q.device)
    if backend != "auto":
        chosen = BACKENDS[backend] if isinstance(backend, str) else backend
        reason = _unsupported_reason(call, memoized(neighbourhood, graph, call.q.device), chosen)
        collectives.check_agreement({}, reason, graph.group, call.q.device)
    agreed.add(key)


def _unsupported_reason(call: AttentionCall, near: Neighbourhood, backend: Backend) -> str:
    """Why a backend does not support the part of this rank; empty if it does."""
    if call.dropout and near.has_gaps and backend.name not in DROP_AT_POSITIONS:
        reason: str | None = (
            "its dropout needs tokens in a row; use a contiguous partition, or backend='dense'"
        )
    else:
        k, v = (
            x.new_zeros(()).expand(*x.shape[:2], near.graph.num_src, x.shape[3]) for x in (call.k, call.v)
        )
        reason = backend.unsupported_reason(_at_positions(replace(call, graph=near.graph, k=k, v=v), near))
    return "" if reason is None else f"backend {backend.name!r} cannot hold {near.graph!r}: {reason}"


def _describe_shards(graph: TokenGraph, partition: Partition) -> dict[str, str]:
    # all edges of a list, or the number of in-edges of each receiver
    numbers = graph.in_degree() if graph.edges.stored_list() is None else graph.edge_index
    fingerprint = hashlib.sha256(numbers.contiguous().numpy().tobytes()).hexdigest()[:12]
    owners = ", ".join(shares.digest[:8] for shares in (partition.dst, partition.src))
    return {
        "graph": f"{graph!r} with edges {fingerprint}",
        "partition": f"{partition!r} with owners {owners}",
    }
