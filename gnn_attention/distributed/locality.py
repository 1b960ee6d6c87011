"""Partitions that keep who hears one another together, for graphs without a useful order: RCM, METIS.

Both read the list of edges, as an undirected graph without self loops. The nodes of a graph between two sequences are its
receivers and its senders. A rank still holds its tokens in ascending order: only who owns them changes.
"""

from __future__ import annotations

from typing import Any

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.distributed.balance import edges_of_each, equal_bounds
from gnn_attention.distributed.partition import Partition, of_owners
from gnn_attention.graph import TokenGraph, edge_list
from gnn_attention.graph.regions.quadtree import ragged

__all__ = ["MOST_EDGES", "metis", "rcm", "rcm_order"]

MOST_EDGES = 2**25  # that are listed, in about 3 GB

Adjacency = tuple[Tensor, Tensor]  # where the neighbours of each node start, the neighbours


def rcm(graph: TokenGraph, world_size: int) -> Partition:
    """Neighbours in the reverse Cuthill-McKee order (:func:`rcm_order`), with as nearly as possible the same number of edges.

    ValueError for a graph of more than 2^25 edges.

    >>> from gnn_attention import patterns
    >>> rcm(patterns.permutation([0, 2, 4, 1, 3, 5]), 2).world_size
    2
    """
    world_size = checks.size("world_size", world_size, 1)
    weight, order = _weights(graph), rcm_order(graph)
    bounds = torch.tensor(equal_bounds(weight[order], world_size), device="cpu")
    owner = torch.empty_like(order)
    owner[order] = torch.repeat_interleave(torch.arange(world_size, device="cpu"), bounds.diff())
    return _of_nodes(graph, owner, world_size, "rcm")


def metis(graph: TokenGraph, world_size: int) -> Partition:
    """METIS's k-way partition: the fewest senders that travel, the edges in balance; the same for the same graph.

    Needs pymetis (extra ``metis``). ImportError without it, ValueError for a graph of more than 2^25 edges.

    G. Karypis and V. Kumar, "A fast and high quality multilevel scheme for partitioning irregular graphs", 1998.
    """
    world_size, pymetis = checks.size("world_size", world_size, 1), _pymetis()
    weight, (start, neighbours) = _weights(graph), _adjacency(graph)
    if world_size == 1 or len(weight) <= world_size or not len(neighbours):
        owner = torch.arange(len(weight), device="cpu") % world_size
    else:
        options = pymetis.Options(objtype=1, seed=0)  # 1: the volume that travels, instead of the edges that are cut
        table = pymetis.CSRAdjacency(start.numpy(), neighbours.numpy())
        found = pymetis.part_graph(world_size, table, vweights=weight.numpy(), recursive=False, options=options)
        owner = torch.as_tensor(found.vertex_part, dtype=torch.int64, device="cpu")
    return _of_nodes(graph, owner, world_size, "metis")


def rcm_order(graph: TokenGraph) -> Int[Tensor, " nodes"]:
    """The nodes in reverse Cuthill-McKee order, which keeps neighbours near: receivers, then senders if they are not the same.

    Breadth first from an end of each connected part, the children of a node by the number of their neighbours; then reversed.
    E. Cuthill and J. McKee, "Reducing the bandwidth of sparse symmetric matrices", 1969.

    >>> from gnn_attention.graph import TokenGraph
    >>> path = TokenGraph.from_edges(torch.tensor([[0, 3, 1], [3, 1, 2]]), 4)      # 0 -> 3 -> 1 -> 2
    >>> rcm_order(path).tolist() in ([0, 3, 1, 2], [2, 1, 3, 0])
    True
    """
    table = _adjacency(graph)
    degree = table[0].diff()
    part = _parts(table)
    first = _least_of_each(part, degree, torch.arange(len(part), device="cpu"))
    _, level = _visits(table, degree, first)
    last = torch.zeros_like(level).scatter_reduce_(0, part, level, "amax")[part] == level
    visit, _ = _visits(table, degree, _least_of_each(part, degree, last.nonzero().flatten()))
    return (part * len(part) + visit).argsort().flip(0)


# -- breadth first ----------------------------------------------------------------------------------------------------


def _visits(table: Adjacency, degree: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """When each node is visited from the first ones on, and its distance from them; all parts at a time."""
    visit = torch.full_like(degree, -1)
    level, reached, distance = torch.zeros_like(degree), 0, 0
    most = int(degree.max()) + 1 if len(degree) else 1
    while len(first):
        visit[first] = torch.arange(reached, reached + len(first), device="cpu")
        level[first] = distance
        reached, distance = reached + len(first), distance + 1
        parent, number = ragged(degree[first])
        child = table[1][table[0][first][parent] + number]
        fresh = visit[child] < 0
        parent, child = parent[fresh], child[fresh]
        child = child[(parent * most + degree[child]).argsort(stable=True)]
        first = child[edge_list.first_of_each(child)]
    return visit, level


def _parts(table: Adjacency) -> Tensor:
    """The connected part of each node, named by its first node."""
    name = torch.arange(len(table[0]) - 1, device="cpu")
    node = torch.repeat_interleave(name, table[0].diff())
    while True:
        lower = name.scatter_reduce(0, node, name[table[1]], "amin")
        lower = lower[lower]
        if torch.equal(lower, name):
            return name
        name = lower


def _least_of_each(part: Tensor, degree: Tensor, among: Tensor) -> Tensor:
    """Of each part, the node with the fewest neighbours among the given ones."""
    order = among[(part[among] * (len(part) + 1) + degree[among]).argsort(stable=True)]
    return order[edge_list.first_of_each(part[order])]


# -- nodes and their neighbours ---------------------------------------------------------------------------------------


def _adjacency(graph: TokenGraph) -> Adjacency:
    """The undirected graph, without self loops."""
    src, dst = _edges(graph)
    nodes, shift = (graph.num_dst, 0) if graph.num_dst == graph.num_src else (graph.num_dst + graph.num_src, graph.num_dst)
    src = src + shift
    both = torch.cat([dst * nodes + src, src * nodes + dst])
    key = torch.unique(both[torch.cat([src, src]) != torch.cat([dst, dst])])
    start = torch.cat(
        [torch.zeros(1, dtype=torch.int64, device="cpu"), torch.bincount(key // max(nodes, 1), minlength=nodes).cumsum(0)]
    )
    return start, key % max(nodes, 1)


def _edges(graph: TokenGraph) -> Tensor:
    """The edges of all heads and samples."""
    if graph.num_edges > MOST_EDGES:
        raise ValueError(
            f"{graph!r} has {graph.num_edges} edges, too many to list; take contiguous, zigzag, by_edges or documents"
        )
    samples = ((b, h) for b in range(graph.batch or 1) for h in range(graph.heads or 1))
    return torch.cat([graph.select(b, h).edge_index for b, h in samples], dim=1)


def _weights(graph: TokenGraph) -> Tensor:
    """What each node costs: its edges, and itself."""
    edges = edges_of_each(graph) + 1
    return (
        edges
        if graph.num_dst == graph.num_src
        else torch.cat([edges, torch.ones(graph.num_src, dtype=torch.int64, device="cpu")])
    )


def _of_nodes(graph: TokenGraph, owner: Tensor, world_size: int, name: str) -> Partition:
    dst = of_owners(owner[: graph.num_dst], world_size)
    return Partition(dst, dst if graph.num_dst == graph.num_src else of_owners(owner[graph.num_dst :], world_size), name)


def _pymetis() -> Any:
    try:
        import pymetis
    except ImportError:
        raise ImportError("metis needs pymetis: pip install 'gnn_attention[metis]', or take rcm, which needs nothing") from None
    return pymetis
