"""The senders that each receiver chose, as rows of numbers: one graph for each sample and head.

The rows of all samples and heads stand one after the other, sorted and without repetition. Nothing here is as
large as tokens x tokens, and nothing leaves the device on which the senders were chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import rules
from gnn_attention.graph.edges.edge_set import EdgeSet
from gnn_attention.graph.edges.listed import ListedEdges
from gnn_attention.graph.rules import Rule, Shape


@dataclass(frozen=True, eq=False)
class ChosenEdges(EdgeSet):
    """The senders of receiver ``dst`` of sample b and head h are ``src[ptr[r]] .. src[ptr[r + 1] - 1]``.

    ``r = (b * heads + h) * num_dst + dst``; they ascend, and none stands twice. ``shape`` is ``(batch, heads,
    num_dst, num_src)``, with 1 where the graph does not differ. ``index_order`` are the edges of one sample
    and head in the order of the index that they came from; without it they are listed by receiver, then
    sender.
    """

    ptr: Int[Tensor, " rows_and_one"]
    src: Int[Tensor, " edges"]
    shape: Shape
    index_order: Int[Tensor, "2 edges"] | None = None

    has_structure = False

    @classmethod
    def of_rows(cls, row: Int[Tensor, " edges"], src: Int[Tensor, " edges"], shape: Shape) -> ChosenEdges:
        """The edges of rows ``r`` and senders in ascending order, without repetition."""
        ends = torch.bincount(row, minlength=math.prod(shape[:3])).cumsum(0)
        return cls(torch.cat([ends.new_zeros(1), ends]), src.to(torch.int32), shape)

    @property
    def slices(self) -> int:
        """Samples times heads."""
        return self.shape[0] * self.shape[1]

    @cached_property
    def has_slices(self) -> bool:  # type: ignore[override]
        return self.slices > 1

    @property
    def row(self) -> Int[Tensor, " edges"]:
        """The row ``r`` of every edge."""
        return torch.repeat_interleave(self.ptr.diff(), output_size=len(self.src))

    @cached_property
    def table(self) -> Int[Tensor, " edges_and_one"]:
        """``r * num_src + src`` of every edge, ascending, and the largest int64."""
        return torch.cat([self.row * self.shape[3] + self.src, rules.LAST_KEY.to(self.src.device)])

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return partial(rules.is_chosen, self.table, self.shape)

    def count(self) -> int:
        return self.src.numel()

    def listed(self) -> Int[Tensor, "2 edges"] | None:
        return self._in_order if self.slices == 1 else None

    @cached_property
    def _in_order(self) -> Int[Tensor, "2 edges"]:
        return torch.stack([self.src.long(), self.row]) if self.index_order is None else self.index_order

    def pointers(self) -> tuple[Int[Tensor, " rows_and_one"], Int[Tensor, " edges"]]:
        return self.ptr, self.src

    def keys(self) -> Int[Tensor, " edges"]:
        return self.table[:-1]

    def in_degree(self) -> Int[Tensor, " rows"]:
        return self.ptr.diff().cpu()

    def rows(self, start: int, stop: int) -> EdgeSet:
        first = [number * self.shape[2] for number in range(self.slices)]
        parts = [self._slice_rows(row + start, row + stop) for row in first]
        count = torch.cat([ptr.diff() for ptr, _ in parts]).cumsum(0)
        listed = self.index_order
        if listed is not None:
            inside = (listed[1] >= start) & (listed[1] < stop)
            listed = listed[:, inside] - listed.new_tensor([[0], [start]])
        src, shape = torch.cat([src for _, src in parts]), (*self.shape[:2], stop - start, self.shape[3])
        return ChosenEdges(torch.cat([count.new_zeros(1), count]), src, shape, listed)

    def _slice_rows(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """``ptr`` and ``src`` of the rows ``first .. stop - 1``, counted through samples and heads."""
        ptr = self.ptr[first : stop + 1]
        begin, end = ptr[[0, -1]].tolist()
        return ptr - begin, self.src[begin:end]

    def select(self, batch: int, head: int) -> EdgeSet:
        # An index of one sample or head serves all of them.
        batch, head = batch if self.shape[0] > 1 else 0, head if self.shape[1] > 1 else 0
        if self.slices == 1:
            return self
        first = (batch * self.shape[1] + head) * self.shape[2]
        return ChosenEdges(*self._slice_rows(first, first + self.shape[2]), (1, 1, *self.shape[2:]))

    def transposed(self) -> EdgeSet:
        batch, heads, num_dst, num_src = self.shape
        if self.slices == 1:
            return ListedEdges(self._in_order.flip(0).cpu(), num_src, num_dst)
        number, dst = self.row // max(num_dst, 1), self.row % max(num_dst, 1)
        key = ((number * num_src + self.src) * num_dst + dst).sort().values
        return ChosenEdges.of_rows(key // num_dst, key % num_dst, (batch, heads, num_src, num_dst))

    def restricted_to(self, other: EdgeSet, is_edge: bool, slices: tuple[int, int]) -> EdgeSet | None:
        batch, heads, num_dst, _ = self.shape
        if slices != (batch, heads):
            return None
        number, dst = self.row // max(num_dst, 1), self.row % max(num_dst, 1)
        ends = number // heads, number % heads, dst
        inside = other.contains(*ends, self.src.long()).expand(len(self.src)) == is_edge
        if bool(inside.all()):
            return self
        edges, listed = ChosenEdges.of_rows(self.row[inside], self.src[inside], self.shape), self.index_order
        if listed is None:
            return edges
        zero = torch.zeros_like(listed[1])
        inside = other.contains(zero, zero, listed[1], listed[0]).expand(len(zero)) == is_edge
        return replace(edges, index_order=listed[:, inside])

    def without_lists(self, num_dst: int, num_src: int) -> tuple[EdgeSet, list[Int[Tensor, " pairs"]]]:
        if self.slices > 1:
            return self, []
        listed = torch.stack([self.src.long(), self.row]).cpu()
        return ListedEdges(listed, *self.shape[2:]).without_lists(num_dst, num_src)
