"""Rules made with lists of edges, counted without them: the pairs apart, and all that is counted, against
dense masks.
"""

import pytest
import torch
from support.inputs import scattered

from gnn_attention import TokenGraph, patterns
from gnn_attention.graph import tiling
from gnn_attention.graph.regions import counting, enumerate_pairs
from tests.graph.test_tiling import check

N = 60


LIST, OTHER = scattered(N, N, 150), scattered(N, N, 150, seed=1)
WINDOW, CAUSAL = patterns.window(N, 7), patterns.causal(N)
BY_HEAD = TokenGraph.from_rule(lambda b, h, dst, src: (src <= dst) & (dst - src < 5 * h + 3), N, heads=3)
BY_BOTH = TokenGraph.from_rule(
    lambda b, h, dst, src: (src <= dst) & ((dst - src < 5 * h + 3) | (src < b)), N, heads=2, batch=2
)
GRAPHS = {
    "union": WINDOW | LIST,
    "difference": WINDOW - LIST,
    "symmetric difference": CAUSAL ^ LIST,
    "complement": ~LIST,
    "two lists": (WINDOW ^ LIST) - (~OTHER & CAUSAL),
    "transpose": (WINDOW | LIST).T,
    "rows": (WINDOW | LIST).rows(20, 50),
    "columns": (WINDOW | LIST).T.rows(20, 50).T,
    "rows of rows": ((WINDOW | LIST).rows(10, 50) ^ scattered(N, N, 90).rows(10, 50)).rows(5, 33),
    "wide": (patterns.cross(30, 80) - patterns.prefix(80, 9).rows(0, 30)) ^ scattered(30, 80, 200),
    "by head": BY_HEAD | LIST,
    "one head": (BY_HEAD | LIST).select(0, 2),
    "by head and sample": BY_BOTH ^ LIST,
    "a list of more tokens": TokenGraph.from_rule(
        (patterns.window(90, 7) | scattered(90, 90, 400)).rule, 50, 45
    ),
    "a list of fewer tokens": TokenGraph.from_rule(LIST.rule, 50, 70),
    "no edges": patterns.cross(0, 5) | scattered(0, 5, 0),
}
each_graph = pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)


@pytest.fixture(autouse=True)
def by_boxes(monkeypatch):
    """Small graphs too."""
    monkeypatch.setattr(enumerate_pairs, "FEW", -1)
    monkeypatch.setattr(counting, "MANY", -1)


@each_graph
def test_degrees_edges_and_counts(graph):
    mask = graph.mask()
    assert torch.equal(graph.in_degree(), mask.sum(-1))
    assert graph.num_edges == int(mask.sum())
    if mask.dim() == 2:
        assert torch.equal(graph.edge_index, mask.nonzero().t().flip(0))


@each_graph
def test_tiles(graph):
    check(graph, 16)


def test_equality():
    """Also where graphs differ at a listed pair alone, or next to one alone."""
    assert LIST | WINDOW == WINDOW | LIST
    assert (WINDOW | LIST) - LIST == WINDOW - LIST
    assert (WINDOW ^ LIST) ^ LIST == WINDOW
    assert ~(~WINDOW - LIST) == WINDOW | LIST
    outside = (~WINDOW.mask()[LIST.edge_index[1], LIST.edge_index[0]]).nonzero().flatten()
    fewer = TokenGraph.from_edges(LIST.edge_index[:, torch.arange(150) != outside[0]], N)
    graph, wider = WINDOW | LIST, patterns.window(N, 8) | LIST
    assert graph != WINDOW | fewer
    assert graph != wider
    assert TokenGraph.from_edges(WINDOW.edge_index, N) == WINDOW
    assert TokenGraph.from_edges(WINDOW.edge_index[:, 1:], N) != WINDOW


def test_scattered_pairs_break_no_box(monkeypatch):
    """Of 4 million pairs not many more are visited than are listed; the tiles too are found so."""
    n, visited, evaluate = 2048, [], enumerate_pairs.evaluate
    graph = patterns.window(n, 64) | scattered(n, n, 8 * n)

    def counted(rule, name, b, h, dst, src):
        edge = evaluate(rule, name, b, h, dst, src)
        visited.append(edge.numel())
        return edge

    monkeypatch.setattr(enumerate_pairs, "evaluate", counted)
    assert graph.num_edges == int(graph.in_degree().sum())
    assert sum(visited) < 3 * 8 * n
    tiling.tiles(graph, 128)
    assert sum(visited) < 10 * 8 * n
