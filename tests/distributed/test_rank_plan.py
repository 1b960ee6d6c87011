"""A plan for ranks: what it counts against the mask, what it estimates against sums by hand, what it chooses."""

import json
import math

import pytest
import torch

from gnn_attention import patterns
from gnn_attention.backends.cost_model import Costs
from gnn_attention.distributed import planner
from gnn_attention.distributed.halo_sets import halo_sizes
from gnn_attention.distributed.partition import Partition, contiguous, of_bounds, of_owners, zigzag
from gnn_attention.distributed.plan_devices import DEVICES, LINKS, Link, Rates, link_of, rates_of
from gnn_attention.distributed.plan_estimates import EXCHANGES, Setting, Traffic, estimate
from gnn_attention.distributed.planner import PARTITIONS, best, plan
from gnn_attention.graph import TokenGraph
from gnn_attention.verify.measure import EXACT

PLAIN = Setting(1, 1, 2, 3, 1, torch.float32, Rates("one", 10.0, math.inf, 0.0), Link("link", 20.0, 0.5))  # 10 flops an edge: 1 s


def by_head(n: int) -> TokenGraph:
    return TokenGraph.from_rule(lambda b, h, dst, src: (src <= dst) & (dst - src <= 2 * h), n, heads=4, name="by head")


def by_sample(n: int) -> TokenGraph:
    return TokenGraph.from_rule(lambda b, h, dst, src: (src <= dst) & (dst - src <= 3 * b), n, batch=2, name="by sample")


GRAPHS = {
    "window": (patterns.window(50, 7), 4 * 2),
    "cross": (patterns.cross(20, 33), 4 * 2),
    "list": (TokenGraph.from_edges(torch.tensor([[0, 5, 9, 2], [1, 0, 3, 9]]), 10), 4 * 2),
    "by head": (by_head(30), 2),
    "by sample": (by_sample(30), 4),
    "nobody": (patterns.causal(6) - patterns.causal(6), 4 * 2),
}


class TestCounts:
    @pytest.mark.parametrize("name", GRAPHS)
    @pytest.mark.parametrize("world", [1, 3, 40])
    def test_edges_flops_and_bytes_are_exact(self, name, world):
        """4 heads of 5 and 7 channels, 2 of keys and values, 2 samples, bfloat16: 2 * 2 * 12 * 2 bytes of a sender."""
        graph, copies = GRAPHS[name]
        found = plan(graph, world, 4, 5, kv_heads=2, value_dim=7, batch=2, partition="contiguous")
        partition, row = contiguous(graph, world), 2 * 2 * (5 + 7) * 2
        mask = graph.mask().reshape(-1, graph.num_dst, graph.num_src)
        for load in found.ranks:
            own, others = partition.dst.tokens(load.rank), partition.src.tokens(load.rank)
            assert load.edges == int(mask[:, own].sum()) * copies
            assert load.flops == load.edges * 2 * (5 + 7)
            assert (load.receivers, load.senders) == (len(own), len(others))
            heard = mask[:, own].any(0).any(0)
            assert load.halo == int(heard.sum() - heard[others].sum())
        assert found.halo_bytes == sum(load.halo for load in found.ranks) * row
        assert sum(load.edges for load in found.ranks) == graph.num_edges * copies

    def test_bytes_of_the_chosen_exchange(self):
        """Halo: what each rank hears, from whom. A window of 5 over 20 tokens on 4 ranks: 4 senders from the rank before."""
        found = plan(patterns.window(20, 5), 4, 2, 8, partition="contiguous", dtype=torch.float32)
        row = 2 * (8 + 8) * 4
        assert found.exchange == "halo"
        assert [load.received for load in found.ranks] == [0, 4 * row, 4 * row, 4 * row]
        assert [load.sent for load in found.ranks] == [4 * row, 4 * row, 4 * row, 0]

    def test_bytes_of_every_exchange(self):
        """9 tokens as 4, 3, 2: a ring hands on what is not one's own, a gather takes blocks of 4."""
        graph, row = patterns.full(9), 20
        partition = Partition(of_bounds([0, 4, 7, 9]), of_bounds([0, 4, 7, 9]))
        traffic = Traffic(torch.ones(3, 3, dtype=torch.int64), halo_sizes(graph, partition), partition)
        found = {name: estimate(name, traffic, PLAIN) for name in EXCHANGES}
        assert PLAIN.row_bytes == row
        assert found["halo"].received.tolist() == [5 * row, 6 * row, 7 * row]
        assert found["halo"].sent.tolist() == [8 * row, 6 * row, 4 * row]
        assert found["ring"].received.tolist() == [5 * row, 6 * row, 7 * row]
        assert found["ring"].sent.tolist() == [6 * row, 7 * row, 5 * row]
        assert found["gather"].received.tolist() == found["gather"].sent.tolist() == [8 * row] * 3
        assert found["ring"].held.tolist() == [2 * 4 * row] * 3

    def test_balance(self):
        found = plan(patterns.causal(8), 2, 1, 4, partition="contiguous")
        assert found.balance == 26 / 18  # 10 and 26 edges
        assert found.token_balance == 1.0
        assert plan(patterns.causal(8), 2, 1, 4, partition="zigzag").balance == 1.0

    def test_of_one_rank_nothing_travels(self):
        found = plan(patterns.causal(64), 1, 4, 8)
        assert (found.halo_bytes, found.heard, found.seconds) == (0, 0.0, found.alone)
        assert [each.received for each in found.exchanges] == [0, 0, 0]


class TestEstimates:
    """A second for an edge, 20 bytes a second, half a second for a message, 20 bytes a sender, merging for nothing."""

    def traffic(self, edges: list[list[int]], heard: list[list[int]], sizes: tuple[int, ...]) -> Traffic:
        shares = of_owners(torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)), len(sizes))
        return Traffic(torch.tensor(edges), torch.tensor(heard), Partition(shares, shares))

    def test_a_halo_hides_behind_the_own_edges(self):
        """Rank 1: 3 rows take 3.5 s; its own 9 edges hide them, or its own 2 do not."""
        hidden = estimate("halo", self.traffic([[5, 0], [4, 9]], [[0, 0], [3, 0]], (4, 4)), PLAIN)
        assert hidden.communication.tolist() == [3.5, 3.5]
        assert hidden.seconds.tolist() == [5.0, 13.0]
        seen = estimate("halo", self.traffic([[1, 0], [4, 2]], [[0, 0], [3, 0]], (4, 4)), PLAIN)
        assert seen.seconds.tolist() == [3.5, 7.5]

    def test_packing_and_merging_take_the_memory(self):
        """At 60 bytes a second 3 rows are read and written in 2 s; 4 results of 16 bytes, twice read and once written: 3.2 s."""
        slow = Setting(1, 1, 2, 3, 1, torch.float32, PLAIN.rates._replace(copy=60.0), PLAIN.link)
        found = estimate("halo", self.traffic([[5, 0], [4, 2]], [[0, 0], [3, 0]], (4, 4)), slow)
        assert found.communication.tolist() == pytest.approx([5.5, 3.5], rel=EXACT)
        assert found.seconds.tolist() == pytest.approx([5.5, 3.5 + 4 + 3.2], rel=EXACT)

    def test_a_ring_waits_for_the_slowest_at_every_step(self):
        """Blocks of 4 take 4.5 s. Steps of 3 ranks: own edges (1, 2, 9), then from r - 1 (3, 1, 2), then from r - 2 (1, 7, 1)."""
        edges = [[1, 1, 3], [1, 2, 7], [1, 2, 9]]
        found = estimate("ring", self.traffic(edges, [[0, 4, 4], [4, 0, 4], [4, 4, 0]], (4, 4, 4)), PLAIN)
        assert found.communication.tolist() == [9.0] * 3
        assert found.seconds.tolist() == [9.0 + 4.5 + 7.0] * 3

    def test_a_gather_brings_everything_at_once(self):
        """2 blocks of 4 rows: 8.5 s, behind the own edges where they take longer."""
        edges = [[1, 1, 3], [1, 2, 7], [1, 2, 9]]
        found = estimate("gather", self.traffic(edges, [[0, 4, 4], [4, 0, 4], [4, 4, 0]], (4, 4, 4)), PLAIN)
        assert found.communication.tolist() == [8.5] * 3
        assert found.seconds.tolist() == [8.5 + 4, 8.5 + 8, 9.0 + 3]

    def test_calls_take_their_time(self):
        """One for the own edges, one for the others, none where there are none."""
        called = Setting(1, 1, 2, 3, 1, torch.float32, PLAIN.rates._replace(launch=100.0), PLAIN.link)
        found = estimate("halo", self.traffic([[5, 0], [4, 0]], [[0, 0], [3, 0]], (4, 4)), called)
        assert found.seconds.tolist() == [105.0, 3.5 + 104.0]
        assert called.seconds(0) == 0.0
        assert called.seconds(7) == 107.0


class TestChoice:
    @pytest.mark.parametrize(
        ("graph", "how", "exchange"),
        [
            (patterns.window(65536, 512), {}, "halo"),
            (patterns.full(65536), {}, "ring"),
            (patterns.full(256), {}, "gather"),  # latency decides: a ring has 7 steps, a halo packs
            (patterns.documents([4096] * 16), {}, "halo"),
        ],
    )
    def test_of_the_exchange(self, graph, how, exchange):
        found = plan(graph, 8, 32, 128, **how)
        assert found.exchange == exchange
        assert found.seconds == min(each.seconds for each in found.exchanges)
        assert "the least estimated time" in found.reason

    @pytest.mark.parametrize(
        ("graph", "world", "link", "name"),
        [
            (patterns.window(65536, 512), 8, "nvlink4", "contiguous"),
            (patterns.causal(65536), 8, "nvlink4", "zigzag"),
            (patterns.documents([4096] * 16), 8, "nvlink4", "contiguous"),
            (patterns.cross(65536, 4096), 8, "nvlink4", "contiguous"),
            (patterns.documents([3000] * 4 + [9000] * 3 + [3000] * 5), 3, "ethernet-10g", "documents"),
        ],
    )
    def test_of_the_partition(self, graph, world, link, name):
        """Neighbours if they balance; a causal graph is mirrored; documents stay whole where what travels counts."""
        assert best(graph, world, heads=32, dim=128, link_bandwidth=link).name == name

    def test_of_a_list_without_an_order(self):
        """A torus of 32 x 32, shuffled, over a slow link: cutting it well is what counts."""
        place = torch.randperm(1024, generator=torch.Generator().manual_seed(0))
        graph = TokenGraph.from_edges(place[patterns.torus(32, 32).edge_index], 1024)
        assert best(graph, 4, heads=8, link_bandwidth=1e7).name in ("rcm", "metis")

    def test_the_best_takes_no_longer_than_any_by_much(self):
        graph = patterns.causal(8192) | patterns.documents([1024] * 8, causal=False)
        chosen = plan(graph, 4, 8, 64)
        others = [plan(graph, 4, 8, 64, partition=name).seconds for name in PARTITIONS if name not in ("rcm", "metis")]
        assert chosen.seconds <= max(planner.NEAR * min(others), planner.ENOUGH * chosen.alone / 4)

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
        ranks = [line for line in lines if line.split()[:1] and line.split()[0].isdigit() and len(line.split()) == 9]
        assert len(ranks) == min(world, 16)
        assert any("... " in line for line in lines) == (world > 16)
        assert f"{found.exchange} <-" in str(found)
        assert "exact: receivers, edges, halo, bytes" in str(found)
        assert "estimated: all times" in str(found)

    def test_as_json(self):
        found = plan(patterns.causal(64), 3, 4, 8, "nvlink4")
        said = json.loads(json.dumps(found.to_dict()))
        assert said["seconds"] == found.seconds
        assert said["halo_bytes"] == found.halo_bytes
        assert [rank["edges"] for rank in said["ranks"]] == [load.edges for load in found.ranks]
        assert said["setting"]["link"]["bandwidth"] == 450e9
        assert set(said["exact"]) & set(said["estimated"]) == set()
        assert set(said["ranks"][0]) - {"rank"} <= set(said["exact"]) | set(said["estimated"])


class TestRates:
    def test_names_in_any_case(self):
        assert rates_of("h200", torch.bfloat16) == rates_of("H200", torch.bfloat16)
        assert link_of("NVLink4") == LINKS["nvlink4"]
        for name in DEVICES:
            assert rates_of(name, torch.float32).flops > 0

    def test_of_a_cpu_by_the_cost_model(self, monkeypatch):
        """2 ns for a pair of 64 channels: 256 operations in 2 ns."""
        monkeypatch.setattr("gnn_attention.distributed.plan_devices.costs", lambda: Costs(cell=2.0, call=5000.0))
        assert rates_of("cpu", torch.float32)[1:] == (128e9, 1e10, pytest.approx(5e-6, rel=EXACT))

    def test_numbers(self):
        assert link_of(3e9).bandwidth == 3e9
        assert rates_of(5e12, torch.bfloat16).flops == 5e12

    def test_twice_the_rate_is_half_the_time(self):
        graph = patterns.causal(4096)
        slow, fast = (plan(graph, 4, 8, 64, rate, device=1e3 * rate, partition="zigzag") for rate in (1e6, 2e6))
        assert fast.ranks[0].compute == pytest.approx(slow.ranks[0].compute / 2, rel=1e-3)
        assert fast.ranks[0].communication == pytest.approx(slow.ranks[0].communication / 2, rel=1e-3)


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
            (GRAPH, 2, 1, 4, "tin cans"),
            {},
            ValueError,
            "link_bandwidth must be bytes a second or one of nvlink5, .*got 'tin cans'",
        ),
        ((GRAPH, 2, 1, 4, -1.0), {}, ValueError, "link_bandwidth must be a positive number or a name, got -1.0"),
        ((GRAPH, 2, 1, 4), {"device": "abacus"}, ValueError, "device must be operations a second or one of H200, .*got 'abacus'"),
        ((GRAPH, 2, 1, 4), {"device": float("nan")}, ValueError, "device must be a positive number or a name, got nan"),
        ((GRAPH, 2, 1, 4), {"dtype": torch.int32}, TypeError, "dtype must be a floating point dtype of torch, got torch.int32"),
        ((GRAPH, 2, 1, 4), {"partition": "half"}, ValueError, "partition must be one of 'contiguous', .*got 'half'"),
        ((GRAPH, 2, 1, 4), {"partition": contiguous(GRAPH, 3)}, ValueError, "partition is of 3 ranks, but world_size is 2"),
        ((GRAPH, 2, 1, 4), {"partition": 3}, TypeError, "partition must be a Partition, got int"),
        (("causal(8)", 2, 1, 4), {}, TypeError, "graph must be a TokenGraph, got str"),
    ],
)
def test_wrong_arguments_are_named(arguments, how, error, message):
    with pytest.raises(error, match=message):
        plan(*arguments, **how)
