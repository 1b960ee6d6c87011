"""Helpers for selectors: they check the candidates and build the graph of the chosen edges."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from gnn_attention import patterns
from gnn_attention._support import checks, edge_checks
from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.indices import Rows
from gnn_attention.graph.regions.enumerate_pairs import evaluate, has_few_pairs
from gnn_attention.patterns._choice import select_largest_by_rows


def check_candidates(graph: TokenGraph | None, q: Tensor, k: Tensor) -> TokenGraph:
    """Return the graph to choose from, by default causal; raise an error if it does not fit q and k."""
    for name, x in (("q", q), ("k", k)):
        edge_checks.floats(name, x, "[batch, ..., tokens, dim]")
    num_dst, num_src = q.shape[-2], k.shape[-2]
    if graph is None and num_dst == num_src:
        return patterns.causal(num_dst)
    if graph is None:
        raise ValueError(
            f"graph is needed to align q of {num_dst} tokens with k of {num_src}; "
            "for a decoding step pass causal(n).rows(start, stop)"
        )
    if checks.instance("graph", graph, TokenGraph).frame[:2] != (num_dst, num_src):
        raise ValueError(f"{graph!r} does not fit q with {num_dst} receivers and k with {num_src} senders")
    return graph


def are_edges(graph: TokenGraph, dst: Tensor, src: Tensor) -> Bool[Tensor, "..."]:
    """Return whether the pairs ``dst, src`` are edges, ``[batch, heads, rows, pairs]``."""
    b, h = (torch.arange(n or 1, device=dst.device) for n in (graph.batch, graph.heads))
    b, h = b.view(-1, 1, 1, 1), h.view(-1, 1, 1)
    shape = torch.broadcast_tensors(b, h, dst, src)[0].shape  # type: ignore[no-untyped-call]
    return evaluate(graph.edges.contains, graph.name, b, h, dst, src).expand(shape)


def mask_rows(graph: TokenGraph, rows: tuple[int, int], device: torch.device) -> Bool[Tensor, "..."]:
    """Return the rows ``start .. stop - 1`` of a graph's mask, ``[batch, heads, rows, src]``."""
    # All layers share the graph of a step, so a small mask is worth caching.
    if rows == (0, graph.num_dst) and has_few_pairs(graph.shape4):
        return graph.mask(device).view(graph.shape4)
    dst = torch.arange(*rows, device=device).unsqueeze(-1)
    return are_edges(graph, dst, torch.arange(graph.num_src, device=device))


def choose(
    compute_scores: Callable[[tuple[int, int]], Tensor],
    candidates: TokenGraph,
    row_size: int,
    k: int,
    name: str,
    num_heads: int = 1,
    block_size: int | None = None,
) -> TokenGraph:
    """Return the graph of the ``k`` largest scores of each receiver among ``candidates``.

    ``compute_scores(rows)`` scores senders, or blocks of ``block_size`` senders. If fewer than
    ``num_heads`` heads have scores, groups of heads share them. Scoring one receiver needs
    ``row_size`` numbers.
    """
    num_src = candidates.num_src
    index = select_largest_by_rows(compute_scores, candidates.num_dst, row_size, k)
    if block_size is not None:
        index = expand_blocks(index, block_size, candidates)
    if index.shape[1] > 1:
        index = index.repeat_interleave(num_heads // index.shape[1], 1)
    offsets: dict[str, Any] = {"dst_offset": candidates.dst_offset, "src_offset": candidates.src_offset}
    if torch.compiler.is_compiling():
        # A leading axis of size 1 is dropped, because the graph is the same along it.
        if len(index) == 1:
            index = index[0, 0] if index.shape[1] == 1 else index[0]
        return replace(TokenGraph.from_indices(index, num_src), name=name, **offsets)
    edges = Rows(index.masked_fill(index < 0, num_src), num_src, is_distinct=True).to_edges()
    batch, heads = (size if size > 1 else None for size in index.shape[:2])
    return TokenGraph(edges, index.shape[2], num_src, heads, batch, name=name, **offsets)


def expand_blocks(
    blocks: Int[Tensor, "batch heads dst k"], block_size: int, candidates: TokenGraph
) -> Int[Tensor, "batch heads dst tokens"]:
    """Return the senders in the chosen blocks, with -1 where ``candidates`` has no edge."""
    offsets = torch.arange(block_size, device=blocks.device, dtype=blocks.dtype)
    return keep_edges(candidates, (blocks.unsqueeze(-1) * block_size + offsets).flatten(-2))


def keep_edges(candidates: TokenGraph, index: Int[Tensor, "batch heads dst k"]) -> Int[Tensor, "..."]:
    """Return ``index`` with -1 where ``candidates`` has no edge."""
    dst = torch.arange(candidates.num_dst, device=index.device).unsqueeze(-1)
    src = index.clamp(0, candidates.num_src - 1).long()
    return index.masked_fill(~(are_edges(candidates, dst, src) & (index == src)), -1)
