"""The conditions of Yun et al. and Hamiltonian paths agree with papers and with all orders of tokens."""

from itertools import pairwise, permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import expressive
from examples.expressive import yun_conditions
from gnn_attention import TokenGraph, analyse, patterns


def graph_of(n, edges):
    pairs = torch.tensor(sorted(set(edges)), dtype=torch.int64).reshape(-1, 2).t()
    return TokenGraph.from_edges(pairs, n)


@st.composite
def graphs(draw, most=6):
    n = draw(st.integers(1, most))
    pair = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))
    return graph_of(n, draw(st.lists(pair, max_size=3 * n)))


def star(n, relay=0):
    """Return a path graph with a relay that attends to all tokens and to which all tokens attend."""
    return TokenGraph.from_rule(
        lambda b, h, dst, src: ((dst - src).abs() <= 1) | (dst == relay) | (src == relay), n
    )


@pytest.mark.parametrize(
    ("graph", "layers"),
    [
        (star(40), 2),
        (star(40, relay=39), 2),
        (patterns.full(9), 1),
        (patterns.window(33, 3, causal=False) | patterns.global_tokens(33, [0], causal=False), 2),
    ],
    ids=["star", "star relay last", "full", "window and a global token"],
)
def test_the_patterns_of_the_literature(graph, layers):
    conditions = yun_conditions([graph])
    assert (conditions.hold, conditions.layers) == (True, layers)
    assert conditions.path == expressive.Path(True, tuple(range(graph.num_dst)))
    assert conditions.missing_pair is conditions.no_self_loop is None
    assert "all three hold" in str(conditions)
    assert f"after {layers} layers" in str(conditions)


def test_full_reach_and_self_loops_in_every_layer():
    causal = yun_conditions(patterns.causal(6))
    src, dst = causal.missing_pair
    assert src > dst
    assert (causal.hold, causal.path.exists, causal.layers) == (False, True, None)
    assert f"no: {dst} never receives from {src}" in str(causal)
    two_layers = yun_conditions([patterns.full(4), patterns.full(4) - graph_of(4, [(2, 2)])])
    assert (two_layers.no_self_loop, two_layers.hold) == ((2, 2), False)
    assert "in layer 2 token 2 does not attend to itself" in str(two_layers)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(graphs(most=6))
def test_against_all_orders(graph):
    mask = graph.mask().tolist()
    orders = [p for p in permutations(range(graph.num_dst)) if all(mask[b][a] for a, b in pairwise(p))]
    result = yun_conditions(graph)
    assert result.path.exists is bool(orders), graph
    assert result.path.tokens in orders if orders else result.path.tokens is None and result.path.obstacle
    assert (result.missing_pair is None) == (analyse.diameter(graph) is not None)
    assert result.layers == analyse.diameter(graph)


def test_obstacles():
    sinks, order = patterns.window(6, 1) | patterns.sinks(6, 1), "causal graph allows no other order"
    for graph, words in (
        (patterns.documents([3, 3], causal=False), "the graph has 2 components"),
        (sinks, f"2 does not attend to 1, and a {order}"),
        (sinks.T, f"1 does not attend to 2, and an anti-{order}"),
        (patterns.global_tokens(5, [2], causal=False), "no order of the tokens is a path"),
    ):
        path = expressive.hamiltonian_path(graph)
        assert path.exists is False
        assert words in path.obstacle


def test_a_search_without_enough_budget_is_undecided():
    """A hub with 30 leaves has no path, but only a search shows it."""
    graph = patterns.global_tokens(30, [7], causal=False) | patterns.window(30, 1)
    conditions = yun_conditions(graph, budget=50)
    assert (conditions.path.exists, conditions.hold) == (None, None)
    assert "not found: the search ended after 50 edges" in str(conditions)
    assert "undecided" in str(conditions)
    assert yun_conditions(graph).path.exists is False


def test_wrong_arguments():
    with pytest.raises(ValueError, match="budget must be at least 0, got -1"):
        yun_conditions(patterns.causal(4), budget=-1)
    with pytest.raises(ValueError, match=r"same tokens, got .*causal\(3\).*causal\(4\)"):
        yun_conditions([patterns.causal(3), patterns.causal(4)])
