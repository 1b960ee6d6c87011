"""Edges that are combined with lists, as edges without lists and the pairs about which the two may differ.

With an empty list in the place of each, ``R_0``, the edges ``R`` are the same for all pairs that no list
holds, so ``|R| = |R_0| + sum over listed pairs of (R - R_0)``: structured edges are counted by boxes, and
scattered pairs, which would break every box, one by one. Inside a rule a list stays.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph.edges.edge_set import EdgeSet
from gnn_attention.graph.regions.quadtree import Boxes


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
    key = torch.cat(keys)
    key = torch.unique(key[(key >= 0) & (key < num_dst * num_src)])
    return SplitEdges(without, key % max(num_src, 1), key // max(num_src, 1))


def split_by_box(split: SplitEdges, boxes: Boxes) -> tuple[SplitEdges, Int[Tensor, " pairs"]] | None:
    """The listed pairs inside the boxes, by sample and head, and the box of each.

    None if the boxes are not tiles of one grid, among which the box of a pair is looked up.
    """
    height, width = int(boxes.height.max()), int(boxes.width.max())
    top, left = int(boxes.dst[0]) % height, int(boxes.src[0]) % width
    last_dst, last_src = boxes.dst + boxes.height - 1, boxes.src + boxes.width - 1
    rows, columns = int(last_dst.max()) // height + 3, int(last_src.max()) // width + 3

    def cells(sample: Tensor | int, dst: Tensor, src: Tensor) -> Tensor:
        return (sample * rows + (dst - top) // height + 1) * columns + (src - left) // width + 1

    sample = boxes.batch * (int(boxes.head.max()) + 1) + boxes.head
    first = cells(sample, boxes.dst, boxes.src)
    keys, order = first.sort()
    if not torch.equal(first, cells(sample, last_dst, last_src)) or not bool((keys[1:] > keys[:-1]).all()):
        return None
    found = []
    for number in torch.unique(sample).tolist():
        key = cells(number, split.dst, split.src)
        place = torch.searchsorted(keys, key).clamp(max=len(keys) - 1)
        box = order[place]
        inside = (keys[place] == key) & (split.dst >= boxes.dst[box]) & (split.src >= boxes.src[box])
        inside &= (split.dst <= last_dst[box]) & (split.src <= last_src[box])
        found.append((split.src[inside], split.dst[inside], box[inside]))
    src, dst, box = (torch.cat(parts) for parts in zip(*found, strict=True))
    return SplitEdges(split.edges, src, dst), box
