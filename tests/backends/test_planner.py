"""Whole plans: exact for every graph, with true flags, and small where the graph is simple."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.covering import thinned
from support.plans import PLAIN, random_mask, tokens, visits

import gnn_attention as ga
from gnn_attention import TokenGraph, patterns
from gnn_attention.backends.cost_model import costs
from gnn_attention.backends.plan.dense_blocks import rectangles
from gnn_attention.backends.plan.plan import Edges, Rectangles, Strided, packed, unpacked
from gnn_attention.backends.plan.planner import (
    PLANS,
    counted_work,
    documents_work,
    mixed_plan,
    packed_plan,
    rows_plan,
    runs_work,
    tiles_plan,
)
from gnn_attention.backends.plan.planner import _documents as documents_of
from gnn_attention.backends.plan.tile_density import divided
from gnn_attention.backends.plan.work import WORK, is_estimated

CPU = torch.device("cpu")


def receivers(piece, num_dst):
    if isinstance(piece, Edges):
        return list(range(num_dst))
    return [i for g in range(piece.dst.count) for i in tokens(piece.dst, g).tolist()]


def check(kind, graph, mask=None):
    """The pieces are disjoint and together the graph; the flags of pieces and plan are true."""
    return check_plan(PLANS[kind](graph), kind, graph, graph.mask().long() if mask is None else mask)


def check_plan(plan, kind, graph, mask):
    assert torch.equal(visits(plan.pieces, graph.num_dst, graph.num_src), mask), (kind, graph.name)
    seen, ready = set(), set()
    for piece in plan.pieces:
        these = receivers(piece, graph.num_dst)
        assert len(set(these)) == len(these)
        assert piece.fresh == seen.isdisjoint(these)
        seen |= set(these)
        ready |= set(these) if piece.fresh else set()
        if isinstance(piece, Rectangles):
            table = None if piece.masks is None else piece.masks.table[piece.masks.which]
            assert piece.has_empty_rows == (table is not None and bool((~table.any(-1)).any()))
            assert piece.masks is None or not piece.causal
            # no view goes back, no mask is unused
            ends = [groups for groups in (piece.dst, piece.src) if isinstance(groups, Strided)]
            assert all(groups.stride >= 0 for groups in ends)
            assert piece.masks is None or len(piece.masks.which.unique()) == len(piece.masks.table)
    assert plan.complete == (ready == set(range(graph.num_dst)) and bool(plan.pieces))
    return plan


@pytest.mark.parametrize("name", thinned(PLAIN, 0))
def test_a_plan_is_its_graph(name):
    graph = PLAIN[name]
    mask = graph.mask().long()
    for kind in PLANS:
        wanted, words = packed(check(kind, graph, mask))
        tensors, numbers = packed_plan(kind, graph, CPU, backward=True)
        assert numbers == words, kind
        assert all(torch.equal(x, y) for x, y in zip(tensors, wanted, strict=True)), kind
        assert packed_plan(kind, graph, CPU, backward=True)[0] is tensors
        forward = packed_plan(kind, graph, CPU)
        check_plan(unpacked(*forward), kind, graph, mask)
        assert packed_plan(kind, graph, CPU) is forward


@pytest.mark.parametrize(
    "graph", [patterns.full(5), patterns.cross(130, 70), patterns.causal(400)], ids=lambda g: g.name
)
def test_full_and_causal_graphs_are_one_rectangle(graph):
    for same in (graph, ga.convert.from_mask(graph.mask())):
        (piece,) = tiles_plan(same).pieces
        assert (piece.dst, piece.src) == (Strided(0, 1, 1, graph.num_dst), Strided(0, 1, 1, graph.num_src))
        assert piece.masks is None
        assert piece.causal == (graph.name.startswith("causal"))


def test_mixed_takes_well_filled_tiles_and_a_list():
    """A window with single edges far away: the list has just those, after the rectangles."""
    far = torch.tensor([[0, 5, 190, 640], [400, 700, 600, 10]])
    graph = patterns.window(768, 128) | TokenGraph.from_edges(far, 768)
    plan = mixed_plan(graph)
    assert [isinstance(piece, Edges) for piece in plan.pieces] == [False] * (len(plan.pieces) - 1) + [True]
    listed = plan.pieces[-1]
    assert not listed.fresh
    assert {(0, 400), (5, 700), (190, 600), (640, 10)} <= set(
        zip(listed.src.tolist(), listed.dst.tolist(), strict=True)
    )
    assert len(listed.src) < 0.1 * graph.num_edges
    assert rows_plan(graph).pieces[0].fresh


def in_tens(b, h, dst, src):
    return (dst // 10 == src // 10) & (src <= dst)


RAGGED = [5, 1, 64, 0, 130, 1, 64, 33]
RECOGNISED = {
    "causal": (patterns.documents(RAGGED), True),
    "one length": (patterns.documents([9] * 7), True),
    "pairs and single tokens": (patterns.documents([1, 2, 1], causal=False), False),
    "a window longer than all": (patterns.documents([20, 30]) & patterns.window(50, 30), True),
}
OTHERS = {
    "with a window": patterns.documents([20, 30]) & patterns.window(50, 29),
    "with sinks": patterns.documents([20, 30]) | patterns.sinks(50, 1),
    "without loops": patterns.documents([20, 30]) & patterns.strict_causal(50),
    "one edge between": patterns.documents([20, 30]) | TokenGraph.from_edges(torch.tensor([[3], [40]]), 50),
    "an isolated token": TokenGraph.from_rule(
        lambda b, h, dst, src: in_tens(b, h, dst, src) & (dst != 15), 50
    ),
    "not square": patterns.documents([20, 30]).rows(20, 50),
    "listed": ga.convert.from_mask(patterns.documents([20, 30]).mask()),
}


@pytest.mark.parametrize(("graph", "causal"), RECOGNISED.values(), ids=RECOGNISED)
def test_documents_are_recognised(graph, causal, monkeypatch):
    """Their bounds, read back, give the mask; with a piece for each length, without masks."""
    found = documents_of(graph)
    assert found.causal == causal
    mask = torch.zeros_like(graph.mask())
    for start, length in zip(found.start.tolist(), found.length.tolist(), strict=True):
        block = torch.ones(length, length, dtype=torch.bool)
        mask[start : start + length, start : start + length] = block.tril() if causal else block
    assert torch.equal(mask, graph.mask())
    plan = by_documents(graph, monkeypatch)
    assert sorted(piece.dst.size for piece in plan.pieces) == sorted({n for n in found.length.tolist() if n})
    for piece in plan.pieces:
        assert piece.masks is None
        assert piece.causal == (causal and piece.dst.size > 1)
        assert piece.dst.count == int((found.length == piece.dst.size).sum())


@pytest.mark.parametrize("graph", OTHERS.values(), ids=OTHERS)
def test_other_graphs_are_no_documents(graph):
    assert documents_of(graph) is None
    check("tiles", graph)


def by_documents(graph, monkeypatch):
    monkeypatch.setattr("gnn_attention.backends.plan.planner._seconds", lambda work: 0.0)
    return check("tiles", graph)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=10), st.booleans())
def test_any_packing(lengths, causal):
    check("tiles", patterns.documents(lengths, causal=causal))


@pytest.mark.parametrize("name", thinned(PLAIN, 1))
def test_work_is_about_what_the_plan_visits(name):
    """Lists exactly, rules of many pairs about; cells not below the trimmed ones of the plan, nor above whole
    tiles at every border.
    """
    for kind in WORK:
        check_work(kind, PLAIN[name])


def check_work(kind, graph):
    work, plan = WORK[kind](graph), PLANS[kind](graph)
    edges = sum(len(piece.src) for piece in plan.pieces if isinstance(piece, Edges))
    assert abs(work.edges - edges) <= (0.1 * edges if is_estimated(graph) else 0)
    cells = sum(piece.cells for piece in plan.pieces if isinstance(piece, Rectangles))
    if work.plain_pairs:
        assert cells in (work.plain_pairs, 2 * work.plain_pairs, 2 * work.plain_pairs + 1)
    else:
        whole = -(-graph.num_dst // 512) * 512 * -(-graph.num_src // 512) * 512
        assert work.weighted_cells <= work.cells <= whole
        assert kind != "mixed" or cells <= work.cells


@pytest.mark.parametrize(
    "lengths", [[2048] * 4, [1 + i % 97 for i in range(97)], [100, 300] * 20, [16] * 300], ids=str
)
def test_documents_are_chosen_where_they_are_cheaper(lengths):
    graph = patterns.documents(lengths)
    by_tiles, by_length = runs_work(graph), documents_work(documents_of(graph))
    cheaper = costs().seconds(by_length, heads=8) <= costs().seconds(by_tiles, heads=8)
    assert any(piece.causal for piece in tiles_plan(graph).pieces) == cheaper
    assert counted_work(graph) == (by_length if cheaper else by_tiles)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["strict_causal", "prefix"])
@pytest.mark.parametrize("kind", ["tiles", "mixed"])
def test_masks_of_a_nearly_causal_graph_grow_with_its_length(kind, name):
    """Not with its pairs: long full runs are pieces without the tiles that need a mask."""

    def numbers(n):
        graph = patterns.strict_causal(n) if name == "strict_causal" else patterns.prefix(n, 100)
        return sum(x.numel() for x in packed_plan(kind, graph, CPU)[0] if x.dtype == torch.bool)

    assert numbers(8192) < 3 * numbers(4096) < 4096 * 4096 // 4
    check(kind, patterns.strict_causal(1100))


sizes, shares = st.integers(1, 150), st.floats(0.0, 1.0)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(sizes, sizes, shares, st.integers(0, 99))
def test_random_graphs(num_dst, num_src, density, seed):
    coarse = random_mask(-(-num_dst // 8), -(-num_src // 8), density, seed)
    mask = coarse.repeat_interleave(8, 0).repeat_interleave(8, 1)[:num_dst, :num_src]
    mask = mask & (random_mask(num_dst, num_src, 0.98, seed + 1))
    rule = TokenGraph.from_rule(lambda b, h, dst, src: mask[dst, src], num_dst, num_src)
    for graph, kind in itertools.product((ga.convert.from_mask(mask), rule), ("tiles", "mixed")):
        check(kind, graph)


def two_of_three(b, h, dst, src):
    """Rows 0, 1 and 3 of tiles have edges from two distant blocks, row 2 none."""
    return (dst // 64 != 2) & ((src // 64 == dst // 64) | (src // 64 == dst // 64 + 3))


WINDOW, STEPS = patterns.window(131072, 256), [Strided(256, 64, 2044, 64), Strided(0, 64, 2044, 320)]
SHAPES = {
    "full": (patterns.full(1000), [(1, 1000, 1000, 0)]),
    "documents": (patterns.documents([256, 256], causal=False), [(2, 256, 256, 0)]),
    "small documents": (patterns.documents([64] * 50), [(50, 64, 64, 1)]),
    "neighbours alone": (
        TokenGraph.from_rule(lambda b, h, dst, src: (dst // 64 == 2) == (src // 64 == 1), 256, 128),
        [(1, 128, 64, 0), (2, 64, 64, 0)],
    ),
    "the first and its own": (
        TokenGraph.from_rule(lambda b, h, dst, src: (src < 64) | (src // 64 == dst // 64), 640),
        [(1, 64, 64, 0), (1, 64, 128, 0), (8, 64, 128, 0)],
    ),
    "gathered receivers": (TokenGraph.from_rule(two_of_three, 256, 512), [(3, 64, 128, 0)]),
}


def tile_pieces(graph):
    return rectangles(graph, divided(graph, 64, 0.0)[0])


@pytest.mark.parametrize(("graph", "wanted"), SHAPES.values(), ids=SHAPES)
def test_few_pieces(graph, wanted):
    found = [
        (p.dst.count, p.dst.size, p.src.size, 0 if p.masks is None else len(p.masks.table))
        for p in tile_pieces(graph)
    ]
    assert sorted(found) == wanted


def test_a_long_window_is_one_strided_piece_with_one_mask():
    """But for the rows at the beginning, where it is cut: steps of 64 tokens, 319 senders and one more."""
    found = tile_pieces(WINDOW)
    largest = max(found, key=lambda piece: piece.cells)
    assert [largest.dst, largest.src] == STEPS
    assert largest.masks.table.shape == (1, 64, 320)
    assert len(found) <= 5
    assert sum(t.numel() for p in found for t in (p.masks.table, p.masks.which)) < 100_000
