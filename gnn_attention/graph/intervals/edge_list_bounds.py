"""A list of edges evaluated on whole boxes at once: which boxes hold a listed pair.

The list is a table of sorted keys ``dst * num_src + src``, closed by the largest int64. Boxes of one size on
one grid are answered exactly from the number of edges in each cell of that grid; others on the safe side.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch.utils.weak import WeakIdKeyDictionary

from gnn_attention._support.shapes import Tensor
from gnn_attention.graph.intervals.values import ANYTHING, Interval, TriState

Frame = tuple[int, int, int, int]
# keys -> edges in each cell of the grid that was used last
_grids: MutableMapping[Tensor, tuple[Frame, Tensor, Tensor]] = WeakIdKeyDictionary()


def in_boxes(keys: Tensor, num_src: int, dst: Interval, src: Interval) -> TriState:
    """Whether some and whether all pairs of ``dst x src`` are listed."""
    if not len(dst.low):
        return TriState(dst.box, dst.low > 0, dst.low > 0, dst.axes)
    height, width = (int((side.high - side.low).max()) + 1 for side in (dst, src))
    frame = (height, width, int(dst.low[0]) % height, int(src.low[0]) % width)
    cached = _grids.get(keys)
    if cached is None or cached[0] != frame:
        _grids[keys] = cached = (frame, *_cells(keys, num_src, frame))
    _, cells, counts = cached
    rows = [(end - frame[2]) // height + 1 for end in (dst.low, dst.high)]
    columns = [(end - frame[3]) // width + 1 for end in (src.low, src.high)]
    across = num_src // width + 3
    inside = torch.stack([_count(cells, counts, row * across + column) for row in rows for column in columns])
    whole = (rows[0] == rows[1]) & (columns[0] == columns[1]) & (inside[0] == height * width)
    whole &= (dst.high - dst.low + 1 == height) & (src.high - src.low + 1 == width)
    # there a key is that of another pair
    beyond = (src.low < 0) | (src.high >= num_src)
    some, whole = (inside > 0).any(0) | beyond, whole & ~beyond
    return TriState(dst.box, some, whole, torch.full_like(dst.axes, ANYTHING).masked_fill(whole | ~some, 0))


def _cells(keys: Tensor, num_src: int, frame: Frame) -> tuple[Tensor, Tensor]:
    """The cells that hold edges, sorted, and how many each holds."""
    height, width, top, left = frame
    dst, src = keys[:-1] // max(num_src, 1), keys[:-1] % max(num_src, 1)
    across = num_src // width + 3
    cell = ((dst - top) // height + 1) * across + (src - left) // width + 1
    largest = int(cell.max()) + 1 if len(cell) else 0
    # a table of all cells is quicker than sorting, but takes memory
    if largest > 4 * len(cell):
        found: tuple[Tensor, Tensor] = torch.unique(cell, return_counts=True)
        return found
    counts = torch.bincount(cell, minlength=largest)
    cells = counts.nonzero().flatten()
    return cells, counts[cells]


def _count(cells: Tensor, counts: Tensor, cell: Tensor) -> Tensor:
    if not len(cells):
        return torch.zeros_like(cell)
    place = torch.searchsorted(cells, cell).clamp(max=len(cells) - 1)
    return torch.where(cells[place] == cell, counts[place], 0)
