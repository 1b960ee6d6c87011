"""A rank's halo has the senders of its receivers in the mask, except those that it owns."""

from dataclasses import replace

import pytest
import torch
from support.covering import thin

from gnn_attention import patterns
from gnn_attention.convert import expressions
from gnn_attention.distributed import halo_sets
from gnn_attention.distributed.halo_sets import halo, halo_sizes
from gnn_attention.distributed.partition import Partition, Shares, contiguous, zigzag
from gnn_attention.graph import TokenGraph

ASYMMETRIC = TokenGraph.from_edges(torch.tensor([[0, 2, 1, 8, 3, 3], [1, 1, 2, 0, 7, 8]]), 9)


def random_partition(graph, world, seed=0):
    """Put every receiver and every sender on a random rank."""
    draw = torch.Generator().manual_seed(seed)
    sizes = graph.num_dst, graph.num_src
    return Partition(*(Shares(torch.randint(0, world, (n,), generator=draw), world) for n in sizes))


def assert_halo(graph, partition):
    """Assert that the halo and its sizes are those of the mask."""
    mask = graph.mask().reshape((graph.batch or 1) * (graph.heads or 1), graph.num_dst, graph.num_src)
    sizes = halo_sizes(graph, partition)
    for rank in range(partition.world_size):
        rows = mask[:, partition.dst.tokens(rank)]
        is_sender = rows.any(0).any(0)
        halo_senders = halo(graph, partition, rank)
        assert len(halo_senders) == partition.world_size
        for owner in range(partition.world_size):
            local_senders = partition.src.tokens(owner)
            expected = local_senders[is_sender[local_senders]] if owner != rank else local_senders[:0]
            assert torch.equal(halo_senders[owner], expected)
            assert int(sizes[rank, owner]) == len(expected)


GRAPHS = {
    **{text: expressions.evaluate(text) for text in ("window(64, 8)", "cross(24, 64)", "bigbird(64, 4)")},
    **{text: expressions.evaluate(text) for text in ("dilated(64, 8, 4)", "duo_attention(64, 4, [1], 8)")},
    "tree": expressions.evaluate("shared_bucket(tensor([[0, 1, 0, 2, 1, 0, 2, 1]]))"),
    "rows": patterns.strict_causal(40).rows(7, 31),
    "complement": ~(patterns.window(50, 5).T),
    "list": ASYMMETRIC.T,
    "no edges": patterns.causal(4) - patterns.causal(4),
    "no tokens": patterns.causal(0),
    "no receivers": patterns.cross(0, 5),
    "no senders": patterns.cross(5, 0),
}


@pytest.mark.parametrize("side", [2**13, 7])
@pytest.mark.parametrize("name", thin(GRAPHS, 0))
def test_a_handful_of_graphs(name, side, monkeypatch):
    """The halo is that of the mask, even if rules are evaluated on small boxes."""
    monkeypatch.setattr(halo_sets, "MAX_BOX_SIDE", side)
    for make, world in ((contiguous, 3), (zigzag, 3), (random_partition, 4)):
        # A copy has no cached results.
        graph = replace(GRAPHS[name])
        assert_halo(graph, make(graph, world))


@pytest.mark.parametrize(("n", "w", "world"), [(100, 60, 7), (100, 100, 5), (1_000_000, 4096, 64)])
def test_the_halo_of_a_window_is_the_tokens_before_its_first(n, w, world):
    """It has min(w - 1, start) senders, and all earlier tokens if the graph is causal (w = n)."""
    graph = patterns.window(n, w)
    partition = contiguous(graph, world)
    starts = [partition.dst.ranges(rank)[0][0] for rank in range(world)]
    assert halo_sizes(graph, partition).sum(1).tolist() == [min(w - 1, start) for start in starts]
    last_halo = torch.cat(halo(graph, partition, world - 1))
    assert torch.equal(last_halo, torch.arange(starts[-1] - min(w - 1, starts[-1]), starts[-1]))


def test_other_partitions_and_ranks_raise():
    graph = patterns.window(8, 2)
    for count in (halo_sizes, lambda graph, partition: halo(graph, partition, 0)):
        with pytest.raises(ValueError, match=r"partition must fit .*window.* got 7 receivers and 7 senders"):
            count(graph, contiguous(patterns.causal(7), 2))
    with pytest.raises(IndexError, match=r"rank must be in 0 .. 1, got 2"):
        halo(graph, contiguous(graph, 2), 2)
