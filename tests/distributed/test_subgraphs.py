"""Subgraphs of ranks: every edge is in one of them, and every row that is needed is sent by its owner."""

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


def partition_of(graph, kind):
    """On three ranks."""
    if kind != "scattered":
        return getattr(partitions, kind)(graph, 3)
    draw = torch.Generator().manual_seed(graph.num_dst)
    owners = [torch.randint(3, (n,), generator=draw) for n in (graph.num_dst, graph.num_src)]
    return partitions.Partition(*(partitions.of_owners(owner, 3) for owner in owners))


@pytest.mark.parametrize("exchange", ["halo", "ring", "gather"])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "scattered"])
@pytest.mark.parametrize("name", GRAPHS)
def test_every_edge_is_in_one_subgraph_of_its_receivers_rank(name, kind, exchange):
    """The bias of a rank's edges is found by each subgraph; positions of its rows are those of the graph."""
    graph = GRAPHS[name]
    partition, found = partition_of(graph, kind), []
    for rank in range(3):
        own = subgraphs.in_edges(graph, partition, rank)
        assert torch.equal(own, graph.edge_index[:, partition.dst.owner(graph.edge_index[1]) == rank])
        for part in subgraphs.rank_subgraphs(graph, partition, rank, exchange):
            src, dst = part.graph.edge_index
            ends = torch.stack([part.src[src], part.dst[dst]])
            assert torch.equal(own[:, subgraphs.edge_positions(graph, partition, rank, part)], ends)
            found.append(ends)
            check_positions(part, graph)
    src, dst = torch.cat(found, dim=1)
    key = graph.edge_index[1] * graph.num_src + graph.edge_index[0]
    assert torch.equal((dst * graph.num_src + src).sort().values, key.sort().values)


def check_positions(part, graph):
    """By offsets where rows are neighbours, else by tables."""
    for side in ("dst", "src"):
        tokens, at = getattr(part, side), getattr(part, f"{side}_at")
        rows = torch.arange(len(tokens)) + getattr(part.graph, f"{side}_offset")
        assert torch.equal(rows if at is None else at[rows], tokens + getattr(graph, f"{side}_offset"))


def test_neighbouring_rows_need_no_table():
    graph = GRAPHS["window"]
    assert not subgraphs.subgraph(graph, torch.arange(2, 5), torch.arange(1, 4)).has_gaps
    assert subgraphs.subgraph(graph, torch.arange(2, 5), torch.tensor([1, 3])).has_gaps


@pytest.mark.parametrize("sizes", [(3, 3, 3), (5, 0, 2), (1,)])
def test_every_block_reaches_every_rank_once(sizes):
    """A ring sends every block from rank to rank, a gather all at once."""
    world = len(sizes)
    for step in range(world - 1):
        steps = [subgraphs.ring_step(sizes, rank, step) for rank in range(world)]
        for rank, transfer in enumerate(steps):
            after = (rank + 1) % world
            assert transfer.send_counts[after] == sum(transfer.send_counts) == sizes[(rank - step) % world]
            assert steps[after].receive_counts[rank] == transfer.send_counts[after]
    for rank in range(world):
        transfer = subgraphs.to_all_ranks(sizes, rank, "cpu")
        assert transfer.receive_counts == tuple(0 if r == rank else size for r, size in enumerate(sizes))
        assert transfer.send_counts == tuple(0 if r == rank else sizes[rank] for r in range(world))
