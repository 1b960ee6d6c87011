"""The algebra of lists and rules, also by head or sample, agrees with boolean matrices and networkx."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial, reduce
from itertools import product

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnn_attention import TokenGraph, convert, patterns
from gnn_attention.algebra import (
    cartesian_product,
    closure,
    disjoint_sum,
    extend,
    per_head,
    per_sample,
    restrict,
)
from gnn_attention.graph import edge_list

reproducible = settings(derandomize=True, deadline=None, max_examples=40)


def from_pairs(pairs: list[tuple[int, int]], num_dst: int, num_src: int | None = None) -> TokenGraph:
    """Return a graph with the edges ``(src, dst)`` in this order."""
    return TokenGraph.from_edges(torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t(), num_dst, num_src)


def list_edges(graph: TokenGraph) -> list[tuple[int, int]]:
    return [(src, dst) for src, dst in graph.edge_index.t().tolist()]


def read_table(table: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return table[b % len(table), h % len(table[0]), dst, src]


def from_table(table: Tensor, heads: int | None = None, batch: int | None = None) -> TokenGraph:
    """Return a graph whose rule reads a table, bool ``[batch or 1, heads or 1, dst, src]``."""
    return TokenGraph.from_rule(partial(read_table, table), table.shape[2], table.shape[3], heads, batch)


def has_edge_list(graph: TokenGraph) -> bool:
    """Return True if the graph stores its edges, so that its rule calls no other rule."""
    return graph.edges.listed() is not None


@st.composite
def shared_graphs(draw: st.DrawFn, num_dst: int, num_src: int) -> TokenGraph:
    """Draw a list in any order, or a rule, for all heads and samples; to draw each edge would be slow."""
    all_pairs, rng = list(product(range(num_src), range(num_dst))), draw(st.randoms(use_true_random=False))
    graph = from_pairs(rng.sample(all_pairs, rng.randint(0, min(14, len(all_pairs)))), num_dst, num_src)
    return graph if draw(st.booleans()) else from_table(graph.mask()[None, None])


@st.composite
def sliced_graphs(draw: st.DrawFn, num_dst: int, num_src: int, heads: int = 2, batch: int = 3) -> TokenGraph:
    """Draw a graph that is shared, or varies by head, by sample, or by both."""
    kind = draw(st.sampled_from(["shared", "shared", "heads", "batch", "both"]))
    if kind == "shared":
        return draw(shared_graphs(num_dst, num_src))
    shape = (1 if kind == "heads" else batch, 1 if kind == "batch" else heads, num_dst, num_src)
    bits = draw(st.integers(0, 2**60 - 1))
    table = torch.rand(shape, generator=torch.Generator().manual_seed(bits)) < 0.4
    return from_table(table, None if kind == "batch" else heads, None if kind == "heads" else batch)


def size(largest: int = 4) -> st.SearchStrategy[int]:
    return st.integers(0, largest)


def expand_mask(graph: TokenGraph) -> Tensor:
    """Return the mask expanded to ``[3, 2, dst, src]``."""
    mask = graph.mask() if graph.batch is not None else graph.mask()[None]
    mask = mask if mask.dim() == 4 else mask[:, None]
    return mask.expand(3, 2, *mask.shape[2:])


def assert_mask(graph: TokenGraph, expected: Tensor) -> None:
    """Check the mask ``[3, 2, dst, src]`` of a graph, and that degrees, edges and their number agree."""
    assert torch.equal(expand_mask(graph), expected)
    assert torch.equal(graph.in_degree(), graph.mask().sum(-1))
    if graph.heads is None and graph.batch is None:
        assert {(src, dst) for dst, src in expected[0, 0].nonzero().tolist()} == set(list_edges(graph))
        assert len(list_edges(graph)) == graph.num_edges


def matrix_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the boolean matrix product."""
    return (a.double() @ b.double()) > 0


def map_slices(matrices: Callable[..., Tensor], *masks: Tensor) -> Tensor:
    """Apply a function of int matrices to each sample and head."""
    slices = zip(*(mask.int().flatten(0, 1) for mask in masks), strict=True)
    return torch.stack([matrices(*parts) for parts in slices]).unflatten(0, (3, 2)).bool()


def identity(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.bool)


@pytest.mark.parametrize("gain", [0, 10**9], ids=["sparse", "dense"])
@pytest.mark.parametrize("sizes", [(0, 3, 2), (3, 0, 2), (5, 7, 4), (16, 16, 16)])
def test_both_ways_to_compose_give_the_same_list(sizes, gain, monkeypatch):
    """Both ways sort the edges by receiver, then by sender."""
    monkeypatch.setattr(edge_list, "DENSE_SPEEDUP", gain)
    rows, middle, columns = sizes
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.rand(shape, generator=rng) < 0.3 for shape in ((rows, middle), (middle, columns)))
    left, right = (mask.nonzero().T.flip(0) for mask in (a, b))
    product_edges = edge_list.product(left, right, rows, middle, columns)
    assert torch.equal(product_edges, matrix_product(a, b).nonzero().T.flip(0))


class TestStacks:
    @given(st.data())
    @reproducible
    def test_graph_k_is_slice_k(self, data):
        num_dst, num_src = data.draw(size()), data.draw(size())
        table = [[data.draw(shared_graphs(num_dst, num_src)) for _ in range(2)] for _ in range(3)]
        sample_stack = per_sample(*(per_head(*heads) for heads in table))
        head_stack = per_head(*(per_sample(*samples) for samples in zip(*table, strict=True)))
        assert sample_stack == head_stack
        assert (sample_stack.heads, sample_stack.batch) == (2, 3)
        for b, h in product(range(3), range(2)):
            assert sample_stack.select(b, h) == table[b][h]
        assert per_sample(table[0][0], table[1][0]).mask().shape == (2, 1, num_dst, num_src)


class TestDisjointSum:
    @given(st.data(), st.integers(1, 4))
    @reproducible
    def test_block_diagonal(self, data, count):
        graphs = [data.draw(sliced_graphs(data.draw(size()), data.draw(size()))) for _ in range(count)]
        total = disjoint_sum(*graphs)
        assert_mask(total, map_slices(torch.block_diag, *map(expand_mask, graphs)))
        assert total.num_edges == expand_mask(total)[: total.batch or 1, : total.heads or 1].sum()
        assert disjoint_sum(graphs[0], disjoint_sum(*graphs)) == disjoint_sum(
            disjoint_sum(graphs[0], *graphs[:-1]), graphs[-1]
        )
        assert disjoint_sum(*(g.T for g in graphs)) == total.T


class TestProducts:
    @given(st.data())
    @reproducible
    def test_networkx_has_the_same_product(self, data):
        m, n = data.draw(size()), data.draw(size())
        a, b = data.draw(shared_graphs(m, m)), data.draw(shared_graphs(n, n))
        expected = nx.cartesian_product(convert.to_networkx(a), convert.to_networkx(b))
        assert cartesian_product(a, b) == convert.from_networkx(expected, list(product(range(m), range(n))))


@st.composite
def token_lists(draw: st.DrawFn, n: int) -> list[int]:
    """Draw a list of distinct tokens below n in any order."""
    return draw(st.permutations(range(n)))[: draw(st.integers(0, n))]


class TestTokens:
    @given(st.data())
    @reproducible
    def test_restrict(self, data):
        n = data.draw(size(5))
        g, tokens = data.draw(sliced_graphs(n, n)), data.draw(token_lists(n))
        part = restrict(g, tokens)
        assert_mask(part, expand_mask(g)[:, :, tokens][..., tokens])
        subset = data.draw(token_lists(len(tokens)))
        assert restrict(part, subset) == restrict(g, [tokens[i] for i in subset])
        assert restrict(~g, tokens) == ~part
        assert restrict(g.T, tokens) == part.T
        assert restrict(g, torch.tensor(tokens, dtype=torch.int32)) == part

    @given(st.data(), st.integers(0, 3), st.sampled_from(["none", "senders", "receivers", "both"]))
    @pytest.mark.parametrize("among", ["none", "self", "causal", "full"])
    @reproducible
    def test_extend(self, among, data, count, link):
        n = data.draw(size())
        g = data.draw(sliced_graphs(n, n))
        extension = extend(g, count, link, among)
        old_receive, new_receive = link in ("senders", "both"), link in ("receivers", "both")
        expected = torch.zeros(3, 2, n + count, n + count, dtype=torch.bool)
        expected[:, :, :n, :n] = expand_mask(g)
        expected[:, :, :n, n:], expected[:, :, n:, :n] = old_receive, new_receive
        loops, full = torch.eye(count) > 0, torch.ones(count, count) > 0
        expected[:, :, n:, n:] = {"none": ~full, "self": loops, "causal": full.tril(), "full": full}[among]
        assert_mask(extension, expected)
        assert restrict(extension, range(n)) == g


class TestClosure:
    @given(st.data(), st.integers(0, 7))
    @reproducible
    def test_closure_is_the_union_of_powers(self, data, hops):
        n = data.draw(size(6))
        g = data.draw(shared_graphs(n, n))
        powers = [reduce(matrix_product, [g.mask()] * k, identity(n)) for k in range(hops + 1)]
        expected = reduce(operator.or_, powers[1:], torch.zeros(n, n, dtype=torch.bool))
        assert torch.equal(closure(g, hops).mask(), expected)
        assert torch.equal(closure(g, hops, reflexive=True).mask(), expected | identity(n))

    def test_a_long_path_takes_few_products(self, monkeypatch):
        """2000 hops take about 22 products, and none after the last new edge."""
        calls = []
        multiply = TokenGraph.__matmul__
        monkeypatch.setattr(TokenGraph, "__matmul__", lambda a, b: calls.append(1) or multiply(a, b))
        parents = from_pairs([(i, i + 1) for i in range(300)], 301)
        assert closure(parents, 2000) == patterns.strict_causal(301)
        assert len(calls) < 25
