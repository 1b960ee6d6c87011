"""Who owns which tokens: shares as sets, and each partition by the theorem that it promises."""

import copy
import pickle
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extras import needs
from support.refusals import assert_refusals

from gnn_attention import algebra, patterns
from gnn_attention.distributed import partitioners
from gnn_attention.distributed.halo_sets import halo_sizes
from gnn_attention.distributed.partition import (
    Partition,
    check_partition,
    contiguous,
    of_bounds,
    of_owners,
    of_ranges,
    zigzag,
)
from gnn_attention.distributed.partitioners import (
    by_edges,
    closed_runs,
    documents,
    equal_bounds,
    metis,
    rcm,
    rcm_order,
)
from gnn_attention.graph import TokenGraph

OWNERS = st.integers(1, 5).flatmap(
    lambda world: st.tuples(st.just(world), st.lists(st.integers(0, world - 1), min_size=0, max_size=30))
)


def by_metis(graph, world):
    needs("pymetis")
    return metis(graph, world)


def loads(graph, partition):
    """Edges of each rank, from the mask."""
    mask = graph.mask().reshape((graph.batch or 1) * (graph.heads or 1), graph.num_dst, graph.num_src)
    return [int(mask[:, partition.dst.tokens(rank)].sum()) for rank in range(partition.world_size)]


def shuffled(graph, seed=0):
    """The same graph of tokens in a random order."""
    place = torch.randperm(graph.num_dst, generator=torch.Generator().manual_seed(seed))
    return TokenGraph.from_edges(place[graph.edge_index], graph.num_dst)


class TestShares:
    @settings(max_examples=60, deadline=None)
    @given(OWNERS)
    def test_every_token_is_owned_once_in_as_few_runs_as_can_be(self, drawn):
        world, owner = drawn[0], torch.tensor(drawn[1], dtype=torch.int64)
        shares = of_owners(owner, world)
        assert torch.equal(shares.owner(torch.arange(len(owner))), owner)
        for rank in range(world):
            own = (owner == rank).nonzero().flatten()
            assert torch.equal(shares.tokens(rank), own)
            assert shares.sizes[rank] == len(own)
            assert [t for start, stop in shares.ranges(rank) for t in range(start, stop)] == own.tolist()
            assert torch.equal(shares.place(own), torch.arange(len(own)))
        single = [[(t, t + 1) for t in reversed(shares.tokens(rank).tolist())] for rank in range(world)]
        again = of_ranges(len(owner), single)
        assert again == shares
        assert hash(again) == hash(shares)
        assert len(shares.start) == int((owner.diff() != 0).sum()) + (len(owner) > 0)
        assert len(owner) == 0 or of_owners((owner + 1) % (world + 1), world + 1) != shares

    def test_partitions_compare_by_their_shares(self):
        partition = zigzag(patterns.causal(11), 3)
        for other in (copy.deepcopy(partition), pickle.loads(pickle.dumps(partition))):
            assert {other, partition} == {partition}
        shares, others = of_bounds([0, 3, 5]), of_bounds([0, 2, 5])
        assert Partition(shares, shares, "one") == Partition(shares, shares, "other")
        assert Partition(shares, others) != Partition(shares, shares)

    def test_many_ranks_and_runs_are_abridged(self):
        found = repr(of_owners(torch.arange(20) % 2, 2))
        assert found == "Shares(20 tokens on 2 ranks: 0 2 4 6 ...; 1 3 5 7 ...)"
        found = repr(of_bounds([0, 0, 2, 3, 4, 5]))
        assert found == "Shares(5 tokens on 5 ranks: nothing; 0..1; 2; 3; ... 1 more ranks)"

    def test_wrong_shares_raise(self):
        runs = "after the tokens up to {} the next run starts at {}".format
        once, causal = "every token of 0 .. {} must be owned once".format, patterns.causal(6)
        sides = Partition, of_bounds([0, 2]), of_bounds([0, 1, 2])
        calls = [
            (lambda: of_ranges(4, [[(0, 2)], [(3, 4)]]), ValueError, runs(2, 3)),
            (lambda: of_ranges(4, [[(0, 3)], [(2, 4)]]), ValueError, runs(3, 2)),
            (lambda: of_ranges(4, [[(0, 3)]]), ValueError, runs(3, 4)),
            (lambda: of_ranges(3, [[(0, 4)]]), ValueError, once(2)),
            (lambda: of_ranges(4, [[(0, 5), (5, 4)]]), ValueError, once(3)),
            (lambda: of_ranges(4, []), ValueError, "ranges must hold a list .* for each rank, got none"),
            (lambda: of_owners(torch.tensor([0.0]), 1), TypeError, "owner must be a list of ranks"),
            (lambda: of_owners(torch.tensor([[0]]), 1), TypeError, r"torch.int64 and shape \[1, 1\]"),
            (lambda: of_owners(torch.tensor([0, 2]), 2), ValueError, "hold ranks 0 .. 1, got 0 .. 2"),
            (lambda: of_bounds([0, 2, 4]).tokens(2), IndexError, "rank must be in 0 .. 1, got 2"),
            (lambda: of_bounds([0, 2, 4]).ranges(-1), IndexError, "rank must be in 0 .. 1, got -1"),
            (lambda: sides[0](*sides[1:]), ValueError, "got 1 ranks for the receivers and 2 for"),
            (lambda: contiguous(causal, 0), ValueError, "world_size must be at least 1, got 0"),
            (lambda: zigzag(causal, 2.0), TypeError, "world_size must be an integer"),
            (
                lambda: documents(patterns.cross(3, 4), 2),
                ValueError,
                "of a square graph, got .*take contiguous",
            ),
            (lambda: check_partition(None, causal), TypeError, "partition must be a Partition, got None"),
        ]
        assert_refusals(calls)


SIZES = [(0, 1), (0, 3), (1, 4), (2, 2), (5, 2), (7, 3), (12, 3), (13, 4), (3, 8), (64, 8)]


class TestOfAnyGraph:
    @pytest.mark.parametrize(("n", "world"), SIZES)
    def test_contiguous_shares_differ_by_one_at_most(self, n, world):
        shares = contiguous(patterns.causal(n), world).dst
        assert sum(shares.sizes) == n
        assert max(shares.sizes) - min(shares.sizes) <= 1
        assert all(len(shares.ranges(rank)) <= 1 for rank in range(world))

    @pytest.mark.parametrize(("n", "world"), SIZES)
    def test_zigzag_balances_a_causal_graph(self, n, world):
        """c tokens from the front and their mirror images have c (n + 1) edges; the middle is the last's."""
        graph = patterns.causal(n)
        partition = zigzag(graph, world)
        half = [(size - (n % 2 and rank == world - 1)) // 2 for rank, size in enumerate(partition.dst.sizes)]
        middle = [(n + 1) // 2 if n % 2 and rank == world - 1 else 0 for rank in range(world)]
        found = loads(graph, partition)
        assert found == [c * (n + 1) + extra for c, extra in zip(half, middle, strict=True)]
        assert max(found) - min(found) <= n + 1
        assert all(len(partition.dst.ranges(rank)) <= 2 for rank in range(world))
        if n and n % (2 * world) == 0:
            assert len(set(found)) == len(set(partition.dst.sizes)) == 1

    @pytest.mark.parametrize("make", [contiguous, zigzag, by_edges, rcm, by_metis])
    def test_two_sequences(self, make):
        partition = make(patterns.cross(9, 14), 2)
        assert (partition.dst.num_tokens, partition.src.num_tokens) == (9, 14)
        assert not partition.is_square


class TestByEdges:
    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 9), st.integers(1, 6))
    def test_no_rank_has_more_than_its_share_and_one_receiver(self, lengths, w, world):
        graph = patterns.documents(lengths) & patterns.window(sum(lengths), w)
        partition = by_edges(graph, world)
        assert max(loads(graph, partition)) <= graph.num_edges / world + graph.max_in_degree
        assert all(len(partition.dst.ranges(rank)) <= 1 for rank in range(world))

    def test_all_heads_count_and_without_edges_tokens(self):
        """One head attends to the past, one to the future: together each receiver has n + 1 edges."""
        graph, empty = algebra.per_head(patterns.causal(64), patterns.anti_causal(64)), patterns.window(8, 0)
        assert by_edges(graph, 4) == contiguous(graph, 4)
        assert by_edges(empty, 4) == contiguous(empty, 4)

    def test_bounds_are_the_nearest(self):
        """Before each place are 0 3 4 5 6 9 12, due 4 and 8: 9 is nearer to 8 than 6."""
        assert equal_bounds(torch.tensor([3, 1, 1, 1, 3, 3]), 3) == [0, 2, 5, 6]


class TestDocuments:
    @settings(max_examples=40, deadline=None)
    @given(st.integers(1, 14), st.lists(st.tuples(st.integers(0, 13), st.integers(0, 13)), max_size=10))
    def test_closed_runs_are_the_finest_that_nothing_crosses(self, n, pairs):
        pairs = sorted({(src, dst) for src, dst in pairs if src < n and dst < n})
        graph = TokenGraph.from_edges(torch.tensor(pairs, dtype=torch.int64).view(-1, 2).t(), n)
        cuts = [p for p in range(1, n) if all((src < p) == (dst < p) for src, dst in pairs)]
        assert closed_runs(graph).tolist() == [list(run) for run in zip([0, *cuts], [*cuts, n], strict=True)]

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 5))
    def test_balanced_within_twice_the_share(self, lengths, world):
        graph = patterns.documents(lengths)
        partition = documents(graph, world)
        costs = [sum(pair) for pair in zip(loads(graph, partition), partition.dst.sizes, strict=True)]
        assert max(costs) <= 2 * sum(costs) / world + 2 * max(lengths)

    @pytest.mark.parametrize("lengths", [[8] * 12, [20, 10, 20, 5, 5, 20], [1] * 40, [16, 16, 16]])
    def test_whole_documents_need_no_halo(self, lengths):
        """If none is larger than a rank's share, nothing travels."""
        graph = patterns.documents(lengths)
        partition = documents(graph, 3)
        assert int(halo_sizes(graph, partition).sum()) == 0
        assert min(partition.dst.sizes) > 0

    def test_one_by_one_where_neighbours_would_not_balance(self):
        """44, 90 and 54 edges and tokens: the largest by itself."""
        assert sorted(documents(patterns.documents([8, 12, 9]), 2).dst.sizes) == [12, 17]

    def test_large_documents_are_cut_and_small_neighbours_joined(self):
        graph = patterns.documents([4, 96])
        partition = documents(graph, 4)
        assert min(partition.dst.sizes) > 0
        assert max(loads(graph, partition)) <= 1.3 * graph.num_edges / 4
        assert len(documents(patterns.documents([2] * 2000), 8).dst.rank) == 8


class TestLocality:
    @pytest.mark.parametrize(
        "graph", [shuffled(patterns.window(40, 2)), patterns.cross(5, 3), patterns.full(0)]
    )
    def test_an_order_has_every_node_once_and_neighbours_of_a_path_touch(self, graph):
        order = rcm_order(graph)
        square = graph.num_dst == graph.num_src
        assert sorted(order.tolist()) == list(range(graph.num_dst + (0 if square else graph.num_src)))
        if square and graph.num_edges:
            assert int((order.argsort()[graph.edge_index].diff(dim=0)).abs().max()) == 1

    @pytest.mark.parametrize("make", [rcm, by_metis])
    def test_less_travels_than_at_random(self, make):
        """On a torus of 32 x 32, in no useful order, on 4 ranks; the same partition each time."""
        graph = shuffled(patterns.torus(32, 32))
        owner = torch.randint(0, 4, (1024,), generator=torch.Generator().manual_seed(1))
        partition, random = make(graph, 4), Partition(of_owners(owner, 4), of_owners(owner, 4))
        assert int(halo_sizes(graph, partition).sum()) < int(halo_sizes(graph, random).sum()) / 3
        assert max(loads(graph, partition)) <= 1.1 * graph.num_edges / 4
        assert make(graph, 4) == partition

    @pytest.mark.parametrize("make", [rcm, by_metis])
    @pytest.mark.parametrize("graph", [patterns.cross(6, 9), patterns.causal(0), patterns.self_loops(9)])
    def test_more_ranks_than_nodes_and_nodes_without_edges(self, make, graph):
        partition = make(graph, 4)
        assert (sum(partition.dst.sizes), sum(partition.src.sizes)) == (graph.num_dst, graph.num_src)

    @pytest.mark.parametrize("make", [rcm, by_metis])
    def test_heads_are_cut_as_their_union(self, make):
        rule = lambda b, h, dst, src: (src - dst) % 64 == 7 * (h + 1)  # noqa: E731
        by_head = TokenGraph.from_rule(rule, 64, heads=2)
        union = TokenGraph.from_edges(torch.cat([by_head.select(0, h).edge_index for h in (0, 1)], 1), 64)
        assert make(by_head, 4) == make(union, 4)

    def test_without_pymetis(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "pymetis", None)
        with pytest.raises(ImportError, match=r"needs pymetis: pip install .*metis.*, or take rcm"):
            metis(patterns.torus(4, 4), 2)

    @pytest.mark.parametrize("make", [rcm, by_metis])
    def test_too_many_edges_to_list(self, make, monkeypatch):
        monkeypatch.setattr(partitioners, "MAX_EDGES", 54)
        advice = "has 55 edges, too many to list; take contiguous, zigzag, by_edges or documents"
        with pytest.raises(ValueError, match=advice):
            make(patterns.causal(10), 2)
