"""The lowest and the highest entry of a table over a range of its places, for many ranges at once."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import torch
from torch.utils.weak import WeakIdKeyDictionary

from gnn_attention._support.shapes import Int, Tensor

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
