"""Tables over whole ranges: their lowest and highest entries, and which boxes hold a pair of an edge list."""

from collections.abc import Callable, MutableMapping

import torch
from torch.utils.weak import WeakIdKeyDictionary

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph.intervals.values import ANYTHING, Interval, TriState

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


Frame = tuple[int, int, int, int]
# keys -> edges in each cell of the grid that was used last
_grids: MutableMapping[Tensor, tuple[Frame, Tensor, Tensor]] = WeakIdKeyDictionary()


def in_boxes(keys: Tensor, num_src: int, dst: Interval, src: Interval) -> TriState:
    """Whether some and whether all pairs of ``dst x src`` are listed, by sorted ``keys dst * num_src + src``.

    After the keys comes the largest int64. Boxes of one size on one grid are answered exactly from the number
    of edges in each cell of that grid; others on the safe side.
    """
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
