"""The algebra of graphs: its laws over random small graphs, against boolean matrices and networkx.

The graphs are edge lists in any order, rules, and rules that differ by head or by sample.
"""

from __future__ import annotations

import copy
import inspect
import operator
import pickle
import random
from functools import partial, reduce
from itertools import product

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.error_tables import assert_errors
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from gnn_attention import TokenGraph, algebra, convert, patterns
from gnn_attention.algebra import (
    ancestry,
    blocks,
    blow_up,
    cartesian_product,
    closure,
    disjoint_sum,
    extend,
    intersection,
    per_head,
    per_sample,
    quotient,
    relabel,
    restrict,
    strong_product,
    tensor_product,
    union,
)
from gnn_attention.graph import edge_list

fixed = settings(derandomize=True, deadline=None, max_examples=40)
PRODUCTS = {
    "cartesian_product": cartesian_product,
    "strong_product": strong_product,
    "tensor_product": tensor_product,
}
each_product = pytest.mark.parametrize("multiply", PRODUCTS.values(), ids=PRODUCTS)


def from_pairs(pairs: list[tuple[int, int]], num_dst: int, num_src: int | None = None) -> TokenGraph:
    """Edges (src, dst) in the order given."""
    return TokenGraph.from_edges(torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t(), num_dst, num_src)


def pairs_of(graph: TokenGraph) -> list[tuple[int, int]]:
    return [(src, dst) for src, dst in graph.edge_index.t().tolist()]


def in_table(table: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return table[b % len(table), h % len(table[0]), dst, src]


def from_table(table: Tensor, heads: int | None = None, batch: int | None = None) -> TokenGraph:
    """A rule graph that looks things up in bool ``[batch or 1, heads or 1, dst, src]``."""
    return TokenGraph.from_rule(partial(in_table, table), table.shape[2], table.shape[3], heads, batch)


def listed(graph: TokenGraph) -> bool:
    """True if the graph carries its edges: then its rule asks no other rule."""
    return graph.is_listed


@st.composite
def plain(draw: st.DrawFn, num_dst: int, num_src: int) -> TokenGraph:
    """The same for all: a list in any order, or a rule. One draw for all edges: a draw for each takes most of
    the time.
    """
    everything, rng = (
        [(src, dst) for src in range(num_src) for dst in range(num_dst)],
        random.Random(draw(st.integers(0, 2**32))),
    )
    graph = from_pairs(rng.sample(everything, rng.randint(0, min(14, len(everything)))), num_dst, num_src)
    return graph if draw(st.booleans()) else from_table(graph.mask()[None, None])


@st.composite
def any_kind(draw: st.DrawFn, num_dst: int, num_src: int, heads: int = 2, batch: int = 3) -> TokenGraph:
    """Plain, or different by head, by sample, or by both."""
    kind = draw(st.sampled_from(["plain", "plain", "heads", "batch", "both"]))
    if kind == "plain":
        return draw(plain(num_dst, num_src))
    shape = (1 if kind == "heads" else batch, 1 if kind == "batch" else heads, num_dst, num_src)
    bits = draw(st.integers(0, 2**60 - 1))
    table = torch.rand(shape, generator=torch.Generator().manual_seed(bits)) < 0.4
    return from_table(table, None if kind == "batch" else heads, None if kind == "heads" else batch)


def size(largest: int = 4) -> st.SearchStrategy[int]:
    return st.integers(0, largest)


def wide(graph: TokenGraph) -> Tensor:
    """The mask as ``[3, 2, dst, src]``, whatever the graph differs by."""
    mask = graph.mask() if graph.batch is not None else graph.mask()[None]
    mask = mask if mask.dim() == 4 else mask[:, None]
    return mask.expand(3, 2, *mask.shape[2:])


def same_masks(graph: TokenGraph, expected: Tensor) -> None:
    """The graph has this mask ``[3, 2, dst, src]``; mask, degrees, edges and number of edges agree."""
    assert torch.equal(wide(graph), expected)
    assert torch.equal(graph.in_degree(), graph.mask().sum(-1))
    if graph.heads is None and graph.batch is None:
        assert {(src, dst) for dst, src in expected[0, 0].nonzero().tolist()} == set(pairs_of(graph))
        assert len(pairs_of(graph)) == graph.num_edges


def joined(a: Tensor, b: Tensor) -> Tensor:
    """The boolean matrix product."""
    return (a.double() @ b.double()) > 0


def block_diagonal(masks: list[Tensor]) -> Tensor:
    """torch's block_diag for each sample and head."""
    return torch.stack(
        [
            torch.stack([torch.block_diag(*(m[b, h].int() for m in masks)).bool() for h in range(2)])
            for b in range(3)
        ]
    )


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.bool)


@pytest.mark.parametrize("gain", [0, 10**9], ids=["sparse", "dense"])
@pytest.mark.parametrize("sizes", [(0, 3, 2), (3, 0, 2), (5, 7, 4), (16, 16, 16)])
def test_both_ways_to_compose_give_the_same_list(sizes, gain, monkeypatch):
    """By receiver, then sender, whichever way is taken."""
    monkeypatch.setattr(edge_list, "DENSE_GAIN", gain)
    rows, middle, columns = sizes
    random = torch.Generator().manual_seed(0)
    a, b = (
        torch.rand(rows, middle, generator=random) < 0.3,
        torch.rand(middle, columns, generator=random) < 0.3,
    )
    left, right = (mask.nonzero().T.flip(0) for mask in (a, b))
    expected = (
        torch.tensor([[s, d] for d in range(rows) for s in range(columns) if (a[d] & b[:, s]).any()])
        .reshape(-1, 2)
        .T
    )
    assert torch.equal(edge_list.product(left, right, rows, middle, columns), expected)


class TestOperators:
    """Laws of ``| & - ^ ~ .T @ **``."""

    @given(st.data())
    @fixed
    def test_sets(self, data):
        num_dst, num_src = data.draw(size()), data.draw(size())
        a, b, c = (data.draw(any_kind(num_dst, num_src)) for _ in range(3))
        assert ~(a | b) == ~a & ~b
        assert ~(a & b) == ~a | ~b
        assert ~~a == a
        assert a - b == a & ~b
        assert a ^ b == (a | b) - (a & b)
        assert a ^ b ^ b == a | (b - b)
        assert (a | b) & c == (a & c) | (b & c)
        assert (a & b) | c == (a | c) & (b | c)
        assert a & (a | b) == a | (b - b)
        same_masks(a | b, wide(a) | wide(b))
        same_masks(a & ~b, wide(a) & ~wide(b))

    @given(st.data())
    @fixed
    def test_two_hops(self, data):
        k, m, n, p = (data.draw(size()) for _ in range(4))
        a, b, c, d = (data.draw(plain(*nodes)) for nodes in [(k, m), (m, n), (m, n), (n, p)])
        assert torch.equal((a @ b).mask(), joined(a.mask(), b.mask()))
        assert (a @ b).T == b.T @ a.T
        assert a @ (b | c) == a @ b | a @ c
        assert (b | c) @ d == b @ d | c @ d
        assert (a @ b) @ d == a @ (b @ d)
        assert ((a @ (b & c)) - (a @ b & a @ c)).num_edges == 0  # of an intersection: contained, no more
        assert patterns.window(k, 1) @ a == a == a @ patterns.window(m, 1)


class TestStacks:
    @given(st.data(), st.integers(1, 4))
    @fixed
    def test_union_and_intersection(self, data, count):
        num_dst, num_src = data.draw(size()), data.draw(size())
        graphs = [data.draw(any_kind(num_dst, num_src)) for _ in range(count)]
        same_masks(union(*graphs), reduce(operator.or_, map(wide, graphs)))
        same_masks(intersection(*graphs), reduce(operator.and_, map(wide, graphs)))
        assert union(*graphs) == reduce(operator.or_, graphs)
        assert intersection(*graphs) == reduce(operator.and_, graphs)
        assert ~union(*graphs) == intersection(*(~graph for graph in graphs))
        assert union(*(graph.T for graph in graphs)) == union(*graphs).T

    def test_a_union_of_thousands_is_flat(self):
        """Operators one by one would nest a rule in a rule in a rule."""
        graphs = [patterns.window(4, 1 + k % 3) for k in range(3000)]
        assert union(*graphs) == patterns.window(4, 3)
        assert intersection(*graphs) == patterns.window(4, 1)
        assert union(*graphs).name == "union([3000 graphs])"

    @given(st.data())
    @fixed
    def test_one_for_each_head_and_sample(self, data):
        num_dst, num_src = data.draw(size()), data.draw(size())
        table = [[data.draw(plain(num_dst, num_src)) for _ in range(2)] for _ in range(3)]
        by_sample = per_sample(*(per_head(*heads) for heads in table))
        by_head = per_head(*(per_sample(*samples) for samples in zip(*table, strict=True)))
        assert by_sample == by_head
        assert (by_sample.heads, by_sample.batch) == (2, 3)
        for b, h in product(range(3), range(2)):
            assert by_sample.select(b, h) == table[b][h]
        assert per_sample(table[0][0], table[1][0]).mask().shape == (2, 1, num_dst, num_src)


class TestDisjointSum:
    @given(st.data(), st.integers(1, 4))
    @fixed
    def test_block_diagonal(self, data, count):
        graphs = [data.draw(any_kind(data.draw(size()), data.draw(size()))) for _ in range(count)]
        total = disjoint_sum(*graphs)
        same_masks(total, block_diagonal([wide(g) for g in graphs]))
        assert total.num_edges == wide(total)[: total.batch or 1, : total.heads or 1].sum()
        assert disjoint_sum(graphs[0], disjoint_sum(*graphs)) == disjoint_sum(
            disjoint_sum(graphs[0], *graphs[:-1]), graphs[-1]
        )
        assert disjoint_sum(*(g.T for g in graphs)) == total.T


class TestProducts:
    @each_product
    @given(data=st.data())
    @fixed
    def test_networkx_makes_the_same(self, multiply, data):
        m, n = data.draw(size()), data.draw(size())
        a, b = data.draw(plain(m, m)), data.draw(plain(n, n))
        theirs = getattr(nx, multiply.__name__)(convert.to_networkx(a), convert.to_networkx(b))
        assert multiply(a, b) == convert.from_networkx(theirs, list(product(range(m), range(n))))

    @given(st.data())
    @fixed
    def test_as_kronecker_products(self, data):
        """Cartesian: ``A x I + I x B``; tensor: ``A x B``; strong: their union; for every head and sample."""
        m, n = data.draw(size()), data.draw(size())
        a, b = data.draw(any_kind(m, m)), data.draw(any_kind(n, n))
        up = torch.stack([torch.kron(x, eye(n)) for x in wide(a).flatten(0, 1)]).view(3, 2, m * n, m * n)
        along = torch.stack([torch.kron(eye(m), x) for x in wide(b).flatten(0, 1)]).view(3, 2, m * n, m * n)
        both = torch.stack(
            [torch.kron(x, y) for x, y in zip(wide(a).flatten(0, 1), wide(b).flatten(0, 1), strict=True)]
        )
        same_masks(cartesian_product(a, b), up | along)
        same_masks(tensor_product(a, b), both.view(3, 2, m * n, m * n))
        same_masks(strong_product(a, b), up | along | both.view(3, 2, m * n, m * n))

    @each_product
    @given(data=st.data())
    @fixed
    def test_laws(self, multiply, data):
        k, m, n = (data.draw(size(3)) for _ in range(3))
        a, b, c = data.draw(plain(k, k)), data.draw(plain(m, m)), data.draw(plain(n, n))
        assert multiply(multiply(a, b), c) == multiply(a, multiply(b, c))
        assert multiply(a.T, b.T) == multiply(a, b).T
        assert multiply(disjoint_sum(a, b), c) == disjoint_sum(multiply(a, c), multiply(b, c))
        transposed_grid = [i * m + j for j in range(m) for i in range(k)]
        assert relabel(multiply(a, b), transposed_grid) == multiply(b, a)


@st.composite
def some(draw: st.DrawFn, n: int) -> list[int]:
    """Some of n tokens in any order."""
    return draw(st.permutations(range(n)))[: draw(st.integers(0, n))]


class TestTokens:
    @given(st.data())
    @fixed
    def test_restrict(self, data):
        n = data.draw(size(5))
        g, chosen = data.draw(any_kind(n, n)), data.draw(some(n))
        part = restrict(g, chosen)
        same_masks(part, wide(g)[:, :, chosen][..., chosen])
        again = data.draw(some(len(chosen)))
        assert restrict(part, again) == restrict(g, [chosen[i] for i in again])
        assert restrict(~g, chosen) == ~part
        assert restrict(g.T, chosen) == part.T
        assert restrict(g, torch.tensor(chosen, dtype=torch.int32)) == part

    @given(st.data())
    @fixed
    def test_relabel(self, data):
        n = data.draw(size(5))
        g, h = data.draw(any_kind(n, n)), data.draw(plain(n, n))
        order, further = data.draw(st.permutations(range(n))), data.draw(st.permutations(range(n)))
        moved = relabel(g, order)
        same_masks(moved, wide(g)[:, :, order][..., order])
        assert relabel(moved, sorted(range(n), key=lambda i: order[i])) == g
        assert relabel(moved, further) == relabel(g, [order[i] for i in further])
        assert relabel(g | h, order) == moved | relabel(h, order)
        assert relabel(g.T, order) == moved.T
        assert relabel(h @ h, order) == relabel(h, order) @ relabel(h, order)
        assert sorted(relabel(h, order).in_degree().tolist()) == sorted(h.in_degree().tolist())
        chosen = data.draw(some(n))
        assert restrict(moved, chosen) == restrict(g, [order[i] for i in chosen])

    @given(st.data(), st.integers(0, 3), st.sampled_from(["none", "senders", "receivers", "both"]))
    @pytest.mark.parametrize(
        ("among", "own"),
        [
            ("none", lambda i, j: False),
            ("self", lambda i, j: i == j),
            ("causal", lambda i, j: j <= i),
            ("full", lambda i, j: True),
        ],
        ids=["none", "self", "causal", "full"],
    )
    @fixed
    def test_extend(self, among, own, data, count, link):
        n = data.draw(size())
        g = data.draw(any_kind(n, n))
        longer = extend(g, count, link, among)
        old_receive, new_receive = link in ("senders", "both"), link in ("receivers", "both")
        expected = torch.zeros(3, 2, n + count, n + count, dtype=torch.bool)
        expected[:, :, :n, :n] = wide(g)
        for i, j in product(range(n + count), repeat=2):
            if i >= n or j >= n:
                expected[:, :, i, j] = (
                    own(i, j) if i >= n and j >= n else new_receive if i >= n else old_receive
                )
        same_masks(longer, expected)
        assert restrict(longer, range(n)) == g

    @pytest.mark.parametrize(("n", "count"), [(0, 0), (0, 3), (4, 0), (4, 3)])
    def test_a_text_goes_on(self, n, count):
        assert extend(patterns.causal(n), count) == patterns.causal(n + count)
        assert extend(patterns.full(n), count, "both", "full") == patterns.full(n + count)
        assert extend(patterns.full(n), count, "none", "full") == disjoint_sum(
            patterns.full(n), patterns.full(count)
        )
        assert (
            extend(patterns.causal(n).T, count, "both", "full")
            == extend(patterns.causal(n), count, "both", "full").T
        )


class TestBlocks:
    @given(st.data())
    @fixed
    def test_blow_up(self, data):
        num_dst, num_src = data.draw(size()), data.draw(size())
        g = data.draw(any_kind(num_dst, num_src))
        rows, columns = ([data.draw(st.integers(0, 3)) for _ in range(n)] for n in (num_dst, num_src))
        dst, src = ([i for i, count in enumerate(sizes) for _ in range(count)] for sizes in (rows, columns))
        big = blow_up(g, rows, columns)
        same_masks(big, wide(g)[:, :, dst][..., src])
        assert blow_up(~g, rows, columns) == ~big
        assert blow_up(g.T, columns, rows) == big.T
        for b, h in product(range(g.batch or 1), range(g.heads or 1)):
            chosen = pairs_of(g.select(b, h))
            assert big.select(b, h).num_edges == sum(rows[dst] * columns[src] for src, dst in chosen)

    @given(st.data())
    @fixed
    def test_a_quotient_of_the_blow_up_gives_back(self, data):
        num_dst, num_src = data.draw(size()), data.draw(size())
        g = data.draw(any_kind(num_dst, num_src))
        rows, columns = ([data.draw(st.integers(1, 3)) for _ in range(n)] for n in (num_dst, num_src))
        dst, src = ([i for i, count in enumerate(sizes) for _ in range(count)] for sizes in (rows, columns))
        assert quotient(blow_up(g, rows, columns), dst, src) == g
        assert quotient(blow_up(g, 2), 2) == g

    @given(st.data())
    @fixed
    def test_quotient(self, data):
        num_dst, num_src = data.draw(size(6)), data.draw(size(6))
        g = data.draw(any_kind(num_dst, num_src))
        rows, columns = data.draw(partition(num_dst)), data.draw(partition(num_src))
        small = quotient(g, rows, columns)
        assert (small.num_dst, small.num_src) == (len(set(rows)), len(set(columns)))
        same_masks(small, any_member(wide(g), rows, columns))
        assert quotient(g.T, columns, rows) == small.T

    @given(st.data())
    @fixed
    def test_networkx_makes_the_same_quotient_without_self_loops(self, data):
        n = data.draw(size(6))
        g, groups = data.draw(plain(n, n)), data.draw(partition(n))
        sets = [{i for i in range(n) if groups[i] == group} for group in range(len(set(groups)))]
        theirs = nx.quotient_graph(convert.to_networkx(g), sets, relabel=True, create_using=nx.DiGraph)
        ours = quotient(g, groups)
        assert ours - patterns.window(len(sets), 1) == convert.from_networkx(theirs)

    @pytest.mark.parametrize("at_once", [1, 5, 10**6])
    def test_a_rule_is_looked_at_in_parts(self, monkeypatch, at_once):
        monkeypatch.setattr(blocks, "EDGES_AT_ONCE", at_once)
        expected = [[j <= i and i - j <= 2 for j in range(7)] for i in range(7)]
        assert quotient(patterns.window(20, 5), 3).mask().tolist() == expected


@st.composite
def partition(draw: st.DrawFn, n: int) -> list[int]:
    """A group for each of n tokens, numbered without gaps."""
    raw = [draw(st.integers(0, 3)) for _ in range(n)]
    numbers = draw(st.permutations(sorted(set(raw))))
    return [numbers.index(group) for group in raw]


def any_member(mask: Tensor, rows: list[int], columns: list[int]) -> Tensor:
    small = torch.zeros(3, 2, len(set(rows)), len(set(columns)), dtype=torch.bool)
    for (i, row), (j, column) in product(enumerate(rows), enumerate(columns)):
        small[:, :, row, column] |= mask[:, :, i, j]
    return small


class TestClosure:
    @given(st.data(), st.booleans())
    @fixed
    def test_networkx_makes_the_same(self, data, reflexive):
        n = data.draw(size(6))
        g = data.draw(plain(n, n))
        theirs = nx.transitive_closure(convert.to_networkx(g), reflexive=reflexive)
        assert closure(g, reflexive=reflexive) == convert.from_networkx(theirs)

    @given(st.data(), st.integers(0, 7))
    @fixed
    def test_it_is_the_union_of_powers(self, data, hops):
        n = data.draw(size(6))
        g = data.draw(plain(n, n))
        powers = [reduce(joined, [g.mask()] * k, eye(n)) for k in range(hops + 1)]
        expected = reduce(operator.or_, powers[1:], torch.zeros(n, n, dtype=torch.bool))
        assert torch.equal(closure(g, hops).mask(), expected)
        assert torch.equal(closure(g, hops, reflexive=True).mask(), expected | eye(n))

    @pytest.mark.parametrize("n", [0, 1, 2, 9])
    def test_known_closures(self, n):
        assert closure(patterns.window(n, 2)) == patterns.causal(n)
        for hops in range(1, 5):
            assert closure(patterns.window(n, 3), hops) == patterns.window(n, 2 * hops + 1)
        ring = TokenGraph.from_rule(lambda b, h, dst, src: (dst - src - 1) % max(n, 1) == 0, n)
        assert closure(ring) == patterns.full(n)
        if n > 1:
            assert closure(ring, n - 1) == patterns.no_self(n)

    def test_a_long_path_takes_few_products(self, monkeypatch):
        """2000 hops by about twice eleven products, and none once nothing is added."""
        calls = []
        product_of = TokenGraph.__matmul__
        monkeypatch.setattr(TokenGraph, "__matmul__", lambda a, b: calls.append(1) or product_of(a, b))
        parents = from_pairs([(i, i + 1) for i in range(300)], 301)
        assert closure(parents, 2000) == patterns.strict_causal(301)
        assert len(calls) < 25


class TestAncestry:
    @given(st.data(), st.one_of(st.none(), st.integers(0, 4)))
    @fixed
    def test_networkx_finds_the_same_ancestors(self, data, hops):
        n = data.draw(st.integers(1, 6))
        g, token = data.draw(plain(n, n)), data.draw(st.integers(0, n - 1))
        away = nx.single_source_shortest_path_length(convert.to_networkx(g).reverse(), token)
        near = {i for i, distance in away.items() if hops is None or distance < hops}
        part = ancestry(g, token, hops)
        assert pairs_of(part) == [(src, dst) for src, dst in pairs_of(g) if dst in near]
        assert torch.equal(part.mask(), g.mask() & torch.tensor([[i in near] for i in range(n)]))


CHANGES = {
    "closure": lambda g: closure(g, 2),
    "closure, reflexive": lambda g: closure(g, reflexive=True),
    "ancestry": lambda g: ancestry(g, 2, 2),
    "quotient": lambda g: quotient(g, 2),
    "quotient by groups": lambda g: quotient(g, [0, 1, 1, 0, 2]),
    "blow_up": lambda g: blow_up(g, [1, 0, 2, 1, 3]),
    "restrict": lambda g: restrict(g, [4, 0, 2]),
    "relabel": lambda g: relabel(g, [4, 0, 2, 1, 3]),
    "extend": lambda g: extend(g, 2, "both", "self"),
    "disjoint_sum": lambda g: disjoint_sum(patterns.causal(3), g),
    "cartesian_product": lambda g: cartesian_product(patterns.causal(2), g),
    "strong_product": lambda g: strong_product(g, patterns.causal(2)),
    "tensor_product": lambda g: tensor_product(g, patterns.cross(2, 3)),
    "union": lambda g: union(patterns.window(5, 2), g, patterns.sinks(5, 1)),
    "intersection": lambda g: intersection(patterns.full(5) ** 1, patterns.window(5, 3), g),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(("heads", "batch"), [(2, None), (None, 3), (2, 3)])
def test_each_head_and_sample_by_itself(change, heads, batch):
    """A change of the whole, then a head of it, is the change of that head."""
    table = torch.rand(batch or 1, heads or 1, 5, 5, generator=torch.Generator().manual_seed(7)) < 0.35
    g = from_table(table, heads, batch)
    changed = change(g)
    assert (changed.heads, changed.batch) == (heads, batch)
    parts = [(b, h) for b in range(batch or 1) for h in range(heads or 1)]
    for b, h in parts:
        assert changed.select(b, h) == change(g.select(b, h))
    assert len({tuple(pairs_of(change(g.select(b, h)))) for b, h in parts}) > 1


A = from_pairs([(2, 0), (0, 1), (1, 1)], 3)
B = from_pairs([(1, 0), (0, 0)], 2)

AMONG_NEW = [(2, 2), (2, 3), (3, 3)]
ORDERS = {
    "union": (union(A, from_pairs([(1, 2), (0, 1)], 3)), [(2, 0), (0, 1), (1, 1), (1, 2)]),
    "intersection": (
        intersection(patterns.causal(3), A, from_pairs([(1, 1), (2, 0), (0, 1)], 3)),
        [(0, 1), (1, 1)],
    ),
    "disjoint_sum": (disjoint_sum(A, B, A), [(2, 0), (0, 1), (1, 1), (4, 3), (3, 3), (7, 5), (5, 6), (6, 6)]),
    "tensor_product": (tensor_product(B, A), [(5, 0), (3, 1), (4, 1), (2, 0), (0, 1), (1, 1)]),
    "cartesian_product": (
        cartesian_product(from_pairs([(1, 0), (1, 1)], 2), B),
        [(2, 0), (3, 1), (2, 2), (3, 3), (1, 0), (0, 0), (3, 2)],
    ),
    "strong_product": (
        strong_product(from_pairs([(1, 0)], 2), from_pairs([(1, 0)], 2)),
        [(2, 0), (3, 1), (1, 0), (3, 2), (3, 0)],
    ),
    "restrict": (restrict(A, [1, 0]), [(1, 0), (0, 0)]),
    "restrict both sides": (restrict(A, [1], [1, 2, 0]), [(2, 0), (0, 0)]),
    "relabel": (relabel(A, [2, 0, 1]), [(0, 1), (1, 2), (2, 2)]),
    "extend": (
        extend(B, 2, "both"),
        [
            (1, 0),
            (0, 0),
            *((s, d) for d in (0, 1) for s in (2, 3)),
            *((s, d) for d in (2, 3) for s in (0, 1)),
            *AMONG_NEW,
        ],
    ),
    "blow_up": (blow_up(A, [1, 2, 0]), [(0, 1), (0, 2), (1, 1), (2, 1), (1, 2), (2, 2)]),
    "quotient": (quotient(A, [0, 0, 1]), [(1, 0), (0, 0)]),
    "quotient of a rule": (quotient(patterns.full(4).T, 2), [(0, 0), (1, 0), (0, 1), (1, 1)]),
    "closure": (closure(A), [(2, 0), (0, 1), (1, 1), (2, 1)]),
    "ancestry": (ancestry(A, 0), [(2, 0)]),
}


class TestEdgeOrder:
    @pytest.mark.parametrize(("graph", "expected"), ORDERS.values(), ids=ORDERS)
    def test_lists_keep_the_order_that_is_promised(self, graph, expected):
        assert pairs_of(graph) == expected
        assert listed(graph)

    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    def test_a_list_and_a_rule_give_the_same_edges(self, change):
        edges = [(4, 0), (1, 1), (0, 4), (2, 3), (3, 2), (0, 2), (4, 4)]
        g = from_pairs(edges, 5)
        assert change(g) == change(from_table(g.mask()[None, None]))

    @pytest.mark.parametrize("change", [CHANGES["disjoint_sum"], CHANGES["tensor_product"], CHANGES["union"]])
    def test_a_list_and_a_rule_make_a_rule(self, change):
        assert not listed(change(from_pairs([(1, 0)], 5)))


LISTED = disjoint_sum(from_pairs([(1, 0)], 2), from_pairs([(0, 2), (2, 2)], 3))

MADE = {
    "union": union(patterns.window(4, 2), patterns.sinks(4, 1)),
    "intersection": intersection(patterns.window(4, 2), patterns.documents([1, 3])),
    "per_head": per_head(patterns.window(4, 2), patterns.causal(4)),
    "per_sample": per_sample(patterns.documents([1, 3]), patterns.documents([2, 2])),
    "heads and samples": per_sample(per_head(patterns.causal(2), patterns.full(2)), patterns.window(2, 1)),
    "disjoint_sum": disjoint_sum(patterns.causal(3), patterns.cross(2, 1)),
    "cartesian_product": cartesian_product(patterns.causal(2), patterns.strict_causal(3)),
    "strong_product": strong_product(patterns.window(3, 2), patterns.no_self(2)),
    "tensor_product": tensor_product(patterns.causal(2), patterns.cross(3, 2)),
    "restrict": restrict(patterns.window(6, 2), [5, 0, 4]),
    "restrict both sides": restrict(patterns.window(6, 2), [5, 4], torch.tensor([4, 5, 0])),
    "relabel": relabel(patterns.causal(4), (3, 0, 2, 1)),
    "extend": extend(patterns.window(3, 1), 2),
    "extend otherwise": extend(patterns.window(3, 1), 2, link="senders", among="self"),
    "blow_up": blow_up(patterns.causal(3), 2),
    "blow_up by sizes": blow_up(patterns.cross(2, 3) - patterns.cross(2, 3), [1, 2], range(3)),
    "quotient": quotient(patterns.window(6, 2), 2),
    "quotient by groups": quotient(patterns.cross(2, 3), [0, 0], [1, 0, 1]),
    "closure": closure(patterns.window(5, 2), 2),
    "reflexive closure": closure(patterns.strict_causal(5) - patterns.causal(5).T, reflexive=True),
    "ancestry": ancestry(patterns.tree([-1, 0, 0, 1]), 3),
    "ancestry, near": ancestry(patterns.window(6, 2), 4, 2),
    "nested": union(
        disjoint_sum(patterns.causal(2), patterns.full(2)),
        blow_up(patterns.causal(2) | patterns.full(2).T, 2),
    ).T,
    "an operand": ~restrict(patterns.causal(4) | patterns.full(4), [0, 1]) - closure(~patterns.full(2)) ** 2,
    "listed": LISTED,
    "of lists": extend(relabel(LISTED, [4, 3, 2, 1, 0]), 1, "both"),
}
EVERY = pytest.mark.parametrize("graph", MADE.values(), ids=MADE)


class TestResults:
    def test_every_function_is_here(self):
        used = {name for name in algebra.__all__ if any(f"{name}(" in graph.name for graph in MADE.values())}
        assert used == set(algebra.__all__)

    @pytest.mark.parametrize("name", [name for name in MADE if "list" not in name])
    def test_the_name_builds_it(self, name):
        scope = {name: getattr(module, name) for module in (patterns, algebra) for name in module.__all__}
        assert eval(MADE[name].name, scope) == MADE[name]

    @EVERY
    def test_copies_rows_and_mask_mod(self, graph):
        """The rule has four named positional parameters; FlexAttention calls it under vmap."""
        for again in (pickle.loads(pickle.dumps(graph)), copy.copy(graph), copy.deepcopy(graph)):
            assert (again, again.name) == (graph, graph.name)
        start = graph.num_dst // 2
        assert torch.equal(graph.rows(start, graph.num_dst).mask(), graph.mask()[..., start:, :])
        parameters = [
            p
            for p in inspect.signature(graph.rule).parameters.values()
            if p.default is inspect.Parameter.empty
        ]
        assert [p.name for p in parameters] == ["b", "h", "dst", "src"]
        mask = create_mask(graph.rule, graph.batch, graph.heads, graph.num_dst, graph.num_src, device="cpu")
        assert torch.equal(mask, graph.mask().expand(mask.shape))

    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    def test_another_default_device(self, change):
        """Graphs live on the CPU, whatever device new tensors come to by default."""
        for g in (patterns.window(5, 2), from_pairs([(0, 1), (4, 2), (1, 2), (2, 4)], 5)):
            expected = change(g).edge_index
            with torch.device("meta"):
                changed = change(g)
                assert changed.mask().device.type == "cpu"
                assert torch.equal(changed.edge_index, expected)

    def test_later_changes_of_an_argument_change_no_graph(self):
        g, order, sizes, groups = patterns.causal(3), [2, 1, 0], torch.tensor([1, 2, 1]), [0, 1, 1]
        made = [relabel(g, order), restrict(g, order), blow_up(g, sizes), quotient(g, groups)]
        before = [graph.edge_index.clone() for graph in made]
        order[0], sizes[0], groups[0] = 0, 5, 1
        for graph, edges in zip(made, before, strict=True):
            assert torch.equal(graph.rows(0, graph.num_dst).edge_index, edges)


def test_changes_that_keep_the_tokens_keep_their_positions():
    part = patterns.window(8, 3).rows(2, 6).T.rows(2, 6).T
    lists = part**1
    graphs = [closure(part), closure(part, 0), ancestry(part, 1), ancestry(lists, 1), union(part, part.T)]
    graphs += [union(lists, part**2), intersection(part, part**2), per_head(part, part.T)]
    graphs += [
        per_sample(part, part.T),
        relabel(part, [3, 2, 1, 0]),
        extend(part, 2),
        extend(lists, 2, "both"),
    ]
    for graph in graphs:
        assert (graph.dst_offset, graph.src_offset) == (2, 2), graph.name


class TestLarge:
    def test_making_looks_at_no_edges(self):
        """Graphs of more than 2^40 pairs, and a few of their rows against the definition."""
        n = 2**20
        window, causal = patterns.window(n, 8), patterns.causal(n)
        packed = disjoint_sum(window, causal).rows(n + 1, n + 3)
        assert (packed.edge_index[0] - n).tolist() == [0, 1, 0, 1, 2]
        longer = extend(window, 2, "both", "none")
        assert longer.rows(5, 6).edge_index[0].tolist() == [0, 1, 2, 3, 4, 5, n, n + 1]
        tall = tensor_product(patterns.window(n, 2), patterns.window(4, 1)).rows(4 * n - 1, 4 * n)
        assert tall.edge_index[0].tolist() == [4 * n - 5, 4 * n - 1]
        grid = cartesian_product(patterns.window(1024, 2), patterns.window(1024, 2))
        assert grid.rows(1025, 1026).edge_index[0].tolist() == [1, 1024, 1025]
        blocks = blow_up(patterns.window(1024, 2) - patterns.window(1024, 1), 1024)
        assert blocks.rows(2048, 2049).in_degree().tolist() == [1024]
        assert union(window, causal).rows(2, 3).edge_index[0].tolist() == [0, 1, 2]
        assert per_head(window, causal).num_dst == n

    def test_counts_in_closed_form(self):
        """Sizes at which no pair by pair count is made of a rule."""
        n, triangle, band = 5000, 5000 * 5001 // 2, 3 * 5000 - 3
        window, causal = patterns.window(n, 3), patterns.causal(n)
        for graph, expected in [
            (disjoint_sum(window, causal, window), triangle + 2 * band),
            (extend(window, 7, "both", "full"), band + 14 * n + 49),
            (extend(causal, 7), 5007 * 5008 // 2),
            (per_head(window, causal), band + triangle),
            (per_sample(window, causal), band + triangle),
            (union(window, causal.T), triangle + band - n),
            (intersection(causal, window, causal.T), n),
            (relabel(causal, range(n)[::-1]), triangle),
            (restrict(causal, range(0, n, 2)), 2500 * 2501 // 2),
            (restrict(patterns.full(n), range(n - 1), range(3)), 3 * n - 3),
            (blow_up(patterns.strict_causal(50), 100), 1225 * 10**4),
            (tensor_product(patterns.causal(70), patterns.window(70, 1)), 70 * 2485),
            (cartesian_product(patterns.strict_causal(70), patterns.causal(70)), 70 * (2415 + 2485)),
            (strong_product(patterns.strict_causal(70), patterns.strict_causal(70)), 140 * 2415 + 2415**2),
            (ancestry(patterns.window(n, 3), n // 2, 100), 3 * 199),
            (quotient(window, 10), 500 + 499),
        ]:
            assert graph.num_edges == graph.in_degree().sum() == expected, graph.name

    def test_lists_stay_lists(self):
        """A path of a hundred thousand edges, without asking about a pair of them."""
        n = 10**5
        path = TokenGraph.from_edges(torch.stack([torch.arange(n - 1), torch.arange(1, n)]), n)
        assert disjoint_sum(path, path).num_edges == 2 * n - 2
        assert tensor_product(path, patterns.window(2, 1) ** 1).num_edges == 2 * n - 2
        assert cartesian_product(path, from_pairs([(0, 1)], 2)).num_edges == 3 * n - 2
        assert blow_up(path, 2).num_edges == 4 * n - 4
        assert quotient(path, 2).num_edges == n - 1
        assert ancestry(path, 100).num_edges == 100
        assert extend(path, 1, "both", "none").num_edges == 3 * n - 1
        assert restrict(path, range(n // 2)).num_edges == n // 2 - 1


HEADS = per_head(patterns.causal(3), patterns.full(3))
MORE = per_head(*[patterns.causal(3)] * 3)
SAMPLES = per_sample(patterns.causal(3), patterns.full(3))
ROWS = patterns.causal(5).rows(2, 5)
G = patterns.causal(3)


ERRORS = r"""
union() -> ValueError: union needs at least one graph, got none
union([G, G]) -> TypeError: got list; a list of graphs is union\(\*graphs\)
intersection(G, 3) -> TypeError: intersection takes graphs \(TokenGraph\), got int$
closure(G.mask()) -> TypeError: closure takes graphs .*, got Tensor
strong_product(G, None) -> TypeError: strong_product takes graphs .*, got NoneType
union(G, causal(4)) -> ValueError: same nodes .* got .*causal\(3\).*causal\(4\)
intersection(G, causal(5).rows(0, 3)) -> ValueError: intersection needs graphs of the same nodes
per_head(G, causal(2)) -> ValueError: per_head needs graphs of the same nodes .* restrict one
per_sample(ROWS, cross(3, 5)) -> ValueError: per_sample needs graphs of the same nodes
union(HEADS, MORE) -> ValueError: the same heads, .*heads 2.*heads 3.*select\(batch, head\)
disjoint_sum(HEADS, MORE) -> ValueError: disjoint_sum needs graphs of the same heads
tensor_product(HEADS, MORE) -> ValueError: tensor_product needs graphs of the same heads
per_head(G, HEADS) -> ValueError: a graph for each head, got .*heads 2.*select\(batch, head\)
per_sample(SAMPLES) -> ValueError: a graph for each sample, got .*batch 2.*select
disjoint_sum(G, ROWS) -> ValueError: at position 0, got .*dst from 2.*restrict\(graph, range\(3\)
cartesian_product(G, ROWS) -> ValueError: cartesian_product needs graphs that begin at position 0
cartesian_product(G, cross(2, 3)) -> ValueError: same tokens .*tensor_product takes bipartite
closure(causal(5).rows(2, 5).T.rows(0, 3)) -> ValueError: closure needs the same tokens
closure(G, -1) -> ValueError: hops must be at least 0, got -1
closure(G, 1.5) -> TypeError: hops must be an integer, got 1.5
ancestry(cross(2, 3), 0) -> ValueError: ancestry needs the same tokens
ancestry(G, 3) -> IndexError: token must be in 0 \.\. 2, got 3
ancestry(G, [1]) -> TypeError: token must be an integer, got \[1\]
ancestry(G, 1, -2) -> ValueError: hops must be at least 0, got -2
restrict(G, [3]) -> IndexError: tokens must be positions in 0 \.\. 2, got 3
restrict(G, 2) -> TypeError: tokens must be a list of positions, got 2
restrict(G, [1.0]) -> TypeError: each of tokens must be an integer, got 1.0
restrict(G, torch.tensor([True, False, True])) -> TypeError: must be an integer, got the bool True
restrict(G, torch.tensor([[0, 1]])) -> TypeError: each of tokens must be an integer, got \[0, 1\]
restrict(G, [0, 2, 0, 2]) -> ValueError: a token at most once, got 0 twice; blow_up makes copies
restrict(G, [0], [1, 2, 2]) -> ValueError: src must hold a token at most once, got 2 twice
restrict(cross(2, 3), [0]) -> ValueError: without src needs .*restrict\(g, tokens, src\)
restrict(cross(2, 3), [0], [3]) -> IndexError: src must be positions in 0 \.\. 2, got 3
relabel(G, [0, 1]) -> ValueError: each of the 3 tokens once, got 2; restrict\(g, tokens\)
relabel(G, [0, 1, 1]) -> ValueError: order must hold a token at most once, got 1 twice
relabel(G, [1, 2, 3]) -> IndexError: order must be positions in 0 \.\. 2, got 3
extend(G, -1) -> ValueError: count must be at least 0, got -1
extend(G, 1, "listen") -> ValueError: link must be one of 'none', 'senders', 'receivers', 'both', got 'listen'
extend(G, 1, "both", "all") -> ValueError: among must be one of 'none', 'self', 'causal', 'full', got 'all'
extend(ROWS, 1) -> ValueError: extend needs the same tokens .*rows\(start, stop\)
blow_up(G, -1) -> ValueError: sizes must be at least 0, got -1
blow_up(G, 1.5) -> TypeError: sizes must be an integer, got 1.5
blow_up(G, [1, 2]) -> ValueError: sizes must hold one number for each of 3 tokens, got 2
blow_up(G, [1, -2, 0]) -> ValueError: each of sizes must be at least 0, got -2
blow_up(cross(2, 3), [1, 2]) -> ValueError: blow_up of .*cross\(2, 3\).* needs src_sizes too
blow_up(cross(2, 3), 1, [1, 2]) -> ValueError: src_sizes must hold one .* each of 3 tokens, got 2
quotient(G, 0) -> ValueError: groups must be at least 1, got 0
quotient(G, [0, 1]) -> ValueError: groups must hold one number for each of 3 tokens, got 2
quotient(G, [0, 0, -1]) -> ValueError: each of groups must be at least 0, got -1
quotient(G, [0, 3, 1]) -> ValueError: groups must be numbered 0, 1, ... without gaps, got 3 but no 2
quotient(G, 2, [1, 1, 2]) -> ValueError: src_groups must be numbered 0, 1, ... without gaps, got 2 but no 0
quotient(cross(2, 3), [0, 0]) -> ValueError: quotient of .*cross\(2, 3\).* needs src_groups too
"""


def test_wrong_arguments():
    assert_errors(ERRORS, {**vars(patterns), **globals()})
