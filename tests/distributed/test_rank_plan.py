"""The counts of a plan for ranks equal those of the mask, and sums that were computed by hand."""

import pytest
import torch
from support.refusals import assert_refusals

from gnn_attention import patterns
from gnn_attention.distributed import contiguous, plan, zigzag
from gnn_attention.graph import TokenGraph

BY_HEAD = TokenGraph.from_rule(
    lambda b, h, dst, src: (src <= dst) & (dst - src <= 2 * h), 30, heads=4, name="by head"
)
BY_SAMPLE = TokenGraph.from_rule(
    lambda b, h, dst, src: (src <= dst) & (dst - src <= 3 * b), 30, batch=2, name="by sample"
)
LIST = TokenGraph.from_edges(torch.tensor([[0, 5, 9, 2], [1, 0, 3, 9]]), 10)
EMPTY = patterns.causal(8) - patterns.causal(8)
# The number says how often a call with 4 heads and 2 samples has each edge of the mask.
GRAPHS = {
    "window": (patterns.window(50, 7), 4 * 2),
    "cross": (patterns.cross(20, 33), 4 * 2),
    "list": (LIST, 4 * 2),
    "by head": (BY_HEAD, 2),
    "by sample": (BY_SAMPLE, 4),
    "no edges": (EMPTY, 4 * 2),
}


class TestCounts:
    @pytest.mark.parametrize("name", GRAPHS)
    @pytest.mark.parametrize("world", [1, 3, 40])
    def test_edges_and_bytes_are_exact(self, name, world):
        """Each sender takes 96 bytes: 2 samples, 2 key heads, 5 + 7 channels, and 2 bytes a number."""
        graph, copies = GRAPHS[name]
        cost = plan(graph, world, 4, 5, kv_heads=2, value_dim=7, batch=2)
        partition, row = contiguous(graph, world), 2 * 2 * (5 + 7) * 2
        mask = graph.mask().reshape(-1, graph.num_dst, graph.num_src)
        for load in cost.ranks:
            receivers, senders = partition.dst.tokens(load.rank), partition.src.tokens(load.rank)
            assert load.edges == int(mask[:, receivers].sum()) * copies
            assert load.receivers == len(receivers)
            is_sender = mask[:, receivers].any(0).any(0)
            assert load.halo == int(is_sender.sum() - is_sender[senders].sum())
        assert cost.halo_bytes == sum(load.halo for load in cost.ranks) * row
        assert sum(load.edges for load in cost.ranks) == graph.num_edges * copies

    def test_balance(self):
        cost = plan(patterns.causal(8), 2, 1, 4)
        # The first rank has 10 edges and the second 26, so the mean is 18.
        assert (cost.balance, cost.token_balance) == (26 / 18, 1.0)
        assert plan(patterns.causal(8), 2, 1, 4, partition="zigzag").balance == 1.0


def test_text_of_a_hundred_columns_with_every_rank():
    cost = plan(patterns.window(200_000, 4096), 17, 32, 128, kv_heads=8)
    lines = str(cost).splitlines()
    assert max(map(len, lines)) <= 100
    rows = [line.split() for line in lines]
    assert [int(row[0]) for row in rows if len(row) == 6 and row[0].isdigit()] == list(range(17))
    assert "balance (most / mean): edges" in lines[-1]


def test_wrong_arguments_are_named():
    graph = patterns.causal(8)
    calls = [
        ((graph, 100_000, 1, 4), {}, ValueError, "world_size must be at most 4096, got 100000"),
        ((graph, 2, 3, 4), {"kv_heads": 2}, ValueError, "heads must be a multiple of kv_heads, got 3 and 2"),
        ((BY_HEAD, 2, 3, 4), {}, ValueError, "heads must be 4 as in .*by head.*, got 3"),
        ((BY_SAMPLE, 2, 3, 4), {}, ValueError, "batch must be 2 as in .*by sample.*, got 1"),
        ((graph, 2, 1, 4), {"dtype": torch.int32}, TypeError, "floating-point .*, got torch.int32"),
        ((graph, 2, 1, 4), {"partition": "half"}, ValueError, "one of 'contiguous', .*got 'half'"),
        ((graph, 2, 1, 4), {"partition": zigzag(graph, 3)}, ValueError, "must have 2 ranks, got 3"),
        ((graph, 2, 1, 4), {"partition": 3}, TypeError, "partition must be a Partition, got 3 of type int"),
    ]
    refusals = [(lambda a=args, o=options: plan(*a, **o), *error) for args, options, *error in calls]
    assert_refusals(refusals)
