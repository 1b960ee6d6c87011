"""``patterns.structure``: relations between its builders, refusals, and the same graphs elsewhere."""

from __future__ import annotations

import pickle

import networkx
import pytest
import torch
from support.extras import needs
from support.refusals import assert_refusals
from torch_geometric import transforms, utils
from torch_geometric.data import Data

from gnn_attention import TokenGraph, convert, patterns
from gnn_attention.patterns import structure

each_seed = pytest.mark.parametrize("seed", range(4))


def some_digraph(seed, n=11, chance=0.15):
    """A random directed graph of networkx, with one self loop."""
    graph = networkx.gnp_random_graph(n, chance, seed=seed, directed=True)
    graph.add_edge(3, 3)
    return graph


def asymmetric():
    return TokenGraph.from_edges(torch.tensor([[2, 0, 1, 1], [0, 2, 1, 2]]), 3, name="g")


class TestKin:
    def test_self_loops_keep_the_order_of_the_list(self):
        """The loops that are missing come last; the one that is there stays where it stands."""
        graph = structure.with_self_loops(asymmetric())
        assert graph.edge_index.t().tolist() == [[2, 0], [0, 2], [1, 1], [1, 2], [0, 0], [2, 2]]
        assert structure.with_self_loops(graph) == graph
        assert graph - patterns.window(3, 1) == asymmetric() - patterns.window(3, 1)

    def test_self_loops_of_a_graph_that_differs_by_head(self):
        per_head = TokenGraph.from_rule(lambda b, h, dst, src: dst - src == h + 1, 5, heads=2)
        graph = structure.with_self_loops(per_head)
        assert graph.heads == 2
        for head in range(2):
            assert graph.select(0, head) == per_head.select(0, head) | patterns.window(5, 1)

    @each_seed
    @pytest.mark.parametrize("k", [1, 2, 3, 40])
    def test_hops_are_powers(self, seed, k):
        """A^1 or ... or A^k; with self loops it is the k-th power of A + I."""
        graph = convert.from_networkx(some_digraph(seed))
        united = graph**1
        for hops in range(2, min(k, 11) + 1):
            united = united | graph**hops
        assert structure.k_hop(graph, k) == united
        assert structure.with_self_loops(structure.k_hop(graph, k)) == structure.with_self_loops(graph) ** k

    def test_hops_are_listed_by_receiver_then_sender(self):
        graph = structure.k_hop(convert.from_networkx(some_digraph(1)), 2)
        src, dst = graph.edge_index
        key = dst * 11 + src
        assert key.tolist() == sorted(set(key.tolist()))

    @each_seed
    def test_hops_and_shortest_paths_agree(self, seed):
        graph, everyone = convert.from_networkx(some_digraph(seed)), patterns.no_self(11)
        far = structure.shortest_paths(everyone, graph)
        within = TokenGraph.from_edges(everyone.edge_index[:, (far >= 1) & (far <= 3)], 11)
        assert within == structure.k_hop(graph, 3) - patterns.window(11, 1)

    def test_hops_stop_when_nothing_is_new(self):
        """A million hops over a chain of four take no million products."""
        assert structure.k_hop(patterns.window(4, 2), 10**6) == patterns.causal(4)

    def test_virtual_nodes_keep_the_order_of_the_list(self):
        graph = structure.virtual_nodes(asymmetric(), 2)
        assert graph.edge_index[:, :4].tolist() == asymmetric().edge_index.tolist()
        assert graph.edge_index[:, 4:].tolist() == [
            [0, 1, 2, 0, 1, 2, 3, 3, 3, 4, 4, 4],
            [3, 3, 3, 4, 4, 4, 0, 1, 2, 0, 1, 2],
        ]
        assert structure.virtual_nodes(asymmetric(), 0) == asymmetric()

    def test_two_hops_lead_through_a_virtual_node(self):
        """However sparse the graph, every token that attends to the hub has received from all after two
        layers.
        """
        nothing = TokenGraph.from_edges(torch.zeros(2, 0, dtype=torch.int64), 7)
        two = structure.virtual_nodes(nothing) ** 2
        assert bool(two.mask()[:7, :7].all())

    def test_time_orders_a_full_graph(self):
        assert structure.temporal(patterns.full(6), range(6)) == patterns.causal(6)
        assert structure.temporal(patterns.full(6), range(6), strict=True) == patterns.strict_causal(6)
        assert structure.temporal(patterns.full(6), [2] * 6) == patterns.full(6)
        assert structure.temporal(patterns.full(6), [2] * 6, strict=True).num_edges == 0

    def test_time_keeps_the_order_of_the_list(self):
        graph = structure.temporal(asymmetric(), [1, 1, 0])
        assert graph.edge_index.tolist() == [[2, 1], [0, 1]]

    @pytest.mark.parametrize("late", [2**53 + 1, 1.7e9 + 2**-20])
    def test_close_times_are_told_apart(self, late):
        """Python's numbers, not float32: nanoseconds as integers, seconds as floats."""
        early = 2**53 if isinstance(late, int) else 1.7e9
        assert structure.temporal(patterns.full(2), [late, early], strict=True).edge_index.tolist() == [
            [1],
            [0],
        ]

    def test_types_of_edges_in_the_order_of_the_graph(self):
        """An edge may have several types or none; a bias is a weighted sum of them."""
        graph, before = asymmetric(), patterns.strict_causal(3)
        types = structure.edge_types(graph, [before, patterns.window(3, 1), patterns.no_self(3)])
        assert types.int().tolist() == [[0, 1, 0, 1], [0, 0, 1, 0], [1, 1, 0, 1]]
        assert types.dtype == torch.bool
        assert structure.edge_types(graph, []).shape == (0, 4)

    def test_real_and_virtual_edges(self):
        """SAN: the real edges and the rest of the full graph, each edge of exactly one type."""
        real = asymmetric() - patterns.window(3, 1)
        types = structure.edge_types(patterns.no_self(3), [real, patterns.no_self(3) - real])
        assert types.sum(0).tolist() == [1] * 6
        assert types.sum(1).tolist() == [3, 3]

    def test_shortest_paths_run_with_the_messages(self):
        """On a chain 0 -> 1 -> 2 the token 2 is two hops from 0, and 0 is never reached from 2."""
        chain = TokenGraph.from_edges(torch.tensor([[0, 1], [1, 2]]), 3)
        assert structure.shortest_paths(patterns.full(3), chain).view(3, 3).tolist() == [
            [0, -1, -1],
            [1, 0, -1],
            [2, 1, 0],
        ]
        assert structure.shortest_paths(chain, chain).tolist() == [1, 1]

    def test_shortest_paths_some_senders_at_a_time(self, monkeypatch):
        graph = convert.from_networkx(some_digraph(2))
        whole = structure.shortest_paths(patterns.full(11), graph)
        monkeypatch.setattr(structure, "NUMBERS_AT_ONCE", 1)
        assert torch.equal(structure.shortest_paths(patterns.full(11), graph), whole)

    def test_graphs_can_be_pickled(self):
        for graph in (
            structure.with_self_loops(patterns.strict_causal(4)),
            structure.k_hop(asymmetric(), 2),
            structure.virtual_nodes(asymmetric()),
            structure.temporal(patterns.full(3), [3, 1, 2]),
        ):
            again = pickle.loads(pickle.dumps(graph))
            assert (again, again.name) == (graph, graph.name)


class TestRefusals:
    def test_wrong_arguments(self):
        assert_refusals(
            [
                (lambda: structure.with_self_loops(patterns.cross(2, 3)), ValueError, "graph must be square"),
                (
                    lambda: structure.with_self_loops(torch.eye(3)),
                    TypeError,
                    "graph must be a TokenGraph, got Tensor; see",
                ),
                (
                    lambda: structure.edge_types(torch.eye(3), []),
                    TypeError,
                    "graph must be a TokenGraph, got Tensor",
                ),
                (
                    lambda: structure.edge_types(patterns.causal(3), 1),
                    TypeError,
                    "parts must be a list of graphs.*got 1",
                ),
                (
                    lambda: structure.shortest_paths(None, patterns.causal(3)),
                    TypeError,
                    "graph must be a TokenGraph, got NoneType",
                ),
                (
                    lambda: structure.shortest_paths(patterns.causal(3), 2),
                    TypeError,
                    "structure must be a TokenGraph, got int",
                ),
                (lambda: structure.k_hop(patterns.causal(3), 0), ValueError, "k must be at least 1, got 0"),
                (
                    lambda: structure.k_hop(patterns.causal(3), 1.5),
                    TypeError,
                    "k must be an integer, got 1.5",
                ),
                (
                    lambda: structure.k_hop(patterns.causal(4).rows(1, 3), 2),
                    ValueError,
                    "graph must be square",
                ),
                (
                    lambda: structure.virtual_nodes(patterns.causal(3), -1),
                    ValueError,
                    "m must be at least 0, got -1",
                ),
                (lambda: structure.virtual_nodes(patterns.cross(3, 2)), ValueError, "graph must be square"),
                (
                    lambda: structure.virtual_nodes(
                        TokenGraph.from_rule(lambda b, h, dst, src: src <= dst + h, 3, heads=2)
                    ),
                    ValueError,
                    "differs by head has no single edge list",
                ),
                (
                    lambda: structure.temporal(patterns.full(2), [0.0]),
                    ValueError,
                    r"times must be 2 numbers.* got \[0.0\]",
                ),
                (
                    lambda: structure.temporal(patterns.full(2), [0.0, float("nan")]),
                    ValueError,
                    "and no NaN, got",
                ),
                (
                    lambda: structure.temporal(patterns.full(2), ["a", "b"]),
                    TypeError,
                    "times must be a sequence .* of numbers, got",
                ),
                (
                    lambda: structure.temporal(patterns.full(2), [True, 0]),
                    TypeError,
                    "times must be a sequence",
                ),
                (
                    lambda: structure.temporal(patterns.full(2), 3),
                    TypeError,
                    "times must be a sequence .*got 3",
                ),
                (
                    lambda: structure.temporal(patterns.full(1), torch.tensor(3)),
                    TypeError,
                    "times must be a sequence",
                ),
                (
                    lambda: structure.edge_types(patterns.full(2), [patterns.full(3)]),
                    ValueError,
                    "each of parts must be a graph over",
                ),
                (
                    lambda: structure.edge_types(patterns.full(2), [torch.eye(2)]),
                    ValueError,
                    "each of parts must be a graph over",
                ),
                (
                    lambda: structure.shortest_paths(patterns.full(2), patterns.full(3)),
                    ValueError,
                    "structure must be a graph over",
                ),
                (
                    lambda: structure.shortest_paths(patterns.cross(2, 3), patterns.cross(2, 3)),
                    ValueError,
                    "structure must be square",
                ),
            ]
        )


class TestTorchGeometric:
    def test_self_loops(self):
        """``add_self_loops`` appends them in order, as here; it does not ask whether they are there."""
        edges = torch.tensor([[2, 0, 1], [0, 2, 2]])
        theirs, _ = utils.add_self_loops(edges, num_nodes=3)
        assert torch.equal(structure.with_self_loops(TokenGraph.from_edges(edges, 3)).edge_index, theirs)

    def test_a_virtual_node(self):
        data = Data(edge_index=torch.tensor([[2, 0, 1], [0, 2, 2]]), num_nodes=3)
        theirs = transforms.VirtualNode()(data)
        ours = structure.virtual_nodes(convert.from_pyg(data))
        assert convert.from_edge_index(theirs.edge_index, 4) == ours


class TestNetworkx:
    @each_seed
    def test_powers(self, seed):
        """``networkx.power``: nodes within k of each other in an undirected graph, without self loops."""
        graph = networkx.gnp_random_graph(12, 0.15, seed=seed)
        ours = structure.k_hop(convert.from_networkx(graph), 3) - patterns.window(12, 1)
        assert ours == convert.from_networkx(networkx.power(graph, 3))

    @each_seed
    def test_shortest_paths(self, seed):
        graph, everyone = some_digraph(seed), patterns.full(11)
        lengths = dict(networkx.all_pairs_shortest_path_length(graph))
        expected = [lengths[src].get(dst, -1) for src, dst in everyone.edge_index.t().tolist()]
        assert structure.shortest_paths(everyone, convert.from_networkx(graph)).tolist() == expected


@each_seed
@pytest.mark.parametrize("largest", [1, 3, 20])
def test_attention_gym_marks_far_and_unreachable_alike(seed, largest):
    """Its adjacency is indexed [from, to] as networkx's; what is out of reach stands in one bucket with what
    is too far.
    """
    graph = some_digraph(seed)
    adjacency = torch.tensor(networkx.to_numpy_array(graph, nodelist=range(11)))[None]
    ours = structure.shortest_paths(patterns.full(11), convert.from_networkx(graph)).view(11, 11)
    ours = torch.where(ours < 0, largest + 1, ours.clamp(max=largest + 1))
    graphormer = needs("attn_gym.mods.graphormer")
    assert torch.equal(graphormer.shortest_path_distances(adjacency, largest)[0].T, ours.int())
