"""Partitions that balance the work: neighbouring tokens with equally many edges, documents kept whole.

The edges of a receiver are counted (``in_degree``), over all heads and samples, never listed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from itertools import pairwise

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.distributed.partition import Partition, contiguous, of_bounds, of_ranges
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.liveness import last_receivers, last_senders

__all__ = ["by_edges", "closed_runs", "documents", "edges_of_each", "equal_bounds"]

GRAIN = 16  # short documents travel together, up to this part of a rank's share


def by_edges(graph: TokenGraph, world_size: int) -> Partition:
    """Neighbouring receivers with as nearly as possible the same number of edges on each rank.

    No rank has more than its share ``E / world_size`` and the edges of one receiver. The senders of a square graph are owned
    alike, those of another one as :func:`contiguous` does.

    >>> from gnn_attention import patterns
    >>> by_edges(patterns.causal(10), 2)
    Partition(by edges: 10 receivers and senders on 2 ranks: 0..6; 7..9)
    """
    world_size, weight = checks.size("world_size", world_size, 1), edges_of_each(graph)
    if not int(weight.sum()):
        weight = torch.ones_like(weight)
    dst = of_bounds(equal_bounds(weight, world_size))
    src = dst if graph.num_src == graph.num_dst else contiguous(graph, world_size).src
    return Partition(dst, src, "by edges")


def documents(graph: TokenGraph, world_size: int) -> Partition:
    """Whole documents on each rank where possible, balanced by their edges; one larger than a rank's share spans several.

    A document is a run of tokens that nothing crosses (:func:`closed_runs`), so this fits any square graph that falls apart into
    runs. Neighbouring documents stay together if that balances as well as giving them out one by one, from the largest on, each
    to the rank with the least. No rank has more than twice its share of edges and tokens together, and the edges of one receiver.
    ValueError unless the graph is square.

    >>> from gnn_attention import patterns
    >>> documents(patterns.documents([3, 3, 2, 4]), 2)
    Partition(documents: 12 receivers and senders on 2 ranks: 0..5; 6..11)
    """
    world_size = checks.size("world_size", world_size, 1)
    weight = edges_of_each(graph) + 1  # a token costs something without edges too
    before: list[int] = _before(weight).tolist()
    pieces = _pieces(closed_runs(graph).tolist(), before, -(-before[-1] // world_size))
    sizes = [before[stop] - before[start] for start, stop in pieces]
    owned = min(_side_by_side(sizes, world_size), _one_by_one(sizes, world_size), key=lambda ranks: _most(ranks, sizes))
    shares = of_ranges(graph.num_dst, [[pieces[number] for number in own] for own in owned])
    return Partition(shares, shares, "documents")


def closed_runs(graph: TokenGraph) -> Int[Tensor, "runs 2"]:
    """The shortest runs ``start .. stop - 1`` of tokens that no edge enters or leaves, in order: ValueError unless square.

    >>> from gnn_attention import patterns
    >>> closed_runs(patterns.documents([3, 2])).tolist()
    [[0, 3], [3, 5]]
    """
    if graph.num_dst != graph.num_src:
        raise ValueError(f"documents are runs of the tokens of a square graph, got {graph!r}; take contiguous or by_edges")
    furthest = torch.maximum(last_receivers(graph), last_senders(graph))
    place = torch.arange(graph.num_dst, device="cpu")
    closes = torch.maximum(furthest, place).cummax(0).values == place
    stop = closes.nonzero().flatten() + 1
    return torch.stack([torch.cat([torch.zeros_like(stop[:1]), stop[:-1]]), stop], 1)


# -- helpers ----------------------------------------------------------------------------------------------------------


def edges_of_each(graph: TokenGraph) -> Tensor:
    """Edges of each receiver over all heads and samples."""
    return graph.in_degree().reshape((graph.batch or 1) * (graph.heads or 1), graph.num_dst).sum(0)


def _before(weight: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), weight.cumsum(0)])


def equal_bounds(weight: Tensor, parts: int) -> list[int]:
    """Bounds of runs of nearly the same weight: each the one whose weight before it is nearest to its due."""
    before = _before(weight)
    due = torch.arange(parts + 1, device="cpu") * int(before[-1]) // parts
    above = torch.searchsorted(before, due).clamp(max=len(weight))
    below = (above - 1).clamp(min=0)
    bounds: list[int] = torch.where(due - before[below] < before[above] - due, below, above).tolist()
    return [0, *bounds[1:-1], len(weight)]


def _pieces(runs: list[list[int]], before: list[int], share: int) -> list[tuple[int, int]]:
    """Documents beyond the share cut, small neighbours joined."""
    found: list[tuple[int, int]] = []
    for start, stop in runs:
        if before[stop] - before[start] > share:
            found += _cut(start, stop, before, share)
        elif found and found[-1][1] == start and (before[stop] - before[found[-1][0]]) * GRAIN <= share:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _cut(start: int, stop: int, before: list[int], share: int) -> list[tuple[int, int]]:
    """Pieces of a share each; the rest comes first, where in a causal document the fewest tokens are heard by others."""
    due = reversed(range(before[stop], before[start], -share))
    ends = [start, *(bisect_left(before, weight) for weight in due)]
    return [(a, b) for a, b in pairwise(ends) if a < b]


Owned = list[list[int]]  # by rank, the numbers of its pieces


def _side_by_side(sizes: list[int], world_size: int) -> Owned:
    bounds = equal_bounds(torch.tensor(sizes, dtype=torch.int64, device="cpu"), world_size)
    return [list(range(start, stop)) for start, stop in pairwise(bounds)]


def _one_by_one(sizes: list[int], world_size: int) -> Owned:
    """The largest first, each to the rank with the least so far."""
    loads = [(0, rank) for rank in range(world_size)]
    owned: Owned = [[] for _ in loads]
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        load, rank = loads[0]
        owned[rank].append(number)
        heapq.heapreplace(loads, (load + sizes[number], rank))
    return owned


def _most(owned: Owned, sizes: list[int]) -> int:
    return max(sum(sizes[number] for number in own) for own in owned)
