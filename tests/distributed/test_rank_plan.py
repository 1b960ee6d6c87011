"""A plan for ranks: what it counts against the mask and against sums by hand, what it chooses."""

import json

import pytest
import torch

from gnn_attention import patterns
from gnn_attention.distributed import best, contiguous, of_ranges, plan, planner, zigzag
from gnn_attention.distributed.halo_sets import halo_sizes
from gnn_attention.distributed.partition import Partition
from gnn_attention.graph import TokenGraph


def by_head(n: int) -> TokenGraph:
    return TokenGraph.from_rule(
        lambda b, h, dst, src: (src <= dst) & (dst - src <= 2 * h), n, heads=4, name="by head"
    )


def by_sample(n: int) -> TokenGraph:
    return TokenGraph.from_rule(
        lambda b, h, dst, src: (src <= dst) & (dst - src <= 3 * b), n, batch=2, name="by sample"
    )


GRAPHS = {
    "window": (patterns.window(50, 7), 4 * 2),
    "cross": (patterns.cross(20, 33), 4 * 2),
    "list": (TokenGraph.from_edges(torch.tensor([[0, 5, 9, 2], [1, 0, 3, 9]]), 10), 4 * 2),
    "by head": (by_head(30), 2),
    "by sample": (by_sample(30), 4),
    "no edges": (patterns.causal(6) - patterns.causal(6), 4 * 2),
}


class TestCounts:
    @pytest.mark.parametrize("name", GRAPHS)
    @pytest.mark.parametrize("world", [1, 3, 40])
    def test_edges_flops_and_bytes_are_exact(self, name, world):
        """4 heads of 5 and 7 channels, 2 of keys and values, 2 samples, bfloat16: 2 * 2 * 12 * 2 bytes of a
        sender.
        """
        graph, copies = GRAPHS[name]
        found = plan(graph, world, 4, 5, kv_heads=2, value_dim=7, batch=2, partition="contiguous")
        partition, row = contiguous(graph, world), 2 * 2 * (5 + 7) * 2
        mask = graph.mask().reshape(-1, graph.num_dst, graph.num_src)
        for load in found.ranks:
            own, others = partition.dst.tokens(load.rank), partition.src.tokens(load.rank)
            assert load.edges == int(mask[:, own].sum()) * copies
            assert load.flops == load.edges * 2 * (5 + 7)
            assert (load.receivers, load.senders) == (len(own), len(others))
            attended = mask[:, own].any(0).any(0)
            assert load.halo == int(attended.sum() - attended[others].sum())
        assert found.halo_bytes == sum(load.halo for load in found.ranks) * row
        assert sum(load.edges for load in found.ranks) == graph.num_edges * copies

    def test_bytes_of_the_chosen_exchange(self):
        """A window of 5 over 20 tokens on 4 ranks: 4 senders from the rank before."""
        found = plan(patterns.window(20, 5), 4, 2, 8, partition="contiguous", dtype=torch.float32)
        row = 2 * (8 + 8) * 4
        assert found.exchange == "halo"
        assert [load.received for load in found.ranks] == [0, 4 * row, 4 * row, 4 * row]
        assert [load.sent for load in found.ranks] == [4 * row, 4 * row, 4 * row, 0]
        assert found.halo_share == 12 / 60

    def test_rows_of_every_exchange(self):
        """9 tokens as 4, 3, 2: a ring passes on the blocks of others, a gather takes blocks of 4."""
        graph, shares = patterns.full(9), of_ranges(9, [[(0, 4)], [(4, 7)], [(7, 9)]])
        partition = Partition(shares, shares)
        found = planner.volumes(halo_sizes(graph, partition), partition)
        assert [found["halo"].received.tolist(), found["halo"].sent.tolist()] == [[5, 6, 7], [8, 6, 4]]
        assert [found["ring"].received.tolist(), found["ring"].sent.tolist()] == [[5, 6, 7], [6, 7, 5]]
        assert found["gather"].received.tolist() == found["gather"].sent.tolist() == [8] * 3
        assert [found[name].held.tolist() for name in planner.EXCHANGES] == [[5, 6, 7], [8] * 3, [8] * 3]
        exchanges = plan(graph, 3, 1, 2, value_dim=3, dtype=torch.float32, partition=partition).exchanges
        assert [(each.received, each.most_received) for each in exchanges] == [
            (360, 140),
            (360, 140),
            (480, 160),
        ]

    def test_balance(self):
        found = plan(patterns.causal(8), 2, 1, 4, partition="contiguous")
        assert found.balance == 26 / 18  # 10 and 26 edges
        assert found.token_balance == 1.0
        assert plan(patterns.causal(8), 2, 1, 4, partition="zigzag").balance == 1.0

    def test_on_one_rank_nothing_travels(self):
        found = plan(patterns.causal(64), 1, 4, 8)
        assert (found.halo_bytes, found.halo_share, found.exchange) == (0, 0.0, "halo")
        assert [(each.received, each.most_held) for each in found.exchanges] == [(0, 0)] * 3


class TestChoice:
    @pytest.mark.parametrize(
        ("graph", "how", "exchange"),
        [
            (patterns.window(65536, 512), {}, "halo"),
            (patterns.full(65536), {}, "ring"),
            (patterns.documents([4096] * 16), {}, "halo"),
            (
                patterns.causal(65536),
                {"partition": "zigzag"},
                "ring",
            ),  # a rank attends to two thirds of the others
            (patterns.full(8) - patterns.full(8), {}, "halo"),
        ],
    )
    def test_of_the_exchange(self, graph, how, exchange):
        """The halo where it moves at most half of a ring's bytes."""
        found = plan(graph, 8, 32, 128, **how)
        assert found.exchange == exchange == planner.choose_exchange(graph, found.partition)
        received = {each.name: each.received for each in found.exchanges}
        assert (2 * received["halo"] <= received["ring"]) == (exchange == "halo")
        assert "% of the others' keys and values" in found.reason

    @pytest.mark.parametrize(
        ("graph", "world", "name"),
        [
            (patterns.window(65536, 512), 8, "contiguous"),
            (patterns.causal(65536), 8, "zigzag"),
            (patterns.documents([4096] * 16), 8, "contiguous"),
            (patterns.cross(65536, 4096), 8, "contiguous"),
            (patterns.documents([3000] * 4 + [9000] * 3 + [3000] * 5), 3, "documents"),
        ],
    )
    def test_of_the_partition(self, graph, world, name):
        """Neighbours if they balance; a causal graph is mirrored; documents stay whole."""
        assert best(graph, world).name == plan(graph, world, 1, 4).partition.name == name

    def test_of_a_list_without_an_order(self):
        """A torus of 32 x 32, shuffled: any cut balances, a good one saves rows."""
        place = torch.randperm(1024, generator=torch.Generator().manual_seed(0))
        graph = TokenGraph.from_edges(place[patterns.torus(32, 32).edge_index], 1024)
        assert best(graph, 4).name in ("rcm", "metis")

    def test_the_best_is_near_the_least_load_and_then_the_smallest_halo(self):
        graph = patterns.causal(8192) | patterns.documents([1024] * 8, causal=False)
        plans = [
            plan(graph, 4, 8, 64, partition=name)
            for name in ("contiguous", "zigzag", "documents", "by_edges")
        ]
        loads = [max(each.balance, each.token_balance) for each in plans]
        chosen = plan(graph, 4, 8, 64)
        limit = planner.BALANCED * min(loads)
        assert max(chosen.balance, chosen.token_balance) <= limit
        smallest = min(each.halo_bytes for each, load in zip(plans, loads, strict=True) if load <= limit)
        assert chosen.halo_bytes <= planner.BALANCED * smallest

    def test_without_pymetis_the_others_are_tried(self, monkeypatch):
        monkeypatch.setattr(planner.importlib.util, "find_spec", lambda name: None)
        names = [make.__name__ for make in planner._candidates(GRAPHS["list"][0])]
        assert names == ["contiguous", "zigzag", "documents", "by_edges", "rcm"]

    def test_a_given_partition_is_taken(self):
        graph = patterns.causal(12)
        assert plan(graph, 2, 1, 4, partition=zigzag(graph, 2)).partition == zigzag(graph, 2)


class TestText:
    @pytest.mark.parametrize("world", [1, 2, 16, 17, 64])
    def test_a_hundred_columns_and_every_rank_or_the_ends(self, world):
        found = plan(patterns.window(200_000, 4096), world, 32, 128, kv_heads=8, partition="contiguous")
        lines = str(found).splitlines()
        assert max(map(len, lines)) <= 100
        ranks = [
            line.split()
            for line in lines
            if line.split()[:1] and line.split()[0].isdigit() and len(line.split()) == 6
        ]
        assert len(ranks) == min(world, 16)
        assert [int(row[0]) for row in ranks[-min(world, 8) :]] == list(range(world))[-min(world, 8) :]
        assert any("... " in line for line in lines) == (world > 16)
        assert f"{found.exchange} <-" in str(found)
        assert "balance (most / mean): edges" in lines[-1]

    def test_as_json(self):
        found = plan(patterns.causal(64), 3, 4, 8)
        numbers = json.loads(json.dumps(found.to_dict()))
        assert numbers["halo_bytes"] == found.halo_bytes
        assert [rank["edges"] for rank in numbers["ranks"]] == [load.edges for load in found.ranks]
        assert numbers["setting"] == {
            "heads": 4,
            "kv_heads": 4,
            "dim": 8,
            "value_dim": 8,
            "batch": 1,
            "dtype": "bfloat16",
        }
        assert numbers["balance"] == found.balance


GRAPH = patterns.causal(8)


@pytest.mark.parametrize(
    ("arguments", "how", "error", "message"),
    [
        ((GRAPH, 0, 1, 4), {}, ValueError, "world_size must be at least 1, got 0"),
        ((GRAPH, 100_000, 1, 4), {}, ValueError, "world_size must be at most 4096: .*, got 100000"),
        ((GRAPH, 2, 0, 4), {}, ValueError, "heads must be at least 1, got 0"),
        ((GRAPH, 2, 3, 4), {"kv_heads": 2}, ValueError, "heads must be a multiple of kv_heads, got 3 and 2"),
        ((by_head(8), 2, 3, 4), {}, ValueError, "heads=3, but .* differs by them and has 4"),
        ((by_sample(8), 2, 3, 4), {}, ValueError, "batch=1, but .* differs by them and has 2"),
        (
            (GRAPH, 2, 1, 4),
            {"dtype": torch.int32},
            TypeError,
            "dtype must be a floating point dtype of torch, got torch.int32",
        ),
        (
            (GRAPH, 2, 1, 4),
            {"partition": "half"},
            ValueError,
            "partition must be one of 'contiguous', .*got 'half'",
        ),
        (
            (GRAPH, 2, 1, 4),
            {"partition": contiguous(GRAPH, 3)},
            ValueError,
            "partition is of 3 ranks, but world_size is 2",
        ),
        ((GRAPH, 2, 1, 4), {"partition": 3}, TypeError, "partition must be a Partition, got int"),
        (("causal(8)", 2, 1, 4), {}, TypeError, "graph must be a TokenGraph, got str"),
    ],
)
def test_wrong_arguments_are_named(arguments, how, error, message):
    with pytest.raises(error, match=message):
        plan(*arguments, **how)


def test_best_names_wrong_arguments():
    with pytest.raises(TypeError, match="graph must be a TokenGraph, got str"):
        best("causal(8)", 2)
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        best(GRAPH, 0)
