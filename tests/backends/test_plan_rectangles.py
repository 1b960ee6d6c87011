"""The theorem of lowering: rectangles and left-over edges are disjoint and together exactly the graph."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import PLAIN, random_mask, tokens, visits

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends.plan.dense_blocks import rectangles
from gnn_attention.backends.plan.plan import Gathered, Strided
from gnn_attention.backends.plan.tile_density import divided, left_over


def check(graph, block, least):
    """The theorem, and the flags of the pieces; the pieces of the dense tiles."""
    dense, sparse = divided(graph, block, least)
    pieces, edges = rectangles(graph, dense), left_over(graph, sparse)
    count = visits(pieces, graph.num_dst, graph.num_src)
    count[edges[1], edges[0]] += 1
    assert torch.equal(count, graph.mask().long()), graph.name
    receivers = [i for piece in pieces for g in range(piece.dst.count) for i in tokens(piece.dst, g).tolist()]
    assert len(set(receivers)) == len(receivers)
    for piece in pieces:
        check_flags(piece, graph)
    return pieces


def check_flags(piece, graph):
    assert piece.src.count == piece.dst.count
    assert piece.fresh
    assert not piece.causal
    # no view goes back
    assert all(groups.stride >= 0 for groups in (piece.dst, piece.src) if isinstance(groups, Strided))
    if piece.masks is None:
        assert not piece.has_empty_rows
        return
    table = piece.masks.table
    assert table.shape[1:] == (piece.dst.size, piece.src.size)
    assert len(piece.masks.which) == piece.dst.count
    assert sorted(set(piece.masks.which.tolist())) == list(range(len(table)))  # none is there in vain
    assert piece.has_empty_rows == bool((~table.any(-1)).any())
    # senders without out-edges are cut off at both ends
    used = table.any(0).any(0)
    assert bool(used[0] & used[-1])


@pytest.mark.slow
@pytest.mark.parametrize("least", [0.0, 0.25])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("name", PLAIN)
def test_cells_and_edges_are_the_graph(name, block, least):
    """Graphs of several tiles, with borders, in every form."""
    check(PLAIN[name], block, least)


sizes, shares = st.integers(1, 90), st.floats(0.0, 1.0)


@settings(max_examples=40, deadline=None)
@given(sizes, sizes, st.sampled_from([1, 5, 16, 32]), shares, shares, st.integers(0, 99))
def test_random_graphs(num_dst, num_src, block, least, density, seed):
    """Blocks of edges with holes, as a list and as a rule."""
    coarse = random_mask(-(-num_dst // 8), -(-num_src // 8), density, seed)
    mask = coarse.repeat_interleave(8, 0).repeat_interleave(8, 1)[:num_dst, :num_src]
    mask = mask & (random_mask(num_dst, num_src, 0.98, seed + 1))
    check(ga.convert.from_mask(mask), block, least)
    check(ga.TokenGraph.from_rule(lambda b, h, dst, src: mask[dst, src], num_dst, num_src), block, least)


def shapes(graph, block=64):
    """``(count, height, width, masks)`` of every piece with all tiles taken; None for no mask."""
    found = rectangles(graph, divided(graph, block, 0.0)[0])
    number_of_masks = [None if p.masks is None else len(p.masks.table) for p in found]
    return [(p.dst.count, p.dst.size, p.src.size, n) for p, n in zip(found, number_of_masks, strict=True)]


class TestFewPieces:
    """How graphs of a known form come out, by hand."""

    def test_a_long_window_is_one_strided_piece_with_one_mask(self):
        """But for the rows at the beginning, where it is cut: steps of 64 tokens, 319 senders each."""
        graph = patterns.window(131072, 256)
        found = rectangles(graph, divided(graph, 64, 0.0)[0])
        largest = max(found, key=lambda piece: piece.cells)
        assert largest.dst == Strided(256, 64, 2044, 64)
        assert largest.src == Strided(1, 64, 2044, 319)
        assert largest.masks.table.shape == (1, 64, 319)
        assert len(found) <= 5
        assert sum(t.numel() for p in found for t in (p.masks.table, p.masks.which)) < 100_000

    def test_rows_of_the_same_senders_become_one_tall_rectangle(self):
        assert shapes(patterns.full(1000)) == [(1, 1000, 1000, None)]
        assert shapes(patterns.cross(1000, 70)) == [(1, 1000, 70, None)]
        assert shapes(patterns.documents([256, 256], causal=False)) == [(2, 256, 256, None)]

    def test_only_neighbours_become_one(self):
        """Rows 0, 1 and 3 of tiles have the same senders, row 2 others: only 0 and 1 are one rectangle."""
        graph = ga.TokenGraph.from_rule(lambda b, h, dst, src: (dst // 64 == 2) == (src // 64 == 1), 256, 128)
        check(graph, 64, 0.0)
        assert sorted(shapes(graph)) == [(1, 128, 64, None), (2, 64, 64, None)]

    def test_documents_of_one_length(self):
        assert shapes(patterns.documents([64] * 50)) == [(50, 64, 64, 1)]

    def test_senders_apart_are_gathered_together(self):
        """Blocks with edges from themselves and the first: all rows of one width in one piece."""
        graph = ga.TokenGraph.from_rule(lambda b, h, dst, src: (src < 64) | (src // 64 == dst // 64), 640)
        found = check(graph, 64, 0.0)
        gathered = [piece for piece in found if isinstance(piece.src, Gathered)]
        assert [(piece.dst, piece.src.size) for piece in gathered] == [(Strided(128, 64, 8, 64), 128)]

    def test_scattered_receivers_are_gathered_too(self):
        """Rows 0, 1 and 3 of tiles have edges from two distant blocks, row 2 none."""

        def rule(b, h, dst, src):
            return (dst // 64 != 2) & ((src // 64 == dst // 64) | (src // 64 == dst // 64 + 3))

        graph = ga.TokenGraph.from_rule(rule, 256, 512)
        found = check(graph, 64, 0.0)
        assert [type(piece.dst) for piece in found] == [Gathered]
        assert found[0].dst.index[:, 0].tolist() == [0, 64, 192]

    def test_bigbird(self):
        """A window of blocks, a global block and random blocks: as many pieces as widths, not as rows."""
        graph = patterns.bigbird(64 * 64, 64)
        found = check(graph, 64, 0.0)
        widths = {piece.src.size for piece in found}
        assert len(found) <= 2 * len(widths) + 3
        assert any(isinstance(piece.src, Gathered) and piece.dst.count > 8 for piece in found)

    def test_nothing(self):
        for graph in (patterns.cross(0, 5), patterns.cross(5, 0), patterns.window(100, 0)):
            assert rectangles(graph, divided(graph, 64, 0.0)[0]) == []
