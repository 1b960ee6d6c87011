"""Every token has one owner, and each partition keeps the bounds that its docstring promises."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extras import needs
from support.refusals import assert_refusals

from gnn_attention import algebra, patterns
from gnn_attention.distributed import partition as partitions
from gnn_attention.distributed.halo_sets import halo_sizes
from gnn_attention.distributed.partition import (
    Partition,
    Shares,
    by_edges,
    contiguous,
    metis,
    resolve_partition,
    zigzag,
)
from gnn_attention.graph import TokenGraph

OWNERS = st.integers(1, 5).flatmap(
    lambda world: st.tuples(st.just(world), st.lists(st.integers(0, world - 1), min_size=0, max_size=30))
)


def by_metis(graph, world):
    needs("pymetis")
    return metis(graph, world)


def count_edges(graph, partition):
    """Count the edges of each rank in the mask."""
    mask = graph.mask().reshape((graph.batch or 1) * (graph.heads or 1), graph.num_dst, graph.num_src)
    return [int(mask[:, partition.dst.tokens(rank)].sum()) for rank in range(partition.world_size)]


def shuffle(graph, seed=0):
    """Return the same graph with its tokens in a random order."""
    order = torch.randperm(graph.num_dst, generator=torch.Generator().manual_seed(seed))
    return TokenGraph.from_edges(order[graph.edge_index], graph.num_dst)


class TestShares:
    @settings(max_examples=60, deadline=None)
    @given(OWNERS)
    def test_every_token_is_owned_once_in_as_few_runs_as_can_be(self, case):
        world, owner = case[0], torch.tensor(case[1], dtype=torch.int64)
        shares = Shares(owner, world)
        for rank in range(world):
            tokens = (owner == rank).nonzero().flatten()
            assert torch.equal(shares.tokens(rank), tokens)
            assert shares.sizes[rank] == len(tokens)
            assert [t for start, stop in shares.ranges(rank) for t in range(start, stop)] == tokens.tolist()
        runs = sum(len(shares.ranges(rank)) for rank in range(world))
        assert runs == int((owner.diff() != 0).sum()) + (len(owner) > 0)
        copy = Shares(owner.to(torch.int32), world)
        assert (copy, hash(copy)) == (shares, hash(shares))
        assert len(owner) == 0 or Shares((owner + 1) % (world + 1), world + 1) != shares

    def test_wrong_shares_raise(self):
        causal, owner = patterns.causal(6), torch.tensor([0, 1])
        shares = Shares(owner, 2)
        calls = [
            (lambda: Shares([0, 1], 2), TypeError, "owner must be a Tensor, got .* of type list"),
            (lambda: Shares(torch.tensor([0.0]), 1), TypeError, "owner must be a 1-D tensor of integers"),
            (lambda: Shares(torch.tensor([[0]]), 1), TypeError, r"torch.int64 and shape \[1, 1\]"),
            (lambda: Shares(torch.tensor([0, 2]), 2), ValueError, "hold ranks 0 .. 1, got 0 .. 2"),
            (lambda: shares.tokens(2), IndexError, "rank must be in 0 .. 1, got 2"),
            (lambda: Partition(shares, Shares(owner, 3)), ValueError, "same number of ranks, got 2 and 3"),
            (lambda: contiguous(causal, 0), ValueError, "world_size must be at least 1, got 0"),
            (lambda: resolve_partition(causal, None), TypeError, "partition must be a Partition, got None"),
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
        """Any c tokens and their mirror images have c (n + 1) edges; the last rank owns the middle token."""
        graph = patterns.causal(n)
        partition = zigzag(graph, world)
        half = [(size - (n % 2 and rank == world - 1)) // 2 for rank, size in enumerate(partition.dst.sizes)]
        middle = [(n + 1) // 2 if n % 2 and rank == world - 1 else 0 for rank in range(world)]
        edges = count_edges(graph, partition)
        assert edges == [c * (n + 1) + extra for c, extra in zip(half, middle, strict=True)]
        assert max(edges) - min(edges) <= n + 1
        assert all(len(partition.dst.ranges(rank)) <= 2 for rank in range(world))
        if n and n % (2 * world) == 0:
            assert len(set(edges)) == len(set(partition.dst.sizes)) == 1

    @pytest.mark.parametrize("make", [contiguous, zigzag, by_edges, by_metis])
    def test_two_sequences(self, make):
        partition = make(patterns.cross(9, 14), 2)
        assert (partition.dst.num_tokens, partition.src.num_tokens) == (9, 14)


class TestByEdges:
    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 9), st.integers(1, 6))
    def test_no_rank_has_more_than_its_share_and_one_receiver(self, lengths, w, world):
        graph = patterns.documents(lengths) & patterns.window(sum(lengths), w)
        partition = by_edges(graph, world)
        assert max(count_edges(graph, partition)) <= graph.num_edges / world + graph.max_in_degree
        assert all(len(partition.dst.ranges(rank)) <= 1 for rank in range(world))

    def test_all_heads_count_and_without_edges_tokens(self):
        """If one head attends to the past and one to the future, each receiver has n + 1 edges in all."""
        graph, empty = algebra.per_head(patterns.causal(64), patterns.anti_causal(64)), patterns.window(8, 0)
        assert by_edges(graph, 4) == contiguous(graph, 4)
        assert by_edges(empty, 4) == contiguous(empty, 4)


class TestMetis:
    def test_less_travels_than_at_random(self):
        """On a shuffled torus, metis always finds one partition, with less than a third of a random halo."""
        graph = shuffle(patterns.torus(32, 32))
        owner = torch.randint(0, 4, (1024,), generator=torch.Generator().manual_seed(1))
        partition, random = by_metis(graph, 4), Partition(Shares(owner, 4), Shares(owner, 4))
        assert int(halo_sizes(graph, partition).sum()) < int(halo_sizes(graph, random).sum()) / 3
        assert max(count_edges(graph, partition)) <= 1.1 * graph.num_edges / 4
        assert by_metis(graph, 4) == partition

    def test_without_pymetis(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "pymetis", None)
        with pytest.raises(ImportError, match=r"needs pymetis: pip install .*metis.* or use by_edges"):
            metis(patterns.torus(4, 4), 2)

    def test_too_many_edges_to_list(self, monkeypatch):
        monkeypatch.setattr(partitions, "MAX_METIS_EDGES", 54)
        with pytest.raises(ValueError, match="has 55 edges, too many for metis; use by_edges"):
            by_metis(patterns.causal(10), 2)
