"""Pairs of tokens in an attention call: which of them are edges, and their logits.

A pair is a column ``(src, dst)`` of an int64 tensor ``[2, K]``. Values of pairs are ``[B, H, K]``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch_geometric.utils import coalesce

from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.backends.call import AttentionCall
from gnn_attention.edge_ops.edge_lists import select_slice
from gnn_attention.graph import TokenGraph, edge_list, memoized
from gnn_attention.graph.regions import enumerate_pairs


def read_pairs(pairs: Any) -> Int[Tensor, "2 pairs"]:
    """Return ``[2, K]`` from a tensor of that shape, a list of ``(src, dst)`` or one pair."""
    if isinstance(pairs, Tensor):
        edge_index = edge_list.unwrap_tensor("edges", pairs)
    else:
        if not isinstance(pairs, Sequence) or isinstance(pairs, str):
            raise TypeError(f"edges must be a tensor [2, K] or a list of (src, dst), got {quote(pairs)}")
        try:
            rows = torch.tensor(pairs) if len(pairs) else torch.zeros(0, 2, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError):
            rows = torch.zeros(0)
        edge_index = (rows.unsqueeze(0) if rows.dim() == 1 else rows).movedim(-1, 0)
    has_two_rows = edge_index.dim() == 2 and len(edge_index) == 2
    is_integer = edge_index.dtype in edge_list.SIGNED_DTYPES
    if not has_two_rows or not is_integer or (edge_index < 0).any():
        error = ValueError if not has_two_rows else IndexError if is_integer else TypeError
        wrong = edge_index[:, (edge_index < 0).any(0)].mT.tolist() if error is IndexError else pairs
        raise error(f"edges must be pairs (src, dst) of integers >= 0, or [2, K], got {quote(wrong)}")
    return edge_index.detach().to("cpu", torch.int64, copy=True)


def compute_edge_union(graph: TokenGraph, device: torch.device) -> Int[Tensor, "2 pairs"]:
    """Return the edges of all samples and heads together, sorted if the graph varies by any of them."""
    if not graph.varying_axes:
        return graph.edges_on(device)
    pairs: Tensor = memoized(_compute_edge_union, graph)
    return pairs.to(device)


def _compute_edge_union(graph: TokenGraph) -> Tensor:
    samples, heads = range(graph.batch or 1), range(graph.heads or 1)
    edges = torch.cat([select_slice(graph, b, h).edge_index for b in samples for h in heads], dim=1)
    num_nodes = max(graph.num_src, graph.num_dst)
    union: Tensor = coalesce(edges, num_nodes=num_nodes, sort_by_row=False)
    return union


def is_edge(
    graph: TokenGraph, pairs: Int[Tensor, "2 pairs"], batch: int, heads: int | Sequence[int]
) -> Bool[Tensor, "batch heads pairs"]:
    """Return which pairs are edges in the first ``heads`` heads, or in the heads of a list."""
    src, dst = pairs
    head_indices = list(range(heads) if isinstance(heads, int) else heads)
    b = torch.arange(batch, device=pairs.device).view(-1, 1, 1)
    h = torch.tensor(head_indices, dtype=torch.int64, device=pairs.device).view(1, -1, 1)
    contains = enumerate_pairs.evaluate(graph.edges.contains, repr(graph), b, h, dst, src)
    return contains.expand(batch, len(head_indices), len(src))


def check_edges(graph: TokenGraph, pairs: Tensor, num_heads: int, heads: Any, advice: str) -> None:
    """Raise ValueError or IndexError for a pair that is not an edge in any sample and head."""
    edge_list.check_edge_index(pairs, graph.num_dst, graph.num_src)
    missing = ~is_edge(graph, pairs, graph.batch or 1, num_heads if heads is None else heads).any(0).any(0)
    if missing.any():
        src, dst = pairs[:, missing][:, 0].tolist()
        raise ValueError(f"{src} -> {dst} is not an edge of {graph!r}: {advice}")


def logits(call: AttentionCall, pairs: Int[Tensor, "2 pairs"]) -> Float[Tensor, "batch heads pairs"]:
    """Return the logits of edges, bias included; -inf in samples and heads that lack the edge."""
    values = call.scores(pairs)
    if call.bias is not None:
        bias = call.bias[..., call.graph.positions_of(pairs).to(pairs.device)]
        values = values + bias.to(values.dtype)
    if not call.graph.varying_axes:
        return values
    return values.masked_fill(~is_edge(call.graph, pairs, *values.shape[:2]), -torch.inf)


def restrict_bias(bias: Any, graph: TokenGraph, subgraph: TokenGraph) -> Any:
    """Restrict a bias that varies by edge to the edges of a subgraph; return any other bias."""
    is_per_edge = isinstance(bias, Tensor) and bias.dim() and bias.shape[-1] == graph.num_edges != 1
    if not is_per_edge:
        return bias
    if subgraph.varying_axes:
        raise NotImplementedError("bias= excludes interventions on some heads: select all, or use score_mod")
    return bias[..., graph.positions_of(subgraph.edge_index).to(bias.device)]
