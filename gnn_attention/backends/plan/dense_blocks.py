"""Build rectangles from runs of tiles. A plan has few pieces, each of many rectangles of one size.

Each row of tiles becomes one rectangle. Rectangles of one size that advance in equal steps are
strided views of the tokens; other rectangles copy their tokens. A single large rectangle on
consecutive senders is a piece of its own. Every receiver is in at most one rectangle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.backends.plan.plan import Gathered, Groups, Masks, Rectangles, Strided
from gnn_attention.backends.plan.tile_masks import build_tile_masks, group_equal_rows
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.regions.quadtree import enumerate_groups
from gnn_attention.graph.tiling import Tiles

# The kernel computes this many senders at once: any width costs as much as the next multiple.
SENDER_STEP = 16
# From this many pairs on, a call for one rectangle is cheaper than a copy of its senders.
MIN_LARGE_PAIRS = 2**15


@dataclass(frozen=True, eq=False)
class _Stack:
    """Rectangles, one below another. Each is a row of tiles of ``height`` receivers from ``top`` on.

    ``left`` is the first of ``width`` senders, which are consecutive if ``is_contiguous``. The runs
    of tiles in a rectangle are ``begin .. end - 1``; some are partial if ``has_mask``.
    """

    top: Int[Tensor, " rectangles"]
    height: Int[Tensor, " rectangles"]
    left: Int[Tensor, " rectangles"]
    width: Int[Tensor, " rectangles"]
    is_contiguous: Bool[Tensor, " rectangles"]
    has_mask: Bool[Tensor, " rectangles"]
    begin: Int[Tensor, " rectangles"]
    end: Int[Tensor, " rectangles"]

    def select(self, index: Tensor) -> _Stack:
        return _Stack(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


def build_rectangles(graph: TokenGraph, runs: Tiles) -> list[Rectangles]:
    """Build rectangles that have exactly the edges in ``runs`` of tiles."""
    partial_runs = runs.at(~runs.full)
    index, tile_masks = build_tile_masks(graph, runs.block, partial_runs.row, partial_runs.first)
    # The mask of each run is tile_masks[mask_index]; -1 means a full run.
    mask_index = torch.full_like(runs.row, -1)
    mask_index[~runs.full] = index
    width = _count_senders(graph, runs)
    pieces = []
    for stack in split_into_pieces(graph, runs):
        down, right = stack.top.diff(), stack.left.diff()  # steps to the next rectangle
        dst: Groups = _strided_groups(stack.top, stack.height)
        src: Groups = _strided_groups(stack.left, stack.width)
        # A strided view cannot go backwards over the senders.
        is_regular = (down == down[:1]) & (right == right[:1]) & (right >= 0)
        if not bool(is_regular.all() & stack.is_contiguous.all()):
            rectangle, run_in_rectangle = enumerate_groups(stack.end - stack.begin)
            run = stack.begin[rectangle] + run_in_rectangle
            item, offset = enumerate_groups(width[run])
            src = Gathered(((runs.first * runs.block)[run][item] + offset).view(len(stack.top), -1))
            # Receivers are also gathered unless each rectangle begins where the one before ends.
            if bool((down != dst.size).any()):
                dst = Gathered(stack.top.unsqueeze(1) + torch.arange(dst.size, device="cpu"))
        piece = Rectangles(dst, src)
        if bool(stack.has_mask[0]):
            piece = trim_senders(replace(piece, masks=_build_masks(stack, width, mask_index, tile_masks)))
        pieces.append(piece)
    return pieces


def split_into_pieces(graph: TokenGraph, runs: Tiles) -> list[_Stack]:
    """Split rectangles into progressions in equal steps, single large ones, and others by kind."""
    if not len(runs.row):
        return []
    stack = _stack_tiles(graph, runs)
    properties = [stack.height, stack.width, stack.has_mask, stack.is_contiguous]
    kind, _ = group_equal_rows(torch.stack(properties, 1).to(torch.int64))
    is_large = (stack.is_contiguous & (stack.height * stack.width >= MIN_LARGE_PAIRS)).tolist()
    # Rectangles of one kind on consecutive senders form a progression while their steps are equal.
    num_rectangles = len(stack.top)
    goes_forward = stack.left[1:] >= stack.left[:-1]
    continues = torch.zeros(num_rectangles + 1, dtype=torch.bool, device="cpu")
    continues[1:num_rectangles] = (kind[1:] == kind[:-1]) & stack.is_contiguous[1:] & goes_forward
    step = torch.zeros(num_rectangles + 1, 2, dtype=torch.int64, device="cpu")
    step[1:num_rectangles] = torch.stack([stack.top.diff(), stack.left.diff()], 1)
    starts = ~continues
    # The second rectangle of a progression sets its step.
    starts[1:] |= continues[:-1] & (step[1:] != step[:-1]).any(1)
    pieces, single_starts = [], []
    for start, stop in pairwise(starts.nonzero().flatten().tolist()):
        if stop - start > 1 or is_large[start]:
            pieces.append(stack.select(torch.arange(start, stop, device="cpu")))
        else:
            single_starts.append(start)
    single = torch.tensor(single_starts, dtype=torch.int64, device="cpu")
    single_kinds = torch.unique(kind[single]).tolist()
    return pieces + [stack.select(single[kind[single] == x]) for x in single_kinds]


def _stack_tiles(graph: TokenGraph, runs: Tiles) -> _Stack:
    """Join the runs in each row of tiles into one rectangle."""
    rows, num_runs = torch.unique_consecutive(runs.row, return_counts=True)
    end = num_runs.cumsum(0)
    begin = end - num_runs
    rectangle = torch.repeat_interleave(num_runs)
    has_gap = torch.zeros_like(runs.full)
    has_gap[1:] = (runs.row[1:] == runs.row[:-1]) & (runs.first[1:] != runs.stop[:-1])
    counts = torch.stack([_count_senders(graph, runs), ~runs.full, has_gap])
    width, num_partial, num_gaps = counts.new_zeros(3, len(rows)).index_add_(1, rectangle, counts)
    top = rows * runs.block
    height = (top + runs.block).clamp(max=graph.num_dst) - top
    left = runs.first[begin] * runs.block
    return _Stack(top, height, left, width, num_gaps == 0, num_partial > 0, begin, end)


def _count_senders(graph: TokenGraph, runs: Tiles) -> Int[Tensor, " runs"]:
    return (runs.stop * runs.block).clamp(max=graph.num_src) - runs.first * runs.block


def _strided_groups(first: Tensor, size: Tensor) -> Strided:
    stride = int(first[1] - first[0]) if len(first) > 1 else int(size[0])
    return Strided(int(first[0]), stride, len(first), int(size[0]))


def trim_senders(piece: Rectangles) -> Rectangles:
    """Remove senders without edges from a masked piece, but keep a multiple of ``SENDER_STEP``.

    A strided piece loses senders only at its ends.
    """
    assert piece.masks is not None
    table = piece.masks.table
    has_edge = table.any(1).any(0)
    if isinstance(piece.src, Strided):
        index = has_edge.nonzero().flatten()
        first, stop = (int(index[0]), int(index[-1]) + 1) if len(index) else (0, 1)
        width = min(-(-(stop - first) // SENDER_STEP) * SENDER_STEP, len(has_edge))
        first = min(first, len(has_edge) - width)
        src: Groups = piece.src.select_tokens(first, first + width)
        table = table[:, :, first : first + width].contiguous()
    else:
        width = min(-(-max(int(has_edge.sum()), 1) // SENDER_STEP) * SENDER_STEP, len(has_edge))
        index = has_edge.to(torch.uint8).argsort(stable=True, descending=True)[:width].sort().values
        src, table = Gathered(piece.src.index[:, index].contiguous()), table[:, :, index].contiguous()
    masks = Masks(table, piece.masks.index)
    return replace(piece, src=src, masks=masks, has_empty_rows=bool((~table.any(-1)).any()))


def _build_masks(stack: _Stack, width: Tensor, mask_index: Tensor, tile_masks: Tensor) -> Masks:
    """Build one mask for all rectangles with equal tile masks at equal columns.

    ``width`` and ``mask_index`` have an entry for each run; its mask is ``tile_masks[mask_index]``.
    """
    num_runs = stack.end - stack.begin
    rectangle, run_in_rectangle = enumerate_groups(num_runs)
    run = stack.begin[rectangle] + run_in_rectangle
    width_before = width[run].cumsum(0) - width[run]
    column = width_before - width_before[num_runs.cumsum(0) - num_runs][rectangle]
    is_partial = mask_index[run] >= 0
    rectangle, column, tile_mask = (x[is_partial] for x in (rectangle, column, mask_index[run]))
    _, position = enumerate_groups(torch.bincount(rectangle, minlength=len(stack.top)))
    keys = torch.full((len(stack.top), 2 * int(position.max()) + 2), -1, dtype=torch.int64, device="cpu")
    keys[rectangle, 2 * position], keys[rectangle, 2 * position + 1] = column, tile_mask
    mask_class, example = group_equal_rows(keys)
    shape = len(example), int(stack.height[0]), int(stack.width[0])
    table = torch.ones(shape, dtype=torch.bool, device="cpu")
    entries = torch.stack([mask_class[rectangle], column, tile_mask])[:, torch.isin(rectangle, example)]
    for row, left, index in entries.T.tolist():
        target = table[row, :, left : left + tile_masks.shape[2]]
        target.copy_(tile_masks[index, : target.shape[0], : target.shape[1]])
    return Masks(table, mask_class)
