"""Counts, degrees, lists and equality from boxes: against visiting every pair, and by closed forms."""

import pytest
import torch
from support.covering import thinned
from support.plans import PLAIN

from gnn_attention import TokenGraph, patterns
from gnn_attention.graph.regions import counting, enumerate_pairs

MILLION = 10**6


@pytest.fixture
def by_boxes(monkeypatch):
    """Small graphs too."""
    monkeypatch.setattr(enumerate_pairs, "FEW", -1)
    monkeypatch.setattr(counting, "MANY", -1)


@pytest.mark.usefixtures("by_boxes")
@pytest.mark.parametrize("name", thinned(PLAIN, 2))
def test_degrees_and_lists(name):
    """Of a graph, its complement and its transpose."""
    for graph in (PLAIN[name], ~PLAIN[name], PLAIN[name].T):
        expected = graph.mask()
        assert graph.in_degree().tolist() == expected.sum(1).tolist()
        assert graph.num_edges == int(expected.sum())
        if graph.listed_edges is None:
            assert torch.equal(graph.edge_index, expected.nonzero().t().flip(0))


@pytest.mark.usefixtures("by_boxes")
@pytest.mark.parametrize("shift", [-2, 1, 3])
def test_a_list_beyond_its_tokens(shift):
    """Its keys are those of other pairs there; the answer is as when every pair is visited."""
    pairs = torch.randperm(97 * 33, generator=torch.Generator().manual_seed(0))[: 97 * 33 // 2]
    listed = TokenGraph.from_edges(torch.stack([pairs % 33, pairs // 33]), 97, 33)
    graph = TokenGraph.from_rule(lambda b, h, dst, src: listed.rule(b, h, dst, src + shift), 97, 33)
    assert graph.in_degree().tolist() == graph.mask().sum(1).tolist()


@pytest.mark.parametrize(
    ("graph", "edges"),
    [
        (patterns.full(MILLION), MILLION**2),
        (patterns.causal(MILLION), MILLION * (MILLION + 1) // 2),
        (~patterns.causal(MILLION), MILLION * (MILLION - 1) // 2),
        (patterns.window(MILLION, 8), 8 * MILLION - 28),
        (patterns.window(MILLION, 0), 0),
        (patterns.dilated(MILLION, 4, 16), 4 * MILLION - 16 * 6),
        (patterns.sinks(MILLION, 4, causal=False), 4 * MILLION),
        (patterns.sinks(MILLION, 4, causal=False).T, 4 * MILLION),
        (patterns.documents([MILLION // 2] * 2), 2 * (MILLION // 2) * (MILLION // 2 + 1) // 2),
        (patterns.prefix(MILLION, 1000), 1000 * MILLION + (MILLION - 1000) * (MILLION - 999) // 2),
        (patterns.window(MILLION, 8) | patterns.sinks(MILLION, 4), 12 * MILLION - 28 - 4 * 8 - 6),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_million_tokens_are_counted_without_their_pairs(graph, edges):
    assert graph.num_edges == edges
