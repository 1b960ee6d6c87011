"""Tiles divided by how well they are filled, against counting the pairs of each."""

import functools

import pytest
import torch
from support.covering import thinned
from support.plans import PLAIN

from gnn_attention import patterns
from gnn_attention.backends.plan.tile_density import cells_at, divided, left_over

each_graph = pytest.mark.parametrize("name", thinned(PLAIN, 0))


@functools.cache
def by_hand(name, block):
    """``{(row, column): (edges, pairs)}`` of every tile with an edge."""
    graph, found = PLAIN[name], {}
    mask = graph.mask()
    for i in range(0, graph.num_dst, block):
        for j in range(0, graph.num_src, block):
            tile = mask[i : i + block, j : j + block]
            if tile.any():
                found[i // block, j // block] = (int(tile.sum()), tile.numel())
    return found


def listed(runs):
    parts = (runs.row, runs.first, runs.stop, runs.full, runs.edges)
    fields = zip(*(part.tolist() for part in parts), strict=True)
    return [(row, j, full, edges) for row, first, stop, full, edges in fields for j in range(first, stop)]


@each_graph
def test_tiles_are_divided_by_their_fill(name):
    """Every tile with an edge on one side exactly, with its edges; those of sparse ones are left over."""
    graph = PLAIN[name]
    # a tile of two columns of 16 is just as full as wanted
    for block, least in ((16, 0.125), (64, 0.9 if list(PLAIN).index(name) % 2 else 0.0)):
        dense, sparse = divided(graph, block, least)
        tiles, left = by_hand(name, block), torch.zeros_like(graph.mask())
        for runs, filled in ((dense, True), (sparse, False)):
            wanted = [at for at, (edges, pairs) in tiles.items() if (edges >= least * pairs) == filled]
            assert [tile[:2] for tile in listed(runs)] == wanted
            for row, column, full, edges in listed(runs):
                assert full == (tiles[row, column][0] == tiles[row, column][1])
                assert full or edges == tiles[row, column][0]
        for row, column, _, _ in listed(sparse):
            left[row * block : (row + 1) * block, column * block : (column + 1) * block] = True
        assert torch.equal(left_over(graph, sparse), (graph.mask() & left).nonzero().t().flip(0))


@each_graph
def test_cells_at(name):
    """All columns that one of the rows of tiles needs; whole tiles are counted, at the border too."""
    runs = divided(PLAIN[name], 16, 0.0)[0]
    for times in (1, 3, 8):
        columns = {(row // times, column) for row, column in by_hand(name, 16)}
        assert cells_at(runs, times) == len(columns) * times * 16**2


def test_a_long_graph_is_not_visited_and_runs_are_cached():
    graph = patterns.causal(2**17)
    runs, _ = divided(graph, 64, 0.0)
    assert len(runs.row) == 2 * 2**11 - 1
    assert divided(graph, 64, 0.0)[0] is runs
