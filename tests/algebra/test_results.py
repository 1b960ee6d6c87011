"""The algebra of graphs: order of lists, names, copies, devices, large graphs and what is refused."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from support.error_tables import assert_errors
from torch.nn.attention.flex_attention import create_mask

from gnn_attention import algebra, patterns
from gnn_attention.algebra import (
    ancestry,
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
from tests.algebra.test_algebra import from_pairs, from_table, listed, pairs_of

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


LISTED = disjoint_sum(from_pairs([(1, 0)], 2), from_pairs([(0, 2), (2, 2)], 3))

MADE = {
    "union": union(patterns.window(4, 2), patterns.sinks(4, 1)),
    "intersection": intersection(patterns.window(4, 2), patterns.documents([1, 3])),
    "per_head": per_head(patterns.window(4, 2), patterns.causal(4)),
    "per_sample": per_sample(patterns.documents([1, 3]), patterns.documents([2, 2])),
    "disjoint_sum": disjoint_sum(patterns.causal(3), patterns.cross(2, 1)),
    "cartesian_product": cartesian_product(patterns.causal(2), patterns.strict_causal(3)),
    "strong_product": strong_product(patterns.window(3, 2), patterns.no_self(2)),
    "tensor_product": tensor_product(patterns.causal(2), patterns.cross(3, 2)),
    "restrict": restrict(patterns.window(6, 2), [5, 0, 4]),
    "relabel": relabel(patterns.causal(4), (3, 0, 2, 1)),
    "extend": extend(patterns.window(3, 1), 2),
    "blow_up": blow_up(patterns.causal(3), 2),
    "quotient": quotient(patterns.window(6, 2), 2),
    "closure": closure(patterns.window(5, 2), 2),
    "ancestry": ancestry(patterns.tree([-1, 0, 0, 1]), 3),
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


HEADS = per_head(patterns.causal(3), patterns.full(3))
MORE = per_head(*[patterns.causal(3)] * 3)
SAMPLES = per_sample(patterns.causal(3), patterns.full(3))
ROWS = patterns.causal(5).rows(2, 5)
G = patterns.causal(3)


ERRORS = r"""
union() -> ValueError: union needs at least one graph, got none
union([G, G]) -> TypeError: got list; a list of graphs is union\(\*graphs\)
intersection(G, 3) -> TypeError: intersection takes graphs \(TokenGraph\), got int$
strong_product(G, None) -> TypeError: strong_product takes graphs .*, got NoneType
union(G, causal(4)) -> ValueError: same nodes .* got .*causal\(3\).*causal\(4\)
intersection(G, causal(5).rows(0, 3)) -> ValueError: intersection needs graphs of the same nodes
per_head(G, causal(2)) -> ValueError: per_head needs graphs of the same nodes .* restrict one
union(HEADS, MORE) -> ValueError: the same heads, .*heads 2.*heads 3.*select\(batch, head\)
per_head(G, HEADS) -> ValueError: a graph for each head, got .*heads 2.*select\(batch, head\)
per_sample(SAMPLES) -> ValueError: a graph for each sample, got .*batch 2.*select
disjoint_sum(G, ROWS) -> ValueError: at position 0, got .*dst from 2.*restrict\(graph, range\(3\)
cartesian_product(G, cross(2, 3)) -> ValueError: same tokens .*tensor_product takes bipartite
closure(causal(5).rows(2, 5).T.rows(0, 3)) -> ValueError: closure needs the same tokens
closure(G, -1) -> ValueError: hops must be at least 0, got -1
closure(G, 1.5) -> TypeError: hops must be an integer, got 1.5
ancestry(cross(2, 3), 0) -> ValueError: ancestry needs the same tokens
ancestry(G, 3) -> IndexError: token must be in 0 \.\. 2, got 3
ancestry(G, [1]) -> TypeError: token must be an integer, got \[1\]
restrict(G, [3]) -> IndexError: tokens must be positions in 0 \.\. 2, got 3
restrict(G, 2) -> TypeError: tokens must be a list of positions, got 2
restrict(G, [1.0]) -> TypeError: each of tokens must be an integer, got 1.0
restrict(G, torch.tensor([True, False, True])) -> TypeError: must be an integer, got the bool True
restrict(G, [0, 2, 0, 2]) -> ValueError: a token at most once, got 0 twice; blow_up makes copies
restrict(G, [0], [1, 2, 2]) -> ValueError: src must hold a token at most once, got 2 twice
restrict(cross(2, 3), [0]) -> ValueError: without src needs .*restrict\(g, tokens, src\)
restrict(cross(2, 3), [0], [3]) -> IndexError: src must be positions in 0 \.\. 2, got 3
relabel(G, [0, 1]) -> ValueError: each of the 3 tokens once, got 2; restrict\(g, tokens\)
extend(G, -1) -> ValueError: count must be at least 0, got -1
extend(G, 1, "listen") -> ValueError: link must be one of 'none', 'senders', 'receivers', 'both', got 'listen'
extend(G, 1, "both", "all") -> ValueError: among must be one of 'none', 'self', 'causal', 'full', got 'all'
extend(ROWS, 1) -> ValueError: extend needs the same tokens .*rows\(start, stop\)
blow_up(G, -1) -> ValueError: sizes must be at least 0, got -1
blow_up(G, [1, 2]) -> ValueError: sizes must hold one number for each of 3 tokens, got 2
blow_up(G, [1, -2, 0]) -> ValueError: each of sizes must be at least 0, got -2
blow_up(cross(2, 3), [1, 2]) -> ValueError: blow_up of .*cross\(2, 3\).* needs src_sizes too
blow_up(cross(2, 3), 1, [1, 2]) -> ValueError: src_sizes must hold one .* each of 3 tokens, got 2
quotient(G, 0) -> ValueError: groups must be at least 1, got 0
quotient(G, [0, 3, 1]) -> ValueError: groups must be numbered 0, 1, ... without gaps, got 3 but no 2
quotient(G, 2, [1, 1, 2]) -> ValueError: src_groups must be numbered 0, 1, ... without gaps, got 2 but no 0
"""


def test_wrong_arguments():
    assert_errors(ERRORS, {**vars(patterns), **globals()})
