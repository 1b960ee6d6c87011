"""Counts, degrees, tiles and equality from boxes agree with masks, for rules combined with lists too."""

import pytest
import torch
from support.covering import thin
from support.inputs import random_graph
from support.plans import PLAIN

from gnn_attention import TokenGraph, algebra, patterns
from gnn_attention.graph import tiling
from gnn_attention.graph.liveness import last_receivers, last_senders
from gnn_attention.graph.regions import counting, enumerate_pairs
from tests.graph.test_tiling import check

N, MILLION = 60, 10**6

LIST, SECOND_LIST = random_graph(N, N, 150), random_graph(N, N, 150, seed=1)
WINDOW, CAUSAL = patterns.window(N, 7), patterns.causal(N)
HEAD_GRAPH = TokenGraph.from_rule(lambda b, h, dst, src: (src <= dst) & (dst - src < 5 * h + 3), N, heads=3)
SLICE_GRAPH = TokenGraph.from_rule(
    lambda b, h, dst, src: (src <= dst) & ((dst - src < 5 * h + 3) | (src < b)), N, heads=2, batch=2
)
GRAPHS = {
    "union": WINDOW | LIST,
    "difference": WINDOW - LIST,
    "symmetric difference": CAUSAL ^ LIST,
    "complement": ~LIST,
    "two lists": (WINDOW ^ LIST) - (~SECOND_LIST & CAUSAL),
    "transpose": (WINDOW | LIST).T,
    "rows": (WINDOW | LIST).rows(20, 50),
    "columns": (WINDOW | LIST).T.rows(20, 50).T,
    "rows of rows": ((WINDOW | LIST).rows(10, 50) ^ random_graph(N, N, 90).rows(10, 50)).rows(5, 33),
    "wide": (patterns.cross(30, 80) - patterns.prefix(80, 9).rows(0, 30)) ^ random_graph(30, 80, 200),
    "by head": HEAD_GRAPH | LIST,
    "one head": (HEAD_GRAPH | LIST).select(0, 2),
    "by head and sample": SLICE_GRAPH ^ LIST,
    "a list of more tokens": TokenGraph.from_rule(
        (patterns.window(90, 7) | random_graph(90, 90, 400)).rule, 50, 45
    ),
    "a list of fewer tokens": TokenGraph.from_rule(LIST.rule, 50, 70),
    "no edges": patterns.cross(0, 5) | random_graph(0, 5, 0),
}
ALL_GRAPHS = GRAPHS | PLAIN


@pytest.fixture
def search_by_boxes(monkeypatch):
    """Search small graphs by boxes, too."""
    monkeypatch.setattr(enumerate_pairs, "MAX_ENUMERATED_PAIRS", -1)
    monkeypatch.setattr(counting, "MAX_DENSE_LIST_PAIRS", -1)


@pytest.mark.usefixtures("search_by_boxes")
@pytest.mark.parametrize("name", [*GRAPHS, *thin(PLAIN, 2)])
def test_degrees_edges_and_counts(name):
    """Compare a graph, its complement and its transpose with their masks."""
    for graph in (ALL_GRAPHS[name], ~ALL_GRAPHS[name], ALL_GRAPHS[name].T):
        mask = graph.mask()
        assert torch.equal(graph.in_degree(), mask.sum(-1))
        assert graph.num_edges == int(mask.sum())
        if mask.dim() == 2 and graph.edges.listed() is None:
            assert torch.equal(graph.edge_index, mask.nonzero().t().flip(0))


@pytest.mark.usefixtures("search_by_boxes")
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_tiles(graph):
    check(graph, 16)


@pytest.mark.usefixtures("search_by_boxes")
def test_equality():
    """Graphs may differ only at a listed pair, or only next to one."""
    assert LIST | WINDOW == WINDOW | LIST
    assert (WINDOW | LIST) - LIST == WINDOW - LIST
    assert (WINDOW ^ LIST) ^ LIST == WINDOW
    assert ~(~WINDOW - LIST) == WINDOW | LIST
    new_pairs = (~WINDOW.mask()[LIST.edge_index[1], LIST.edge_index[0]]).nonzero().flatten()
    shorter_list = TokenGraph.from_edges(LIST.edge_index[:, torch.arange(150) != new_pairs[0]], N)
    graph, wider_graph = WINDOW | LIST, patterns.window(N, 8) | LIST
    assert graph != WINDOW | shorter_list
    assert graph != wider_graph
    assert TokenGraph.from_edges(WINDOW.edge_index, N) == WINDOW
    assert TokenGraph.from_edges(WINDOW.edge_index[:, 1:], N) != WINDOW


@pytest.mark.usefixtures("search_by_boxes")
def test_scattered_pairs_break_no_box(monkeypatch):
    """Counts and tiles visit the listed pairs, and few others of 4 million."""
    n, sizes, evaluate = 2048, [], enumerate_pairs.evaluate
    graph = patterns.window(n, 64) | random_graph(n, n, 8 * n)

    def counting_evaluate(rule, name, b, h, dst, src):
        is_edge = evaluate(rule, name, b, h, dst, src)
        sizes.append(is_edge.numel())
        return is_edge

    monkeypatch.setattr(enumerate_pairs, "evaluate", counting_evaluate)
    assert graph.num_edges == int(graph.in_degree().sum())
    assert sum(sizes) < 3 * 8 * n
    tiling.tiles(graph, 128)
    assert sum(sizes) < 10 * 8 * n


@pytest.mark.usefixtures("search_by_boxes")
@pytest.mark.parametrize("shift", [-2, 1, 3])
def test_a_list_beyond_its_tokens(shift):
    """A sender beyond the list would share its key with another pair; the mask is the truth."""
    pairs = torch.randperm(97 * 33, generator=torch.Generator().manual_seed(0))[: 97 * 33 // 2]
    graph_of_list = TokenGraph.from_edges(torch.stack([pairs % 33, pairs // 33]), 97, 33)
    graph = TokenGraph.from_rule(lambda b, h, dst, src: graph_of_list.rule(b, h, dst, src + shift), 97, 33)
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


def find_last_edges(mask):
    """Return the largest dst with ``mask[dst, src]`` for each src over all heads and samples, or -1."""
    while mask.dim() > 2:
        mask = mask.any(0)
    return [max((dst for dst, edge in enumerate(column) if edge), default=-1) for column in mask.T.tolist()]


LIVES = PLAIN | {
    "by head": algebra.per_head(
        patterns.window(130, 3), patterns.strict_causal(130) & patterns.documents([50, 80])
    ),
    "by sample": algebra.per_sample(patterns.window(130, 3), patterns.documents([50, 80])),
}


@pytest.mark.parametrize("name", LIVES)
def test_last_receivers_and_senders(name):
    graph = LIVES[name]
    mask = graph.mask()
    assert last_receivers(graph).tolist() == find_last_edges(mask)
    assert last_senders(graph).tolist() == find_last_edges(mask.mT)


@pytest.mark.slow
def test_the_lives_of_a_million_tokens():
    n, w, s = MILLION, 4096, 4
    receivers = last_receivers(patterns.window(n, w) | patterns.sinks(n, s))
    src = torch.arange(n)
    assert torch.equal(receivers, torch.where(src < s, n - 1, (src + w - 1).clamp(max=n - 1)))
    assert torch.equal(last_senders(patterns.prefix(n, 1000)), src.clamp(min=999))
