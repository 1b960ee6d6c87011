"""From runs of tiles to rectangles: few pieces, each of many equal rectangles.

Rows of tiles without a mask that hear the same senders become one tall rectangle. Rectangles of one size
whose receivers and senders move on in equal steps are strided views of the tokens; others of one size are
gathered together; a large one on consecutive senders stands alone. Every receiver is in one rectangle at
most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.backends.plan.plan import Gathered, Groups, Masks, Rectangles, Strided
from gnn_attention.backends.plan.tile_density import Runs
from gnn_attention.backends.plan.tile_masks import classes, masks_of_tiles
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.regions.quadtree import ragged

ALONE = (
    2**15
)  # pairs from which a rectangle is worth a call of the kernel of its own, more than a copy of its senders


@dataclass(frozen=True, eq=False)
class _Stack:
    """Rectangles one below the other: receivers from ``top`` on, ``height`` of them, over all runs of one row
    of tiles.

    ``width`` counts senders, ``left`` is the first of them, ``joined`` says that they stand in a row,
    ``begin`` and ``end`` where the runs stand in the list.
    """

    top: Int[Tensor, " rectangles"]
    height: Int[Tensor, " rectangles"]
    left: Int[Tensor, " rectangles"]
    width: Int[Tensor, " rectangles"]
    joined: Bool[Tensor, " rectangles"]
    masked: Bool[Tensor, " rectangles"]
    begin: Int[Tensor, " rectangles"]
    end: Int[Tensor, " rectangles"]

    def at(self, chosen: Tensor) -> _Stack:
        """The chosen ones."""
        return _Stack(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


def rectangles(graph: TokenGraph, runs: Runs) -> list[Rectangles]:
    """Rectangles that hold the given tiles of a plain graph."""
    tokens = _Tokens(graph, runs)
    pieces = []
    for part in _alike(graph, runs, tokens):
        strided = len(part.top) == 1 or (bool(part.joined.all()) and _in_steps(part))
        if strided and bool(part.joined[0]):
            pieces.append(_piece(part, tokens, _steps(part.top, part.height), _steps(part.left, part.width)))
        else:
            pieces.append(_gathered(part, tokens))
    return pieces


def number_of_rectangles(graph: TokenGraph, runs: Runs) -> int:
    """How many pieces :func:`rectangles` makes of them."""
    return len(_alike(graph, runs, _Tokens(graph, runs)))


def _alike(graph: TokenGraph, runs: Runs, tokens: _Tokens) -> list[_Stack]:
    """The rectangles by pieces: those in equal steps, large ones alone, all others of one size together."""
    if not len(runs.row):
        return []
    stack = _stacked(graph, runs, tokens)
    kind, _ = classes(torch.stack([stack.height, stack.width, stack.masked, stack.joined], 1).to(torch.int64))
    large = (stack.joined & (stack.height * stack.width >= ALONE)).tolist()
    parts, rest = [], []
    for start, stop in _progressions(stack, kind):
        if stop - start > 1 or large[start]:
            parts.append(stack.at(torch.arange(start, stop, device="cpu")))
        else:
            rest.append(start)
    waiting = torch.tensor(rest, dtype=torch.int64, device="cpu")
    return parts + [stack.at(waiting[kind[waiting] == one]) for one in torch.unique(kind[waiting]).tolist()]


def _in_steps(part: _Stack) -> bool:
    """Whether receivers and senders move on in equal steps, and not backwards."""
    down, right = part.top.diff(), part.left.diff()
    return bool((down == down[0]).all()) and bool((right == right[0]).all()) and int(right[0]) >= 0


class _Tokens:
    """The runs in tokens instead of tiles, and the masks of the partial ones."""

    def __init__(self, graph: TokenGraph, runs: Runs) -> None:
        self.block = runs.block
        self.left = runs.first * runs.block
        self.width = (runs.stop * runs.block).clamp(max=graph.num_src) - self.left
        self.partial = ~runs.full
        self._graph, self._runs = graph, runs

    @cached_property
    def masks(self) -> tuple[Tensor, Tensor]:
        """For each run which mask of the table it has, -1 for a full one; and the table."""
        runs, mask = self._runs, torch.full_like(self.left, -1)
        which, table = masks_of_tiles(
            self._graph, runs.block, runs.row[self.partial], runs.first[self.partial]
        )
        mask[self.partial] = which
        return mask, table


def _stacked(graph: TokenGraph, runs: Runs, tokens: _Tokens) -> _Stack:
    """One rectangle for each row of tiles, or for several that hear the same senders without a mask."""
    rows, count = torch.unique_consecutive(runs.row, return_counts=True)
    end = count.cumsum(0)
    begin = end - count
    row_of = torch.repeat_interleave(torch.arange(len(rows), device="cpu"), count)
    masked = _some(tokens.partial, row_of, len(rows))
    gap = torch.zeros_like(runs.full)
    gap[1:] = (runs.row[1:] == runs.row[:-1]) & (runs.first[1:] != runs.stop[:-1])
    width = torch.zeros_like(rows).index_add_(0, row_of, tokens.width)
    starts = ~_like_above(runs, rows, count, begin, masked)
    bottom = ((rows + 1) * runs.block).clamp(max=graph.num_dst)
    last = torch.cat([starts[1:], starts.new_ones(1)])
    top, left, joined = rows * runs.block, tokens.left[begin], ~_some(gap, row_of, len(rows))
    height = bottom[last] - top[starts]
    return _Stack(top[starts], height, *(part[starts] for part in (left, width, joined, masked, begin, end)))


def _some(flag: Bool[Tensor, " runs"], row_of: Tensor, rows: int) -> Bool[Tensor, " rows"]:
    return torch.zeros(rows, dtype=torch.int64, device="cpu").index_add_(0, row_of, flag.to(torch.int64)) > 0


def _like_above(
    runs: Runs, rows: Tensor, count: Tensor, begin: Tensor, masked: Tensor
) -> Bool[Tensor, " rows"]:
    """Whether a row of tiles hears, without a mask, exactly what the row above it hears."""
    alike = torch.zeros_like(masked)
    alike[1:] = (rows[1:] == rows[:-1] + 1) & (count[1:] == count[:-1]) & ~masked[1:] & ~masked[:-1]
    row, number = ragged(count * alike)
    here = begin[row] + number
    above = here - count[row]
    differs = (runs.first[here] != runs.first[above]) | (runs.stop[here] != runs.stop[above])
    return alike & ~_some(differs, row, len(rows))


def _progressions(stack: _Stack, alike: Tensor) -> list[tuple[int, int]]:
    """Runs of alike rectangles on consecutive senders whose tops and left ends move on in equal steps; all
    others alone.
    """
    size = len(stack.top)
    same = torch.zeros(size + 1, dtype=torch.bool, device="cpu")  # alike the one above
    same[1:size] = (alike[1:] == alike[:-1]) & stack.joined[1:] & (stack.left[1:] >= stack.left[:-1])
    step = torch.zeros(size + 1, 2, dtype=torch.int64, device="cpu")
    step[1:size, 0], step[1:size, 1] = stack.top.diff(), stack.left.diff()
    starts = ~same
    starts[1:] |= same[:-1] & (step[1:] != step[:-1]).any(1)  # the second of a progression sets the step
    bounds = starts.nonzero().flatten().tolist()
    return list(pairwise(bounds))


def _steps(first: Tensor, size: Tensor) -> Strided:
    stride = int(first[1] - first[0]) if len(first) > 1 else int(size[0])
    return Strided(int(first[0]), stride, len(first), int(size[0]))


def _gathered(stack: _Stack, tokens: _Tokens) -> Rectangles:
    """Rectangles of one size, their senders gathered; their receivers too unless they follow each other."""
    rectangle, number = ragged(stack.end - stack.begin)
    run = stack.begin[rectangle] + number
    item, place = ragged(tokens.width[run])
    src = Gathered((tokens.left[run][item] + place).view(len(stack.top), -1))
    dst: Groups = _steps(stack.top, stack.height)
    if bool((stack.top.diff() != dst.size).any()):
        dst = Gathered(stack.top.unsqueeze(1) + torch.arange(dst.size, device="cpu"))
    return _piece(stack, tokens, dst, src)


def _piece(stack: _Stack, tokens: _Tokens, dst: Groups, src: Groups) -> Rectangles:
    if not bool(stack.masked[0]):
        return Rectangles(dst, src)
    masks = _masks(stack, tokens)
    heard = masks.table.any(1).any(0).nonzero().flatten()
    first, stop = int(heard[0]), int(heard[-1]) + 1
    trimmed = Masks(masks.table[:, :, first:stop].contiguous(), masks.which)
    return Rectangles(dst, _trimmed(src, first, stop), trimmed, silent=bool((~trimmed.table.any(-1)).any()))


def _trimmed(groups: Groups, first: int, stop: int) -> Groups:
    """Without the senders at either end whom nobody hears."""
    if isinstance(groups, Gathered):
        return Gathered(groups.index[:, first:stop].contiguous())
    return Strided(groups.start + first, groups.stride, groups.count, stop - first)


def _masks(stack: _Stack, tokens: _Tokens) -> Masks:
    """The masks of rectangles of one size, each distinct one once."""
    rectangle, number = ragged(stack.end - stack.begin)
    run = stack.begin[rectangle] + number
    before = tokens.width[run].cumsum(0) - tokens.width[run]
    place = before - before[(stack.end - stack.begin).cumsum(0) - (stack.end - stack.begin)][rectangle]
    masks, tiles = tokens.masks
    some = masks[run] >= 0
    rectangle, place, mask = rectangle[some], place[some], masks[run][some]
    which, example = _distinct(rectangle, place, mask, len(stack.top))
    table = torch.ones(
        len(example), int(stack.height[0]), int(stack.width[0]), dtype=torch.bool, device="cpu"
    )
    wanted = torch.isin(rectangle, example)
    for r, left, m in zip(
        which[rectangle[wanted]].tolist(), place[wanted].tolist(), mask[wanted].tolist(), strict=True
    ):
        inside = table[r, :, left : left + tokens.block]
        inside.copy_(tiles[m, : inside.shape[0], : inside.shape[1]])
    return Masks(table, which)


def _distinct(rectangle: Tensor, place: Tensor, mask: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Which rectangles have the same masks at the same places: a class for each, and a rectangle of every
    class.
    """
    count = torch.bincount(rectangle, minlength=number)
    _, position = ragged(count)
    rows = torch.full((number, 2 * int(count.max())), -1, dtype=torch.int64, device="cpu")
    rows[rectangle, 2 * position], rows[rectangle, 2 * position + 1] = place, mask
    return classes(rows)
