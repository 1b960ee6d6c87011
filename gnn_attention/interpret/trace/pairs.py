"""Chosen pairs of tokens in a call of attention: which are edges, and their logits.

A pair is a column ``(src, dst)`` of an int64 ``[2, K]``; numbers of pairs are ``[B, H, K]``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch_geometric.utils import coalesce

from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.backends.call import AttentionCall, select_slice
from gnn_attention.graph import TokenGraph, edge_list, memoized
from gnn_attention.graph.regions import enumerate_pairs


def as_pairs(pairs: Any) -> Int[Tensor, "2 pairs"]:
    """``[2, K]`` from a tensor of that shape, a list of ``(src, dst)`` or a single such pair."""
    if not isinstance(pairs, Tensor):
        if not isinstance(pairs, Sequence) or isinstance(pairs, str):
            raise TypeError(f"edges must be a tensor [2, K] or a list of (src, dst), got {quote(pairs)}")
        try:
            rows = torch.tensor(pairs) if len(pairs) else torch.zeros(0, 2, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError):
            rows = torch.zeros(0)
        columns = (rows.unsqueeze(0) if rows.dim() == 1 else rows).movedim(-1, 0)
    else:
        columns = edge_list.unwrap_tensor("edges", pairs)
    is_table, is_integer = columns.dim() == 2 and len(columns) == 2, columns.dtype in edge_list.SIGNED_DTYPES
    if not is_table or not is_integer or (columns < 0).any():
        error = ValueError if not is_table else IndexError if is_integer else TypeError
        got = quote(columns[:, (columns < 0).any(0)].mT.tolist() if error is IndexError else pairs)
        raise error(f"edges: a pair is (src, dst), integers from 0 on, or a column of [2, K], got {got}")
    return columns.detach().to("cpu", torch.int64, copy=True)


def union(graph: TokenGraph, device: torch.device) -> Int[Tensor, "2 pairs"]:
    """All pairs that are an edge for some sample and head; sorted where it varies."""
    if not graph.varying_axes:
        return graph.edges_on(device)
    pairs: Tensor = memoized(_union, graph)
    return pairs.to(device)


def _union(graph: TokenGraph) -> Tensor:
    samples, heads = range(graph.batch or 1), range(graph.heads or 1)
    parts = [select_slice(graph, b, h).edge_index for b in samples for h in heads]
    nodes = max(graph.num_src, graph.num_dst)
    edges: Tensor = coalesce(torch.cat(parts, dim=1), num_nodes=nodes, sort_by_row=False)
    return edges


def is_edge(
    graph: TokenGraph, pairs: Int[Tensor, "2 pairs"], batch: int, heads: int | Sequence[int]
) -> Bool[Tensor, "batch heads pairs"]:
    """For so many heads, or those of these numbers."""
    src, dst = pairs
    b = torch.arange(batch, device=pairs.device).view(-1, 1, 1)
    numbers = list(range(heads) if isinstance(heads, int) else heads)
    h = torch.tensor(numbers, dtype=torch.int64, device=pairs.device).view(1, -1, 1)
    found = enumerate_pairs.evaluate(graph.edges.contains, repr(graph), b, h, dst, src)
    return found.expand(batch, len(numbers), len(src))


def check_edges(graph: TokenGraph, pairs: Tensor, heads: int, chosen: Sequence[int] | None, why: str) -> None:
    """ValueError or IndexError for a pair that is no edge for any sample and any of the ``chosen`` heads."""
    edge_list.check_edge_index(pairs, graph.num_dst, graph.num_src)
    missing = ~is_edge(graph, pairs, graph.batch or 1, heads if chosen is None else chosen).any(0).any(0)
    if missing.any():
        src, dst = pairs[:, missing][:, 0].tolist()
        raise ValueError(f"{src} -> {dst} is no edge of {graph!r}: {why}")


def logits(call: AttentionCall, pairs: Int[Tensor, "2 pairs"]) -> Float[Tensor, "batch heads pairs"]:
    """The logit of edges, bias included; -inf for the samples and heads in which a pair is no edge."""
    numbers = call.scores(pairs)
    if call.bias is not None:
        bias = call.bias[..., call.graph.positions_of(pairs).to(pairs.device)]
        numbers = numbers + bias.to(numbers.dtype)
    if not call.graph.varying_axes:
        return numbers
    return numbers.masked_fill(~is_edge(call.graph, pairs, *numbers.shape[:2]), -torch.inf)


def bias_of(part: TokenGraph, graph: TokenGraph, bias: Any) -> Any:
    """The bias of the edges of a part, where it is one number for each edge of the whole."""
    per_edge = isinstance(bias, Tensor) and bias.dim() and bias.shape[-1] == graph.num_edges != 1
    if not per_edge:
        return bias
    if part.varying_axes:
        raise NotImplementedError(
            "bias with an intervention on some heads: intervene in all heads, or give it as a score_mod"
        )
    return bias[..., graph.positions_of(part.edge_index).to(bias.device)]
