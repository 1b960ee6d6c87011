"""The largest scores of each receiver, some receivers at a time, as a graph."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from gnn_attention import patterns
from gnn_attention._support import checks, edge_checks
from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.indices import Rows
from gnn_attention.graph.regions.enumerate_pairs import evaluate, few

# 4 MiB of float32
SCORES_AT_ONCE = 2**20


def checked(graph: TokenGraph | None, q: Tensor, k: Tensor) -> TokenGraph:
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


def row_blocks(num_dst: int, numbers_of_one: int) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` of successive receivers, each of which takes so many numbers."""
    step = max(1, SCORES_AT_ONCE // max(1, numbers_of_one))
    yield from ((start, min(start + step, num_dst)) for start in range(0, num_dst, step))


def edges_among(graph: TokenGraph, dst: Tensor, src: Tensor) -> Bool[Tensor, "..."]:
    """Whether pairs are edges, ``[batch, heads, rows, pairs]`` for what ``dst`` and ``src`` broadcast to."""
    b, h = (torch.arange(n or 1, device=dst.device) for n in (graph.batch, graph.heads))
    ends = b.view(-1, 1, 1, 1), h.view(-1, 1, 1), dst, src
    shape = torch.broadcast_tensors(*ends)[0].shape  # type: ignore[no-untyped-call]
    return evaluate(graph.edges.contains, graph.name, *ends).expand(shape)


def allowed(
    graph: TokenGraph, rows: tuple[int, int], device: torch.device
) -> Bool[Tensor, "batch heads rows src"]:
    """The rows of the mask of ``graph``; a small one is cached, for all layers have the graph of a token."""
    if rows == (0, graph.num_dst) and few(graph.shape4):
        return graph.mask(device).view(graph.shape4)
    dst = torch.arange(*rows, device=device).unsqueeze(-1)
    return edges_among(graph, dst, torch.arange(graph.num_src, device=device))


def top_rows(
    scores_of: Callable[[tuple[int, int]], Tensor], graph: TokenGraph, width: int, count: int
) -> Int[Tensor, "batch heads dst most"]:
    """The places of the ``count`` largest of ``scores_of(rows) [batch, heads, rows, pairs]``, -1 for -inf.

    ``width`` is how many numbers those of one receiver take.
    """
    places = []
    for rows in row_blocks(graph.num_dst, width):
        scores = scores_of(rows)
        largest = scores.topk(min(count, scores.shape[-1]), dim=-1)
        places.append(torch.where(largest.values > -torch.inf, largest.indices, -1).int())
    return torch.cat(places, dim=2)


def subgraph(index: Int[Tensor, "batch heads dst most"], of: TokenGraph, name: str) -> TokenGraph:
    """The graph of the senders that were chosen from another, each once, at the positions of that."""
    at: dict[str, Any] = {"name": name, "dst_offset": of.dst_offset, "src_offset": of.src_offset}
    if torch.compiler.is_compiling():
        varying = index if len(index) > 1 else index[0, 0] if index.shape[1] == 1 else index[0]
        return replace(TokenGraph.from_indices(varying, of.num_src), **at)
    edges = Rows(index.masked_fill(index < 0, of.num_src), of.num_src, once=True).choose()
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
