"""What a call of attention says about chosen pairs of tokens: which are edges, for whom, and with which logit.

A pair is a column ``(src, dst)`` of an int64 ``[2, K]``; numbers of pairs are ``[B, H, K]``. Nothing of the size tokens x tokens
or pairs x heads x channels is made: ends are gathered some pairs at a time, those of a whole graph not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gnn_attention import edges
from gnn_attention._support.autograd import recomputed
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.backends.call import Call, one_of
from gnn_attention.backends.cpu import csr_ops
from gnn_attention.backends.plan.csr import edges_of, order_of
from gnn_attention.graph import TokenGraph, edge_list, kept
from gnn_attention.graph.regions import enumerate_pairs

__all__ = ["as_pairs", "check_edges", "listing", "logits", "overlaps", "positions", "present", "varies"]

AT_ONCE = 2**16  # pairs whose ends are gathered together


def as_pairs(pairs: Any) -> Int[Tensor, "2 pairs"]:
    """``[2, K]`` from a tensor of that shape, a list of ``(src, dst)`` or a single such pair.

    TypeError, ValueError or IndexError for what is none of them.

    >>> as_pairs((0, 3)).tolist(), as_pairs([(0, 3), (1, 2)]).tolist()
    ([[0], [3]], [[0, 1], [3, 2]])
    """
    if not isinstance(pairs, Tensor):
        if not isinstance(pairs, Sequence) or isinstance(pairs, str):
            raise TypeError(f"edges must be a tensor [2, K] or a list of (src, dst), got {type(pairs).__name__}")
        rows = torch.tensor(pairs) if len(pairs) else torch.zeros(0, 2, dtype=torch.int64)
        pairs = (rows.unsqueeze(0) if rows.dim() == 1 else rows).mT
    highest = 1 if pairs.is_floating_point() or not pairs.numel() else int(pairs.max()) + 1
    return edge_list.checked(pairs, highest, highest)


def positions(chosen: Tensor, count: int) -> Int[Tensor, " edges"]:
    """Positions ``[K]`` in a list of ``count`` edges; TypeError or IndexError for what is none."""
    if chosen.is_floating_point() or chosen.dtype == torch.bool:
        raise TypeError(f"edges must be integers, positions [K] or pairs, got {chosen.dtype}; of a bool mask use nonzero()")
    if ((chosen < 0) | (chosen >= count)).any():
        raise IndexError(f"edges must be positions in 0 .. {count - 1}, got {int(chosen.min())} .. {int(chosen.max())}")
    return chosen.long()


def varies(graph: TokenGraph) -> bool:
    """True if the graph differs by head or sample."""
    return graph.heads is not None or graph.batch is not None


def listing(graph: TokenGraph, device: torch.device) -> Int[Tensor, "2 pairs"]:
    """All pairs that are an edge for some sample and head: ``graph.edge_index`` unless the graph varies, else by receiver.

    >>> graph = TokenGraph.from_rule(lambda b, h, dst, src: dst == src + h, 3, heads=2)
    >>> listing(graph, torch.device("cpu")).tolist()
    [[0, 0, 1, 1, 2], [0, 1, 1, 2, 2]]
    """
    if not varies(graph):
        return graph.edges_on(device)
    pairs: Tensor = kept(_union, graph)
    return pairs.to(device)


def _union(graph: TokenGraph) -> Tensor:
    parts = [one_of(graph, b, h).edge_index for b in range(graph.batch or 1) for h in range(graph.heads or 1)]
    width = max(graph.num_src, 1)
    keys: Tensor = torch.unique(torch.cat([dst * width + src for src, dst in parts]))
    return torch.stack([keys % width, keys // width])


def present(graph: TokenGraph, pairs: Int[Tensor, "2 pairs"], batch: int, heads: int) -> Bool[Tensor, "batch heads pairs"]:
    """Where each pair is an edge of the graph, for each sample and head."""
    src, dst = pairs
    b = torch.arange(batch, device=pairs.device).view(-1, 1, 1)
    h = torch.arange(heads, device=pairs.device).view(1, -1, 1)
    return enumerate_pairs.evaluate(graph.rule, repr(graph), b, h, dst, src).expand(batch, heads, len(src))


def check_edges(graph: TokenGraph, pairs: Int[Tensor, "2 pairs"], heads: int, chosen: list[int] | None, then: str) -> None:
    """ValueError or IndexError for a pair that is no edge for any sample and any of the ``chosen`` heads."""
    edge_list.checked(pairs, graph.num_dst, graph.num_src)
    found = present(graph, pairs, graph.batch or 1, heads)
    missing = ~(found if chosen is None else found[:, chosen]).any(0).any(0)
    if missing.any():
        src, dst = pairs[:, missing][:, 0].tolist()
        raise ValueError(f"{src} -> {dst} is no edge of {graph!r}: {then}")


def overlaps(call: Call, pairs: Int[Tensor, "2 pairs"]) -> Float[Tensor, "batch heads pairs"]:
    """``score_mod(scale * q_dst . k_src)`` of any pairs, edges or not; in float32 or better."""
    if _is_listing(pairs, call.graph):
        return _overlaps_of_all(call)
    return torch.cat([recomputed(_overlaps, call, part) for part in torch.split(pairs, AT_ONCE, dim=1)], dim=-1)


def _is_listing(pairs: Tensor, graph: TokenGraph) -> bool:
    return not varies(graph) and pairs is graph.edges_on(pairs.device)


def _overlaps_of_all(call: Call) -> Tensor:
    """Of all edges at once, by the operator over lists of edges: nothing is gathered."""
    wide, device = edges.accumulation_dtype(call.q.dtype), call.q.device
    listed = csr_ops.tensors_of(edges_of(call.graph, device))
    score = csr_ops.products(call.q.to(wide), call.k.to(wide), listed) * call.scale
    score = call.modified(score, listed[2].long(), listed[1].long())
    return torch.empty_like(score).index_copy(2, order_of(call.graph, device), score)


def _overlaps(call: Call, pairs: Tensor) -> Tensor:
    wide, (src, dst) = edges.accumulation_dtype(call.q.dtype), pairs
    q_dst, k_src = call.q.to(wide).index_select(2, dst), call.k.to(wide).index_select(2, src)  # gradients are summed in it too
    return call.modified(edges.logit(q_dst, edges.per_query_head(k_src, call.q.shape[1]), call.scale), dst, src)


def logits(call: Call, pairs: Int[Tensor, "2 pairs"]) -> Float[Tensor, "batch heads pairs"]:
    """The logit of edges, bias included; -inf for the samples and heads in which a pair is no edge."""
    numbers = overlaps(call, pairs)
    if call.bias is not None:
        bias = call.bias if _is_listing(pairs, call.graph) else call.bias[..., call.graph.positions_of(pairs).to(pairs.device)]
        numbers = numbers + bias.to(numbers.dtype)
    if not varies(call.graph):
        return numbers
    return numbers.masked_fill(~present(call.graph, pairs, *numbers.shape[:2]), -torch.inf)
