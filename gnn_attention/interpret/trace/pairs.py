"""Chosen pairs of tokens in a call of attention: which are edges, and their logits.

A pair is a column ``(src, dst)`` of an int64 ``[2, K]``; numbers of pairs are ``[B, H, K]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gnn_attention import edges
from gnn_attention._support.autograd import recomputed
from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.backends.call import AttentionCall, one_of
from gnn_attention.backends.cpu import csr_ops
from gnn_attention.backends.plan.csr import edges_of, order_of
from gnn_attention.graph import TokenGraph, edge_list, memoized
from gnn_attention.graph.regions import enumerate_pairs

# pairs whose ends are gathered together
AT_ONCE = 2**16


def as_pairs(pairs: Any) -> Int[Tensor, "2 pairs"]:
    """``[2, K]`` from a tensor of that shape, a list of ``(src, dst)`` or a single such pair."""
    if not isinstance(pairs, Tensor):
        if not isinstance(pairs, Sequence) or isinstance(pairs, str):
            raise TypeError(f"edges must be a tensor [2, K] or a list of (src, dst), got {quoted(pairs)}")
        rows = torch.tensor(pairs) if len(pairs) else torch.zeros(0, 2, dtype=torch.int64)
        pairs = (rows.unsqueeze(0) if rows.dim() == 1 else rows).mT
    highest = 1 if pairs.is_floating_point() or not pairs.numel() else int(pairs.max()) + 1
    return edge_list.checked(pairs, highest, highest)


def positions(chosen: Tensor, count: int) -> Int[Tensor, " edges"]:
    if chosen.is_floating_point() or chosen.dtype == torch.bool:
        raise TypeError(f"edges must be integers, got {chosen.dtype}; of a bool mask use nonzero()")
    if ((chosen < 0) | (chosen >= count)).any():
        raise IndexError(f"edges must be positions in 0 .. {count - 1}, got {quoted(chosen.tolist())}")
    return chosen.long()


def union(graph: TokenGraph, device: torch.device) -> Int[Tensor, "2 pairs"]:
    """All pairs that are an edge for some sample and head; by receiver where the graph varies."""
    if not graph.varying_axes:
        return graph.edges_on(device)
    pairs: Tensor = memoized(_union, graph)
    return pairs.to(device)


def _union(graph: TokenGraph) -> Tensor:
    parts = [one_of(graph, b, h).edge_index for b in range(graph.batch or 1) for h in range(graph.heads or 1)]
    src, dst = torch.cat(parts, dim=1)
    width = max(graph.num_src, 1)
    keys: Tensor = torch.unique(dst * width + src)
    return torch.stack([keys % width, keys // width])


def is_edge(
    graph: TokenGraph, pairs: Int[Tensor, "2 pairs"], batch: int, heads: int
) -> Bool[Tensor, "batch heads pairs"]:
    src, dst = pairs
    b = torch.arange(batch, device=pairs.device).view(-1, 1, 1)
    h = torch.arange(heads, device=pairs.device).view(1, -1, 1)
    return enumerate_pairs.evaluate(graph.rule, repr(graph), b, h, dst, src).expand(batch, heads, len(src))


def check_edges(graph: TokenGraph, pairs: Tensor, heads: int, chosen: Sequence[int] | None, why: str) -> None:
    """ValueError or IndexError for a pair that is no edge for any sample and any of the ``chosen`` heads."""
    edge_list.checked(pairs, graph.num_dst, graph.num_src)
    there = is_edge(graph, pairs, graph.batch or 1, heads)
    missing = ~(there if chosen is None else there[:, list(chosen)]).any(0).any(0)
    if missing.any():
        src, dst = pairs[:, missing][:, 0].tolist()
        raise ValueError(f"{src} -> {dst} is no edge of {graph!r}: {why}")


def overlaps(call: AttentionCall, pairs: Int[Tensor, "2 pairs"]) -> Float[Tensor, "batch heads pairs"]:
    """``score_mod(scale * q_dst . k_src)`` of any pairs, edges or not; in float32 or better."""
    if _is_edge_index(pairs, call.graph):
        return _overlaps_of_edges(call)
    parts = torch.split(pairs, AT_ONCE, dim=1)
    return torch.cat([recomputed(_overlaps, call, part) for part in parts], dim=-1)


def logits(call: AttentionCall, pairs: Int[Tensor, "2 pairs"]) -> Float[Tensor, "batch heads pairs"]:
    """The logit of edges, bias included; -inf for the samples and heads in which a pair is no edge."""
    numbers, bias = overlaps(call, pairs), call.bias
    if bias is not None:
        all_edges = _is_edge_index(pairs, call.graph)
        bias = bias if all_edges else bias[..., call.graph.positions_of(pairs).to(pairs.device)]
        numbers = numbers + bias.to(numbers.dtype)
    if not call.graph.varying_axes:
        return numbers
    return numbers.masked_fill(~is_edge(call.graph, pairs, *numbers.shape[:2]), -torch.inf)


def _is_edge_index(pairs: Tensor, graph: TokenGraph) -> bool:
    return not graph.varying_axes and pairs is graph.edges_on(pairs.device)


def _overlaps_of_edges(call: AttentionCall) -> Tensor:
    # by the operator over edge lists, which gathers nothing
    wide, device = edges.accumulation_dtype(call.q.dtype), call.q.device
    tensors = edges_of(call.graph, device).tensors
    score = csr_ops.products(call.q.to(wide), call.k.to(wide), tensors) * call.scale
    score = call.modified(score, tensors[2].long(), tensors[1].long())
    return torch.empty_like(score).index_copy(2, order_of(call.graph, device), score)


def _overlaps(call: AttentionCall, pairs: Tensor) -> Tensor:
    # widened before the gather, so that gradients are summed in the wide dtype too
    wide, (src, dst) = edges.accumulation_dtype(call.q.dtype), pairs
    q_dst, k_src = call.q.to(wide).index_select(2, dst), call.k.to(wide).index_select(2, src)
    score = edges.logit(q_dst, edges.per_query_head(k_src, call.q.shape[1]), call.scale)
    return call.modified(score, dst, src)
