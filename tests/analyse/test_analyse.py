"""Where information can flow in a graph agrees with closed forms, matrix powers and networkx."""

from __future__ import annotations

import math
from itertools import pairwise

import networkx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import assert_exact
from support.refusals import assert_errors

from gnn_attention import TokenGraph, analyse, convert, patterns
from gnn_attention.analyse import _walks


def make_graph(n, edges, name="graph"):
    pairs = torch.tensor(sorted(set(edges)), dtype=torch.int64).reshape(-1, 2).t()
    return TokenGraph.from_edges(pairs, n, name=name)


@st.composite
def graphs(draw, max_tokens=7):
    n = draw(st.integers(1, max_tokens))
    pair = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))
    return make_graph(n, draw(st.lists(pair, max_size=3 * n)))


@st.composite
def stacks(draw):
    first = draw(graphs())
    n = first.num_dst
    pair = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))
    edge_lists = draw(st.lists(st.lists(pair, max_size=2 * n), max_size=2))
    return [first, *(make_graph(n, edges) for edges in edge_lists)]


def matrix_powers(stack, layers, residual=True):
    """Return the boolean products of the masks of the first 0, 1, ... layers, ``[layers + 1, dst, src]``."""
    masks, powers = [graph.mask().float() for graph in stack], [torch.eye(stack[0].num_dst)]
    for layer in range(layers):
        previous = powers[-1]
        powers.append((masks[layer % len(masks)] @ previous + (previous if residual else 0) > 0).float())
    return torch.stack(powers) > 0


class TestReach:
    @settings(max_examples=60, deadline=None)
    @given(stacks(), st.integers(0, 9), st.booleans())
    def test_receptive_field_is_a_row_of_the_matrix_power(self, stack, layers, residual):
        fields = [analyse.receptive_field(stack, dst, layers, residual) for dst in range(stack[0].num_dst)]
        power = matrix_powers(stack, layers, residual)[-1]
        assert [field.tolist() for field in fields] == [row.nonzero().flatten().tolist() for row in power]

    @settings(max_examples=30, deadline=None)
    @given(stacks())
    def test_layers_between_and_witness(self, stack):
        """The first power with the pair gives the number of layers; a witness takes an edge or waits."""
        n, long_enough = stack[0].num_dst, stack[0].num_dst * len(stack)
        powers = matrix_powers(stack, long_enough)
        for src in range(n):
            for dst in range(n):
                is_reached = powers[:, dst, src]
                expected = int(is_reached.int().argmax()) if bool(is_reached.any()) else None
                assert analyse.layers_between(stack, src, dst) == expected
                path = analyse.witness(stack, src, dst)
                assert (path is None) == (expected is None)
                if path is not None:
                    assert (path[0], path[-1], len(path)) == (src, dst, expected + 1)
                    for layer, (a, b) in enumerate(pairwise(path)):
                        assert a == b or bool(stack[layer % len(stack)].mask()[b, a])
                    assert analyse.witness(stack, src, dst, layers=expected) == path
                    assert expected == 0 or analyse.witness(stack, src, dst, layers=expected - 1) is None

    @settings(max_examples=60, deadline=None)
    @given(stacks())
    def test_full_reach_and_never_hears(self, stack):
        n = stack[0].num_dst
        powers = matrix_powers(stack, n * len(stack))
        full_layers = [layers for layers, power in enumerate(powers) if bool(power.all())]
        assert analyse.diameter(stack) == (full_layers[0] if full_layers else None)
        causal = all(bool((src <= dst).all()) for src, dst in (graph.edge_index for graph in stack))
        target = torch.ones(n, n, dtype=torch.bool).tril() if causal else torch.ones(n, n, dtype=torch.bool)
        assert analyse.never_hears(stack).mask().tolist() == (target & ~powers[-1]).tolist()
        sufficient_layers = [layers for layers, power in enumerate(powers) if bool(power[target].all())]
        assert analyse.layers_to_full_reach(stack) == (sufficient_layers[0] if sufficient_layers else None)
        final_layers = [layers for layers, power in enumerate(powers) if torch.equal(power, powers[-1])]
        full_graph = TokenGraph.from_rule(lambda b, h, dst, src: (dst >= 0) & (src >= 0), n)
        assert analyse.layers_to_full_reach(stack, ~analyse.never_hears(stack, full_graph)) == final_layers[0]

    @pytest.mark.parametrize(("n", "w"), [(1, 2), (2, 2), (17, 4), (66, 5), (130, 64), (129, 65)])
    def test_depth_of_a_window(self, n, w):
        depth, graph = math.ceil((n - 1) / (w - 1)), patterns.window(n, w)
        assert analyse.layers_to_full_reach(graph) == analyse.layers_between(graph, 0, n - 1) == depth
        for layers in range(4):
            expected = list(range(max(0, n - 1 - layers * (w - 1)), n))
            assert analyse.receptive_field(graph, n - 1, layers).tolist() == expected

    def test_no_token_and_one_token(self):
        assert analyse.diameter(patterns.full(0)) == analyse.diameter(patterns.strict_causal(1)) == 0
        assert analyse.never_hears(patterns.strict_causal(1)).num_edges == 0
        assert analyse.layers_to_full_reach(patterns.causal(0)) == 0
        assert analyse.witness(patterns.strict_causal(1), 0, 0) == [0]
        assert analyse.path_counts(patterns.causal(0), 3).shape == (0, 0)


class TestPaths:
    @settings(max_examples=40, deadline=None)
    @given(stacks(), st.integers(0, 5))
    def test_product_of_the_masks(self, stack, layers):
        expected = torch.eye(stack[0].num_dst, dtype=torch.int64)
        for layer in range(layers):
            expected = stack[layer % len(stack)].mask().long() @ expected
        assert torch.equal(analyse.path_counts(stack, layers), expected)

    def test_exact_below_2_to_53_and_refused_from_there_on(self):
        """In the full graph of two tokens, 2^(L - 1) walks of L hops lead from any token to any other."""
        assert int(analyse.path_counts(patterns.full(2), 53).max()) == 2**52
        for layers in (54, 2000):
            with pytest.raises(ValueError, match=r"layers must be at most 53, got"):
                analyse.path_counts(patterns.full(2), layers)


class TestSummary:
    @settings(max_examples=60, deadline=None)
    @given(graphs())
    def test_against_networkx_and_the_mask(self, graph):
        mask, facts = graph.mask(), analyse.summary(graph)
        n = graph.num_dst
        digraph = convert.to_networkx(graph)
        assert (facts.num_dst, facts.num_src, facts.edges, facts.name) == (n, n, int(mask.sum()), graph.name)
        assert facts.density == int(mask.sum()) / n**2
        for degrees, sums in ((facts.in_degree, mask.sum(1)), (facts.out_degree, mask.sum(0))):
            assert (degrees.least, degrees.most) == (int(sums.min()), int(sums.max()))
            assert_exact(degrees.mean, int(mask.sum()) / n)
        isolated = (int((~mask.any(1)).sum()), int((~mask.any(0)).sum()))
        assert (facts.num_isolated_dst, facts.num_isolated_src) == isolated
        assert list(facts.isolated_dst) == (~mask.any(1)).nonzero().flatten()[:5].tolist()
        assert list(facts.isolated_src) == (~mask.any(0)).nonzero().flatten()[:5].tolist()
        assert facts.self_loops == int(mask.diagonal().sum())
        assert facts.symmetric == torch.equal(mask, mask.T)
        assert facts.causal == (not bool(mask.triu(1).any()))
        digraph.remove_edges_from(list(networkx.selfloop_edges(digraph)))
        assert facts.acyclic == networkx.is_directed_acyclic_graph(digraph)

    def test_bipartite(self):
        facts = analyse.summary(patterns.cross(2, 5))
        assert (facts.in_degree, facts.out_degree) == (analyse.Degrees(5, 5.0, 5), analyse.Degrees(2, 2.0, 2))
        assert (facts.symmetric, facts.causal, facts.acyclic, facts.self_loops) == (None, None, None, None)
        assert "no in-edges     7: 0, 1, 2, 3, 4, ...\n" in str(analyse.summary(patterns.window(7, 0)))
        assert "symmetric" not in str(facts)
        assert analyse.summary(patterns.full(0)).in_degree == analyse.Degrees(0, 0.0, 0)


class TestLongOrDeep:
    """A visit to every edge in every layer would here take hours, or more memory than there is."""

    @pytest.mark.slow
    @pytest.mark.parametrize("residual", [True, False])
    def test_a_million_tokens(self, residual):
        n = 10**6
        field = analyse.receptive_field(patterns.window(n, 4096), n - 1, 10, residual)
        assert torch.equal(field, torch.arange(n - 1 - 10 * 4095, n))
        field = analyse.receptive_field(
            [patterns.window(n, 8), patterns.dilated(n, 4, 1000)], n - 1, 2, residual
        )
        assert field.tolist() == sorted(n - 1 - 1000 * i - j for i in range(4) for j in range(8))
        assert len(analyse.receptive_field(patterns.causal(n), n // 2, 3, residual)) == n // 2 + 1


PER_HEAD = TokenGraph.from_rule(lambda b, h, dst, src: dst - src <= h, 4, heads=2)
ERRORS = r"""
receptive_field(causal(4), 4, 1) -> IndexError: receiver must be a position in 0 \.\. 3, got 4
receptive_field(causal(4), 0, -1) -> ValueError: layers must be at least 0, got -1
witness(causal(4), 0, 1, layers=1.5) -> TypeError: layers must be an integer, got 1.5
path_counts(causal(4), -2) -> ValueError: layers must be at least 0, got -2
layers_to_full_reach(causal(4), causal(5)) -> ValueError: target must have the tokens.*causal\(5\)
components(cross(3, 4)) -> ValueError: must be square
summary(PER_HEAD) -> ValueError: varies by head: use select\(batch, head\)
diff(causal(3), 3) -> TypeError: second must be a TokenGraph, got 3 of type int
diameter(window(8193, 1)) -> ValueError: takes at most 8192 tokens, got .*: use
"""


class TestErrors:
    def test_wrong_arguments(self):
        assert_errors(ERRORS, {**vars(patterns), **vars(analyse), "PER_HEAD": PER_HEAD})

    def test_wrong_layers(self):
        causal = [patterns.causal(3), patterns.causal(4)]
        for graphs, error, match in [
            (PER_HEAD, ValueError, r"varies by head: use select\(batch, head\)"),
            (patterns.cross(3, 4), ValueError, "must be square, .*: use @ to compose"),
            (causal, ValueError, r"same tokens, got .*causal\(3\).*causal\(4\)"),
            ([], ValueError, "at least one graph, got an empty list"),
            ([causal[0], 5], TypeError, r"graphs\[1\] must be a TokenGraph, got 5 of type int"),
        ]:
            with pytest.raises(error, match=match):
                analyse.diameter(graphs)
        assert analyse.layers_to_full_reach(PER_HEAD.select(0, 1)) == 3

    def test_too_many_edges_to_list(self, monkeypatch):
        monkeypatch.setattr(_walks, "MAX_EDGES", 9)
        with pytest.raises(ValueError, match=r"causal\(4\).* has 10 edges, too many to list"):
            analyse.components(patterns.causal(4))
        # The rule is evaluated instead.
        assert analyse.witness(patterns.causal(4), 0, 3) == [0, 3]
