"""Tables over whole ranges: their lowest and highest entries, and which boxes hold a pair of an edge list."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from itertools import product
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph.intervals.values import ANYTHING, Interval, TriState, tristate

Levels = list[tuple[Tensor, Tensor]]
# table -> axis -> a copy, and its levels
_pyramids: MutableMapping[Tensor, dict[int, tuple[Tensor, Levels]]] = WeakIdKeyDictionary()

Ranges = Int[Tensor, " ranges"]


def extremes(table: Tensor, axis: int, lead: Ranges, first: Ranges, last: Ranges) -> tuple[Tensor, Tensor]:
    """Bounds of ``table[lead, first .. last]``, the other axes flattened into ``lead``.

    They are taken over one or two aligned pieces of a power of two that hold the range: exact for ranges that
    are such a piece, as those of a grid of boxes are, and else on the safe side. A place outside the table
    (which counts from the end, or is an error later) gets the bounds of the whole table.
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
    """Level k: lowest and highest of each ``2^k`` neighbours along the axis, ``[other axes, n / 2^k]``."""
    cached = _pyramids.setdefault(table, {})
    flat = table.detach().cpu().movedim(axis, -1).reshape(-1, table.shape[axis])
    # a buffer that is written anew for every batch is another table
    if axis not in cached or not torch.equal(cached[axis][0], flat):
        copy = flat.clone()
        levels = [(copy.to(torch.uint8), copy.to(torch.uint8)) if table.dtype == torch.bool else (copy, copy)]
        while levels[-1][0].shape[1] > 1:
            levels.append((_halve(levels[-1][0], torch.amin), _halve(levels[-1][1], torch.amax)))
        cached[axis] = copy, levels
    return cached[axis][1]


def _halve(values: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    if values.shape[1] % 2:
        values = torch.cat([values, values[:, -1:]], dim=1)
    return reduce(values.reshape(len(values), -1, 2), dim=2)


class Grid(NamedTuple):
    """Cells of ``height x width`` pairs, numbered row by row; one of them begins at ``(top, left)``."""

    height: int
    width: int
    top: int
    left: int
    columns: int

    @classmethod
    def of(cls, dst: Tensor, src: Tensor, height: int, width: int, num_src: int) -> Grid:
        """The grid in which boxes that begin at these receivers and senders are cells."""
        return cls(height, width, int(dst[0]) % height, int(src[0]) % width, num_src // width + 3)

    def cell(self, dst: Tensor, src: Tensor) -> Tensor:
        row, column = (dst - self.top) // self.height, (src - self.left) // self.width
        return (row + 1) * self.columns + column + 1


# keys -> the cells with an edge, in the grid that was used last
_grids: MutableMapping[Tensor, tuple[Grid, Tensor]] = WeakIdKeyDictionary()


def in_boxes(keys: Tensor, num_src: int, dst: Interval, src: Interval) -> TriState:
    """Whether some pair of ``dst x src`` may be listed, by sorted ``keys dst * num_src + src``.

    After the keys comes the largest int64. Boxes of one size on one grid are answered exactly from the cells
    of that grid that hold an edge; others on the safe side. That all pairs of a box are listed is never told.
    """
    axes, never = torch.full_like(dst.axes, ANYTHING), torch.zeros_like(dst.low, dtype=torch.bool)
    if not len(never):
        return TriState(dst.box, never, never, axes)
    height, width = (int((side.high - side.low).max()) + 1 for side in (dst, src))
    grid = Grid.of(dst.low, src.low, height, width, num_src)
    cached = _grids.get(keys)
    if cached is None or cached[0] != grid:
        _grids[keys] = cached = grid, _cells_with_edges(keys, num_src, grid)
    _, cells = cached
    corners = [grid.cell(*ends) for ends in product((dst.low, dst.high), (src.low, src.high))]
    around = torch.stack(corners)
    # beyond the last sender a key is that of another pair
    some = (cells[torch.searchsorted(cells, around)] == around).any(0) | (src.low < 0) | (src.high >= num_src)
    return tristate(dst.box, some, never, axes)


def _cells_with_edges(keys: Tensor, num_src: int, grid: Grid) -> Tensor:
    """The cells in order, and the largest int64, so that every search ends inside the table."""
    cell = grid.cell(keys[:-1] // max(num_src, 1), keys[:-1] % max(num_src, 1))
    largest = int(cell.max()) + 1 if len(cell) else 0
    # a table of all cells is quicker than sorting, but takes memory
    few = largest <= 4 * len(cell)
    cells = torch.bincount(cell, minlength=1).nonzero().flatten() if few else torch.unique(cell)
    return torch.cat([cells, keys[-1:]])
