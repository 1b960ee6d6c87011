"""Degrees, counts, edge lists and equality: exact, and for many pairs read off the cut into boxes.

Edges that are combined with lists are counted without them and corrected at their pairs
(``split_edge_lists``).
"""

import math
import operator
from dataclasses import replace
from itertools import product

import torch

from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph.edges.edge_set import EdgeSet
from gnn_attention.graph.edges.rule import CombinedEdges
from gnn_attention.graph.regions import enumerate_pairs
from gnn_attention.graph.regions.quadtree import Boxes, Piece, bands, ragged, root
from gnn_attention.graph.regions.split_edge_lists import SplitEdges, split_by_box, split_edge_lists
from gnn_attention.graph.rules import Shape

# pairs up to which visiting all of them is the quickest way to a list, because it comes out sorted
MANY = 2**20
# tokens at which two rules are compared first
PROBES = 64


def in_degree(edges: EdgeSet, name: str, shape: Shape) -> Int[Tensor, "batch heads dst"]:
    if enumerate_pairs.few(shape):
        return enumerate_pairs.dense(edges.contains, name, shape).sum(-1)
    if (split := split_edge_lists(edges, *shape[2:])) is None:
        return _in_degree(edges, shape)
    degree = _in_degree(split.edges, shape)
    for batch, head in product(range(shape[0]), range(shape[1])):
        b, h = torch.full_like(split.dst, batch), torch.full_like(split.dst, head)
        degree[batch, head].index_add_(0, split.dst, _correction(edges, split, b, h))
    return degree


def _in_degree(edges: EdgeSet, shape: Shape) -> Int[Tensor, "batch heads dst"]:
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
    number = torch.arange(len(piece.boxes), device="cpu")
    return edges_of_each(edges, replace(piece.boxes, owner=number), len(number))


def edges_of_each(edges: EdgeSet, boxes: Boxes, number: int) -> Int[Tensor, " number"]:
    """How many edges the boxes of each owner 0 .. number - 1 hold together."""
    if (split := _split_in_boxes(edges, boxes)) is None:
        return _edges_of_each(edges, boxes, number)
    pairs, box = split
    change = _correction(edges, pairs, boxes.batch[box], boxes.head[box])
    return _edges_of_each(pairs.edges, boxes, number).index_add_(0, boxes.owner[box], change)


def _edges_of_each(edges: EdgeSet, boxes: Boxes, number: int) -> Int[Tensor, " number"]:
    total = torch.zeros(number, dtype=torch.int64, device="cpu")
    for band in bands(edges, boxes):
        total.index_add_(0, band.owner, band.rows * band.width)
    return total


def same(left: EdgeSet, right: EdgeSet, name: str, shape: Shape) -> bool:
    """True if both rules hold for the same pairs, for every sample and head."""
    if left is right:
        return True
    if enumerate_pairs.few(shape):
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
    if (split := _split_in_boxes(edges, boxes)) is None:
        key = _keys_in(edges, boxes, num_src)
    else:
        pairs, box = split
        key, listed = _keys_in(pairs.edges, boxes, num_src), pairs.dst * num_src + pairs.src
        listed_edge = _evaluate(edges, pairs, boxes.batch[box], boxes.head[box])
        key = torch.cat([key[~torch.isin(key, listed)], listed[listed_edge]])
    key = key.sort().values
    return torch.stack([key % max(num_src, 1), key // max(num_src, 1)])


def _keys_in(edges: EdgeSet, boxes: Boxes, num_src: int) -> Int[Tensor, " edges"]:
    keys = [torch.zeros(0, dtype=torch.int64, device="cpu")]
    for band in bands(edges, boxes):
        part, row = ragged(band.rows)
        key = (band.dst * num_src + band.src)[part] + row * (num_src + band.slope)
        if bool((band.width > 1).any()):
            start, column = ragged(band.width[part])
            key = key[start] + column
        keys.append(key)
    return torch.cat(keys)


def _evaluate(edges: EdgeSet, pairs: SplitEdges, b: Tensor, h: Tensor) -> Bool[Tensor, " pairs"]:
    edge = enumerate_pairs.evaluate(edges.contains, "this graph", b, h, pairs.dst, pairs.src)
    return edge.expand(len(pairs.dst))


def _correction(edges: EdgeSet, pairs: SplitEdges, b: Tensor, h: Tensor) -> Int[Tensor, " pairs"]:
    """``R - R_0`` at the listed pairs of these samples and heads."""
    return _evaluate(edges, pairs, b, h).to(torch.int64) - _evaluate(pairs.edges, pairs, b, h).to(torch.int64)


def _split_in_boxes(edges: EdgeSet, boxes: Boxes) -> tuple[SplitEdges, Int[Tensor, " pairs"]] | None:
    if not len(boxes):
        return None
    num_dst, num_src = int((boxes.dst + boxes.height).max()), int((boxes.src + boxes.width).max())
    split = split_edge_lists(edges, num_dst, num_src)
    return None if split is None else split_by_box(split, boxes)
