"""Degrees, counts, lists and equality of rules: exact, and above a few pairs from their cover by boxes,
without visiting each.

A rule made with lists of edges is counted without them, and put right at their pairs (``split_edge_lists``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph.regions import enumerate_pairs
from gnn_attention.graph.regions.grid_index import Grid
from gnn_attention.graph.regions.quadtree import (
    CELLS,
    DIFFERENCE,
    DST,
    FULL,
    SRC,
    Boxes,
    Piece,
    cells,
    decompose,
    profile,
    ragged,
    root,
)
from gnn_attention.graph.regions.split_edge_lists import SplitRule, split_edge_lists
from gnn_attention.graph.rules import Rule, xor

MANY = 2**24  # pairs up to which a list is made quickest by visiting them, because it comes out sorted


def in_degree(rule: Rule, name: str, shape: enumerate_pairs.Shape) -> Int[Tensor, "batch heads dst"]:
    """How many senders each receiver attends to."""
    if enumerate_pairs.few(shape):
        return enumerate_pairs.in_degree(rule, name, shape)
    found = split_edge_lists(rule, *shape[2:])
    if found is None:
        return _in_degree(rule, shape)
    degree = _in_degree(found.rule, shape)
    for b, h in product(range(shape[0]), range(shape[1])):
        change = _evaluate_sample(rule, found, b, h).to(torch.int64) - _evaluate_sample(
            found.rule, found, b, h
        ).to(torch.int64)
        degree[b, h].index_add_(0, found.dst, change)
    return degree


def _in_degree(rule: Rule, shape: enumerate_pairs.Shape) -> Int[Tensor, "batch heads dst"]:
    batch, heads, num_dst, _ = shape
    change = torch.zeros(batch * heads, num_dst + 1, dtype=torch.int64, device="cpu")
    for piece in decompose(rule, root(shape)):
        for boxes, _, count in _equal_rows(rule, piece):
            first = boxes.owner * (num_dst + 1) + boxes.dst
            change.view(-1).index_add_(0, first, count)
            change.view(-1).index_add_(0, first + boxes.height, -count)
        for boxes, row, count in _single_rows(rule, piece):
            first = boxes.owner * (num_dst + 1) + boxes.dst + row
            change.view(-1).index_add_(0, first, count)
            change.view(-1).index_add_(0, first + 1, -count)
    return change.cumsum_(1)[:, :-1].reshape(batch, heads, num_dst)


def edges_of_each(rule: Rule, boxes: Boxes, number: int) -> Int[Tensor, " number"]:
    """How many edges the boxes of each owner 0 .. number - 1 hold together."""
    found = _split_in_boxes(rule, boxes)
    if found is None:
        return _edges_of_each(rule, boxes, number)
    listed, box = found
    total = _edges_of_each(listed.rule, boxes, number)
    b, h = boxes.batch[box], boxes.head[box]
    for of, sign in ((rule, 1), (listed.rule, -1)):
        total.index_add_(0, boxes.owner[box], _evaluate_at(of, b, h, listed).to(torch.int64), alpha=sign)
    return total


def _edges_of_each(rule: Rule, boxes: Boxes, number: int) -> Int[Tensor, " number"]:
    total = torch.zeros(number, dtype=torch.int64, device="cpu")
    for piece in decompose(rule, boxes):
        for part, _, count in _equal_rows(rule, piece):
            total.index_add_(0, part.owner, count * part.height)
        for part, _, count in _single_rows(rule, piece):
            total.index_add_(0, part.owner, count)
    return total


def same(left: Rule, right: Rule, name: str, shape: enumerate_pairs.Shape) -> bool:
    """True if both rules hold for the same pairs, for every sample and head."""
    if left is right:
        return True
    if enumerate_pairs.few(shape):
        return enumerate_pairs.same(left, right, name, shape)
    return not any_edge(partial(xor, left, right), shape)


def any_edge(rule: Rule, shape: enumerate_pairs.Shape) -> bool:
    """True if the rule holds anywhere."""
    found = split_edge_lists(rule, *shape[2:])
    if found is None:
        return _any_edge(rule, shape)
    places = list(product(range(shape[0]), range(shape[1])))
    if any(bool(_evaluate_sample(rule, found, *place).any()) for place in places):
        return True
    if not _any_edge(found.rule, shape):
        return False
    return int(_in_degree(found.rule, shape).sum()) > sum(
        int(_evaluate_sample(found.rule, found, *place).sum()) for place in places
    )


def _any_edge(rule: Rule, shape: enumerate_pairs.Shape) -> bool:
    for piece in decompose(rule, root(shape)):
        for way in (_equal_rows, _single_rows):
            if any(bool((count > 0).any()) for _, _, count in way(rule, piece)):
                return True
    return False


def edge_list(rule: Rule, name: str, shape: enumerate_pairs.Shape) -> Int[Tensor, "2 edges"]:
    """The edges of the first sample and head, by receiver, then sender."""
    if math.prod(shape[2:]) <= MANY:
        return enumerate_pairs.edge_list(rule, name, shape)
    found = split_edge_lists(rule, *shape[2:])
    edges = edges_in(rule if found is None else found.rule, root((1, 1, *shape[2:])), shape[3])
    return edges if found is None else _correct_listed(edges, rule, found, shape[3])


def edges_in(rule: Rule, boxes: Boxes, num_src: int) -> Int[Tensor, "2 edges"]:
    """The edges inside some boxes of one sample and head, by receiver, then sender."""
    found = _split_in_boxes(rule, boxes)
    if found is None:
        return _edges_in(rule, boxes, num_src)
    return _correct_listed(_edges_in(found[0].rule, boxes, num_src), rule, found[0], num_src)


def _edges_in(rule: Rule, boxes: Boxes, num_src: int) -> Int[Tensor, "2 edges"]:
    keys = [torch.zeros(0, dtype=torch.int64, device="cpu")]
    for piece in decompose(rule, boxes):
        for dst, src, step_dst, step_src, count in _strokes(rule, piece):
            stroke, number = ragged(count)
            keys.append((dst * num_src + src)[stroke] + number * (step_dst * num_src + step_src))
    key = torch.cat(keys).sort().values
    return torch.stack([key % max(num_src, 1), key // max(num_src, 1)])


def _correct_listed(
    edges: Int[Tensor, "2 edges"], rule: Rule, found: SplitRule, num_src: int
) -> Int[Tensor, "2 edges"]:
    """The edges of the rule without lists, sorted, with the listed pairs as the rule itself has them."""
    key, listed = (dst * num_src + src for dst, src in ((edges[1], edges[0]), (found.dst, found.src)))
    place = torch.searchsorted(key, listed)
    there = place[place < len(key)][key[place[place < len(key)]] == listed[place < len(key)]]
    others = torch.ones_like(key, dtype=torch.bool).index_fill_(0, there, False)
    nothing = torch.zeros_like(found.dst)
    key = torch.cat([key[others], listed[_evaluate_at(rule, nothing, nothing, found)]]).sort().values
    return torch.stack([key % max(num_src, 1), key // max(num_src, 1)])


def _evaluate_at(rule: Rule, b: Tensor, h: Tensor, pairs: SplitRule) -> Bool[Tensor, " pairs"]:
    return enumerate_pairs.evaluate(rule, "this graph", b, h, pairs.dst, pairs.src).expand(len(pairs.dst))


def _evaluate_sample(rule: Rule, pairs: SplitRule, batch: int, head: int) -> Bool[Tensor, " pairs"]:
    return _evaluate_at(rule, torch.full_like(pairs.dst, batch), torch.full_like(pairs.dst, head), pairs)


def _split_in_boxes(rule: Rule, boxes: Boxes) -> tuple[SplitRule, Int[Tensor, " pairs"]] | None:
    """The rule without its lists, the listed pairs inside the boxes, and the box of each, sample after
    sample.

    None without lists, or if boxes are not tiles of one grid, among which the box of a pair is looked up.
    """
    if not len(boxes):
        return None
    found = split_edge_lists(
        rule, int((boxes.dst + boxes.height).max()), int((boxes.src + boxes.width).max())
    )
    grid = None if found is None else Grid.of(boxes)
    if found is None or grid is None:
        return None
    samples = torch.unique(torch.stack([boxes.batch, boxes.head], 1), dim=0).tolist()
    inside = [grid.boxes_of(b, h, found.dst, found.src) for b, h in samples]
    pair = torch.cat([pairs for pairs, _ in inside])
    return SplitRule(found.rule, found.src[pair], found.dst[pair]), torch.cat([box for _, box in inside])


Rows = tuple[Boxes, Tensor, Tensor]  # boxes, the row inside each, how many edges that row holds


def _equal_rows(rule: Rule, piece: Piece) -> Iterator[Rows]:
    boxes = piece.boxes
    if piece.kind == FULL:
        yield boxes, torch.zeros_like(boxes.dst), boxes.width
    elif piece.kind == SRC:
        edge, box, _ = profile(rule, piece)
        count = torch.zeros_like(boxes.dst).index_add_(0, box, edge.to(torch.int64))
        yield boxes, torch.zeros_like(boxes.dst), count


def _single_rows(rule: Rule, piece: Piece) -> Iterator[Rows]:
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
