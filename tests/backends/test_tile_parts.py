"""Tiles divided by how well they are filled, against counting the pairs of each."""

import functools

import pytest
import torch
from support.plans import PLAIN, random_mask

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends.plan.tile_density import Runs, cells_at, divided, left_over

each_graph = pytest.mark.parametrize("name", PLAIN)


@functools.cache
def by_hand(name, block):
    """``{(row, column): (edges, pairs)}`` of every tile that holds an edge."""
    graph, found = PLAIN[name], {}
    mask = graph.mask()
    for i in range(0, graph.num_dst, block):
        for j in range(0, graph.num_src, block):
            tile = mask[i : i + block, j : j + block]
            if tile.any():
                found[i // block, j // block] = (int(tile.sum()), tile.numel())
    return found


def listed(runs):
    """``[(row, column, full, edges)]`` of all tiles, in order."""
    fields = zip(
        *(part.tolist() for part in (runs.row, runs.first, runs.stop, runs.full, runs.edges)), strict=True
    )
    return [
        (row, column, full, edges)
        for row, first, stop, full, edges in fields
        for column in range(first, stop)
    ]


@each_graph
def test_tiles_are_divided_by_their_fill(name):
    """Every tile with an edge on one side exactly, full ones always on the first, partial ones with their
    number of edges.
    """
    for block, least in ((16, 0.0), (64, 0.9)) if list(PLAIN).index(name) % 2 else ((64, 0.0), (16, 0.9)):
        check_fill(name, block, least)


def check_fill(name, block, least):
    graph = PLAIN[name]
    dense, sparse = (listed(runs) for runs in divided(graph, block, least))
    tiles = by_hand(name, block)
    assert [tile[:2] for tile in dense] == [
        at for at, (edges, pairs) in tiles.items() if edges >= least * pairs
    ]
    assert [tile[:2] for tile in sparse] == [
        at for at, (edges, pairs) in tiles.items() if edges < least * pairs
    ]
    for row, column, full, edges in dense + sparse:
        assert full == (tiles[row, column][0] == tiles[row, column][1])
        assert full or edges == tiles[row, column][0]


@each_graph
def test_what_is_left_over(name):
    """The edges of sparse tiles, by receiver, then sender."""
    graph, block = PLAIN[name], (16, 64)[list(PLAIN).index(name) % 2]
    _, sparse = divided(graph, block, 0.25)
    mask = torch.zeros_like(graph.mask())
    for row, column, _, _ in listed(sparse):
        mask[row * block : (row + 1) * block, column * block : (column + 1) * block] = True
    assert torch.equal(left_over(graph, sparse), (graph.mask() & mask).nonzero().t().flip(0))


def visited(name, block, times):
    """Pairs under all columns that one of ``times`` rows of tiles needs."""
    columns = {(row // times, column) for row, column in by_hand(name, block)}
    return len(columns) * times * block**2


@each_graph
def test_cells_at(name):
    """Whole tiles are counted, at the border too."""
    runs = divided(PLAIN[name], 16, 0.0)[0]
    for times in (1, 3, 8):
        assert cells_at(runs, times) == visited(name, 16, times)


def test_cells_at_with_runs_that_cover_one_another():
    """Long runs above short ones, nested, overlapping, touching and apart."""
    spans = [
        (0, 0, 9),
        (1, 2, 3),
        (1, 8, 12),
        (2, 0, 1),
        (3, 1, 2),
        (3, 5, 6),
        (5, 4, 7),
        (6, 0, 2),
        (6, 6, 8),
    ]
    row, first, stop = torch.tensor(spans).t()
    runs = Runs(4, row, first, stop, torch.ones_like(row, dtype=torch.bool), torch.zeros_like(row))
    for times in (1, 2, 3, 4, 7, 100):
        columns = {(r // times, column) for r, a, b in spans for column in range(a, b)}
        assert cells_at(runs, times) == len(columns) * times * 16


def test_worked_out_once():
    graph = patterns.window(500, 40)
    assert divided(graph, 64, 0.25)[0].block == 64
    assert divided(graph, 64, 0.0)[0] is divided(graph, 64, 0.0)[0]


def test_long_graphs_are_not_visited():
    """A full run is one entry however long it is."""
    runs, _ = divided(patterns.causal(2**17), 64, 0.25)
    assert len(runs.row) == 2 * 2**11 - 1


def test_a_list_and_its_rule_agree():
    mask = random_mask(100, 130, 0.3, seed=5)
    by_list = ga.convert.from_mask(mask)
    by_rule = ga.TokenGraph.from_rule(lambda b, h, dst, src: mask[dst, src], 100, 130)
    for least in (0.0, 0.25, 0.32):
        for one, other in zip(divided(by_list, 16, least), divided(by_rule, 16, least), strict=True):
            assert listed(one) == listed(other)
            assert torch.equal(
                left_over(by_list, one.at(~one.full)), left_over(by_rule, other.at(~other.full))
            )
