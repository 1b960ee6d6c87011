"""Find bounds of the table entries in a range, and whether a box may hold a listed edge."""

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


def find_bounds(table: Tensor, axis: int, row: Ranges, start: Ranges, end: Ranges) -> tuple[Tensor, Tensor]:
    """Return bounds of ``table[row, start .. end]``; ``row`` is a flat index of the other axes.

    They are exact if all ranges are aligned and have ``2^k`` entries, as in a grid of boxes. Any
    other range gets the bounds of two that cover it. An index outside gets bounds of the whole
    table.
    """
    levels = _build_pyramid(table, axis)
    size = table.shape[axis]
    is_inside = (start >= 0) & (end < size) & (row >= 0) & (row < len(levels[0][0]))
    row = row.clamp(0, len(levels[0][0]) - 1)
    start, end = start.clamp(0, size - 1), end.clamp(0, size - 1)
    exponent = int((end - start).max()).bit_length() if len(start) else 0
    low, high = levels[min(exponent, len(levels) - 1)]
    left, right = start >> exponent, end >> exponent
    low = torch.where(is_inside, torch.minimum(low[row, left], low[row, right]), levels[-1][0].amin())
    high = torch.where(is_inside, torch.maximum(high[row, left], high[row, right]), levels[-1][1].amax())
    return low, high


def _build_pyramid(table: Tensor, axis: int) -> Levels:
    """For each k, return minima and maxima of groups of ``2^k`` entries along ``axis``, [other, n / 2^k]."""
    cache_by_axis = _pyramids.setdefault(table, {})
    flat_table = table.detach().cpu().movedim(axis, -1).reshape(-1, table.shape[axis])
    # A comparison with the copy shows whether the table has been overwritten.
    if axis not in cache_by_axis or not torch.equal(cache_by_axis[axis][0], flat_table):
        copy = flat_table.clone()
        levels = [(copy.to(torch.uint8), copy.to(torch.uint8)) if table.dtype == torch.bool else (copy, copy)]
        while levels[-1][0].shape[1] > 1:
            low, high = levels[-1]
            levels.append((_reduce_pairs(low, torch.amin), _reduce_pairs(high, torch.amax)))
        cache_by_axis[axis] = copy, levels
    return cache_by_axis[axis][1]


def _reduce_pairs(values: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    if values.shape[1] % 2:
        values = torch.cat([values, values[:, -1:]], dim=1)
    return reduce(values.reshape(len(values), -1, 2), dim=2)


class Grid(NamedTuple):
    """Cells of ``height x width`` pairs, numbered row by row. One cell begins at ``(top, left)``."""

    height: int
    width: int
    top: int
    left: int
    num_columns: int

    @classmethod
    def from_boxes(cls, dst: Tensor, src: Tensor, height: int, width: int, num_src: int) -> Grid:
        """Return the grid whose cells are the boxes that begin at these receivers and senders."""
        return cls(height, width, int(dst[0]) % height, int(src[0]) % width, num_src // width + 3)

    def cell(self, dst: Tensor, src: Tensor) -> Tensor:
        row, column = (dst - self.top) // self.height, (src - self.left) // self.width
        return (row + 1) * self.num_columns + column + 1


# keys -> (the grid that was used last, its cells with an edge)
_grids: MutableMapping[Tensor, tuple[Grid, Tensor]] = WeakIdKeyDictionary()


def has_edge_in_boxes(keys: Tensor, num_src: int, dst: Interval, src: Interval) -> TriState:
    """Return whether boxes hold a listed edge; ``keys`` are sorted and end with the largest int64.

    ``any_true`` is exact for boxes that are cells of one grid. In other boxes it may be True
    without an edge. ``all_true`` is always False.
    """
    axes = torch.full_like(dst.axes, ANYTHING)
    all_true = torch.zeros_like(dst.low, dtype=torch.bool)
    if not len(all_true):
        return TriState(dst.box, all_true, all_true, axes)
    height, width = (int((side.high - side.low).max()) + 1 for side in (dst, src))
    grid = Grid.from_boxes(dst.low, src.low, height, width, num_src)
    entry = _grids.get(keys)
    if entry is None or entry[0] != grid:
        index = grid.cell(keys[:-1] // max(num_src, 1), keys[:-1] % max(num_src, 1))
        num_cells = int(index.max()) + 1 if len(index) else 0
        # A table of all cells is faster than sorting, but takes memory.
        is_small = num_cells <= 4 * len(index)
        cells = torch.bincount(index, minlength=1).nonzero().flatten() if is_small else torch.unique(index)
        _grids[keys] = entry = grid, torch.cat([cells, keys[-1:]])
    _, cells = entry
    # A box touches at most the four cells at its corners.
    corners = torch.stack([grid.cell(*pair) for pair in product((dst.low, dst.high), (src.low, src.high))])
    has_edge = (cells[torch.searchsorted(cells, corners)] == corners).any(0)
    # A sender beyond the last one of the list would have the key of another pair.
    any_true = has_edge | (src.low < 0) | (src.high >= num_src)
    return tristate(dst.box, any_true, all_true, axes)
