"""Compute exact degrees, counts, edge lists and equality. Large graphs are cut into boxes (``quadtree``).

Let ``R`` be an expression of edge sets, and ``R_0`` the same expression with empty lists. They
differ at listed pairs only, so ``|R| = |R_0| + sum over listed pairs of (R - R_0)``. Structured
edges are counted box by box. Listed pairs would split the boxes, so they are counted one by one.
"""

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
from gnn_attention.graph.regions.quadtree import Bands, Boxes, Piece, bands_from_piece, enumerate_groups
from gnn_attention.graph.rules import Shape

# Up to this number of pairs, visiting all of them is the fastest way to a sorted list.
MAX_DENSE_LIST_PAIRS = 2**20
# Two edge sets are first compared at this number of receivers and senders.
NUM_PROBES = 64


class SplitEdges(NamedTuple):
    """Edges without their lists, and the distinct listed pairs, sorted by receiver, then sender."""

    edges: EdgeSet
    src: Int[Tensor, " pairs"]
    dst: Int[Tensor, " pairs"]


def split_edge_lists(edges: EdgeSet, num_dst: int, num_src: int) -> SplitEdges | None:
    """Separate the listed pairs from the other edges; None if there is no list."""
    structured_edges, lists = edges.extract_lists(num_dst, num_src)
    if not lists:
        return None
    # The keys of a single list are sorted already.
    keys = lists[0] if len(lists) == 1 else torch.unique(torch.cat(lists))
    keys = keys[(keys >= 0) & (keys < num_dst * num_src)]
    return SplitEdges(structured_edges, keys % max(num_src, 1), keys // max(num_src, 1))


def bands_from_boxes(edges: EdgeSet, boxes: Boxes) -> Iterator[Bands]:
    """Yield the edges of ``boxes`` as bands. The boxes must be tiles of one grid.

    Bands of the edges without lists come first. Then each listed pair is one band. Its width is 1
    if the lists add the pair, -1 if they remove it, and 0 if they change nothing.
    """
    if not len(boxes):
        return
    sizes = int((boxes.dst + boxes.height).max()), int((boxes.src + boxes.width).max())
    split = split_edge_lists(edges, *sizes)
    structured_edges = edges if split is None else split.edges
    for piece in quadtree.decompose(structured_edges, boxes):
        yield from bands_from_piece(structured_edges, piece)
    if split is None:
        return
    for box, pair in _find_boxes(split, boxes, sizes):
        dst, src = split.dst[pair], split.src[pair]
        owner, b, h = (values[box].expand_as(dst) for values in (boxes.owner, boxes.batch, boxes.head))
        is_edge, is_structured_edge = (
            enumerate_pairs.evaluate(x.contains, "this graph", b, h, dst, src).expand_as(dst).to(torch.int64)
            for x in (edges, split.edges)
        )
        yield Bands(owner, dst, src, torch.ones_like(dst), is_edge - is_structured_edge)


def _find_boxes(split: SplitEdges, boxes: Boxes, sizes: tuple[int, int]) -> Iterator[tuple[Any, Any]]:
    """Yield ``(box, pair)``: indices of boxes, and of the listed pairs inside them."""
    # A box of all tokens holds every pair.
    if int(boxes.height.min()) == sizes[0] and int(boxes.width.min()) == sizes[1]:
        yield from ((box, slice(None)) for box in range(len(boxes)))
        return
    grid = Grid.from_boxes(boxes.dst, boxes.src, int(boxes.height.max()), int(boxes.width.max()), sizes[1])
    num_cells = (sizes[0] // grid.height + 3) * grid.num_columns
    box_slice = boxes.batch * (int(boxes.head.max()) + 1) + boxes.head
    keys, order = (box_slice * num_cells + grid.cell(boxes.dst, boxes.src)).sort()
    cell = grid.cell(split.dst, split.src)
    # Searching slice by slice keeps memory proportional to the number of pairs.
    for slice_index in torch.unique(box_slice).tolist():
        key = slice_index * num_cells + cell
        index = torch.searchsorted(keys, key).clamp(max=len(keys) - 1)
        pair = (keys[index] == key).nonzero().flatten()
        yield order[index[pair]], pair


def in_degree(edges: EdgeSet, name: str, shape: Shape) -> Int[Tensor, "batch heads dst"]:
    if enumerate_pairs.has_few_pairs(shape):
        return enumerate_pairs.dense_mask(edges.contains, name, shape).sum(-1)
    batch, heads, num_dst, _ = shape
    # Entry i is the degree of receiver i minus that of receiver i - 1. A band changes two entries.
    degree_change = torch.zeros(batch * heads, num_dst + 1, dtype=torch.int64, device="cpu")
    for bands in bands_from_boxes(edges, quadtree.root(shape)):
        start = bands.owner * (num_dst + 1) + bands.dst
        degree_change.view(-1).index_add_(0, start, bands.width)
        degree_change.view(-1).index_add_(0, start + bands.num_rows, -bands.width)
    return degree_change.cumsum_(1)[:, :-1].reshape(batch, heads, num_dst)


def count_edges(edges: EdgeSet, piece: Piece) -> Int[Tensor, " boxes"]:
    """Return the number of edges in each box."""
    boxes = piece.boxes
    group = index = torch.arange(len(boxes), device="cpu")
    if piece.kind == quadtree.DIFFERENCE and len(boxes) and _depends_on_difference(edges, boxes):
        key = torch.stack([boxes.batch, boxes.head, boxes.dst - boxes.src, boxes.height, boxes.width])
        # Boxes of one shape on the same diagonals have equal counts, so only one of them is counted.
        unique_keys, group = torch.unique(key, dim=1, return_inverse=True)
        boxes = boxes.at(torch.empty_like(unique_keys[0]).scatter_(0, group, index))
    boxes = replace(boxes, owner=torch.arange(len(boxes), device="cpu"))
    num_edges = torch.zeros_like(boxes.owner)
    for bands in bands_from_boxes(edges, boxes):
        num_edges.index_add_(0, bands.owner, bands.num_rows * bands.width)
    return num_edges[group]


def _depends_on_difference(edges: EdgeSet, boxes: Boxes) -> bool:
    """Return True if the edges depend only on ``dst - src`` in a box around all boxes.

    It is not enough to check each box: boxes in different documents may depend on it differently.
    """
    zero = torch.zeros_like(boxes.dst)
    height, width = zero + (boxes.dst + boxes.height).max(), zero + (boxes.src + boxes.width).max()
    bounding_boxes = replace(boxes, dst=zero, src=zero, height=height, width=width)
    return bool((quadtree.classify(edges, bounding_boxes) == quadtree.DIFFERENCE).all())


def has_same_pairs(left: EdgeSet, right: EdgeSet, name: str, shape: Shape) -> bool:
    """Return True if two edge sets are equal in every sample and head."""
    if left is right:
        return True
    if enumerate_pairs.has_few_pairs(shape):
        left_mask = enumerate_pairs.dense_mask(left.contains, name, shape)
        return torch.equal(left_mask, enumerate_pairs.dense_mask(right.contains, name, shape))
    # Unequal edge sets nearly always differ at some of these pairs, which are spread over all tokens.
    batch, heads, num_dst, num_src = shape
    dst, src = (torch.linspace(0, n - 1, NUM_PROBES, device="cpu").round().long() for n in (num_dst, num_src))
    b, h = (torch.arange(n, device="cpu").view(-1, 1, 1)[:NUM_PROBES] for n in (batch, heads))
    pairs = b.unsqueeze(1), h, dst.unsqueeze(1), torch.cat([src, dst.clamp(max=num_src - 1)])
    left_mask = enumerate_pairs.evaluate(left.contains, name, *pairs)
    if bool((left_mask != enumerate_pairs.evaluate(right.contains, name, *pairs)).any()):
        return False
    difference = CombinedEdges(operator.xor, (left, right))
    if split_edge_lists(difference, *shape[2:]) is not None:
        return not in_degree(difference, name, shape).any()
    return not any(len(bands.dst) for bands in bands_from_boxes(difference, quadtree.root(shape)))


def edge_list(edges: EdgeSet, name: str, shape: Shape) -> Int[Tensor, "2 edges"]:
    """Return the edges of the first sample and head, sorted by receiver, then sender."""
    if math.prod(shape[2:]) <= MAX_DENSE_LIST_PAIRS:
        mask = enumerate_pairs.dense_mask(edges.contains, name, (1, 1, *shape[2:]))
        return mask[0, 0].nonzero().t().flip(0)
    return edges_in(edges, quadtree.root((1, 1, *shape[2:])), shape[3])


def edges_in(edges: EdgeSet, boxes: Boxes, num_src: int) -> Int[Tensor, "2 edges"]:
    """Return the edges inside boxes of one sample and head, sorted by receiver, then sender."""
    keys, removed_keys = [torch.zeros(0, dtype=torch.int64, device="cpu")], []
    for bands in bands_from_boxes(edges, boxes):
        band, row = enumerate_groups(bands.num_rows)
        key = (bands.dst * num_src + bands.src)[band] + row * (num_src + bands.slope)
        width = bands.width[band]
        if bool((width < 0).any()):
            removed_keys.append(key[width < 0])
        if bool((width != 1).any()):
            start, column = enumerate_groups(width.clamp(min=0))
            key = key[start] + column
        keys.append(key)
    key = torch.cat(keys)
    if removed_keys:
        key = key[~torch.isin(key, torch.cat(removed_keys))]
    key = key.sort().values
    return torch.stack([key % max(num_src, 1), key // max(num_src, 1)])
