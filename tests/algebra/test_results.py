"""Algebra gives the documented order of edges and names, scales to large graphs, and explains errors."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from support.refusals import assert_errors
from torch.nn.attention.flex_attention import create_mask

from gnn_attention import algebra, patterns
from tests.algebra.test_algebra import from_pairs, has_edge_list, list_edges

NAMES = {name: getattr(module, name) for module in (patterns, algebra) for name in module.__all__}

# Each edge is two digits, src and dst. A = 20 01 11, B = 10 00.
ORDERS = """
disjoint_sum(A, B, A) -> 20 01 11 43 33 75 56 66
cartesian_product(graph_of(2, "10 11"), B) -> 20 31 22 33 10 00 32
restrict(A, [1, 0]) -> 10 00
restrict(A, [1], [1, 2, 0]) -> 20 00
extend(B, 2, "both") -> 10 00 20 30 21 31 02 12 03 13 22 23 33
closure(A) -> 20 01 11 21
"""


def graph_of(n, pairs):
    """Return a graph of n tokens with these edges in this order."""
    return from_pairs([(int(src), int(dst)) for src, dst in pairs.split()], n)


class TestEdgeOrder:
    @pytest.mark.parametrize("line", ORDERS.strip().splitlines())
    def test_lists_have_the_documented_order(self, line):
        call, pairs = line.split(" -> ")
        names = {"graph_of": graph_of, "A": graph_of(3, "20 01 11"), "B": graph_of(2, "10 00")}
        graph = eval(call, NAMES | names)
        assert [f"{src}{dst}" for src, dst in list_edges(graph)] == pairs.split()
        assert has_edge_list(graph)


CALLS = """
per_head(window(4, 2), causal(4))
per_sample(documents([1, 3]), documents([2, 2]))
disjoint_sum(causal(3), cross(2, 1))
cartesian_product(causal(2), strict_causal(3))
restrict(window(6, 2), [5, 0, 4])
extend(window(3, 1), 2)
closure(window(5, 2), 2)
~restrict(causal(4) | full(4), [0, 1]) - closure(~full(2)) ** 2
LISTED
"""


class TestResults:
    def test_every_function_is_called(self):
        assert {name for name in algebra.__all__ if f"{name}(" in CALLS} == set(algebra.__all__)

    @pytest.mark.parametrize("call", CALLS.strip().splitlines())
    def test_name_copies_rows_and_mask_mod(self, call):
        """The rule has four named positional parameters; FlexAttention calls it under vmap."""
        graph = eval(call, NAMES | {"LISTED": algebra.disjoint_sum(graph_of(2, "10"), graph_of(3, "02 22"))})
        assert "LISTED" in call or eval(graph.name, dict(NAMES)) == graph
        for graph_copy in (pickle.loads(pickle.dumps(graph)), copy.copy(graph), copy.deepcopy(graph)):
            assert (graph_copy, graph_copy.name) == (graph, graph.name)
        start = graph.num_dst // 2
        assert torch.equal(graph.rows(start, graph.num_dst).mask(), graph.mask()[..., start:, :])
        parameters = inspect.signature(graph.rule).parameters.values()
        assert [p.name for p in parameters if p.default is p.empty] == ["b", "h", "dst", "src"]
        mask = create_mask(graph.rule, graph.batch, graph.heads, graph.num_dst, graph.num_src, device="cpu")
        assert torch.equal(mask, graph.mask().expand(mask.shape))


SAME_TOKENS = """
closure(part)
closure(part, 0)
per_head(part, part.T)
per_sample(part, part.T)
extend(part, 2)
extend(lists, 2, "both")
"""


def test_functions_that_keep_the_tokens_keep_their_positions():
    part = patterns.window(8, 3).rows(2, 6).T.rows(2, 6).T
    for call in SAME_TOKENS.strip().splitlines():
        graph = eval(call, NAMES | {"part": part, "lists": part**1})
        assert (graph.dst_offset, graph.src_offset) == (2, 2), call


LARGE = """
disjoint_sum(window, causal).rows(n + 1, n + 3) -> n, n + 1, n, n + 1, n + 2
extend(window, 2, "both", "none").rows(5, 6) -> 0, 1, 2, 3, 4, 5, n, n + 1
cartesian_product(sparse, sparse).rows(1025, 1026) -> 1, 1024, 1025
per_head(window, causal).select(0, 1).rows(2, 3) -> 0, 1, 2
"""


class TestLarge:
    def test_no_edges_are_enumerated(self):
        """A few rows of graphs with more than 2^40 pairs equal their definition."""
        n = 2**20
        names = {"n": n, "window": patterns.window(n, 8), "causal": patterns.causal(n), "patterns": patterns}
        names["sparse"] = patterns.window(1024, 2)
        for line in LARGE.strip().splitlines():
            rows, senders = (eval(part, NAMES | names) for part in line.split(" -> "))
            assert rows.edge_index[0].tolist() == list(senders), line


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
per_head() -> ValueError: per_head needs at least one graph, got none
per_head([G, G]) -> TypeError: per_head takes graphs, got a list; use per_head\(\*graphs\)
per_head(G, 3) -> TypeError: per_head takes graphs \(TokenGraph\), got int$
per_head(G, causal(5).rows(0, 3)) -> ValueError: per_head needs graphs of the same nodes
per_sample(HEADS, MORE) -> ValueError: the same heads, .*heads 2.*heads 3.*select\(batch, head\)
per_head(G, HEADS) -> ValueError: the same for every head, got .*heads 2.*select\(batch, head\)
disjoint_sum(G, ROWS) -> ValueError: at position 0, got .*dst from 2.*restrict\(graph, range\(3\)
cartesian_product(G, cross(2, 3)) -> ValueError: same tokens .*the token of one axis only
closure(causal(5).rows(2, 5).T.rows(0, 3)) -> ValueError: closure needs the same tokens
closure(G, -1) -> ValueError: hops must be at least 0, got -1
restrict(G, [3]) -> IndexError: tokens must be positions in 0 \.\. 2, got 3
restrict(G, torch.tensor([True, False, True])) -> TypeError: must be an integer, got the bool True
restrict(G, [0, 2, 0, 2]) -> ValueError: a token at most once, got 0 twice
restrict(cross(2, 3), [0]) -> ValueError: without src needs .*restrict\(g, tokens, src\)
extend(G, 1, "listen") -> ValueError: link must be one of 'none', 'senders', 'receivers', 'both', got 'listen'
extend(ROWS, 1) -> ValueError: extend needs the same tokens .*rows\(start, stop\)
"""


def test_wrong_arguments():
    assert_errors(ERRORS, NAMES | OPERANDS)
