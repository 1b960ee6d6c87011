"""A token graph keeps its contract, and its algebra is that of Python sets of edges and boolean matrices.

A graph is compared with a set of pairs ``(src, dst)``. :func:`edges_of` returns this set, and checks that all
views of the graph agree: edge list, mask, degrees, number of edges, and the rule without the graph.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from functools import partial
from itertools import product
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

import gnn_attention as ga
from gnn_attention import TokenGraph, patterns
from gnn_attention.graph.edges import RuleEdges

reproducible = settings(derandomize=True, deadline=None, max_examples=60)

Edge = tuple[int, int]


def graph_from_list(edges: list[Edge], num_dst: int, num_src: int) -> TokenGraph:
    """Return a graph that stores these edges in this order."""
    return TokenGraph.from_edges(torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t(), num_dst, num_src)


def read_table(table: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return table[dst, src]


def graph_from_rule(edges: list[Edge], num_dst: int, num_src: int) -> TokenGraph:
    """Return a graph of these edges from a rule."""
    table = torch.zeros(num_dst, num_src, dtype=torch.bool)
    for src, dst in edges:
        table[dst, src] = True
    return TokenGraph.from_rule(partial(read_table, table), num_dst, num_src)


def list_edges(graph: TokenGraph) -> list[Edge]:
    """Return the edges in the order of the list."""
    return [(src, dst) for src, dst in graph.edge_index.t().tolist()]


def edges_of(graph: TokenGraph) -> set[Edge]:
    """Return the set of edges of a graph of one slice, after a check of every view."""
    edges = list_edges(graph)
    assert graph.edge_index.shape == (2, len(edges))
    assert graph.edge_index.dtype == torch.int64
    assert len(set(edges)) == len(edges) == graph.num_edges
    mask = graph.mask()
    assert mask.dtype == torch.bool
    assert mask.shape == (graph.num_dst, graph.num_src)
    assert {(src, dst) for dst, src in mask.nonzero().tolist()} == set(edges)
    degrees = [sum(1 for _, receiver in edges if receiver == dst) for dst in range(graph.num_dst)]
    assert graph.in_degree().tolist() == degrees
    assert graph.in_degree().dtype == torch.int64
    assert graph.max_in_degree == max(degrees, default=0)
    assert graph.has_empty_rows == (0 in degrees)
    assert graph.is_full() == (len(edges) == graph.num_dst * graph.num_src)
    zero = torch.zeros((), dtype=torch.int64)
    for dst, src in product(range(graph.num_dst), range(graph.num_src)):
        assert bool(graph.rule(zero, zero, torch.tensor(dst), torch.tensor(src))) == (
            (src, dst) in set(edges)
        )
    return set(edges)


@st.composite
def graphs(draw: st.DrawFn, num_dst: int, num_src: int) -> tuple[TokenGraph, set[Edge]]:
    """Draw a graph from a rule or a list, and its set of edges."""
    all_pairs = [(src, dst) for src in range(num_src) for dst in range(num_dst)]
    edges = draw(st.lists(st.sampled_from(all_pairs), unique=True, max_size=12)) if all_pairs else []
    make = draw(st.sampled_from([graph_from_list, graph_from_rule]))
    return make(edges, num_dst, num_src), set(edges)


@st.composite
def groups(draw: st.DrawFn, count: int, square: bool = False) -> list[tuple[TokenGraph, set[Edge]]]:
    """Draw graphs on the same nodes."""
    num_dst = draw(st.integers(0, 5))
    num_src = num_dst if square else draw(st.integers(0, 5))
    return [draw(graphs(num_dst, num_src)) for _ in range(count)]


def per_head(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return src <= dst + h


def per_sample(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return src < dst - b


def per_both(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (src - dst) == h - b


def family(num_dst: int = 3, num_src: int = 4) -> dict[str, TokenGraph]:
    """Return graphs that vary by head, by sample, and by both."""
    return {
        "heads": TokenGraph.from_rule(per_head, num_dst, num_src, heads=2),
        "batch": TokenGraph.from_rule(per_sample, num_dst, num_src, batch=3),
        "both": TokenGraph.from_rule(per_both, num_dst, num_src, heads=2, batch=3),
    }


TENSORS = {
    "from_edges": (torch.tensor([[0, 1, 2], [1, 2, 2]]), lambda x: TokenGraph.from_edges(x, 3)),
    "from_mask": (torch.eye(3, dtype=torch.bool), ga.convert.from_mask),
    "from_indices": (torch.tensor([[0, 1], [1, 2], [1, 2]]), lambda x: TokenGraph.from_indices(x, 3)),
    "documents": (torch.tensor([1, 1, 2]), patterns.documents),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_graph_keeps_its_edges_when_the_tensor_changes(name):
    """The tensor belongs to the caller, who may fill it with the next batch."""
    tensor, make = TENSORS[name]
    argument = tensor.clone()
    graph, expected = make(argument), edges_of(make(tensor))
    argument.zero_()
    assert edges_of(graph) == expected


class TestContract:
    def test_an_edge_goes_from_sender_to_receiver(self):
        """Row 0 of ``edge_index`` holds the senders, and the mask is ``[dst, src]``."""
        graph = TokenGraph.from_edges(torch.tensor([[0, 2], [1, 1]]), 3)
        assert graph.mask().tolist() == [[False] * 3, [True, False, True], [False] * 3]
        assert graph.in_degree().tolist() == [0, 2, 0]
        assert edges_of(graph) == {(0, 1), (2, 1)}

    @pytest.mark.parametrize(
        ("axes", "shape"), [("heads", (2, 3, 4)), ("batch", (3, 1, 3, 4)), ("both", (3, 2, 3, 4))]
    )
    def test_views_where_the_graph_varies(self, axes, shape):
        graph, rule = family()[axes], {"heads": per_head, "batch": per_sample, "both": per_both}[axes]
        mask = graph.mask()
        indices = (
            torch.arange(n).view(-1, *[1] * num_axes)
            for num_axes, n in zip((3, 2, 1, 0), graph.shape4, strict=True)
        )
        assert torch.equal(mask, rule(*indices).expand(graph.shape4).reshape(shape))
        assert torch.equal(graph.in_degree(), mask.sum(-1))
        assert graph.num_edges == int(mask.sum())

    def test_name_and_text(self):
        graph = TokenGraph.from_rule(per_head, 2, 3, heads=4, batch=5, name="mine")
        assert graph.name == "mine"
        assert repr(graph) == str(graph) == "TokenGraph(mine: 3 src -> 2 dst, batch 5, heads 4)"
        graph = TokenGraph.from_rule(per_head, 2, heads=2)
        assert graph.name == "per_head"
        # A graph that varies has no single picture.
        assert str(graph) == repr(graph)
        assert str(family()["batch"]) == repr(family()["batch"])

    @pytest.mark.parametrize(
        ("graph", "expected"),
        [
            (graph_from_list([(s, d) for d in range(4) for s in range(d + 1)], 4, 4), True),
            (patterns.window(5, 5), True),
            (patterns.window(5, 4), False),
            (patterns.causal(5).T, False),
            (patterns.causal(5).rows(0, 4), False),
            (TokenGraph.from_rule(per_head, 3, heads=2), False),
        ],
    )
    def test_is_causal(self, graph, expected):
        assert graph.is_causal() is expected


class TestAlgebra:
    @reproducible
    @given(groups(2))
    def test_operators_are_those_of_sets(self, operands):
        (a, A), (b, B) = operands
        all_pairs = set(product(range(a.num_src), range(a.num_dst)))
        assert edges_of(a) == A
        assert edges_of(b) == B
        assert edges_of(a | b) == A | B
        assert edges_of(a & b) == A & B
        assert edges_of(a - b) == A - B
        assert edges_of(a ^ b) == A ^ B
        assert edges_of(~a) == all_pairs - A
        assert edges_of(a.T) == {(dst, src) for src, dst in A}

    @reproducible
    @given(groups(2))
    def test_equality_is_equality_of_sets_and_hashes_follow(self, operands):
        (a, A), (b, B) = operands
        assert (a == b) is (A == B)
        assert (a != b) is (A != B)
        rule_graph = graph_from_rule(sorted(A), a.num_dst, a.num_src)
        list_graph = graph_from_list(sorted(A, reverse=True), a.num_dst, a.num_src)
        assert a == rule_graph == list_graph
        assert hash(a) == hash(rule_graph) == hash(list_graph)
        assert len({a, rule_graph, list_graph}) == 1

    @reproducible
    @given(st.data())
    def test_two_hops_are_the_boolean_matrix_product(self, data):
        m, k, n, p = (data.draw(st.integers(0, 4)) for _ in range(4))
        (a, A), (b, B), (c, _) = (data.draw(graphs(*size)) for size in ((m, k), (k, n), (n, p)))
        expected = {(src, dst) for src, middle in B for sender, dst in A if middle == sender}
        assert edges_of(a @ b) == expected
        assert torch.equal((a @ b).mask(), (a.mask().int() @ b.mask().int()) > 0)
        assert (a @ b) @ c == a @ (b @ c)
        assert (a @ b).T == b.T @ a.T

    def test_equality_sees_offsets_and_heads(self):
        last_row = patterns.full(3).rows(2, 3)
        first_row = patterns.full(3).rows(0, 1)
        assert torch.equal(last_row.mask(), first_row.mask())
        assert last_row != first_row
        assert TokenGraph.from_rule(per_head, 3, heads=2) != TokenGraph.from_rule(per_head, 3, heads=3)
        graph = TokenGraph.from_rule(lambda b, h, dst, src, low=0: (src <= dst) & (h >= low), 3, heads=2)
        assert graph == TokenGraph.from_rule(lambda b, h, dst, src: (src <= dst) | (h < 0), 3, heads=2)

    @pytest.mark.parametrize("axes", ["heads", "batch", "both"])
    def test_operators_where_graphs_vary(self, axes):
        graph, list_graph = family(3, 4)[axes], graph_from_list([(3, 0), (1, 2)], 3, 4)
        mask, table = graph.mask(), list_graph.mask()
        for result, expected in (
            (graph | list_graph, mask | table),
            (list_graph | graph, mask | table),
            (graph & list_graph, mask & table),
            (list_graph & graph, mask & table),
            (graph - list_graph, mask & ~table),
            (list_graph - graph, table & ~mask),
            (graph ^ list_graph, mask ^ table),
            (~graph, ~mask),
            (graph.T, mask.mT),
            (graph.rows(1, 3), mask[..., 1:3, :]),
        ):
            assert (result.heads, result.batch) == (graph.heads, graph.batch)
            assert torch.equal(result.mask(), expected)


class TestEdgeOrder:
    order: ClassVar = [(3, 1), (0, 2), (2, 1), (1, 0), (0, 1)]

    def test_operators_keep_it(self):
        graph, list_graph = graph_from_list(self.order, 4, 4), graph_from_list([(2, 2), (2, 1), (3, 1)], 4, 4)
        assert list_edges(graph | list_graph) == [*self.order, (2, 2)]
        assert list_edges(graph & list_graph) == [(3, 1), (2, 1)]
        assert list_edges(list_graph & graph) == [(2, 1), (3, 1)]
        assert list_edges(graph - list_graph) == [(0, 2), (1, 0), (0, 1)]
        assert list_edges(graph ^ list_graph) == [(0, 2), (1, 0), (0, 1), (2, 2)]
        assert list_edges(graph.T) == [(dst, src) for src, dst in self.order]
        assert list_edges(graph.rows(1, 2)) == [(3, 0), (2, 0), (0, 0)]
        assert list_edges(graph & patterns.causal(4)) == [(0, 2), (0, 1)]
        assert list_edges(patterns.causal(4) & graph) == [(0, 2), (0, 1)]
        assert list_edges(graph - patterns.causal(4)) == [(3, 1), (2, 1), (1, 0)]

    @pytest.mark.parametrize("make", [graph_from_list, graph_from_rule])
    def test_positions_of_some_edges(self, make):
        graph = make(self.order, 4, 5)
        all_edges = list_edges(graph)
        expected = [(0, 1), (3, 1), (1, 0)]
        indices = graph.positions_of(torch.tensor(expected).t())
        assert [all_edges[index] for index in indices.tolist()] == expected
        assert graph.positions_of(graph.edge_index).tolist() == [0, 1, 2, 3, 4]
        assert graph.positions_of(torch.zeros(2, 0, dtype=torch.int64)).tolist() == []


class TestRows:
    @reproducible
    @given(groups(1), st.data())
    def test_rows_of_any_graph(self, group, data):
        [(graph, edges)] = group
        start = data.draw(st.integers(0, graph.num_dst))
        stop = data.draw(st.integers(start, graph.num_dst))
        rows = graph.rows(start, stop)
        assert edges_of(rows) == {(src, dst - start) for src, dst in edges if start <= dst < stop}
        assert (rows.dst_offset, rows.src_offset) == (start, 0)
        assert torch.equal(rows.mask(), graph.mask()[start:stop])
        inner = data.draw(st.integers(0, stop - start))
        assert rows.rows(inner, stop - start) == graph.rows(start + inner, stop)

    @pytest.mark.parametrize("make", [graph_from_list, graph_from_rule])
    def test_operators_keep_the_offsets(self, make):
        a, b, c = make([(3, 2), (0, 4)], 6, 6).rows(2, 5), make([(1, 3)], 6, 6).rows(2, 5), make([], 6, 6)
        for graph in (a | b, a & b, a - b, a ^ b, ~a, a @ c, a @ c.T):
            assert (graph.dst_offset, graph.src_offset) == (2, 0)


LIST_GRAPH = graph_from_list([(3, 0), (1, 2), (0, 2), (4, 4)], 5, 5)
EXPRESSIONS = [
    LIST_GRAPH,
    ~LIST_GRAPH,
    patterns.causal(5).rows(1, 4),
    patterns.window(5, 2) @ LIST_GRAPH,
    *family().values(),
]


@pytest.mark.parametrize("graph", EXPRESSIONS, ids=lambda graph: graph.name)
def test_copies_pickles_and_mask_mods(graph):
    """Copies are equal, and FlexAttention, which calls the rule under ``vmap``, finds the same edges."""
    mask = graph.mask()
    # The mask is memoized.
    assert graph.mask() is mask
    for clone in (copy.copy(graph), copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert (clone, clone.name, hash(clone)) == (graph, graph.name, hash(graph))
        assert torch.equal(clone.mask(), mask)
    flex_mask = create_mask(graph.rule, graph.batch, graph.heads, graph.num_dst, graph.num_src, device="cpu")
    assert torch.equal(flex_mask, mask.expand(flex_mask.shape))


class TestSurroundings:
    """A graph does not depend on where it was first used."""

    def test_first_used_in_inference_mode(self):
        """Tensors that were cached in inference mode can be used in training."""
        g = patterns.strict_causal(5)
        with torch.inference_mode():
            list_graph = TokenGraph.from_edges(torch.tensor([[0, 1], [1, 2]]), 5)
        x = torch.ones(1, 1, 5, 2, requires_grad=True)
        with torch.inference_mode():
            ga.attend(x, x, x, g)
            assert g.in_degree().sum() == 10
        ga.attend(x, x, x, g, score_mod=lambda score, b, h, dst, src: score * 2).sum().backward()
        ga.attend(x, x, x, list_graph, backend="reference").sum().backward()
        assert x.grad.isfinite().all()

    def test_another_default_device(self):
        """Graphs are on the CPU, whatever the default device is."""
        with torch.device("meta"):
            g = patterns.documents([2, 3]) | patterns.tree([-1, 0, 0, 1, -1])
            list_graph = TokenGraph.from_edges(torch.tensor([[0, 1], [1, 2]], device="cpu"), 3)
            for graph in (g, list_graph, list_graph @ list_graph, g**2, list_graph.rows(1, 3)):
                tensors = graph.edge_index, graph.mask(), graph.in_degree()
                assert {x.device.type for x in tensors} == {"cpu"}


def test_a_graph_made_from_another_has_its_own_cache():
    """A list keeps the order of the caller, and a rule is sorted: neither cache serves the other."""
    source = TokenGraph.from_edges(torch.tensor([[2, 1, 0], [1, 1, 0]]), 3, 3)
    assert source.edge_index.tolist() == [[2, 1, 0], [1, 1, 0]]
    rule_graph = dataclasses.replace(source, edges=RuleEdges(source.rule))
    assert rule_graph.edge_index.tolist() == [[0, 1, 2], [0, 1, 1]]
    assert source.edge_index.tolist() == [[2, 1, 0], [1, 1, 0]]


OWNER, SPANS = torch.tensor([0, 0, 1, 1, 1, 2, 2]), torch.tensor([[0, 2], [1, 5], [4, 7]])
LEFT, RIGHT = torch.randn(2, 2, 3, 7, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
# FlexAttention calls a mask_mod with single numbers. Called with tensors, these raise or give other edges.
SINGLE_NUMBER_RULES = {
    "a row of a table": lambda b, h, dst, src: (src >= SPANS[OWNER[dst]][0]) & (src < SPANS[OWNER[dst]][1]),
    "a product of vectors": lambda b, h, dst, src: torch.dot(LEFT[b, h, dst], RIGHT[b, h, src]) > 0,
    "a sum": lambda b, h, dst, src: LEFT[b, h, dst].sum() > RIGHT[b, h, src, 0],
    "numbers alone": lambda b, h, dst, src: (LEFT[0, h, dst, 2] > 0) & (src <= dst),
}


@pytest.mark.parametrize("rule", SINGLE_NUMBER_RULES.values(), ids=SINGLE_NUMBER_RULES)
def test_rules_of_single_numbers(rule):
    """Compare all views with FlexAttention's mask, also after set operators and for some receivers."""
    graph = TokenGraph.from_rule(rule, 7, heads=3, batch=2)
    expected = create_mask(rule, 2, 3, 7, 7, device="cpu")
    assert torch.equal(graph.mask(), expected)
    assert torch.equal((graph & patterns.causal(7)).mask(), expected.tril())
    assert torch.equal(graph.rows(2, 5).mask(), expected[:, :, 2:5])
    assert torch.equal(graph.T.mask(), expected.mT)
    assert graph.select(1, 2).edge_index.T.tolist() == expected[1, 2].nonzero().flip(1).tolist()
    x, weights = torch.eye(7).expand(2, 3, 7, 7), expected / expected.sum(-1, keepdim=True).clamp(min=1)
    for backend in ("reference", "dense", "tiles", "rows"):
        out = ga.attend(torch.zeros(2, 3, 7, 7), x, x, graph, backend=backend)
        torch.testing.assert_close(out, weights)


GENERATOR = torch.Generator().manual_seed(1)
NEAREST = torch.randint(0, 200, (200, 3), generator=GENERATOR)
BUCKETS = torch.randint(0, 8, (200, 2), generator=GENERATOR)
# Called with tensors of indices, each of these rules returns bools that are right for many pairs.
SIMILAR_RULES = {
    "nearest": lambda b, h, dst, src: torch.isin(src, NEAREST[dst]),
    "buckets": lambda b, h, dst, src: (dst > src) & (BUCKETS[dst] == BUCKETS[src]).all(),
}


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop because we have not yet implemented the batching"
)
@pytest.mark.parametrize("rule", SIMILAR_RULES.values(), ids=SIMILAR_RULES)
def test_rules_whose_forms_agree_by_chance(rule):
    """Operators, not results for a few pairs, show whether a rule needs single numbers."""
    expected = create_mask(rule, None, None, 200, 200, device="cpu")[0, 0]
    assert torch.equal(TokenGraph.from_rule(rule, 200).mask(), expected)


def test_the_error_of_a_rule_is_its_own():
    """A rule that fails either way raises the error that tensors of indices cause."""
    with pytest.raises(IndexError, match="index 9 is out of bounds for dimension 0"):
        TokenGraph.from_rule(lambda b, h, dst, src: SPANS[OWNER[dst]][9] > src, 7)
    with pytest.raises(TypeError, match="must return a bool tensor, got a"):
        TokenGraph.from_rule(lambda b, h, dst, src: dst - src, 7)
    with pytest.raises(TypeError, match=r"made of tensor operators .*a tensor instead of a list"):
        TokenGraph.from_rule(lambda b, h, dst, src: SPANS.tolist()[src][0] < dst, 7)
    with pytest.raises(ZeroDivisionError):
        TokenGraph.from_rule(lambda b, h, dst, src: 1 / 0, 7)
