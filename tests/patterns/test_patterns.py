"""Every builder agrees with an independent predicate and theorems, from the table ``tests/support/zoo``."""

from __future__ import annotations

import copy
import pickle
import re

import networkx
import pytest
import torch
from support.zoo import ROWS

from gnn_attention import convert, patterns
from gnn_attention.graph.symbols import compute, dst, src
from gnn_attention.huggingface._alignment import structural_key


def reach_by_layer(mask):
    """Yield the tokens from which each token has received after each layer, its own state included."""
    is_reached = torch.eye(len(mask))
    while True:
        yield is_reached > 0
        next_is_reached = (is_reached + mask.float() @ is_reached > 0).float()
        if torch.equal(next_is_reached, is_reached):
            return
        is_reached = next_is_reached


def check_edges(row, n, graph):
    num_dst, num_src = row.nodes(n)
    table = [[bool(row.edge(n, dst, src)) for src in range(num_src)] for dst in range(num_dst)]
    assert (graph.num_dst, graph.num_src, graph.heads, graph.batch) == (num_dst, num_src, None, None)
    assert graph.mask().tolist() == table
    assert graph.rows(num_dst // 2, num_dst).mask().tolist() == table[num_dst // 2 :]


def check_counts(row, n, graph):
    degrees = (
        [row.degree(n, dst) for dst in range(graph.num_dst)] if row.degree else graph.mask().sum(1).tolist()
    )
    assert graph.in_degree().tolist() == degrees
    assert graph.num_edges == sum(degrees)


def check_causal(row, n, graph):
    """Check that a causal graph has only ``src <= dst``, and that others break this at the largest size."""
    src, dst = graph.edge_index
    if row.causal:
        assert bool((src <= dst).all())
    elif n == row.sizes[-1]:
        assert bool((src > dst).any())


def check_symmetric(row, n, graph):
    if row.symmetric:
        assert graph == graph.T
    elif n == row.sizes[-1] and graph.num_dst == graph.num_src:
        assert graph != graph.T


def check_acyclic(row, n, graph):
    if graph.num_dst != graph.num_src:
        return
    digraph = convert.to_networkx(graph)
    digraph.remove_edges_from(list(networkx.selfloop_edges(digraph)))
    if row.acyclic or n == row.sizes[-1]:
        assert networkx.is_directed_acyclic_graph(digraph) == row.acyclic


def check_layers(row, n, graph):
    if row.layers and graph.num_dst == graph.num_src:
        is_allowed = torch.ones(graph.num_dst, graph.num_dst, dtype=torch.bool)
        is_allowed = is_allowed.tril() if row.causal else is_allowed
        is_full = [bool(is_reached[is_allowed].all()) for is_reached in reach_by_layer(graph.mask())]
        assert (is_full.index(True) if any(is_full) else None) == row.layers(n)


def check_copies(row, n, graph):
    """Check that copies keep the graph and its name."""
    graph_copy = pickle.loads(pickle.dumps(graph))
    assert copy.deepcopy(graph) == graph_copy == graph
    assert graph_copy.name == graph.name


THEOREMS = [value for name, value in list(globals().items()) if name.startswith("check_")]


def test_every_builder_has_a_row():
    assert {word for row in ROWS for word in re.findall(r"\w+", row.name)} >= set(patterns.__all__)
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_theorems(row):
    for n in row.sizes:
        graph = row.build(n)
        for theorem in THEOREMS:
            theorem(row, n, graph)


@pytest.mark.parametrize("row", [row for row in ROWS if row.named_at is not None], ids=lambda row: row.name)
def test_the_name_builds_the_graph(row):
    graph = row.build(row.named_at)
    assert eval(graph.name, vars(patterns)) == graph


class TestSymbols:
    """Rules are made of expressions of ``src`` and ``dst``."""

    def test_a_chained_comparison_is_refused(self):
        """Python would keep only the second half of the comparison."""
        with pytest.raises(TypeError, match="join comparisons by"):
            3 < src <= dst  # noqa: B015

    def test_a_repeated_expression_is_computed_once(self):
        calls = []
        gap = compute(lambda a, b: calls.append(1) or a - b, dst, src)
        tokens = torch.arange(4)
        edge = ((gap == 0) | (gap == 2))(0, 0, tokens[:, None], tokens)
        assert edge.nonzero().tolist() == [[0, 0], [1, 1], [2, 0], [2, 2], [3, 1], [3, 3]]
        assert len(calls) == 1

    def test_equal_calls_have_equal_keys(self):
        """With equal keys, the plan of a forward pass of a transformers model serves the next pass."""
        rules = [patterns.power_attention(n, 4, 2).rule for n in (64, 64, 65)]
        keys = [structural_key(rule) for rule in rules]
        assert keys[0] == keys[1] != keys[2]
        assert keys[0] is not None
