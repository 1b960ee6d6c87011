"""From runs of tiles to rectangles: few pieces, each of many equal rectangles.

Each row of tiles is a rectangle. Rectangles of one size whose receivers and senders move on in equal steps
are strided views of the tokens; others of one size are gathered together; a large one on consecutive senders
is a piece. Every receiver is in one rectangle at most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.backends.plan.plan import Gathered, Groups, Masks, Rectangles, Strided
from gnn_attention.backends.plan.tile_masks import classes, masks_of_tiles
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.regions.quadtree import enumerate_groups
from gnn_attention.graph.tiling import Tiles

STEP = 16  # senders that the kernel takes at once: others of a width that is no multiple cost as much
LARGE = 2**15  # pairs from which a rectangle is worth a call of the kernel, more than a copy of its senders


@dataclass(frozen=True, eq=False)
class _Stack:
    """Rectangles one below the other: ``height`` receivers from ``top`` on, over the runs of a row of tiles.

    ``width`` counts senders, ``left`` is the first of them, ``joined``: they are consecutive; ``begin`` and
    ``end``: where the runs are in the list.
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
        return _Stack(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


def rectangles(graph: TokenGraph, runs: Tiles) -> list[Rectangles]:
    partial = runs.at(~runs.full)
    which, tiles = masks_of_tiles(graph, runs.block, partial.row, partial.first)
    # which of these masks each run has, -1 for a full one
    mask = torch.full_like(runs.row, -1)
    mask[~runs.full] = which
    left, width = runs.first * runs.block, _widths(graph, runs)
    pieces = []
    for part in by_piece(graph, runs):
        down, right = part.top.diff(), part.left.diff()
        dst: Groups = _steps(part.top, part.height)
        src: Groups = _steps(part.left, part.width)
        # both move on in equal steps, senders not backwards
        strided = ((down == down[:1]) & (right == right[:1]) & (right >= 0)).all() & part.joined.all()
        if not bool(strided):
            rectangle, number = enumerate_groups(part.end - part.begin)
            run = part.begin[rectangle] + number
            item, place = enumerate_groups(width[run])
            src = Gathered((left[run][item] + place).view(len(part.top), -1))
            # receivers are gathered, too, unless they follow each other
            if bool((down != dst.size).any()):
                dst = Gathered(part.top.unsqueeze(1) + torch.arange(dst.size, device="cpu"))
        piece = Rectangles(dst, src)
        if bool(part.masked[0]):
            piece = trim_senders(replace(piece, masks=_masks(part, width, mask, tiles)))
        pieces.append(piece)
    return pieces


def by_piece(graph: TokenGraph, runs: Tiles) -> list[_Stack]:
    """The rectangles of each piece: those in equal steps, a large one, or all others of one size."""
    if not len(runs.row):
        return []
    stack = _stack_tiles(graph, runs)
    kind, _ = classes(torch.stack([stack.height, stack.width, stack.masked, stack.joined], 1).to(torch.int64))
    large = (stack.joined & (stack.height * stack.width >= LARGE)).tolist()
    # runs of rectangles of one kind on consecutive senders in equal steps; others are runs of one
    size = len(stack.top)
    same = torch.zeros(size + 1, dtype=torch.bool, device="cpu")  # of the kind of the one above
    same[1:size] = (kind[1:] == kind[:-1]) & stack.joined[1:] & (stack.left[1:] >= stack.left[:-1])
    step = torch.zeros(size + 1, 2, dtype=torch.int64, device="cpu")
    step[1:size, 0], step[1:size, 1] = stack.top.diff(), stack.left.diff()
    starts = ~same
    starts[1:] |= same[:-1] & (step[1:] != step[:-1]).any(1)  # the second of a progression sets the step
    parts, rest = [], []
    for start, stop in pairwise(starts.nonzero().flatten().tolist()):
        if stop - start > 1 or large[start]:
            parts.append(stack.at(torch.arange(start, stop, device="cpu")))
        else:
            rest.append(start)
    waiting = torch.tensor(rest, dtype=torch.int64, device="cpu")
    return parts + [stack.at(waiting[kind[waiting] == one]) for one in torch.unique(kind[waiting]).tolist()]


def _widths(graph: TokenGraph, runs: Tiles) -> Int[Tensor, " runs"]:
    """The senders of each run."""
    return (runs.stop * runs.block).clamp(max=graph.num_src) - runs.first * runs.block


def _stack_tiles(graph: TokenGraph, runs: Tiles) -> _Stack:
    """One rectangle for each row of tiles."""
    rows, count = torch.unique_consecutive(runs.row, return_counts=True)
    end = count.cumsum(0)
    begin = end - count
    row_of = torch.repeat_interleave(count)
    masked = _any_by_row(~runs.full, row_of, len(rows))
    gap = torch.zeros_like(runs.full)
    gap[1:] = (runs.row[1:] == runs.row[:-1]) & (runs.first[1:] != runs.stop[:-1])
    joined = ~_any_by_row(gap, row_of, len(rows))
    width = torch.zeros_like(rows).index_add_(0, row_of, _widths(graph, runs))
    top = rows * runs.block
    height = (top + runs.block).clamp(max=graph.num_dst) - top
    return _Stack(top, height, runs.first[begin] * runs.block, width, joined, masked, begin, end)


def _any_by_row(flag: Bool[Tensor, " runs"], row_of: Tensor, rows: int) -> Bool[Tensor, " rows"]:
    return torch.zeros(rows, dtype=torch.int64, device="cpu").index_add_(0, row_of, flag.to(torch.int64)) > 0


def _steps(first: Tensor, size: Tensor) -> Strided:
    stride = int(first[1] - first[0]) if len(first) > 1 else int(size[0])
    return Strided(int(first[0]), stride, len(first), int(size[0]))


def trim_senders(piece: Rectangles) -> Rectangles:
    """A masked piece without senders that have no edge, but for those that make a width of whole steps.

    Of strided ones only those at the ends go. The others are masked: ``masks`` has no edge of theirs.
    """
    assert piece.masks is not None
    table = piece.masks.table
    used = table.any(1).any(0)
    if isinstance(piece.src, Strided):
        number = used.nonzero().flatten()
        first, stop = (int(number[0]), int(number[-1]) + 1) if len(number) else (0, 1)
        width = _whole_steps(stop - first, len(used))
        first = min(first, len(used) - width)
        src: Groups = piece.src.band(first, first + width)
        table = table[:, :, first : first + width].contiguous()
    else:
        width = _whole_steps(max(int(used.sum()), 1), len(used))
        kept = used.to(torch.uint8).argsort(stable=True, descending=True)[:width].sort().values
        src, table = Gathered(piece.src.index[:, kept].contiguous()), table[:, :, kept].contiguous()
    masks = Masks(table, piece.masks.which)
    return replace(piece, src=src, masks=masks, has_empty_rows=bool((~table.any(-1)).any()))


def _whole_steps(width: int, most: int) -> int:
    return min(-(-width // STEP) * STEP, most)


def _masks(stack: _Stack, width: Tensor, mask_of: Tensor, tiles: Tensor) -> Masks:
    """The masks of the rectangles; those with the same masks of tiles at the same places share one.

    ``width`` and ``mask_of`` are those of each run, ``tiles`` the masks.
    """
    rectangle, number = enumerate_groups(stack.end - stack.begin)
    run = stack.begin[rectangle] + number
    before = width[run].cumsum(0) - width[run]
    place = before - before[(stack.end - stack.begin).cumsum(0) - (stack.end - stack.begin)][rectangle]
    some = mask_of[run] >= 0
    rectangle, place, mask = rectangle[some], place[some], mask_of[run][some]
    _, position = enumerate_groups(torch.bincount(rectangle, minlength=len(stack.top)))
    rows = torch.full((len(stack.top), 2 * int(position.max()) + 2), -1, dtype=torch.int64, device="cpu")
    rows[rectangle, 2 * position], rows[rectangle, 2 * position + 1] = place, mask
    which, example = classes(rows)
    shape = len(example), int(stack.height[0]), int(stack.width[0])
    table = torch.ones(shape, dtype=torch.bool, device="cpu")
    wanted = torch.isin(rectangle, example)
    for r, left, m in torch.stack([which[rectangle], place, mask])[:, wanted].T.tolist():
        inside = table[r, :, left : left + tiles.shape[2]]
        inside.copy_(tiles[m, : inside.shape[0], : inside.shape[1]])
    return Masks(table, which)
