"""Cut a graph into boxes that can be counted without visiting their pairs: a quadtree of intervals.

A rule is evaluated on many boxes at once (``intervals.arithmetic``), starting with one box for the
graph. A box without edges is dropped. A box is done if all its pairs are edges. It is also done if
the rule, inside the box, depends only on the receiver, only on the sender or only on their
difference: then one column, one row or one pair of each diagonal decides it. Any other box is cut
into 16 boxes, four a side, until their sides have ``MIN_SIDE`` tokens. Then pairs are visited.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph.edges.edge_set import EdgeSet
from gnn_attention.graph.intervals import arithmetic, values
from gnn_attention.graph.regions import enumerate_pairs
from gnn_attention.graph.rules import Shape

# The kind of a piece says what decides whether a pair is an edge.
FULL, DST, SRC, DIFFERENCE, CELLS = 0, values.DST, values.SRC, values.DIFFERENCE, values.ANYTHING
EMPTY = 255
# The smallest boxes have this number of tokens on a side.
MIN_SIDE = 32
# A rule is evaluated on at most this number of boxes at once.
MAX_BOXES = 2**15
# The boxes of a piece have about this many rows and columns in total.
MAX_PIECE_SIDES = 2**21
Items = Int[Tensor, " items"]


@dataclass(frozen=True)
class Boxes:
    """K boxes; each has ``height`` receivers from ``dst`` and ``width`` senders from ``src``.

    Each has a sample and a head. Boxes cut from it inherit its ``owner``, which the caller chose.
    """

    owner: Tensor
    batch: Tensor
    head: Tensor
    dst: Tensor
    src: Tensor
    height: Tensor
    width: Tensor

    def at(self, index: Tensor | slice) -> Boxes:
        return Boxes(*(getattr(self, field.name)[index] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.dst)


class Piece(NamedTuple):
    """Boxes of one kind: FULL, decided by DST, SRC or DIFFERENCE, or visited pair by pair (CELLS)."""

    kind: int
    boxes: Boxes


def root(shape: Shape) -> Boxes:
    batch, heads, num_dst, num_src = shape
    batch = batch if num_dst and num_src else 0
    b = torch.arange(batch, device="cpu").repeat_interleave(heads)
    h = torch.arange(heads, device="cpu").repeat(batch)
    zero = torch.zeros_like(b)
    return Boxes(b * heads + h, b, h, zero, zero, zero + num_dst, zero + num_src)


def decompose(edges: EdgeSet, boxes: Boxes, min_side: int = MIN_SIDE, grid: bool = False) -> Iterator[Piece]:
    """Yield pieces that together hold each edge of the boxes once. The boxes must be tiles of one grid.

    Boxes are cut to sides of ``min_side * 4^k``, so that they stay aligned. With ``grid``, every
    box that is neither full nor empty is cut down to ``min_side``.
    """
    stack = [boxes]
    while stack:
        boxes = stack.pop()
        # The other boxes wait until these are cut down completely. This keeps the stack small.
        if len(boxes) > MAX_BOXES:
            stack.append(boxes.at(slice(MAX_BOXES, None)))
            boxes = boxes.at(slice(MAX_BOXES))
        box_kinds = classify(edges, boxes)
        if grid:
            is_leaf = torch.maximum(boxes.height, boxes.width) <= min_side
            is_done = is_leaf | (box_kinds == FULL) | (box_kinds == EMPTY)
            box_kinds = torch.where(is_done, box_kinds, CELLS)
        for kind in (FULL, DST, SRC, DIFFERENCE):
            yield from _split_into_pieces(kind, boxes.at(box_kinds == kind))
        undecided_boxes = boxes.at(box_kinds == CELLS)
        if len(undecided_boxes):
            side = int(torch.maximum(undecided_boxes.height, undecided_boxes.width).max())
            if side <= min_side:
                yield Piece(CELLS, undecided_boxes)
            else:
                next_side = min_side
                while next_side * 4 < side:
                    next_side *= 4
                stack.append(split_evenly(undecided_boxes, next_side))


def _split_into_pieces(kind: int, boxes: Boxes) -> Iterator[Piece]:
    group = (boxes.height + boxes.width).cumsum(0) // MAX_PIECE_SIDES
    bounds = [0, *(group.diff().nonzero().flatten() + 1).tolist(), len(boxes)]
    yield from (Piece(kind, boxes.at(slice(start, stop))) for start, stop in pairwise(bounds) if start < stop)


def classify(edges: EdgeSet, boxes: Boxes) -> Tensor:
    box = values.Box(boxes.dst, boxes.dst + boxes.height - 1, boxes.src, boxes.src + boxes.width - 1)
    b, h = arithmetic.constant(box, boxes.batch), arithmetic.constant(box, boxes.head)
    state = edges.boxes(b, h, *arithmetic.token_ranges(box))
    has_one_axis = (state.axes == DST) | (state.axes == SRC) | (state.axes == DIFFERENCE)
    kind = torch.where(has_one_axis, state.axes, CELLS).masked_fill(state.all_true, FULL)
    return kind.masked_fill(~state.any_true, EMPTY)


def split_evenly(boxes: Boxes, side: int) -> Boxes:
    """Cut each box into boxes of ``side x side``, which are smaller at its lower and right edges."""
    num_rows, num_columns = -(-boxes.height // side), -(-boxes.width // side)
    parent, child = enumerate_groups(num_rows * num_columns)
    top, left = child // num_columns[parent] * side, child % num_columns[parent] * side
    parents = boxes.at(parent)
    height = (parents.height - top).clamp(max=side)
    width = (parents.width - left).clamp(max=side)
    return replace(parents, dst=parents.dst + top, src=parents.src + left, height=height, width=width)


def enumerate_groups(counts: Int[Tensor, " groups"]) -> tuple[Items, Items]:
    """Return the group of each item, and its index in the group; group i has ``counts[i]`` items."""
    group = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
    return group, torch.arange(len(group), device="cpu") - (counts.cumsum(0) - counts)[group]


def evaluate_lines(edges: EdgeSet, piece: Piece) -> tuple[Bool[Tensor, " items"], Items, Items]:
    """Evaluate one line of pairs for each decision, and return ``(is_edge, box, line)`` of each line.

    The lines of a box are its receivers (kind DST), its senders (SRC) or its diagonals. Diagonal
    t holds the pairs with ``dst - src = dst_0 - (src_0 + width - 1) + t``.
    """
    boxes = piece.boxes
    counts = {DST: boxes.height, SRC: boxes.width, DIFFERENCE: boxes.height + boxes.width - 1}[piece.kind]
    box, line = enumerate_groups(counts)
    dst, src = boxes.dst[box], boxes.src[box]
    if piece.kind == DST:
        dst = dst + line
    elif piece.kind == SRC:
        src = src + line
    else:
        gap = dst - (src + boxes.width[box] - 1) + line
        dst = torch.maximum(dst, src + gap)
        src = dst - gap
    b, h = boxes.batch[box], boxes.head[box]
    is_edge = enumerate_pairs.evaluate(edges.contains, "this graph", b, h, dst, src)
    return is_edge.expand(len(box)), box, line


def cells(edges: EdgeSet, boxes: Boxes) -> Iterator[tuple[Boxes, Bool[Tensor, "boxes height width"]]]:
    """Yield chunks of boxes with the mask of their pairs, which is False outside of a box."""
    if not len(boxes):
        return
    row = torch.arange(int(boxes.height.max()), device="cpu").view(-1, 1)
    column = torch.arange(int(boxes.width.max()), device="cpu")
    chunk_size = max(1, enumerate_pairs.MAX_PAIRS_PER_CHUNK // max(1, len(row) * len(column)))
    for start in range(0, len(boxes), chunk_size):
        chunk = boxes.at(slice(start, start + chunk_size))
        values = (getattr(chunk, field.name).view(-1, 1, 1) for field in fields(chunk))
        _, b, h, top, left, height, width = values
        dst, src = top + torch.minimum(row, height - 1), left + torch.minimum(column, width - 1)
        is_edge = enumerate_pairs.evaluate(edges.contains, "this graph", b, h, dst, src)
        yield chunk, is_edge & (row < height) & (column < width)


class Bands(NamedTuple):
    """Parallelograms of edges: row i has ``width`` edges, from ``(dst + i, src + i * slope)`` on."""

    owner: Tensor
    dst: Tensor
    src: Tensor
    num_rows: Tensor
    width: Tensor
    slope: int = 0


def bands_from_piece(edges: EdgeSet, piece: Piece) -> Iterator[Bands]:
    """Yield bands that hold the edges of a piece, each edge once."""
    boxes = piece.boxes
    if piece.kind == FULL:
        yield Bands(boxes.owner, boxes.dst, boxes.src, boxes.height, boxes.width)
        return
    if piece.kind == CELLS:
        for chunk, is_edge in cells(edges, boxes):
            # Here a band is a run of edges in one row.
            padded_mask = torch.nn.functional.pad(is_edge, (1, 1))
            box, row, start = (is_edge & ~padded_mask[..., :-2]).nonzero(as_tuple=True)
            end = (is_edge & ~padded_mask[..., 2:]).nonzero(as_tuple=True)[2]
            dst, src = chunk.dst[box] + row, chunk.src[box] + start
            yield Bands(chunk.owner[box], dst, src, torch.ones_like(row), end - start + 1)
        return
    is_edge, box, line = evaluate_lines(edges, piece)
    boxes, line = boxes.at(box[is_edge]), line[is_edge]
    ones = torch.ones_like(line)
    if piece.kind == DST:
        yield Bands(boxes.owner, boxes.dst + line, boxes.src, ones, boxes.width)
    elif piece.kind == SRC:
        yield Bands(boxes.owner, boxes.dst, boxes.src + line, boxes.height, ones)
    else:
        # The diagonal enters the box at this row and column.
        row, column = (line - boxes.width + 1).clamp(min=0), (boxes.width - 1 - line).clamp(min=0)
        num_rows = torch.minimum(boxes.height - row, boxes.width - column)
        yield Bands(boxes.owner, boxes.dst + row, boxes.src + column, num_rows, ones, slope=1)
