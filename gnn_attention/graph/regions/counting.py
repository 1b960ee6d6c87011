"""Degrees, counts, edge lists and equality of rules: exact, and for many pairs read off the cut into boxes.

A rule made with lists of edges is counted without them and corrected at their pairs (``split_edge_lists``).
"""

import math
from functools import partial
from itertools import product

import torch

from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph.regions import enumerate_pairs
from gnn_attention.graph.regions.quadtree import Boxes, bands, ragged, root
from gnn_attention.graph.regions.split_edge_lists import SplitRule, split_by_box, split_edge_lists
from gnn_attention.graph.rules import Rule, xor

# pairs up to which visiting all of them is the quickest way to a list, because it comes out sorted
MANY = 2**20
# tokens at which two rules are compared first
PROBES = 64


def in_degree(rule: Rule, name: str, shape: enumerate_pairs.Shape) -> Int[Tensor, "batch heads dst"]:
    if enumerate_pairs.few(shape):
        return enumerate_pairs.in_degree(rule, name, shape)
    if (split := split_edge_lists(rule, *shape[2:])) is None:
        return _in_degree(rule, shape)
    degree = _in_degree(split.rule, shape)
    for batch, head in product(range(shape[0]), range(shape[1])):
        b, h = torch.full_like(split.dst, batch), torch.full_like(split.dst, head)
        degree[batch, head].index_add_(0, split.dst, _correction(rule, split, b, h))
    return degree


def _in_degree(rule: Rule, shape: enumerate_pairs.Shape) -> Int[Tensor, "batch heads dst"]:
    batch, heads, num_dst, _ = shape
    # by how much the degree changes from each receiver to the next
    change = torch.zeros(batch * heads, num_dst + 1, dtype=torch.int64, device="cpu")
    for band in bands(rule, root(shape)):
        first = band.owner * (num_dst + 1) + band.dst
        change.view(-1).index_add_(0, first, band.width)
        change.view(-1).index_add_(0, first + band.rows, -band.width)
    return change.cumsum_(1)[:, :-1].reshape(batch, heads, num_dst)


def edges_of_each(rule: Rule, boxes: Boxes, number: int) -> Int[Tensor, " number"]:
    """How many edges the boxes of each owner 0 .. number - 1 hold together."""
    if (split := _split_in_boxes(rule, boxes)) is None:
        return _edges_of_each(rule, boxes, number)
    pairs, box = split
    change = _correction(rule, pairs, boxes.batch[box], boxes.head[box])
    return _edges_of_each(pairs.rule, boxes, number).index_add_(0, boxes.owner[box], change)


def _edges_of_each(rule: Rule, boxes: Boxes, number: int) -> Int[Tensor, " number"]:
    total = torch.zeros(number, dtype=torch.int64, device="cpu")
    for band in bands(rule, boxes):
        total.index_add_(0, band.owner, band.rows * band.width)
    return total


def same(left: Rule, right: Rule, name: str, shape: enumerate_pairs.Shape) -> bool:
    """True if both rules hold for the same pairs, for every sample and head."""
    if left is right:
        return True
    if enumerate_pairs.few(shape):
        return enumerate_pairs.same(left, right, name, shape)
    # most rules that differ do so at a few pairs
    if _differ_somewhere(left, right, name, shape):
        return False
    difference = partial(xor, left, right)
    if split_edge_lists(difference, *shape[2:]) is not None:
        return not in_degree(difference, name, shape).any()
    return not any(len(band.dst) for band in bands(difference, root(shape)))


def _differ_somewhere(left: Rule, right: Rule, name: str, shape: enumerate_pairs.Shape) -> bool:
    """Whether rules differ at some pairs that are spread over all tokens."""
    batch, heads, num_dst, num_src = shape
    dst, src = (torch.linspace(0, n - 1, PROBES, device="cpu").round().long() for n in (num_dst, num_src))
    b, h = (torch.arange(n, device="cpu").view(-1, 1, 1)[:PROBES] for n in (batch, heads))
    ends = b.unsqueeze(1), h, dst.unsqueeze(1), torch.cat([src, dst.clamp(max=num_src - 1)])
    of_left, of_right = (enumerate_pairs.evaluate(rule, name, *ends) for rule in (left, right))
    return bool((of_left != of_right).any())


def edge_list(rule: Rule, name: str, shape: enumerate_pairs.Shape) -> Int[Tensor, "2 edges"]:
    """The edges of the first sample and head, by receiver, then sender."""
    if math.prod(shape[2:]) <= MANY:
        return enumerate_pairs.edge_list(rule, name, shape)
    return edges_in(rule, root((1, 1, *shape[2:])), shape[3])


def edges_in(rule: Rule, boxes: Boxes, num_src: int) -> Int[Tensor, "2 edges"]:
    """The edges inside some boxes of one sample and head, by receiver, then sender."""
    if (split := _split_in_boxes(rule, boxes)) is None:
        key = _keys_in(rule, boxes, num_src)
    else:
        pairs, box = split
        key, listed = _keys_in(pairs.rule, boxes, num_src), pairs.dst * num_src + pairs.src
        listed_edge = _evaluate(rule, pairs, boxes.batch[box], boxes.head[box])
        key = torch.cat([key[~torch.isin(key, listed)], listed[listed_edge]])
    key = key.sort().values
    return torch.stack([key % max(num_src, 1), key // max(num_src, 1)])


def _keys_in(rule: Rule, boxes: Boxes, num_src: int) -> Int[Tensor, " edges"]:
    keys = [torch.zeros(0, dtype=torch.int64, device="cpu")]
    for band in bands(rule, boxes):
        part, row = ragged(band.rows)
        key = (band.dst * num_src + band.src)[part] + row * (num_src + band.slope)
        if bool((band.width > 1).any()):
            start, column = ragged(band.width[part])
            key = key[start] + column
        keys.append(key)
    return torch.cat(keys)


def _evaluate(rule: Rule, pairs: SplitRule, b: Tensor, h: Tensor) -> Bool[Tensor, " pairs"]:
    return enumerate_pairs.evaluate(rule, "this graph", b, h, pairs.dst, pairs.src).expand(len(pairs.dst))


def _correction(rule: Rule, pairs: SplitRule, b: Tensor, h: Tensor) -> Int[Tensor, " pairs"]:
    """``R - R_0`` at the listed pairs of these samples and heads."""
    return _evaluate(rule, pairs, b, h).to(torch.int64) - _evaluate(pairs.rule, pairs, b, h).to(torch.int64)


def _split_in_boxes(rule: Rule, boxes: Boxes) -> tuple[SplitRule, Int[Tensor, " pairs"]] | None:
    if not len(boxes):
        return None
    num_dst, num_src = int((boxes.dst + boxes.height).max()), int((boxes.src + boxes.width).max())
    split = split_edge_lists(rule, num_dst, num_src)
    return None if split is None else split_by_box(split, boxes)
