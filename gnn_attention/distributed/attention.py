"""Compute attention for the receivers of one rank, after fetching the senders of their halo.

The rank's own senders and its halo, sorted by position, are the senders of an ordinary graph, on
which one call of ``gnn_attention.attend`` computes the result. One all-to-all fetches the keys and
values, and another one returns their gradients.
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
from gnn_attention.attend import check_backend, run_attention
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.dropout import drop_weights
from gnn_attention.distributed import collectives
from gnn_attention.distributed.halo_sets import halo, remote_senders
from gnn_attention.distributed.partition import Partition
from gnn_attention.distributed.rank_graph import RankGraph, subgraph
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.score_mods import ScoreMod

# These backends let the call drop weights, and the call can look up absolute positions.
DROPOUT_BACKENDS = ("dense", "tiles", "rows", "reference")

BackendLike = str | Backend


@dataclass(frozen=True, eq=False)
class Neighbourhood:
    """The graph of a rank's receivers over its senders and its halo, and how to fetch the halo.

    ``send_indices[r]`` are the senders that rank r needs; ``recv_counts[r]`` is the number of
    senders from rank r. ``order`` sorts the rank's senders and the received ones by position.
    ``dst_at`` and ``src_at`` are absolute positions, or None if they follow from the offsets of the
    graph.
    """

    graph: TokenGraph
    dst_at: Int[Tensor, " dst"] | None
    src_at: Int[Tensor, " senders"] | None
    send_indices: tuple[Int[Tensor, " sent"], ...]
    recv_counts: tuple[int, ...]
    order: Int[Tensor, " senders"]

    @property
    def has_gaps(self) -> bool:
        """True if positions must be looked up in ``dst_at`` or ``src_at``."""
        return self.dst_at is not None or self.src_at is not None


def build_neighbourhood(rank_graph: RankGraph, device: torch.device) -> Neighbourhood:
    """Return the :class:`Neighbourhood` of a rank, with indices on ``device``. Not a collective."""
    graph, partition, rank = rank_graph.whole, rank_graph.partition, rank_graph.rank
    local_senders = partition.src.tokens(rank)
    halo_senders = halo(graph, partition, rank)
    senders, order = torch.cat([local_senders, *halo_senders]).sort()
    masks = (remote_senders(graph, partition, other)[local_senders] for other in range(partition.world_size))
    send_indices = tuple(mask.nonzero().flatten().to(device) for mask in masks)
    recv_counts = tuple(map(len, halo_senders))
    local_graph, (dst_at, src_at) = subgraph(graph, partition.dst.tokens(rank), senders)
    return Neighbourhood(local_graph, dst_at, src_at, send_indices, recv_counts, order.to(device))


@not_compiled
def run(call: AttentionCall, backend: BackendLike) -> tuple[Tensor, Tensor | None]:
    """Return ``out [B, Hq, local dst, Dv]`` and ``lse``, if any, on a :class:`RankGraph`. A collective.

    ``torch.compile`` breaks its graph here and compiles nothing inside.
    """
    eager: Any = _run
    # Unless this module is loaded, nothing is being compiled, and loading it would be slow.
    if "torch._dynamo" in sys.modules:
        eager = torch.compiler.disable(_run)  # type: ignore[no-untyped-call]
    return eager(call, backend)  # type: ignore[no-any-return]


def _run(call: AttentionCall, backend: BackendLike) -> tuple[Tensor, Tensor | None]:
    graph: Any = call.graph
    check_backend(backend)
    _check_agreement(call, graph, backend)
    if call.seed is not None:
        distributed.broadcast(call.seed, group=graph.group, group_src=0)
    hood: Neighbourhood = memoized(build_neighbourhood, graph, call.q.device)
    # A row holds the keys and values of a sender, for all samples and heads.
    rows = torch.cat([x.permute(2, 0, 1, 3).flatten(1) for x in (call.k, call.v)], dim=1)
    rows = collectives.exchange(rows, hood.send_indices, hood.recv_counts, graph.group)
    batch, kv_heads, _, dim = call.k.shape
    k_rows, v_rows = rows.index_select(0, hood.order).tensor_split([batch * kv_heads * dim], dim=1)
    k = k_rows.view(len(k_rows), batch, kv_heads, dim).permute(1, 2, 0, 3)
    v = v_rows.view(len(v_rows), batch, kv_heads, call.v.shape[3]).permute(1, 2, 0, 3)
    local_call = _use_positions(replace(call, graph=hood.graph, k=k, v=v), hood)
    if call.dropout and hood.has_gaps and backend == "auto":
        backend = "rows"
    parameters = list(call.score_mod.parameters()) if isinstance(call.score_mod, nn.Module) else []
    inputs = [x for x in (call.q, rows, call.sink_logits, *parameters) if x is not None]
    out, lse = run_attention(local_call, backend)
    lse = None if lse is None else collectives.keep_in_graph(lse, *inputs)
    return collectives.keep_in_graph(out, *inputs), lse


@dataclass(eq=False)
class _CallAtPositions(AttentionCall):
    """A call on a graph with gaps; its dropout looks up positions in ``dst_at`` and ``src_at``."""

    dst_at: Tensor | None = None
    src_at: Tensor | None = None

    def apply_dropout(self, weights: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        dst = _look_up(self.dst_at, dst + self.graph.dst_offset)
        src = _look_up(self.src_at, src + self.graph.src_offset)
        return drop_weights(weights, self.seed, self.dropout, dst, src, self.first_sample, self.first_head)


def _score_at_positions(
    mod: ScoreMod, positions: tuple[Tensor | None, ...], score: Tensor, b: Tensor, h: Tensor, *rows: Tensor
) -> Tensor:
    return mod(score, b, h, *map(_look_up, positions, rows))


def _look_up(table: Tensor | None, row: Tensor) -> Tensor:
    return row if table is None else table.to(row.device)[row]


def _use_positions(call: AttentionCall, hood: Neighbourhood) -> AttentionCall:
    """Make score_mod and dropout use absolute positions."""
    if not hood.has_gaps:
        return call
    arguments = {field.name: getattr(call, field.name) for field in fields(call) if field.init}
    if call.score_mod is not None:
        arguments["score_mod"] = partial(_score_at_positions, call.score_mod, (hood.dst_at, hood.src_at))
    return _CallAtPositions(**arguments, dst_at=hood.dst_at, src_at=hood.src_at)


def _check_agreement(call: AttentionCall, graph: RankGraph, backend: BackendLike) -> None:
    """Raise ValueError on every rank if calls differ between ranks, or one of them is unsupported.

    With gloo every call is checked, otherwise only the first of each kind, to avoid device syncs.
    """
    sizes = [*call.q.shape[:2], *call.k.shape[1::2], call.v.shape[3]]
    requires_grad = torch.is_grad_enabled() and (call.k.requires_grad or call.v.requires_grad)
    extras = {"score_mod": call.score_mod, "sink_logits": call.sink_logits}
    names = ", ".join(name for name, value in extras.items() if value is not None) or "nothing else"
    settings = memoized(_describe_partition, graph.whole, graph.partition) | {
        "backend": backend if isinstance(backend, str) else backend.name,
        "q, k and v": f"[B, Hq, Hkv, D, Dv] = {sizes} in {call.k.dtype}",
        "requires_grad": requires_grad,
        "options": f"scale {call.scale:.9g}, dropout {call.dropout:.9g}, {names}",
    }
    agreed_calls = graph.whole._memo.setdefault((_check_agreement, graph.group), set())
    key = tuple(settings.values())
    if key in agreed_calls and distributed.get_backend(graph.group) != "gloo":
        return
    collectives.check_agreement(settings, "", graph.group, call.q.device)
    # All ranks have the same graph and partition now, so each may compute its neighbourhood.
    if backend != "auto":
        backend = BACKENDS[backend] if isinstance(backend, str) else backend
        reason = _unsupported_reason(call, memoized(build_neighbourhood, graph, call.q.device), backend)
        collectives.check_agreement({}, reason, graph.group, call.q.device)
    agreed_calls.add(key)


def _unsupported_reason(call: AttentionCall, hood: Neighbourhood, backend: Backend) -> str:
    """Return why a backend does not support this rank's part of the call, or an empty string."""
    if call.dropout and hood.has_gaps and backend.name not in DROPOUT_BACKENDS:
        reason: str | None = "its dropout needs a contiguous partition: use one, or backend='dense'"
    else:
        # Keys and values are not fetched yet. Expanded zeros, which take no memory, replace them.
        kv_shape = (*call.k.shape[:2], hood.graph.num_src)
        k, v = (x.new_zeros(()).expand(*kv_shape, x.shape[3]) for x in (call.k, call.v))
        reason = backend.unsupported_reason(_use_positions(replace(call, graph=hood.graph, k=k, v=v), hood))
    return "" if reason is None else f"backend {backend.name!r} does not support {hood.graph!r}: {reason}"


def _describe_partition(graph: TokenGraph, partition: Partition) -> dict[str, str]:
    # A rule may have too many edges to list, so its in-degrees are hashed instead of its edges.
    hashed_tensor = graph.in_degree() if graph.edges.listed() is None else graph.edge_index
    edge_digest = hashlib.sha256(hashed_tensor.contiguous().numpy().tobytes()).hexdigest()[:12]
    owner_digests = ", ".join(shares.digest[:8] for shares in (partition.dst, partition.src))
    return {
        "graph": f"{graph!r} with edges {edge_digest}",
        "partition": f"{partition!r} with owners {owner_digests}",
    }
