"""Degrees, counts, edge lists and equality: exact, and for many pairs read off the cut into boxes.

Edges ``R`` that are combined with lists are cut with an empty list in the place of each, ``R_0``. Both are
the same for all pairs that no list holds, so ``|R| = |R_0| + sum over listed pairs of (R - R_0)``: structured
edges are counted by boxes, and scattered pairs, which would break every box, one by one. Inside a rule a list
stays.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph.edges.edge_set import EdgeSet
from gnn_attention.graph.edges.rule import CombinedEdges
from gnn_attention.graph.intervals.table_bounds import Grid
from gnn_attention.graph.regions import enumerate_pairs, quadtree
from gnn_attention.graph.regions.quadtree import (
    DIFFERENCE,
    Bands,
    Boxes,
    Piece,
    bands_of,
    enumerate_groups,
    root,
)
from gnn_attention.graph.rules import Shape

# pairs up to which visiting all of them is the quickest way to a list, because it comes out sorted
MANY = 2**20
# tokens at which two rules are compared first
PROBES = 64


class SplitEdges(NamedTuple):
    """``edges`` are the same as others for all pairs but these: distinct, by receiver, then sender."""

    edges: EdgeSet
    src: Int[Tensor, " pairs"]
    dst: Int[Tensor, " pairs"]


def split_edge_lists(edges: EdgeSet, num_dst: int, num_src: int) -> SplitEdges | None:
    """The edges without their lists, and the listed pairs among these tokens; None if there is no list."""
    without, keys = edges.without_lists(num_dst, num_src)
    if not keys:
        return None
    # The keys of one list ascend.
    key = keys[0] if len(keys) == 1 else torch.unique(torch.cat(keys))
    key = key[(key >= 0) & (key < num_dst * num_src)]
    return SplitEdges(without, key % max(num_src, 1), key // max(num_src, 1))


def bands(edges: EdgeSet, boxes: Boxes) -> Iterator[Bands]:
    """The edges of boxes that are tiles of one grid, each edge in one band.

    After the edges without lists come the listed pairs, as bands of width 1 where a pair is an edge that was
    not there before, -1 where it was and is none.
    """
    if not len(boxes):
        return
    sizes = int((boxes.dst + boxes.height).max()), int((boxes.src + boxes.width).max())
    split = split_edge_lists(edges, *sizes)
    structured = edges if split is None else split.edges
    for piece in quadtree.decompose(structured, boxes):
        yield from bands_of(structured, piece)
    if split is not None:
        yield from _bands_of_pairs(edges, split, boxes, sizes)


def _bands_of_pairs(
    edges: EdgeSet, split: SplitEdges, boxes: Boxes, sizes: tuple[int, int]
) -> Iterator[Bands]:
    """``R - R_0`` at the listed pairs inside the boxes."""
    for box, pair in _find_boxes(split, boxes, sizes):
        dst, src = split.dst[pair], split.src[pair]
        owner, b, h = (number[box].expand_as(dst) for number in (boxes.owner, boxes.batch, boxes.head))
        is_edge, was_edge = (
            enumerate_pairs.evaluate(x.contains, "this graph", b, h, dst, src).expand_as(dst).to(torch.int64)
            for x in (edges, split.edges)
        )
        yield Bands(owner, dst, src, torch.ones_like(dst), is_edge - was_edge)


def _find_boxes(split: SplitEdges, boxes: Boxes, sizes: tuple[int, int]) -> Iterator[tuple[Any, Any]]:
    """``(box, pair)``: the numbers of boxes, and those of the listed pairs inside them."""
    # Boxes of all tokens hold every pair.
    if int(boxes.height.min()) == sizes[0] and int(boxes.width.min()) == sizes[1]:
        yield from ((box, slice(None)) for box in range(len(boxes)))
        return
    grid = Grid.of(boxes.dst, boxes.src, int(boxes.height.max()), int(boxes.width.max()), sizes[1])
    cells = (sizes[0] // grid.height + 3) * grid.columns
    sample = boxes.batch * (int(boxes.head.max()) + 1) + boxes.head
    keys, order = (sample * cells + grid.cell(boxes.dst, boxes.src)).sort()
    cell = grid.cell(split.dst, split.src)
    # One sample and head after the other keeps memory proportional to the pairs.
    for number in torch.unique(sample).tolist():
        place = torch.searchsorted(keys, number * cells + cell).clamp(max=len(keys) - 1)
        inside = (keys[place] == number * cells + cell).nonzero().flatten()
        yield order[place[inside]], inside


def in_degree(edges: EdgeSet, name: str, shape: Shape) -> Int[Tensor, "batch heads dst"]:
    if enumerate_pairs.has_few_pairs(shape):
        return enumerate_pairs.dense(edges.contains, name, shape).sum(-1)
    batch, heads, num_dst, _ = shape
    # by how much the degree changes from each receiver to the next
    change = torch.zeros(batch * heads, num_dst + 1, dtype=torch.int64, device="cpu")
    for band in bands(edges, root(shape)):
        first = band.owner * (num_dst + 1) + band.dst
        change.view(-1).index_add_(0, first, band.width)
        change.view(-1).index_add_(0, first + band.rows, -band.width)
    return change.cumsum_(1)[:, :-1].reshape(batch, heads, num_dst)


def count_edges(edges: EdgeSet, piece: Piece) -> Int[Tensor, " boxes"]:
    """How many edges each of the boxes holds."""
    boxes, number = piece.boxes, torch.arange(len(piece.boxes), device="cpu")
    if piece.kind == DIFFERENCE and len(boxes) and _depends_on_difference(edges, boxes):
        key = torch.stack([boxes.batch, boxes.head, boxes.dst - boxes.src, boxes.height, boxes.width])
        unique, set_of_box = torch.unique(key, dim=1, return_inverse=True)
        # Boxes of one set are equal, so one of them is counted.
        boxes = boxes.at(torch.empty_like(unique[0]).scatter_(0, set_of_box, number))
        number = set_of_box
    boxes = replace(boxes, owner=torch.arange(len(boxes), device="cpu"))
    total = torch.zeros_like(boxes.owner)
    for band in bands(edges, boxes):
        total.index_add_(0, band.owner, band.rows * band.width)
    return total[number]


def _depends_on_difference(edges: EdgeSet, boxes: Boxes) -> bool:
    """Whether the edges of all pairs around the boxes, not of each box alone, depend on ``dst - src`` alone.

    Two boxes may depend on it in different ways where another part of the rule differs between them.
    """
    top, size = torch.zeros_like(boxes.dst), torch.ones_like(boxes.dst)
    height, width = size * (boxes.dst + boxes.height).max(), size * (boxes.src + boxes.width).max()
    around = replace(boxes, dst=top, src=top, height=height, width=width)
    return bool((quadtree.kinds(edges, around) == DIFFERENCE).all())


def same(left: EdgeSet, right: EdgeSet, name: str, shape: Shape) -> bool:
    """True if both rules hold for the same pairs, for every sample and head."""
    if left is right:
        return True
    if enumerate_pairs.has_few_pairs(shape):
        return torch.equal(*(enumerate_pairs.dense(edges.contains, name, shape) for edges in (left, right)))
    # most rules that differ do so at a few pairs
    if _differ_somewhere(left, right, name, shape):
        return False
    difference = CombinedEdges(operator.xor, (left, right))
    if split_edge_lists(difference, *shape[2:]) is not None:
        return not in_degree(difference, name, shape).any()
    return not any(len(band.dst) for band in bands(difference, root(shape)))


def _differ_somewhere(left: EdgeSet, right: EdgeSet, name: str, shape: Shape) -> bool:
    """Whether rules differ at some pairs that are spread over all tokens."""
    batch, heads, num_dst, num_src = shape
    dst, src = (torch.linspace(0, n - 1, PROBES, device="cpu").round().long() for n in (num_dst, num_src))
    b, h = (torch.arange(n, device="cpu").view(-1, 1, 1)[:PROBES] for n in (batch, heads))
    ends = b.unsqueeze(1), h, dst.unsqueeze(1), torch.cat([src, dst.clamp(max=num_src - 1)])
    of_left, of_right = (enumerate_pairs.evaluate(edges.contains, name, *ends) for edges in (left, right))
    return bool((of_left != of_right).any())


def edge_list(edges: EdgeSet, name: str, shape: Shape) -> Int[Tensor, "2 edges"]:
    """The edges of the first sample and head, by receiver, then sender."""
    if math.prod(shape[2:]) <= MANY:
        return enumerate_pairs.dense(edges.contains, name, (1, 1, *shape[2:]))[0, 0].nonzero().t().flip(0)
    return edges_in(edges, root((1, 1, *shape[2:])), shape[3])


def edges_in(edges: EdgeSet, boxes: Boxes, num_src: int) -> Int[Tensor, "2 edges"]:
    """The edges inside some boxes of one sample and head, by receiver, then sender."""
    keys, removed = [torch.zeros(0, dtype=torch.int64, device="cpu")], []
    for band in bands(edges, boxes):
        part, row = enumerate_groups(band.rows)
        key = (band.dst * num_src + band.src)[part] + row * (num_src + band.slope)
        width = band.width[part]
        if bool((width < 0).any()):
            removed.append(key[width < 0])
        if bool((width != 1).any()):
            start, column = enumerate_groups(width.clamp(min=0))
            key = key[start] + column
        keys.append(key)
    key = torch.cat(keys)
    if removed:
        key = key[~torch.isin(key, torch.cat(removed))]
    key = key.sort().values
    return torch.stack([key % max(num_src, 1), key // max(num_src, 1)])
