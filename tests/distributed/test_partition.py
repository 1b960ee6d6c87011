"""Who owns which tokens: shares as sets, and each way of sharing by the theorem that it promises."""

import copy
import pickle
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extras import needs
from support.refusals import assert_refusals

from gnn_attention import patterns
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


def by_metis(graph: TokenGraph, world: int) -> Partition:
    """``metis``, where pymetis is installed."""
    needs("pymetis")
    return metis(graph, world)


def loads(graph: TokenGraph, partition: Partition) -> list[int]:
    """Edges of each rank, from the mask."""
    degree = (
        graph.mask()
        .reshape((graph.batch or 1) * (graph.heads or 1), graph.num_dst, graph.num_src)
        .sum((0, 2))
    )
    return [int(degree[partition.dst.tokens(rank)].sum()) for rank in range(partition.world_size)]


def shuffled(graph: TokenGraph, seed: int = 0) -> TokenGraph:
    """The same graph of tokens in a random order."""
    place = torch.randperm(graph.num_dst, generator=torch.Generator().manual_seed(seed))
    return TokenGraph.from_edges(place[graph.edge_index], graph.num_dst)


def at_random(graph: TokenGraph, world: int) -> Partition:
    """Every token on a random rank."""
    shares = of_owners(
        torch.randint(0, world, (graph.num_dst,), generator=torch.Generator().manual_seed(1)), world
    )
    return Partition(shares, shares)


class TestShares:
    @settings(max_examples=60, deadline=None)
    @given(OWNERS)
    def test_every_token_is_owned_once_and_stands_in_its_place(self, drawn):
        world, owner = drawn[0], torch.tensor(drawn[1], dtype=torch.int64)
        shares, every = of_owners(owner, world), torch.arange(len(owner))
        if len(owner):
            assert torch.equal(shares.owner(every), owner)
        for rank in range(world):
            own = (owner == rank).nonzero().flatten()
            assert torch.equal(shares.tokens(rank), own)
            assert shares.sizes[rank] == len(own)
            assert [
                token for start, stop in shares.ranges(rank) for token in range(start, stop)
            ] == own.tolist()
            if len(own):
                assert torch.equal(shares.place(own), torch.arange(len(own)))

    @settings(max_examples=40, deadline=None)
    @given(OWNERS)
    def test_runs_are_as_few_as_can_be_and_equal_shares_are_equal(self, drawn):
        world, owner = drawn[0], torch.tensor(drawn[1], dtype=torch.int64)
        shares = of_owners(owner, world)
        single = [
            [(token, token + 1) for token in reversed(shares.tokens(rank).tolist())] for rank in range(world)
        ]
        again = of_ranges(len(owner), single)
        assert again == shares
        assert hash(again) == hash(shares)
        assert len(shares.start) == int((owner.diff() != 0).sum()) + (len(owner) > 0)
        assert len(owner) == 0 or of_owners((owner + 1) % (world + 1), world + 1) != shares

    def test_copies_and_pickles_are_the_same(self):
        partition = zigzag(patterns.causal(11), 3)
        for other in (copy.deepcopy(partition), pickle.loads(pickle.dumps(partition))):
            assert other == partition
            assert len({other, partition}) == 1

    def test_the_name_is_no_part_of_it(self):
        """What was worked out for one is good for the other."""
        shares = of_bounds([0, 3, 5])
        assert Partition(shares, shares, "one") == Partition(shares, shares, "other")
        assert Partition(shares, of_bounds([0, 2, 5])) != Partition(shares, shares)

    def test_many_ranks_and_runs_are_abridged(self):
        assert (
            repr(of_owners(torch.arange(20) % 2, 2))
            == "Shares(20 tokens on 2 ranks: 0 2 4 6 ...; 1 3 5 7 ...)"
        )
        assert (
            repr(of_bounds([0, 0, 2, 3, 4, 5]))
            == "Shares(5 tokens on 5 ranks: nothing; 0..1; 2; 3; ... 1 more ranks)"
        )

    def test_wrong_shares_are_refused(self):
        assert_refusals(
            [
                (
                    lambda: of_ranges(4, [[(0, 2)], [(3, 4)]]),
                    ValueError,
                    "after the tokens up to 2 the next run starts at 3",
                ),
                (
                    lambda: of_ranges(4, [[(0, 3)], [(2, 4)]]),
                    ValueError,
                    "after the tokens up to 3 the next run starts at 2",
                ),
                (
                    lambda: of_ranges(4, [[(0, 3)]]),
                    ValueError,
                    "after the tokens up to 3 the next run starts at 4",
                ),
                (lambda: of_ranges(3, [[(0, 4)]]), ValueError, "every token of 0 .. 2 must be owned once"),
                (
                    lambda: of_ranges(4, [[(0, 5), (5, 4)]]),
                    ValueError,
                    "every token of 0 .. 3 must be owned once",
                ),
                (
                    lambda: of_ranges(4, []),
                    ValueError,
                    "ranges must hold a list of .start, stop. for each rank, got none",
                ),
                (
                    lambda: of_owners(torch.tensor([0.0]), 1),
                    TypeError,
                    "owner must be a list of ranks, an integer for each token",
                ),
                (lambda: of_owners(torch.tensor([[0]]), 1), TypeError, r"got torch.int64 \[1, 1\]"),
                (
                    lambda: of_owners(torch.tensor([0, 2]), 2),
                    ValueError,
                    r"owner must hold ranks 0 .. 1, got 0 .. 2",
                ),
                (lambda: of_bounds([0, 2, 4]).tokens(2), IndexError, r"rank must be in 0 .. 1, got 2"),
                (lambda: of_bounds([0, 2, 4]).ranges(-1), IndexError, r"rank must be in 0 .. 1, got -1"),
                (
                    lambda: Partition(of_bounds([0, 2]), of_bounds([0, 1, 2])),
                    ValueError,
                    "got 1 ranks for the receivers and 2 for",
                ),
                (
                    lambda: contiguous(patterns.causal(3), 0),
                    ValueError,
                    "world_size must be at least 1, got 0",
                ),
                (lambda: zigzag(patterns.causal(3), 2.0), TypeError, "world_size must be an integer"),
            ]
        )

    @pytest.mark.parametrize(
        ("partition", "error", "message"),
        [
            (None, TypeError, "partition must be a Partition, got NoneType; contiguous"),
            (
                contiguous(patterns.causal(5), 2),
                ValueError,
                "partition is of 5 receivers and 5 senders, but .* has 6 and 6",
            ),
        ],
    )
    def test_a_partition_of_other_tokens_is_refused(self, partition, error, message):
        with pytest.raises(error, match=message):
            check_partition(partition, patterns.causal(6))


SIZES = [(0, 1), (0, 3), (1, 4), (2, 2), (5, 2), (7, 3), (12, 3), (13, 4), (3, 8), (64, 8)]


class TestOfAnyGraph:
    @pytest.mark.parametrize(("n", "world"), SIZES)
    def test_contiguous_shares_differ_by_one_at_most(self, n, world):
        shares = contiguous(patterns.causal(n), world).dst
        assert sum(shares.sizes) == n
        assert max(shares.sizes) - min(shares.sizes) <= 1
        assert all(len(shares.ranges(rank)) <= 1 for rank in range(world))
        assert shares.tokens(0).tolist() == list(range(shares.sizes[0]))

    @pytest.mark.parametrize(("n", "world"), SIZES)
    def test_zigzag_gives_every_pair_of_chunks_the_same_edges_of_a_causal_graph(self, n, world):
        """c tokens from the front and their mirror images have c (n + 1) edges; the middle one of an odd
        number is the last's.
        """
        graph = patterns.causal(n)
        partition = zigzag(graph, world)
        half = [(size - (n % 2 and rank == world - 1)) // 2 for rank, size in enumerate(partition.dst.sizes)]
        middle = [(n + 1) // 2 if n % 2 and rank == world - 1 else 0 for rank in range(world)]
        assert loads(graph, partition) == [c * (n + 1) + extra for c, extra in zip(half, middle, strict=True)]
        assert max(loads(graph, partition)) - min(loads(graph, partition)) <= n + 1
        assert all(len(partition.dst.ranges(rank)) <= 2 for rank in range(world))
        if n and n % (2 * world) == 0:
            assert len(set(loads(graph, partition))) == 1
            assert len(set(partition.dst.sizes)) == 1

    def test_sides_of_their_own(self):
        for make in (contiguous, zigzag, by_edges, rcm, by_metis):
            partition = make(patterns.cross(9, 14), 2)
            assert (partition.dst.num_tokens, partition.src.num_tokens) == (9, 14)
            assert not partition.is_square


class TestByEdges:
    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 9), st.integers(1, 6))
    def test_nobody_has_more_than_its_share_and_one_receiver(self, lengths, w, world):
        graph = patterns.documents(lengths) & patterns.window(sum(lengths), w)
        most = graph.num_edges / world + graph.max_in_degree
        partition = by_edges(graph, world)
        assert max(loads(graph, partition)) <= most
        assert all(len(partition.dst.ranges(rank)) <= 1 for rank in range(world))

    def test_all_heads_count(self):
        """One head hears the past, one the future: together all receivers have as many edges, less those that
        both hold.
        """
        rule = lambda b, h, dst, src: ((h == 0) & (src <= dst)) | ((h == 1) & (src >= dst))  # noqa: E731
        graph = TokenGraph.from_rule(rule, 64, heads=2)
        assert by_edges(graph, 4) == contiguous(graph, 4)

    def test_without_edges_tokens_are_shared(self):
        nobody = patterns.causal(8) - patterns.causal(8)
        assert by_edges(nobody, 4) == contiguous(nobody, 4)


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
        costs = [
            edges + size for edges, size in zip(loads(graph, partition), partition.dst.sizes, strict=True)
        ]
        assert max(costs) <= 2 * sum(costs) / world + 2 * max(lengths)

    @pytest.mark.parametrize("lengths", [[8] * 12, [20, 10, 20, 5, 5, 20], [1] * 40, [16, 16, 16]])
    def test_whole_documents_need_no_halo(self, lengths):
        """If none is larger than a rank's share, nothing travels."""
        graph = patterns.documents(lengths)
        partition = documents(graph, 3)
        assert max(length * (length + 3) // 2 for length in lengths) <= -(
            -(graph.num_edges + graph.num_dst) // 3
        )
        assert int(halo_sizes(graph, partition).sum()) == 0
        assert min(partition.dst.sizes) > 0

    def test_a_large_document_spans(self):
        """It is cut into shares; the small one has room beside its rest."""
        graph = patterns.documents([4, 96])
        partition = documents(graph, 4)
        assert min(partition.dst.sizes) > 0
        assert max(loads(graph, partition)) <= 1.3 * graph.num_edges / 4

    def test_given_out_one_by_one_where_neighbours_would_not_balance(self):
        graph = patterns.documents([10, 10, 10, 30, 30, 30])
        assert sorted(documents(graph, 3).dst.sizes) == [40, 40, 40]
        least = documents(
            patterns.documents([8, 12, 9]), 2
        )  # 44, 90 and 54 edges and tokens: the largest alone
        assert sorted(least.dst.sizes) == [12, 17]

    def test_small_neighbours_stay_together(self):
        """One run for each rank, where documents are small and alike."""
        partition = documents(patterns.documents([2] * 2000), 8)
        assert len(partition.dst.rank) == 8

    def test_only_of_a_square_graph(self):
        with pytest.raises(
            ValueError,
            match=r"documents are runs of the tokens of a square graph, got .*cross.*take contiguous",
        ):
            documents(patterns.cross(3, 4), 2)


class TestLocality:
    def test_an_order_holds_every_node_once(self):
        for graph in (
            patterns.torus(5, 7),
            patterns.cross(4, 3),
            patterns.causal(0),
            patterns.self_loops(5),
            patterns.star(4),
        ):
            nodes = graph.num_dst if graph.num_dst == graph.num_src else graph.num_dst + graph.num_src
            assert sorted(rcm_order(graph).tolist()) == list(range(nodes))

    @pytest.mark.parametrize("seed", range(3))
    def test_a_shuffled_path_is_found_again(self, seed):
        """Every edge joins neighbours in the order: bandwidth 1."""
        line = patterns.window(40, 2) - patterns.self_loops(40)
        graph = shuffled(line, seed)
        place = rcm_order(graph).argsort()
        assert int((place[graph.edge_index[0]] - place[graph.edge_index[1]]).abs().max()) == 1

    def test_connected_parts_stay_together(self):
        """Two shuffled paths: the order holds one after the other."""
        graph = shuffled(patterns.documents([9, 14]) & patterns.window(23, 2))
        place = rcm_order(graph).argsort()
        assert int((place[graph.edge_index[0]] - place[graph.edge_index[1]]).abs().max()) == 1

    def test_a_grid_has_the_bandwidth_of_its_side(self):
        """Levels of breadth first are diagonals of at most 12 nodes; neighbours are in levels side by
        side.
        """
        rows, columns = torch.arange(144).view(12, 12), torch.arange(144).view(12, 12).t()
        edges = torch.cat([torch.stack([t[:-1].flatten(), t[1:].flatten()]) for t in (rows, columns)], 1)
        graph = shuffled(TokenGraph.from_edges(edges, 144))
        place = rcm_order(graph).argsort()
        assert int((place[graph.edge_index[0]] - place[graph.edge_index[1]]).abs().max()) <= 13

    @pytest.mark.parametrize("make", [rcm, by_metis])
    def test_less_travels_than_at_random(self, make):
        """On a torus of 32 x 32, in no useful order, on 4 ranks."""
        graph = shuffled(patterns.torus(32, 32))
        cut, random = (
            int(halo_sizes(graph, partition).sum()) for partition in (make(graph, 4), at_random(graph, 4))
        )
        assert cut < random / 3
        assert max(loads(graph, make(graph, 4))) <= 1.1 * graph.num_edges / 4

    @pytest.mark.parametrize("make", [rcm, by_metis])
    def test_the_same_again(self, make):
        graph = shuffled(patterns.torus(16, 16))
        assert make(graph, 3) == make(graph, 3)

    @pytest.mark.parametrize("make", [rcm, by_metis])
    @pytest.mark.parametrize(
        "graph", [patterns.cross(6, 9), patterns.causal(3), patterns.causal(0), patterns.self_loops(9)]
    )
    def test_more_ranks_than_nodes_and_nodes_without_edges(self, make, graph):
        partition = make(graph, 4)
        assert sum(partition.dst.sizes) == graph.num_dst
        assert sum(partition.src.sizes) == graph.num_src

    @pytest.mark.parametrize("make", [rcm, by_metis])
    def test_all_heads_are_read(self, make):
        """A graph that differs by head is shared as the union of its heads."""
        rule = lambda b, h, dst, src: (src - dst) % 64 == 7 * (h + 1)  # noqa: E731
        by_head = TokenGraph.from_rule(rule, 64, heads=2)
        union = TokenGraph.from_edges(torch.cat([by_head.select(0, h).edge_index for h in (0, 1)], 1), 64)
        assert make(by_head, 4) == make(union, 4)

    def test_without_pymetis(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "pymetis", None)
        with pytest.raises(
            ImportError, match=r"metis needs pymetis: pip install 'gnn_attention\[metis\]', or take rcm"
        ):
            metis(patterns.torus(4, 4), 2)

    @pytest.mark.parametrize("make", [rcm, by_metis])
    def test_too_many_edges_to_list(self, make, monkeypatch):
        monkeypatch.setattr(partitioners, "MAX_EDGES", 54)
        with pytest.raises(
            ValueError, match="has 55 edges, too many to list; take contiguous, zigzag, by_edges or documents"
        ):
            make(patterns.causal(10), 2)


def test_equal_bounds_are_the_nearest():
    """Before each place are 0 3 4 5 6 9 12, due 4 and 8: 9 is nearer to 8 than 6; of 0 3 4 7 12, 7 is nearer
    than 12.
    """
    assert equal_bounds(torch.tensor([3, 1, 1, 1, 3, 3]), 3) == [0, 2, 5, 6]
    assert equal_bounds(torch.tensor([3, 1, 3, 5]), 3) == [0, 2, 3, 4]
