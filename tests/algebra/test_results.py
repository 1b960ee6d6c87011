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
from tests.algebra.test_algebra import from_pairs, from_table, listed, pairs_of

NAMES = {name: getattr(module, name) for module in (patterns, algebra) for name in module.__all__}

CHANGES = """
closure(g, 2)
closure(g, reflexive=True)
quotient(g, 2)
quotient(g, [0, 1, 1, 0, 2])
restrict(g, [4, 0, 2])
extend(g, 2, "both", "self")
disjoint_sum(causal(3), g)
cartesian_product(causal(2), g)
union(window(5, 2), g, sinks(5, 1))
intersection(full(5) ** 1, window(5, 3), g)
"""
each_change = pytest.mark.parametrize("change", CHANGES.strip().splitlines())


@each_change
@pytest.mark.parametrize(("heads", "batch"), [(2, None), (None, 3), (2, 3)])
def test_each_head_and_sample_by_itself(change, heads, batch):
    """A change of the whole, then a head of it, is the change of that head."""
    table = torch.rand(batch or 1, heads or 1, 5, 5, generator=torch.Generator().manual_seed(7)) < 0.35
    g = from_table(table, heads, batch)
    changed, different = eval(change, NAMES | {"g": g}), set()
    assert (changed.heads, changed.batch) == (heads, batch)
    for b in range(batch or 1):
        for h in range(heads or 1):
            alone = eval(change, NAMES | {"g": g.select(b, h)})
            assert changed.select(b, h) == alone
            different.add(tuple(pairs_of(alone)))
    assert len(different) > 1


# lists of edges src dst; A = 20 01 11, B = 10 00
ORDERS = """
union(A, of(3, "12 01")) -> 20 01 11 12
intersection(causal(3), A, of(3, "11 20 01")) -> 01 11
disjoint_sum(A, B, A) -> 20 01 11 43 33 75 56 66
cartesian_product(of(2, "10 11"), B) -> 20 31 22 33 10 00 32
restrict(A, [1, 0]) -> 10 00
restrict(A, [1], [1, 2, 0]) -> 20 00
extend(B, 2, "both") -> 10 00 20 30 21 31 02 12 03 13 22 23 33
quotient(A, [0, 0, 1]) -> 10 00
quotient(full(4).T, 2) -> 00 10 01 11
closure(A) -> 20 01 11 21
"""


def of(n, pairs):
    """Some edges among n tokens, in this order."""
    return from_pairs([(int(src), int(dst)) for src, dst in pairs.split()], n)


class TestEdgeOrder:
    @pytest.mark.parametrize("line", ORDERS.strip().splitlines())
    def test_lists_keep_the_order_that_is_promised(self, line):
        call, pairs = line.split(" -> ")
        graph = eval(call, NAMES | {"of": of, "A": of(3, "20 01 11"), "B": of(2, "10 00")})
        assert [f"{src}{dst}" for src, dst in pairs_of(graph)] == pairs.split()
        assert listed(graph)

    @each_change
    def test_a_list_and_a_rule_give_the_same_edges(self, change):
        g = of(5, "40 11 04 23 32 02 44")
        rule = from_table(g.mask()[None, None])
        assert eval(change, NAMES | {"g": g}) == eval(change, NAMES | {"g": rule})


MADE = """
union(window(4, 2), sinks(4, 1))
intersection(window(4, 2), documents([1, 3]))
per_head(window(4, 2), causal(4))
per_sample(documents([1, 3]), documents([2, 2]))
disjoint_sum(causal(3), cross(2, 1))
cartesian_product(causal(2), strict_causal(3))
restrict(window(6, 2), [5, 0, 4])
extend(window(3, 1), 2)
quotient(window(6, 2), 2)
closure(window(5, 2), 2)
~restrict(causal(4) | full(4), [0, 1]) - closure(~full(2)) ** 2
LISTED
"""


class TestResults:
    def test_every_function_is_here(self):
        assert {name for name in algebra.__all__ if f"{name}(" in MADE} == set(algebra.__all__)

    @pytest.mark.parametrize("made", MADE.strip().splitlines())
    def test_name_copies_rows_and_mask_mod(self, made):
        """The rule has four named positional parameters; FlexAttention calls it under vmap."""
        parts = of(2, "10"), of(3, "02 22")
        graph = eval(made, NAMES | {"LISTED": algebra.disjoint_sum(*parts)})
        assert "LISTED" in made or eval(graph.name, dict(NAMES)) == graph
        for again in (pickle.loads(pickle.dumps(graph)), copy.copy(graph), copy.deepcopy(graph)):
            assert (again, again.name) == (graph, graph.name)
        start = graph.num_dst // 2
        assert torch.equal(graph.rows(start, graph.num_dst).mask(), graph.mask()[..., start:, :])
        parameters = inspect.signature(graph.rule).parameters.values()
        assert [p.name for p in parameters if p.default is p.empty] == ["b", "h", "dst", "src"]
        mask = create_mask(graph.rule, graph.batch, graph.heads, graph.num_dst, graph.num_src, device="cpu")
        assert torch.equal(mask, graph.mask().expand(mask.shape))

    @each_change
    def test_another_default_device(self, change):
        """Graphs live on the CPU, whatever device new tensors come to by default."""
        for g in (patterns.window(5, 2), of(5, "01 42 12 24")):
            expected = eval(change, NAMES | {"g": g}).edge_index
            with torch.device("meta"):
                changed = eval(change, NAMES | {"g": g})
                assert changed.mask().device.type == "cpu"
                assert torch.equal(changed.edge_index, expected)


OF_SAME_TOKENS = """
closure(part)
closure(part, 0)
union(part, part.T)
union(lists, part**2)
intersection(part, part**2)
per_head(part, part.T)
per_sample(part, part.T)
extend(part, 2)
extend(lists, 2, "both")
"""


def test_changes_that_keep_the_tokens_keep_their_positions():
    part = patterns.window(8, 3).rows(2, 6).T.rows(2, 6).T
    for call in OF_SAME_TOKENS.strip().splitlines():
        graph = eval(call, NAMES | {"part": part, "lists": part**1})
        assert (graph.dst_offset, graph.src_offset) == (2, 2), call


LARGE = """
disjoint_sum(window, causal).rows(n + 1, n + 3) -> n, n + 1, n, n + 1, n + 2
extend(window, 2, "both", "none").rows(5, 6) -> 0, 1, 2, 3, 4, 5, n, n + 1
cartesian_product(sparse, sparse).rows(1025, 1026) -> 1, 1024, 1025
union(window, causal).rows(2, 3) -> 0, 1, 2
per_head(window, causal).select(0, 1).rows(2, 3) -> 0, 1, 2
"""
# sizes at which no pair by pair count is made of a rule
COUNTS = """
disjoint_sum(window, causal, window) -> triangle + 2 * band
extend(window, 7, "both", "full") -> band + 14 * n + 49
extend(causal, 7) -> 5007 * 5008 // 2
per_head(window, causal) -> band + triangle
per_sample(window, causal) -> band + triangle
union(window, causal.T) -> triangle + band - n
intersection(causal, window, causal.T) -> n
restrict(causal, range(0, n, 2)) -> 2500 * 2501 // 2
restrict(patterns.full(n), range(n - 1), range(3)) -> 3 * n - 3
cartesian_product(patterns.strict_causal(70), patterns.causal(70)) -> 70 * (2415 + 2485)
quotient(window, 10) -> 500 + 499
"""


class TestLarge:
    def test_making_looks_at_no_edges(self):
        """Graphs of more than 2^40 pairs, and a few of their rows against the definition."""
        n = 2**20
        names = {"n": n, "window": patterns.window(n, 8), "causal": patterns.causal(n), "patterns": patterns}
        names["sparse"] = patterns.window(1024, 2)
        for line in LARGE.strip().splitlines():
            rows, senders = (eval(part, NAMES | names) for part in line.split(" -> "))
            assert rows.edge_index[0].tolist() == list(senders), line

    @pytest.mark.slow
    def test_counts_in_closed_form(self):
        n, names = 5000, {"n": 5000, "triangle": 5000 * 5001 // 2, "band": 3 * 5000 - 3}
        names |= {"window": patterns.window(n, 3), "causal": patterns.causal(n), "patterns": patterns}
        for line in COUNTS.strip().splitlines():
            graph, expected = (eval(part, NAMES | names) for part in line.split(" -> "))
            assert graph.num_edges == graph.in_degree().sum() == expected, line


G = patterns.causal(3)
OPERANDS = {
    "G": G,
    "HEADS": algebra.per_head(G, patterns.full(3)),
    "MORE": algebra.per_head(G, G, G),
    "SAMPLES": algebra.per_sample(G, patterns.full(3)),
    "ROWS": patterns.causal(5).rows(2, 5),
    "torch": torch,
}
ERRORS = r"""
union() -> ValueError: union needs at least one graph, got none
union([G, G]) -> TypeError: got list; a list of graphs is union\(\*graphs\)
intersection(G, 3) -> TypeError: intersection takes graphs \(TokenGraph\), got int$
union(G, causal(4)) -> ValueError: same nodes .* got .*causal\(3\).*causal\(4\)
intersection(G, causal(5).rows(0, 3)) -> ValueError: intersection needs graphs of the same nodes
per_head(G, causal(2)) -> ValueError: per_head needs graphs of the same nodes .* restrict one
union(HEADS, MORE) -> ValueError: the same heads, .*heads 2.*heads 3.*select\(batch, head\)
per_head(G, HEADS) -> ValueError: a graph for each head, got .*heads 2.*select\(batch, head\)
per_sample(SAMPLES) -> ValueError: a graph for each sample, got .*batch 2.*select
disjoint_sum(G, ROWS) -> ValueError: at position 0, got .*dst from 2.*restrict\(graph, range\(3\)
cartesian_product(G, cross(2, 3)) -> ValueError: same tokens .*stays on the other
closure(causal(5).rows(2, 5).T.rows(0, 3)) -> ValueError: closure needs the same tokens
closure(G, -1) -> ValueError: hops must be at least 0, got -1
closure(G, 1.5) -> TypeError: hops must be an integer, got 1.5
restrict(G, [3]) -> IndexError: tokens must be positions in 0 \.\. 2, got 3
restrict(G, 2) -> TypeError: tokens must be a list of positions, got 2
restrict(G, [1.0]) -> TypeError: each of tokens must be an integer, got 1.0
restrict(G, torch.tensor([True, False, True])) -> TypeError: must be an integer, got the bool True
restrict(G, [0, 2, 0, 2]) -> ValueError: a token at most once, got 0 twice
restrict(G, [0], [1, 2, 2]) -> ValueError: src must hold a token at most once, got 2 twice
restrict(cross(2, 3), [0]) -> ValueError: without src needs .*restrict\(g, tokens, src\)
restrict(cross(2, 3), [0], [3]) -> IndexError: src must be positions in 0 \.\. 2, got 3
extend(G, -1) -> ValueError: count must be at least 0, got -1
extend(G, 1, "listen") -> ValueError: link must be one of 'none', 'senders', 'receivers', 'both', got 'listen'
extend(G, 1, "both", "all") -> ValueError: among must be one of 'none', 'self', 'causal', 'full', got 'all'
extend(ROWS, 1) -> ValueError: extend needs the same tokens .*rows\(start, stop\)
quotient(G, 0) -> ValueError: groups must be at least 1, got 0
quotient(G, [0, 3, 1]) -> ValueError: groups must be numbered 0, 1, ... without gaps, got 3 but no 2
quotient(G, 2, [1, 1, 2]) -> ValueError: src_groups must be numbered 0, 1, ... without gaps, got 2 but no 0
"""


def test_wrong_arguments():
    assert_errors(ERRORS, NAMES | OPERANDS)
