"""The graph that is chosen from, and the graph of the chosen senders."""

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
from gnn_attention.patterns._choice import top_rows


def check_candidates(graph: TokenGraph | None, q: Tensor, k: Tensor) -> TokenGraph:
    """The graph to choose from, by default causal; TypeError or ValueError for one of other tokens."""
    for name, x in (("q", q), ("k", k)):
        edge_checks.floats(name, x, "[batch, ..., tokens, dim]")
    num_dst, num_src = q.shape[-2], k.shape[-2]
    if graph is None and num_dst == num_src:
        return patterns.causal(num_dst)
    if graph is None:
        raise ValueError(
            f"q has {num_dst} tokens and k {num_src}, which are not aligned by guess: "
            "give graph, for a decoding step causal(n).rows(start, stop)"
        )
    if checks.instance("graph", graph, TokenGraph).frame[:2] != (num_dst, num_src):
        raise ValueError(f"{graph!r} does not fit q with {num_dst} receivers and k with {num_src} senders")
    return graph


def edges_among(graph: TokenGraph, dst: Tensor, src: Tensor) -> Bool[Tensor, "..."]:
    """Whether pairs are edges, ``[batch, heads, rows, pairs]`` for what ``dst`` and ``src`` broadcast to."""
    b, h = (torch.arange(n or 1, device=dst.device) for n in (graph.batch, graph.heads))
    ends = b.view(-1, 1, 1, 1), h.view(-1, 1, 1), dst, src
    shape = torch.broadcast_tensors(*ends)[0].shape  # type: ignore[no-untyped-call]
    return evaluate(graph.edges.contains, graph.name, *ends).expand(shape)


def mask_rows(
    graph: TokenGraph, rows: tuple[int, int], device: torch.device
) -> Bool[Tensor, "batch heads rows src"]:
    """The rows of the mask of ``graph``; a small one is cached, for all layers have the graph of a token."""
    if rows == (0, graph.num_dst) and has_few_pairs(graph.shape4):
        return graph.mask(device).view(graph.shape4)
    dst = torch.arange(*rows, device=device).unsqueeze(-1)
    return edges_among(graph, dst, torch.arange(graph.num_src, device=device))


def choose(
    scores_of: Callable[[tuple[int, int]], Tensor],
    of: TokenGraph,
    width: int,
    count: int,
    name: str,
    num_heads: int = 1,
    block: int | None = None,
) -> TokenGraph:
    """The graph of each receiver's ``count`` largest scores among the edges of another, at its positions.

    ``scores_of(rows)`` are for senders, or for blocks of ``block`` of them; those of fewer than
    ``num_heads`` heads are of groups of these. ``width`` is how many numbers those of one receiver take.
    """
    index = top_rows(scores_of, of.num_dst, width, count)
    index = index if block is None else tokens_of(index, block, of)
    index = index if index.shape[1] == 1 else index.repeat_interleave(num_heads // index.shape[1], 1)
    at: dict[str, Any] = {"name": name, "dst_offset": of.dst_offset, "src_offset": of.src_offset}
    if torch.compiler.is_compiling():
        varying = index if len(index) > 1 else index[0, 0] if index.shape[1] == 1 else index[0]
        return replace(TokenGraph.from_indices(varying, of.num_src), **at)
    edges = Rows(index.masked_fill(index < 0, of.num_src), of.num_src, is_distinct=True).to_edges()
    batch, heads = (size if size > 1 else None for size in index.shape[:2])
    return TokenGraph(edges, index.shape[2], of.num_src, heads, batch, **at)


def tokens_of(
    blocks: Int[Tensor, "batch heads dst most"], size: int, of: TokenGraph
) -> Int[Tensor, "batch heads dst tokens"]:
    """The tokens of the chosen blocks that are edges of the graph ``of``, -1 in the place of others."""
    inside = torch.arange(size, device=blocks.device, dtype=blocks.dtype)
    return within(of, (blocks.unsqueeze(-1) * size + inside).flatten(-2))


def within(of: TokenGraph, index: Int[Tensor, "batch heads dst most"]) -> Int[Tensor, "..."]:
    """The index without what is no edge of ``of``, and without what is no sender."""
    dst = torch.arange(of.num_dst, device=index.device).unsqueeze(-1)
    safe = index.clamp(0, of.num_src - 1).long()
    return index.masked_fill(~(edges_among(of, dst, safe) & (index == safe)), -1)
