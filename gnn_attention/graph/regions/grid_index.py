"""Which of many boxes a pair of tokens lies in, looked up, where the boxes are tiles of one grid."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph.regions.quadtree import Boxes


class Grid(NamedTuple):
    """Boxes by the cell of a grid that each lies in alone: ``keys`` are the cells, ``order`` the boxes."""

    boxes: Boxes
    height: int
    width: int
    keys: Tensor
    order: Tensor

    @staticmethod
    def of(boxes: Boxes) -> Grid | None:
        """The grid of the largest box; None if a box crosses its lines or shares a cell."""
        grid = Grid(boxes, int(boxes.height.max()), int(boxes.width.max()), boxes.dst, boxes.dst)
        first = grid._cells(boxes.batch, boxes.head, boxes.dst, boxes.src)
        last = grid._cells(boxes.batch, boxes.head, boxes.dst + boxes.height - 1, boxes.src + boxes.width - 1)
        keys, order = first.sort()
        one_each = torch.equal(first, last) and bool((keys[1:] > keys[:-1]).all())
        return grid._replace(keys=keys, order=order) if one_each else None

    def boxes_of(
        self, batch: int, head: int, dst: Int[Tensor, " pairs"], src: Int[Tensor, " pairs"]
    ) -> tuple[Int[Tensor, " inside"], Int[Tensor, " inside"]]:
        """Which of the pairs are in a box of this sample and head, and in which box each of these is."""
        b, h = torch.full_like(dst, batch), torch.full_like(dst, head)
        key = self._cells(b, h, dst, src)
        place = torch.searchsorted(self.keys, key).clamp(max=len(self.keys) - 1)
        box, boxes = self.order[place], self.boxes
        inside = (self.keys[place] == key) & (dst >= boxes.dst[box]) & (src >= boxes.src[box])
        inside &= (dst < boxes.dst[box] + boxes.height[box]) & (src < boxes.src[box] + boxes.width[box])
        pair = inside.nonzero().flatten()
        return pair, box[pair]

    def _cells(self, batch: Tensor, head: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        boxes, heads = self.boxes, int(self.boxes.head.max()) + 1
        top, left = int(boxes.dst[0]) % self.height, int(boxes.src[0]) % self.width
        down = int((boxes.dst + boxes.height).max()) // self.height + 2
        across = int((boxes.src + boxes.width).max()) // self.width + 2
        row, column = (dst - top) // self.height + 1, (src - left) // self.width + 1
        return ((batch * heads + head) * down + row) * across + column
