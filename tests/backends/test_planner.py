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
from gnn_attention.backends.plan.plan import EdgeRows, Rectangles, Strided, unpack_plan
from gnn_attention.backends.plan.planner import PLANS, packed_plan, tiles_plan
from gnn_attention.backends.plan.planner import _documents as documents_of
from gnn_attention.graph import memoized

CPU = torch.device("cpu")


def receivers(piece, num_dst):
    if isinstance(piece, EdgeRows):
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
        check(kind, graph, mask)
        plan = memoized(packed_plan, graph, kind, CPU)
        check_plan(unpack_plan(*plan), kind, graph, mask)
        assert memoized(packed_plan, graph, kind, CPU) is plan


@pytest.mark.parametrize(
    "graph", [patterns.full(5), patterns.cross(130, 70), patterns.causal(400)], ids=lambda g: g.name
)
def test_full_and_causal_graphs_are_one_rectangle(graph):
    for same in (graph, ga.convert.from_mask(graph.mask())):
        (piece,) = tiles_plan(same).pieces
        assert (piece.dst, piece.src) == (Strided(0, 1, 1, graph.num_dst), Strided(0, 1, 1, graph.num_src))
        assert piece.masks is None
        assert piece.causal == (graph.name.startswith("causal"))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=10), st.booleans())
def test_any_packing(lengths, causal):
    """Its bounds are found, where a single token is causal and full at once; the plan is the graph."""
    graph = patterns.documents(lengths, causal=causal)
    check("tiles", graph)
    if sum(lengths):
        found = documents_of(graph)
        assert found.cu_seqlens.diff().tolist() == [n for n in lengths if n]
        assert (found.window == (-1, 0)) == causal or max(lengths) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["strict_causal", "prefix"])
@pytest.mark.parametrize("kind", ["tiles", "mixed"])
def test_masks_of_a_nearly_causal_graph_grow_with_its_length(kind, name):
    """Not with its pairs: long full runs are pieces without the tiles that need a mask."""

    def numbers(n):
        graph = patterns.strict_causal(n) if name == "strict_causal" else patterns.prefix(n, 100)
        return sum(x.numel() for x in packed_plan(graph, kind, CPU)[0] if x.dtype == torch.bool)

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
