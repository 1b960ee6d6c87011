"""The conditions of Yun et al. and Hamiltonian paths, against the literature and all orders of tokens."""

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
    """A ring's neighbours on a line, and a relay that attends to all and is attended to by all."""
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
    found = yun_conditions([graph])
    assert (found.hold, found.layers) == (True, layers)
    assert found.path == expressive.Path(True, tuple(range(graph.num_dst)))
    assert found.missing_pair is found.no_self_loop is None
    assert "all three hold" in str(found)
    assert f"after {layers} layers" in str(found)


def test_full_reach_and_self_loops_in_every_layer():
    found = yun_conditions(patterns.causal(6))
    src, dst = found.missing_pair
    assert src > dst
    assert (found.hold, found.path.exists, found.layers) == (False, True, None)
    assert f"no: {dst} never receives from {src}" in str(found)
    found = yun_conditions([patterns.full(4), patterns.full(4) - graph_of(4, [(2, 2)])])
    assert (found.no_self_loop, found.hold) == ((2, 2), False)
    assert "in layer 2 token 2 does not attend to itself" in str(found)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(graphs(most=6))
def test_against_all_orders(graph):
    mask = graph.mask().tolist()
    orders = [p for p in permutations(range(graph.num_dst)) if all(mask[b][a] for a, b in pairwise(p))]
    found = yun_conditions(graph)
    assert found.path.exists is bool(orders), graph
    assert found.path.tokens in orders if orders else found.path.tokens is None and found.path.obstacle
    assert (found.missing_pair is None) == (analyse.diameter(graph) is not None)
    assert found.layers == analyse.diameter(graph)


def test_obstacles():
    sinks, order = patterns.window(6, 1) | patterns.sinks(6, 1), "causal graph allows no other order"
    for graph, words in (
        (patterns.documents([3, 3], causal=False), "falls apart into 2 components"),
        (sinks, f"2 does not attend to 1, and a {order}"),
        (sinks.T, f"1 does not attend to 2, and an anti-{order}"),
        (patterns.global_tokens(5, [2], causal=False), "none of all possible orders"),
    ):
        path = expressive.hamiltonian_path(graph)
        assert path.exists is False
        assert words in path.obstacle


def test_out_of_budget_is_not_a_no():
    """A hub with 30 leaves has no path, which takes a search to see."""
    graph = patterns.global_tokens(30, [7], causal=False) | patterns.window(30, 1)
    found = yun_conditions(graph, budget=50)
    assert (found.path.exists, found.hold) == (None, None)
    assert "not found: the search ended after looking at 50 edges" in str(found)
    assert "undecided" in str(found)
    assert yun_conditions(graph).path.exists is False


def test_wrong_arguments():
    with pytest.raises(ValueError, match="budget must be at least 0, got -1"):
        yun_conditions(patterns.causal(4), budget=-1)
    with pytest.raises(ValueError, match=r"same tokens, got .*causal\(3\).*causal\(4\)"):
        yun_conditions([patterns.causal(3), patterns.causal(4)])
