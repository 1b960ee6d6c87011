"""Bounds of tables over ranges: the lowest and highest entries, and which boxes hold a listed edge."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from itertools import product
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph.intervals.values import ANYTHING, Interval, TriState, tristate

Levels = list[tuple[Tensor, Tensor]]
# table -> axis -> (a copy of the table, its levels)
_pyramids: MutableMapping[Tensor, dict[int, tuple[Tensor, Levels]]] = WeakIdKeyDictionary()

Ranges = Int[Tensor, " ranges"]


def extremes(table: Tensor, axis: int, lead: Ranges, first: Ranges, last: Ranges) -> tuple[Tensor, Tensor]:
    """Return bounds of ``table[lead, first .. last]``, where ``lead`` is the flat index of the other axes.

    They are taken over one or two aligned pieces, of a power of two in length, that cover the
    range: exact for a range that is such a piece, as in a grid of boxes, and otherwise on the safe
    side. An index outside the table, which counts from the end or is an error later, gets the
    bounds of the whole table.
    """
    levels, size = _pyramid(table, axis), table.shape[axis]
    inside = (first >= 0) & (last < size) & (lead >= 0) & (lead < len(levels[0][0]))
    lead = lead.clamp(0, len(levels[0][0]) - 1)
    first, last = first.clamp(0, size - 1), last.clamp(0, size - 1)
    exponent = int((last - first).max()).bit_length() if len(first) else 0
    low, high = levels[min(exponent, len(levels) - 1)]
    left, right = first >> exponent, last >> exponent
    low = torch.where(inside, torch.minimum(low[lead, left], low[lead, right]), levels[-1][0].amin())
    return low, torch.where(inside, torch.maximum(high[lead, left], high[lead, right]), levels[-1][1].amax())


def _pyramid(table: Tensor, axis: int) -> Levels:
    """Return the levels of a table: level k holds the lowest and highest of each ``2^k`` entries along ``axis``.

    Both are ``[other axes, n / 2^k]``.
    """
    cached = _pyramids.setdefault(table, {})
    flat = table.detach().cpu().movedim(axis, -1).reshape(-1, table.shape[axis])
    # The copy shows whether a buffer was overwritten since.
    if axis not in cached or not torch.equal(cached[axis][0], flat):
        copy = flat.clone()
        levels = [(copy.to(torch.uint8), copy.to(torch.uint8)) if table.dtype == torch.bool else (copy, copy)]
        while levels[-1][0].shape[1] > 1:
            levels.append(
                (_reduce_pairs(levels[-1][0], torch.amin), _reduce_pairs(levels[-1][1], torch.amax))
            )
        cached[axis] = copy, levels
    return cached[axis][1]


def _reduce_pairs(values: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    if values.shape[1] % 2:
        values = torch.cat([values, values[:, -1:]], dim=1)
    return reduce(values.reshape(len(values), -1, 2), dim=2)


class Grid(NamedTuple):
    """A grid of cells of ``height x width`` pairs, one of which begins at ``(top, left)``."""

    height: int
    width: int
    top: int
    left: int
    columns: int

    @classmethod
    def from_boxes(cls, dst: Tensor, src: Tensor, height: int, width: int, num_src: int) -> Grid:
        """Return the grid whose cells are the boxes that begin at these receivers and senders."""
        return cls(height, width, int(dst[0]) % height, int(src[0]) % width, num_src // width + 3)

    def cell(self, dst: Tensor, src: Tensor) -> Tensor:
        """Return the number of the cell of each pair, counted row by row."""
        row, column = (dst - self.top) // self.height, (src - self.left) // self.width
        return (row + 1) * self.columns + column + 1


# keys -> (the grid that was used last, its cells with an edge)
_grids: MutableMapping[Tensor, tuple[Grid, Tensor]] = WeakIdKeyDictionary()


def has_edge_in_boxes(keys: Tensor, num_src: int, dst: Interval, src: Interval) -> TriState:
    """Return whether boxes ``dst x src`` hold a listed edge, for the sorted keys ``dst * num_src + src``.

    The largest int64 follows the keys. The answer is exact for boxes of one size on one grid, from
    the cells of that grid with an edge, and otherwise on the safe side. It never says that all
    pairs are listed.
    """
    axes, every = torch.full_like(dst.axes, ANYTHING), torch.zeros_like(dst.low, dtype=torch.bool)
    if not len(every):
        return TriState(dst.box, every, every, axes)
    height, width = (int((side.high - side.low).max()) + 1 for side in (dst, src))
    grid = Grid.from_boxes(dst.low, src.low, height, width, num_src)
    cached = _grids.get(keys)
    if cached is None or cached[0] != grid:
        _grids[keys] = cached = grid, _cells_with_edges(keys, num_src, grid)
    _, cells = cached
    # A box touches at most the four cells at its corners.
    corners = torch.stack([grid.cell(*pair) for pair in product((dst.low, dst.high), (src.low, src.high))])
    has_edge = (cells[torch.searchsorted(cells, corners)] == corners).any(0)
    # A sender that the list does not have would share its key with another pair.
    some = has_edge | (src.low < 0) | (src.high >= num_src)
    return tristate(dst.box, some, every, axes)


def _cells_with_edges(keys: Tensor, num_src: int, grid: Grid) -> Tensor:
    """Return the sorted cells, followed by the largest int64, which ends every search inside the table."""
    cell = grid.cell(keys[:-1] // max(num_src, 1), keys[:-1] % max(num_src, 1))
    largest = int(cell.max()) + 1 if len(cell) else 0
    # A table of all cells is faster than sorting, but takes memory.
    if largest <= 4 * len(cell):
        cells = torch.bincount(cell, minlength=1).nonzero().flatten()
    else:
        cells = torch.unique(cell)
    return torch.cat([cells, keys[-1:]])
