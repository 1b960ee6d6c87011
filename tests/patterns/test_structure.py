"""``patterns.structure``: its builders keep the order of lists, and agree with networkx."""

from __future__ import annotations

import networkx
import pytest
import torch

from gnn_attention import TokenGraph, convert, patterns
from gnn_attention.patterns import structure

each_seed = pytest.mark.parametrize("seed", range(4))


def random_digraph(seed, n=11, chance=0.15):
    """Return a random directed graph of networkx, with one self loop."""
    graph = networkx.gnp_random_graph(n, chance, seed=seed, directed=True)
    graph.add_edge(3, 3)
    return graph


def asymmetric_graph():
    return TokenGraph.from_edges(torch.tensor([[2, 0, 1, 1], [0, 2, 1, 2]]), 3, name="g")


class TestKin:
    def test_self_loops_keep_the_order_of_the_list(self):
        """Missing loops come last, and an existing loop keeps its place."""
        graph = structure.with_self_loops(asymmetric_graph())
        assert graph.edge_index.t().tolist() == [[2, 0], [0, 2], [1, 1], [1, 2], [0, 0], [2, 2]]
        assert structure.with_self_loops(graph) == graph
        assert graph - patterns.window(3, 1) == asymmetric_graph() - patterns.window(3, 1)

    @each_seed
    @pytest.mark.parametrize("k", [1, 2, 3, 40])
    def test_hops_are_powers(self, seed, k):
        """k hops are A^1 or ... or A^k; with self loops they are the k-th power of A + I."""
        graph = convert.from_networkx(random_digraph(seed))
        union = graph**1
        for hops in range(2, min(k, 11) + 1):
            union = union | graph**hops
        assert structure.k_hop(graph, k) == union
        assert structure.with_self_loops(structure.k_hop(graph, k)) == structure.with_self_loops(graph) ** k

    def test_virtual_nodes_keep_the_order_of_the_list(self):
        graph = structure.virtual_nodes(asymmetric_graph(), 2)
        assert graph.edge_index[:, :4].tolist() == asymmetric_graph().edge_index.tolist()
        to_tokens, to_hubs = [[3, 4] * 3, [0, 0, 1, 1, 2, 2]], [[0, 1, 2] * 2, [3] * 3 + [4] * 3]
        assert graph.edge_index[:, 4:].tolist() == [a + b for a, b in zip(to_tokens, to_hubs, strict=True)]
        assert structure.virtual_nodes(asymmetric_graph(), 0) == asymmetric_graph()

    def test_time_keeps_the_order_of_the_list(self):
        graph = structure.temporal(asymmetric_graph(), [1, 1, 0])
        assert graph.edge_index.tolist() == [[2, 1], [0, 1]]

    @pytest.mark.parametrize("later", [2**53 + 1, 1.7e9 + 2**-20])
    def test_close_times_differ(self, later):
        """Times are compared as Python's numbers: nanoseconds as integers, seconds as float64."""
        first_time = 2**53 if isinstance(later, int) else 1.7e9
        graph = structure.temporal(patterns.full(2), [later, first_time], strict=True)
        assert graph.edge_index.tolist() == [[1], [0]]

    def test_types_of_edges_in_the_order_of_the_graph(self):
        """An edge may have several types or none; a bias is a weighted sum of them."""
        graph, past_graph = asymmetric_graph(), patterns.strict_causal(3)
        types = structure.edge_types(graph, [past_graph, patterns.window(3, 1), patterns.no_self(3)])
        expected = [[0, 1, 0, 1], [0, 0, 1, 0], [1, 1, 0, 1]]
        assert torch.equal(types, torch.tensor(expected, dtype=torch.bool))
        assert structure.edge_types(graph, []).shape == (0, 4)

    def test_shortest_paths_in_chunks_of_senders(self, monkeypatch):
        graph = convert.from_networkx(random_digraph(2))
        distances = structure.shortest_paths(patterns.full(11), graph)
        monkeypatch.setattr(structure, "ENTRIES_PER_CHUNK", 1)
        assert torch.equal(structure.shortest_paths(patterns.full(11), graph), distances)

    def test_any_default_dtype(self):
        graph, x = convert.from_networkx(random_digraph(2)), torch.arange(24.0).view(12, 2).sin()
        distances, buckets = structure.shortest_paths(graph, graph), patterns.lsh(x, 4)
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.equal(structure.shortest_paths(graph, graph), distances)
            assert patterns.lsh(x.double(), 4) == buckets
        finally:
            torch.set_default_dtype(torch.float32)


class TestNetworkx:
    @each_seed
    def test_shortest_paths(self, seed):
        graph, pairs = random_digraph(seed), patterns.full(11)
        lengths = dict(networkx.all_pairs_shortest_path_length(graph))
        expected = [lengths[src].get(dst, -1) for src, dst in pairs.edge_index.t().tolist()]
        assert structure.shortest_paths(pairs, convert.from_networkx(graph)).tolist() == expected
