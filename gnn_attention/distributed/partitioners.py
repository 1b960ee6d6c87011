"""Partitions that fit the graph: ranges of equal edges, whole documents, edge lists cut by RCM or METIS.

The first two count the edges of each receiver and list none. The last two read the edge list as an undirected
graph without self loops, whose nodes are the tokens, or the receivers and then the senders.
"""

import heapq
import importlib
from bisect import bisect_left
from itertools import pairwise

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.distributed.partition import Partition, contiguous, of_bounds, of_owners, of_ranges
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.liveness import last_receivers, last_senders

GRAIN = 16  # neighbouring short documents are joined up to this part of a rank's share
MAX_EDGES = 2**25  # that are listed, in about 3 GB

Adjacency = tuple[Tensor, Tensor]  # where the neighbours of each node start, the neighbours
Pieces = list[list[int]]  # by rank, the numbers of its pieces


def by_edges(graph: TokenGraph, world_size: int) -> Partition:
    """Neighbouring receivers with as nearly as possible the same number of edges on each rank.

    No rank has more than its share ``E / world_size`` and the edges of one receiver. The senders of a square
    graph are owned alike, those of another one as :func:`contiguous` does.

    >>> from gnn_attention import patterns
    >>> by_edges(patterns.causal(10), 2)
    Partition(by edges: 10 receivers and senders on 2 ranks: 0..6; 7..9)
    """
    world_size, weight = checks.size("world_size", world_size, 1), _in_degrees(graph)
    if not int(weight.sum()):
        weight = torch.ones_like(weight)
    dst = of_bounds(equal_bounds(weight, world_size))
    src = dst if graph.num_src == graph.num_dst else contiguous(graph, world_size).src
    return Partition(dst, src, "by edges")


def documents(graph: TokenGraph, world_size: int) -> Partition:
    """Whole documents on each rank where possible, balanced by edges; one beyond a rank's share is cut.

    A document is a run of tokens that no edge crosses (:func:`closed_runs`). Documents stay in order if that
    balances as well as dealing them out, the largest first, each to the rank with the least. No rank has more
    than twice its share of edges and tokens together, and one receiver's edges. ValueError unless square.

    >>> from gnn_attention import patterns
    >>> documents(patterns.documents([3, 3, 2, 4]), 2)
    Partition(documents: 12 receivers and senders on 2 ranks: 0..5; 6..11)
    """
    world_size = checks.size("world_size", world_size, 1)
    before: list[int] = _before(_in_degrees(graph) + 1).tolist()  # a token has a cost without edges too
    pieces = _pieces(closed_runs(graph).tolist(), before, -(-before[-1] // world_size))
    sizes = [before[stop] - before[start] for start, stop in pieces]
    candidates = _in_order(sizes, world_size), _largest_first(sizes, world_size)
    owned = min(candidates, key=lambda ranks: max(sum(sizes[number] for number in own) for own in ranks))
    shares = of_ranges(graph.num_dst, [[pieces[number] for number in own] for own in owned])
    return Partition(shares, shares, "documents")


def closed_runs(graph: TokenGraph) -> Int[Tensor, "runs 2"]:
    """The shortest runs ``start .. stop - 1`` that no edge enters or leaves; ValueError unless square."""
    if graph.num_dst != graph.num_src:
        raise ValueError(f"documents are of a square graph, got {graph!r}; take contiguous or by_edges")
    furthest = torch.maximum(last_receivers(graph), last_senders(graph))
    token = torch.arange(graph.num_dst, device="cpu")
    stop = (torch.maximum(furthest, token).cummax(0).values == token).nonzero().flatten() + 1
    return torch.stack([torch.cat([torch.zeros_like(stop[:1]), stop[:-1]]), stop], 1)


def rcm(graph: TokenGraph, world_size: int) -> Partition:
    """Ranges of nearly equal edges of the reverse Cuthill-McKee order (:func:`rcm_order`).

    ValueError for a graph of more than 2^25 edges.
    """
    world_size = checks.size("world_size", world_size, 1)
    weight, order = _node_weights(graph), rcm_order(graph)
    bounds = torch.tensor(equal_bounds(weight[order], world_size), device="cpu")
    owner = torch.empty_like(order)
    owner[order] = torch.repeat_interleave(torch.arange(world_size, device="cpu"), bounds.diff())
    return _of_nodes(graph, owner, world_size, "rcm")


def metis(graph: TokenGraph, world_size: int) -> Partition:
    """METIS's k-way partition: the fewest senders that travel, the edges in balance; deterministic.

    ImportError without pymetis (extra ``metis``), ValueError for a graph of more than 2^25 edges. Source:
    Karypis and Kumar 1998, A fast and high quality multilevel scheme for partitioning irregular graphs.
    """
    world_size = checks.size("world_size", world_size, 1)
    try:
        pymetis = importlib.import_module("pymetis")
    except ImportError:
        message = "metis needs pymetis: pip install 'gnn_attention[metis]', or take rcm, which needs nothing"
        raise ImportError(message) from None
    weight, (start, neighbours) = _node_weights(graph), _adjacency(graph)
    if world_size == 1 or len(weight) <= world_size or not len(neighbours):
        owner = torch.arange(len(weight), device="cpu") % world_size
    else:
        # objtype 1 minimises the volume that travels instead of the edges that are cut
        options = {"recursive": False, "options": pymetis.Options(objtype=1, seed=0)}
        table = pymetis.CSRAdjacency(start.numpy(), neighbours.numpy())
        found = pymetis.part_graph(world_size, table, vweights=weight.numpy(), **options)
        owner = torch.as_tensor(found.vertex_part, dtype=torch.int64, device="cpu")
    return _of_nodes(graph, owner, world_size, "metis")


def rcm_order(graph: TokenGraph) -> Int[Tensor, " nodes"]:
    """The nodes in reverse Cuthill-McKee order, which places neighbours near each other.

    Source: Cuthill and McKee 1969, Reducing the bandwidth of sparse symmetric matrices.

    >>> from gnn_attention.graph import TokenGraph
    >>> path = TokenGraph.from_edges(torch.tensor([[0, 3, 1], [3, 1, 2]]), 4)      # 0 -> 3 -> 1 -> 2
    >>> rcm_order(path).tolist() in ([0, 3, 1, 2], [2, 1, 3, 0])
    True
    """
    import networkx as nx

    start, neighbours = _adjacency(graph)
    node = torch.repeat_interleave(start.diff())
    undirected = nx.empty_graph(len(start) - 1)
    undirected.add_edges_from(zip(node.tolist(), neighbours.tolist(), strict=True))
    order = list(nx.utils.reverse_cuthill_mckee_ordering(undirected))
    return torch.tensor(order, dtype=torch.int64, device="cpu")


def equal_bounds(weight: Tensor, parts: int) -> list[int]:
    """Bounds of runs of nearly the same weight: each where the weight before it is nearest to its due."""
    before = _before(weight)
    due = torch.arange(parts + 1, device="cpu") * int(before[-1]) // parts
    above = torch.searchsorted(before, due).clamp(max=len(weight))
    below = (above - 1).clamp(min=0)
    bounds: list[int] = torch.where(due - before[below] < before[above] - due, below, above).tolist()
    return [0, *bounds[1:-1], len(weight)]


def _in_degrees(graph: TokenGraph) -> Tensor:
    # over all heads and samples
    return graph.in_degree().reshape((graph.batch or 1) * (graph.heads or 1), graph.num_dst).sum(0)


def _before(weight: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), weight.cumsum(0)])


def _pieces(runs: list[list[int]], before: list[int], share: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in runs:
        if found and (before[stop] - before[found[-1][0]]) * GRAIN <= share:
            found[-1] = (found[-1][0], stop)
        else:
            found += _cut(start, stop, before, share)
    return found


def _cut(start: int, stop: int, before: list[int], share: int) -> list[tuple[int, int]]:
    # the rest comes first: of a causal document it is attended to least often
    due = reversed(range(before[stop], before[start], -share))
    ends = [start, *(bisect_left(before, weight) for weight in due)]
    return [(a, b) for a, b in pairwise(ends) if a < b]


def _in_order(sizes: list[int], world_size: int) -> Pieces:
    bounds = equal_bounds(torch.tensor(sizes, dtype=torch.int64, device="cpu"), world_size)
    return [list(range(start, stop)) for start, stop in pairwise(bounds)]


def _largest_first(sizes: list[int], world_size: int) -> Pieces:
    loads = [(0, rank) for rank in range(world_size)]
    owned: Pieces = [[] for _ in loads]
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        load, rank = loads[0]
        owned[rank].append(number)
        heapq.heapreplace(loads, (load + sizes[number], rank))
    return owned


def _adjacency(graph: TokenGraph) -> Adjacency:
    if graph.num_edges > MAX_EDGES:
        advice = "take contiguous, zigzag, by_edges or documents"
        raise ValueError(f"{graph!r} has {graph.num_edges} edges, too many to list; {advice}")
    samples = ((b, h) for b in range(graph.batch or 1) for h in range(graph.heads or 1))
    src, dst = torch.cat([graph.select(b, h).edge_index for b, h in samples], dim=1)
    shift = 0 if graph.num_dst == graph.num_src else graph.num_dst
    src, nodes = src + shift, shift + graph.num_src
    both = torch.cat([dst * nodes + src, src * nodes + dst])
    key = torch.unique(both[torch.cat([src, src]) != torch.cat([dst, dst])])
    return _before(torch.bincount(key // max(nodes, 1), minlength=nodes)), key % max(nodes, 1)


def _node_weights(graph: TokenGraph) -> Tensor:
    # a receiver: its edges and 1; a sender that is none: 1
    edges = _in_degrees(graph) + 1
    return edges if graph.num_dst == graph.num_src else torch.cat([edges, edges.new_ones(graph.num_src)])


def _of_nodes(graph: TokenGraph, owner: Tensor, world_size: int, name: str) -> Partition:
    dst = of_owners(owner[: graph.num_dst], world_size)
    src = dst if graph.num_dst == graph.num_src else of_owners(owner[graph.num_dst :], world_size)
    return Partition(dst, src, name)
