"""Plans have exactly the edges of their graph and true flags, and are small for simple graphs."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.covering import thin
from support.plans import PLAIN, random_mask, tokens, visits

import gnn_attention as ga
from gnn_attention import TokenGraph, patterns
from gnn_attention.backends.plan.plan import EdgeRows, Rectangles, Strided, unpack_plan
from gnn_attention.backends.plan.planner import PLANS, _find_documents, packed_plan, tiles_plan
from gnn_attention.graph import memoized

CPU = torch.device("cpu")


def receivers(piece, num_dst):
    if isinstance(piece, EdgeRows):
        return list(range(num_dst))
    return [i for g in range(piece.dst.count) for i in tokens(piece.dst, g).tolist()]


def check(kind, graph, mask=None):
    """Check that pieces are disjoint, that their union is the graph, and that all flags are true."""
    return check_plan(PLANS[kind](graph), kind, graph, graph.mask().long() if mask is None else mask)


def check_plan(plan, kind, graph, mask):
    assert torch.equal(visits(plan.pieces, graph.num_dst, graph.num_src), mask), (kind, graph.name)
    earlier_rows, first_rows = set(), set()
    for piece in plan.pieces:
        rows = receivers(piece, graph.num_dst)
        assert len(set(rows)) == len(rows)
        assert piece.is_first == earlier_rows.isdisjoint(rows)
        earlier_rows |= set(rows)
        first_rows |= set(rows) if piece.is_first else set()
        if isinstance(piece, Rectangles):
            table = None if piece.masks is None else piece.masks.table[piece.masks.index]
            assert piece.has_empty_rows == (table is not None and bool((~table.any(-1)).any()))
            assert piece.masks is None or not piece.causal
            # No view goes backwards, and no mask is unused.
            ends = [groups for groups in (piece.dst, piece.src) if isinstance(groups, Strided)]
            assert all(groups.stride >= 0 for groups in ends)
            assert piece.masks is None or len(piece.masks.index.unique()) == len(piece.masks.table)
    assert plan.is_complete == (first_rows == set(range(graph.num_dst)) and bool(plan.pieces))
    return plan


@pytest.mark.parametrize("name", thin(PLAIN, 0))
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
    for equal_graph in (graph, ga.convert.from_mask(graph.mask())):
        (piece,) = tiles_plan(equal_graph).pieces
        assert (piece.dst, piece.src) == (Strided(0, 1, 1, graph.num_dst), Strided(0, 1, 1, graph.num_src))
        assert piece.masks is None
        assert piece.causal == (graph.name.startswith("causal"))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=10), st.booleans())
def test_any_packing(lengths, causal):
    """Bounds are found, though a single token is causal and full at once; the plan is the graph."""
    graph = patterns.documents(lengths, causal=causal)
    check("tiles", graph)
    if sum(lengths):
        documents = _find_documents(graph)
        assert documents.cu_seqlens.diff().tolist() == [n for n in lengths if n]
        assert (documents.window == (-1, 0)) == causal or max(lengths) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["strict_causal", "prefix"])
@pytest.mark.parametrize("kind", ["tiles", "mixed"])
def test_masks_of_a_nearly_causal_graph_grow_with_its_length(kind, name):
    """Masks do not grow with the pairs: long full runs are pieces without partial tiles."""

    def count_mask_cells(n):
        graph = patterns.strict_causal(n) if name == "strict_causal" else patterns.prefix(n, 100)
        return sum(x.numel() for x in packed_plan(graph, kind, CPU)[0] if x.dtype == torch.bool)

    assert count_mask_cells(8192) < 3 * count_mask_cells(4096) < 4096 * 4096 // 4
    check(kind, patterns.strict_causal(1100))


sizes, shares = st.integers(1, 150), st.floats(0.0, 1.0)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(sizes, sizes, shares, st.integers(0, 99))
def test_random_graphs(num_dst, num_src, density, seed):
    coarse_mask = random_mask(-(-num_dst // 8), -(-num_src // 8), density, seed)
    mask = coarse_mask.repeat_interleave(8, 0).repeat_interleave(8, 1)[:num_dst, :num_src]
    mask = mask & (random_mask(num_dst, num_src, 0.98, seed + 1))
    rule = TokenGraph.from_rule(lambda b, h, dst, src: mask[dst, src], num_dst, num_src)
    for graph, kind in itertools.product((ga.convert.from_mask(mask), rule), ("tiles", "mixed")):
        check(kind, graph)
