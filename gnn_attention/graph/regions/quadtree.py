"""A graph cut into boxes that can be counted without visiting their pairs: a quadtree of intervals.

A rule is evaluated on all boxes at once (``intervals.arithmetic``), the graph first. A box without an edge is
dropped. A box is done when all its pairs are edges, or when what is open depends on the receiver, the sender
or their difference alone: one column, one row or one diagonal profile decides it. Any other box is cut in
four by four, down to boxes of ``LEAF`` tokens, whose pairs are visited.
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

# the kind of a piece: on what it depends whether a pair is an edge
FULL, DST, SRC, DIFFERENCE, CELLS = 0, values.DST, values.SRC, values.DIFFERENCE, values.ANYTHING
EMPTY = 255
# tokens on the side of the smallest box
LEAF = 32
# boxes evaluated together
AT_ONCE = 2**15
# rows and columns of the boxes of one piece, unless it is one box: a million tokens, or many heads of fewer
LONGEST = 2**21


@dataclass(frozen=True)
class Boxes:
    """K boxes of receivers ``dst .. dst + height - 1`` and senders ``src .. src + width - 1`` of a head each.

    ``owner`` is the caller's: a number that the parts of a box inherit.
    """

    owner: Tensor
    batch: Tensor
    head: Tensor
    dst: Tensor
    src: Tensor
    height: Tensor
    width: Tensor

    def at(self, chosen: Tensor | slice) -> Boxes:
        return Boxes(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.dst)


class Piece(NamedTuple):
    """Boxes of one kind: FULL, open in DST, SRC or DIFFERENCE alone, or CELLS to be visited."""

    kind: int
    boxes: Boxes


def root(shape: Shape) -> Boxes:
    batch, heads, num_dst, num_src = shape
    batch = batch if num_dst and num_src else 0
    b = torch.arange(batch, device="cpu").repeat_interleave(heads)
    h = torch.arange(heads, device="cpu").repeat(batch)
    zero = torch.zeros_like(b)
    return Boxes(b * heads + h, b, h, zero, zero, zero + num_dst, zero + num_src)


def decompose(edges: EdgeSet, boxes: Boxes, leaf: int = LEAF, grid: bool = False) -> Iterator[Piece]:
    """The pieces that together hold every edge of the boxes once; the boxes are tiles of one grid.

    Sides shrink by four from ``leaf * 4^k`` downwards, so that boxes stay aligned. With ``grid`` every box
    but a full one is cut down to ``leaf``.
    """
    waiting = [boxes]
    while waiting:
        boxes = waiting.pop()
        part = boxes.at(slice(AT_ONCE))
        # later, so that few boxes of each size wait
        if len(boxes) > AT_ONCE:
            waiting.append(boxes.at(slice(AT_ONCE, None)))
        kind = kinds(edges, part)
        if grid:
            is_small = torch.maximum(part.height, part.width) <= leaf
            kind = torch.where(is_small | (kind == FULL) | (kind == EMPTY), kind, CELLS)
        yield from (piece for k in (FULL, DST, SRC, DIFFERENCE) for piece in _pieces(k, part.at(kind == k)))
        rest = part.at(kind == CELLS)
        if len(rest):
            side = int(torch.maximum(rest.height, rest.width).max())
            if side <= leaf:
                yield Piece(CELLS, rest)
            else:
                waiting.append(split_evenly(rest, _next_side(side, leaf)))


def _pieces(kind: int, boxes: Boxes) -> Iterator[Piece]:
    group = (boxes.height + boxes.width).cumsum(0) // LONGEST
    bounds = [0, *(group.diff().nonzero().flatten() + 1).tolist(), len(boxes)]
    yield from (Piece(kind, boxes.at(slice(start, stop))) for start, stop in pairwise(bounds) if start < stop)


def _next_side(side: int, leaf: int) -> int:
    return _next_side(side, leaf * 4) if leaf * 4 < side else leaf


def kinds(edges: EdgeSet, boxes: Boxes) -> Tensor:
    box = values.Box(boxes.dst, boxes.dst + boxes.height - 1, boxes.src, boxes.src + boxes.width - 1)
    b, h = arithmetic.constant(box, boxes.batch), arithmetic.constant(box, boxes.head)
    answer = edges.boxes(b, h, *arithmetic.token_ranges(box))
    simple = (answer.axes == DST) | (answer.axes == SRC) | (answer.axes == DIFFERENCE)
    kind = torch.where(simple, answer.axes, CELLS).masked_fill(answer.every, FULL)
    return kind.masked_fill(~answer.some, EMPTY)


def split_evenly(boxes: Boxes, side: int) -> Boxes:
    """Every box cut into boxes of ``side x side``, those at its lower and right border smaller."""
    down, across = -(-boxes.height // side), -(-boxes.width // side)
    parent, number = enumerate_groups(down * across)
    row, column = number // across[parent], number % across[parent]
    cut = boxes.at(parent)
    height = (cut.height - row * side).clamp(max=side)
    width = (cut.width - column * side).clamp(max=side)
    return replace(cut, dst=cut.dst + row * side, src=cut.src + column * side, height=height, width=width)


def enumerate_groups(counts: Int[Tensor, " groups"]) -> tuple[Int[Tensor, " items"], Int[Tensor, " items"]]:
    """For ``counts[g]`` items of each group g: the group of every item, and its number inside the group."""
    group = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
    return group, torch.arange(len(group), device="cpu") - (counts.cumsum(0) - counts)[group]


Items = Int[Tensor, " items"]


def profile(edges: EdgeSet, piece: Piece) -> tuple[Bool[Tensor, " items"], Items, Items]:
    """All that is open in boxes that depend on one thing alone: ``(edge, box, number)``.

    The numbers of a box count its receivers (kind DST), its senders (SRC) or its diagonals (DIFFERENCE):
    diagonal t holds the pairs with ``dst - src = dst_0 - (src_0 + width - 1) + t``.
    """
    boxes = piece.boxes
    counts = {DST: boxes.height, SRC: boxes.width, DIFFERENCE: boxes.height + boxes.width - 1}[piece.kind]
    group, number = enumerate_groups(counts)
    dst, src = boxes.dst[group], boxes.src[group]
    if piece.kind == DIFFERENCE:
        gap = dst - (src + boxes.width[group] - 1) + number
        dst = torch.maximum(dst, src + gap)
        src = dst - gap
    else:
        dst, src = (dst + number, src) if piece.kind == DST else (dst, src + number)
    edge = enumerate_pairs.evaluate(
        edges.contains, "this graph", boxes.batch[group], boxes.head[group], dst, src
    )
    return edge.expand(len(group)), group, number


def cells(edges: EdgeSet, boxes: Boxes) -> Iterator[tuple[Boxes, Bool[Tensor, "boxes height width"]]]:
    """The pairs of boxes, some boxes at a time, False beyond a box's border."""
    tall, wide = (int(side.max()) if len(boxes) else 0 for side in (boxes.height, boxes.width))
    step = max(1, enumerate_pairs.CELLS_AT_ONCE // max(1, tall * wide))
    for start in range(0, len(boxes), step):
        part = boxes.at(slice(start, start + step))
        columns = (getattr(part, field.name).view(-1, 1, 1) for field in fields(part))
        _, b, h, first, left, height, width = columns
        row, column = torch.arange(tall, device="cpu").view(-1, 1), torch.arange(wide, device="cpu")
        dst, src = first + torch.minimum(row, height - 1), left + torch.minimum(column, width - 1)
        edge = enumerate_pairs.evaluate(edges.contains, "this graph", b, h, dst, src)
        yield part, edge & (row < height) & (column < width)


class Bands(NamedTuple):
    """Parallelograms of edges: row i of ``rows`` has ``width`` edges from ``(dst + i, src + i slope)`` on."""

    owner: Tensor
    dst: Tensor
    src: Tensor
    rows: Tensor
    width: Tensor
    slope: int = 0


def bands_of(edges: EdgeSet, piece: Piece) -> Iterator[Bands]:
    """The edges of a piece, each of them in one band."""
    boxes = piece.boxes
    if piece.kind == FULL:
        yield Bands(boxes.owner, boxes.dst, boxes.src, boxes.height, boxes.width)
        return
    if piece.kind == CELLS:
        yield from (_bands_of_cells(part, edge) for part, edge in cells(edges, boxes))
        return
    edge, box, number = profile(edges, piece)
    boxes, number = boxes.at(box[edge]), number[edge]
    one = torch.ones_like(number)
    if piece.kind == DST:
        yield Bands(boxes.owner, boxes.dst + number, boxes.src, one, boxes.width)
    elif piece.kind == SRC:
        yield Bands(boxes.owner, boxes.dst, boxes.src + number, boxes.height, one)
    else:
        # where the diagonal enters the box
        down, right = (number - boxes.width + 1).clamp(min=0), (boxes.width - 1 - number).clamp(min=0)
        rows = torch.minimum(boxes.height - down, boxes.width - right)
        yield Bands(boxes.owner, boxes.dst + down, boxes.src + right, rows, one, slope=1)


def _bands_of_cells(boxes: Boxes, edge: Bool[Tensor, "boxes height width"]) -> Bands:
    """The runs of edges in each row."""
    padded = torch.nn.functional.pad(edge, (1, 1))
    box, row, first = (edge & ~padded[..., :-2]).nonzero(as_tuple=True)
    last = (edge & ~padded[..., 2:]).nonzero(as_tuple=True)[2]
    dst, src = boxes.dst[box] + row, boxes.src[box] + first
    return Bands(boxes.owner[box], dst, src, torch.ones_like(row), last - first + 1)
