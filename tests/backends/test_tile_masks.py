"""The masks of tiles, each distinct one once, against the mask of the whole graph."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.covering import thinned
from support.plans import PLAIN
from torch.nn import functional

import gnn_attention as ga
from gnn_attention import TokenGraph, patterns
from gnn_attention.backends.plan.tile_masks import classes, masks_of_tiles
from gnn_attention.graph.regions import enumerate_pairs, quadtree


def cut(graph, block):
    """The mask cut into tiles by hand, ``[rows, columns, block, block]``, False beyond the border."""
    mask = graph.mask()
    down, across = -mask.shape[0] % block, -mask.shape[1] % block
    padded = functional.pad(mask, (0, across, 0, down))
    return padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block).transpose(1, 2)


@pytest.mark.parametrize("name", thinned(PLAIN, 1))
def test_every_partial_tile_has_its_mask(name):
    graph, block = PLAIN[name], (7, 64)[list(PLAIN).index(name) % 2]
    if not graph.num_dst or not graph.num_src:
        return
    expected = cut(graph, block)
    partial = expected.flatten(2).any(-1) & ~expected.flatten(2).all(-1)
    row, column = partial.nonzero(as_tuple=True)
    for chosen in (slice(None), slice(1, None, 3)):
        which, table = masks_of_tiles(graph, block, row[chosen], column[chosen])
        assert table.dtype == torch.bool
        assert torch.equal(table[which], expected[row[chosen], column[chosen]])


@pytest.mark.parametrize(
    ("graph", "block", "distinct"),
    [
        (patterns.causal(2048), 64, 1),
        (patterns.window(2048, 256), 64, 2),  # the diagonal, and the far end of the window
        (patterns.window(2048, 255), 64, 3),  # an end between tiles cuts two
        (patterns.sinks(2048, 3), 64, 2),  # three columns, and the corner
        (patterns.dilated(2048, 3, 64), 64, 1),
        (ga.convert.from_mask(patterns.window(512, 128).mask()), 64, 2),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_structured_graph_has_few_masks(graph, block, distinct):
    expected = cut(graph, block)
    partial = expected.flatten(2).any(-1) & ~expected.flatten(2).all(-1)
    which, table = masks_of_tiles(graph, block, *partial.nonzero(as_tuple=True))
    assert len(table) == distinct
    assert sorted(set(which.tolist())) == list(range(distinct))


@pytest.mark.parametrize("ranges", [True, False])
def test_each_mask_once_over_many_pieces(ranges, monkeypatch):
    """Tiles are computed a bounded number at a time; what comes again in a later part is the same mask."""
    monkeypatch.setattr(quadtree, "LONGEST", 1000)
    monkeypatch.setattr(enumerate_pairs, "CELLS_AT_ONCE", 2**14)
    graph = patterns.window(2048, 64) if ranges else TokenGraph.from_rule(no_ranges, 2048)
    row = torch.arange(1, 32)
    which, table = masks_of_tiles(graph, 64, row, row - 1)
    assert torch.equal(table, torch.ones(1, 64, 64, dtype=torch.bool).triu(1))
    assert which.tolist() == [0] * 31


def no_ranges(b, h, dst, src):
    return torch.sign((dst - src).double()).ge(0) & (torch.cos((dst - src).double() * 0) * (dst - src) < 64)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(st.integers(-2, 2), min_size=n, max_size=n))))
def test_classes(rows):
    """Two rows have one class exactly if they are equal; classes count from 0, each with a row of it."""
    table = torch.tensor(rows, dtype=torch.int64).view(len(rows), -1 if rows else 3)
    number, some = classes(table)
    assert sorted(set(number.tolist())) == list(range(len(some)))
    assert len(some) == len({tuple(row) for row in rows})
    for row, kind in zip(rows, number.tolist(), strict=True):
        assert rows[int(some[kind])] == row


def test_rows_of_words_with_equal_sums_are_told_apart(monkeypatch):
    """All factors are 1 here, so that (1, 2) and (2, 1) have the sum 3."""
    monkeypatch.setattr(torch, "randint", lambda high, size, **options: torch.zeros(size).long())
    which, some = classes(torch.tensor([[1, 2], [2, 1], [1, 2], [3, 0]]))
    assert which[0] == which[2]
    assert len(set(which.tolist())) == len(some) == 3
