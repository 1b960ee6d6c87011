"""Degrees, counts, lists and equality of rules: exact, and above a few pairs from their cover by boxes, without visiting each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch

from gnn_attention import _enumeration
from gnn_attention._cover import CELLS, DIFFERENCE, DST, FULL, SRC, Boxes, Piece, cells, cover, profile, ragged, root
from gnn_attention._rules import Rule, xor
from gnn_attention._shapes import Int, Tensor

__all__ = ["any_edge", "edge_list", "edges_in", "edges_of_each", "in_degree", "same"]

MANY = 2**24  # pairs up to which a list is made quickest by visiting them, because it comes out sorted


def in_degree(rule: Rule, name: str, shape: _enumeration.Shape) -> Int[Tensor, "batch heads dst"]:
    """How many senders each receiver hears."""
    if _enumeration.few(shape):
        return _enumeration.in_degree(rule, name, shape)
    batch, heads, num_dst, _ = shape
    change = torch.zeros(batch * heads, num_dst + 1, dtype=torch.int64, device="cpu")
    for piece in cover(rule, root(shape)):
        for boxes, _, count in _same_in_all_rows(rule, piece):
            first = boxes.owner * (num_dst + 1) + boxes.dst
            change.view(-1).index_add_(0, first, count)
            change.view(-1).index_add_(0, first + boxes.height, -count)
        for boxes, row, count in _row_by_row(rule, piece):
            first = boxes.owner * (num_dst + 1) + boxes.dst + row
            change.view(-1).index_add_(0, first, count)
            change.view(-1).index_add_(0, first + 1, -count)
    return change.cumsum_(1)[:, :-1].reshape(batch, heads, num_dst)


def edges_of_each(rule: Rule, boxes: Boxes, number: int) -> Int[Tensor, " number"]:
    """How many edges the boxes of each owner 0 .. number - 1 hold together."""
    total = torch.zeros(number, dtype=torch.int64, device="cpu")
    for piece in cover(rule, boxes):
        for part, _, count in _same_in_all_rows(rule, piece):
            total.index_add_(0, part.owner, count * part.height)
        for part, _, count in _row_by_row(rule, piece):
            total.index_add_(0, part.owner, count)
    return total


def same(left: Rule, right: Rule, name: str, shape: _enumeration.Shape) -> bool:
    """True if both rules hold for the same pairs, for every sample and head."""
    if left is right:
        return True
    if _enumeration.few(shape):
        return _enumeration.same(left, right, name, shape)
    return not any_edge(partial(xor, left, right), shape)


def any_edge(rule: Rule, shape: _enumeration.Shape) -> bool:
    """True if the rule holds anywhere."""
    for piece in cover(rule, root(shape)):
        for way in (_same_in_all_rows, _row_by_row):
            if any(bool((count > 0).any()) for _, _, count in way(rule, piece)):
                return True
    return False


def edge_list(rule: Rule, name: str, shape: _enumeration.Shape) -> Int[Tensor, "2 edges"]:
    """The edges of the first sample and head, by receiver, then sender."""
    if math.prod(shape[2:]) <= MANY:
        return _enumeration.edge_list(rule, name, shape)
    return edges_in(rule, root((1, 1, *shape[2:])), shape[3])


def edges_in(rule: Rule, boxes: Boxes, num_src: int) -> Int[Tensor, "2 edges"]:
    """The edges inside some boxes of one sample and head, by receiver, then sender."""
    keys = [torch.zeros(0, dtype=torch.int64, device="cpu")]
    for piece in cover(rule, boxes):
        for dst, src, step_dst, step_src, count in _strokes(rule, piece):
            stroke, number = ragged(count)
            keys.append((dst * num_src + src)[stroke] + number * (step_dst * num_src + step_src))
    key = torch.cat(keys).sort().values
    return torch.stack([key % max(num_src, 1), key // max(num_src, 1)])


Rows = tuple[Boxes, Tensor, Tensor]  # boxes, the row inside each, how many edges that row holds


def _same_in_all_rows(rule: Rule, piece: Piece) -> Iterator[Rows]:
    """Boxes whose rows are all alike."""
    boxes = piece.boxes
    if piece.kind == FULL:
        yield boxes, torch.zeros_like(boxes.dst), boxes.width
    elif piece.kind == SRC:
        edge, box, _ = profile(rule, piece)
        count = torch.zeros_like(boxes.dst).index_add_(0, box, edge.to(torch.int64))
        yield boxes, torch.zeros_like(boxes.dst), count


def _row_by_row(rule: Rule, piece: Piece) -> Iterator[Rows]:
    """All other boxes, an entry for each of their rows."""
    boxes = piece.boxes
    if piece.kind == DST:
        edge, box, row = profile(rule, piece)
        yield boxes.at(box), row, edge * boxes.width[box]
    elif piece.kind == DIFFERENCE:
        edge, _, _ = profile(rule, piece)
        before = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), edge.cumsum(0)])
        length = boxes.height + boxes.width - 1
        box, row = ragged(boxes.height)
        first = (length.cumsum(0) - length)[box] + row  # a row meets `width` diagonals in succession
        yield boxes.at(box), row, before[first + boxes.width[box]] - before[first]
    elif piece.kind == CELLS:
        for part, edge in cells(rule, boxes):
            box, row = ragged(part.height)
            yield part.at(box), row, edge.sum(2)[box, row]


def _strokes(rule: Rule, piece: Piece) -> Iterator[tuple[Tensor, Tensor, int, int, Tensor]]:
    """Edges as straight strokes: first receiver, first sender, the step of both, and the number of edges."""
    boxes = piece.boxes
    if piece.kind == CELLS:
        for part, edge in cells(rule, boxes):
            box, row, column = edge.nonzero(as_tuple=True)
            yield part.dst[box] + row, part.src[box] + column, 0, 0, torch.ones_like(box)
        return
    if piece.kind == FULL:
        box, row = ragged(boxes.height)
        yield boxes.dst[box] + row, boxes.src[box], 0, 1, boxes.width[box]
        return
    edge, box, number = profile(rule, piece)
    box, number = box[edge], number[edge]
    dst, src, height, width = (field[box] for field in (boxes.dst, boxes.src, boxes.height, boxes.width))
    if piece.kind == DST:
        yield dst + number, src, 0, 1, width
    elif piece.kind == SRC:
        yield dst, src + number, 1, 0, height
    else:
        down = (number - width + 1).clamp(min=0)  # where the diagonal enters the box
        right = (width - 1 - number).clamp(min=0)
        yield dst + down, src + right, 1, 1, torch.minimum(height - down, width - right)
