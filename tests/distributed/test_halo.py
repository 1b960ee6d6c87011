"""What travels between ranks: every edge is in one part, every row that is needed is sent by its owner, and
nothing else.
"""

import pytest
import torch

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.distributed import partition as partitions
from gnn_attention.distributed import subgraphs

GRAPHS = {
    "window": patterns.window(17, 5),
    "hubs": patterns.window(17, 3) | patterns.sinks(17, 2),
    "list": ga.TokenGraph.from_edges(patterns.dilated(17, 4, 3).edge_index.flip(1), 17),
    "cross": patterns.cross(6, 11),
    "rows": patterns.causal(17).rows(9, 17),
}
WAYS = ("halo", "ring", "gather")


def partition_of(graph, kind):
    """On three ranks."""
    if kind != "scattered":
        return getattr(partitions, kind)(graph, 3)
    owners = [
        torch.randint(3, (n,), generator=torch.Generator().manual_seed(n))
        for n in (graph.num_dst, graph.num_src)
    ]
    return partitions.Partition(*(partitions.of_owners(owner, 3) for owner in owners))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "scattered"])
@pytest.mark.parametrize("name", GRAPHS)
def test_every_edge_is_in_one_part_of_its_receivers_rank(name, kind, way):
    """And a bias finds its way from the rank's edges to the part's."""
    graph = GRAPHS[name]
    partition, found = partition_of(graph, kind), []
    for rank in range(3):
        own = subgraphs.in_edges(graph, partition, rank)
        assert torch.equal(own, graph.edge_index[:, partition.dst.owner(graph.edge_index[1]) == rank])
        for part in subgraphs.rank_subgraphs(graph, partition, rank, way):
            src, dst = part.graph.edge_index
            ends = torch.stack([part.src[src], part.dst[dst]])
            assert torch.equal(own[:, subgraphs.edge_positions(graph, partition, rank, part)], ends)
            found.append(ends)
    keys = torch.cat(found, dim=1)[1] * graph.num_src + torch.cat(found, dim=1)[0]
    assert torch.equal(
        keys.sort().values, (graph.edge_index[1] * graph.num_src + graph.edge_index[0]).sort().values
    )


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "scattered"])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_part_knows_where_its_rows_stand(name, kind):
    """By offsets where they are neighbours, else by tables; counted from the positions of the graph."""
    graph = GRAPHS[name]
    partition = partition_of(graph, kind)
    for part in subgraphs.rank_subgraphs(graph, partition, 1, "gather"):
        for tokens, at, offset, start in (
            (part.dst, part.dst_at, part.graph.dst_offset, graph.dst_offset),
            (part.src, part.src_at, part.graph.src_offset, graph.src_offset),
        ):
            rows = torch.arange(len(tokens)) + offset
            assert torch.equal(rows if at is None else at[rows], tokens + start)
    assert not subgraphs.subgraph(graph, torch.arange(2, 5), torch.arange(1, 4)).has_gaps


@pytest.mark.parametrize("sizes", [(3, 3, 3), (5, 0, 2), (1,)])
def test_every_block_reaches_every_rank_once(sizes):
    """A ring passes every block to every rank, and what one sends the next one receives; a gather sends all
    at once.
    """
    world = len(sizes)
    for step in range(world - 1):
        steps = [subgraphs.ring_step(sizes, rank, step) for rank in range(world)]
        for rank, travel in enumerate(steps):
            after = (rank + 1) % world
            assert travel.send_counts[after] == sum(travel.send_counts) == sizes[(rank - step) % world]
            assert steps[after].receive_counts[rank] == travel.send_counts[after]
    for rank in range(world):
        travel = subgraphs.to_all_ranks(sizes, rank)
        assert travel.receive_counts == tuple(0 if r == rank else size for r, size in enumerate(sizes))
        assert travel.send_counts == tuple(0 if r == rank else sizes[rank] for r in range(world))
