"""Edges that are stored as chosen rows: the senders that each receiver chose.

The rows of all samples and heads are concatenated into one CSR matrix, on the device on which the
senders were chosen. No tensor has tokens x tokens elements.
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
    """Row ``r = (b * heads + h) * num_dst + dst`` holds the senders ``src[ptr[r] : ptr[r + 1]]``.

    The senders of a row are sorted and distinct. ``shape`` is ``(batch, heads, num_dst, num_src)``,
    with 1 for an axis by which the graph does not differ. If there is one slice, ``ordered_edges``
    may hold the edges in the order of the index that they come from.
    """

    ptr: Int[Tensor, " rows_plus_one"]
    src: Int[Tensor, " edges"]
    shape: Shape
    ordered_edges: Int[Tensor, "2 edges"] | None = None

    has_structure = False

    @classmethod
    def from_rows(cls, row: Int[Tensor, " edges"], src: Int[Tensor, " edges"], shape: Shape) -> ChosenEdges:
        """Build the edges from their rows and senders; these pairs must be sorted and distinct."""
        ends = torch.bincount(row, minlength=math.prod(shape[:3])).cumsum(0)
        return cls(torch.cat([ends.new_zeros(1), ends]), src.to(torch.int32), shape)

    @property
    def num_slices(self) -> int:
        return self.shape[0] * self.shape[1]

    @cached_property
    def has_slices(self) -> bool:  # type: ignore[override]
        return self.num_slices > 1

    @property
    def edge_row(self) -> Int[Tensor, " edges"]:
        return torch.repeat_interleave(self.ptr.diff(), output_size=len(self.src))

    @cached_property
    def keys_with_sentinel(self) -> Int[Tensor, " edges_plus_one"]:
        """The sorted keys ``r * num_src + src``, followed by the largest int64."""
        return torch.cat([self.edge_row * self.shape[3] + self.src, rules.SENTINEL_KEY.to(self.src.device)])

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return partial(rules.is_chosen, self.keys_with_sentinel, self.shape)

    def count(self) -> int:
        return self.src.numel()

    def listed(self) -> Int[Tensor, "2 edges"] | None:
        return self._edge_list if self.num_slices == 1 else None

    @cached_property
    def _edge_list(self) -> Int[Tensor, "2 edges"]:
        edges = self.ordered_edges
        return torch.stack([self.src.long(), self.edge_row]) if edges is None else edges

    def pointers(self) -> tuple[Int[Tensor, " rows_plus_one"], Int[Tensor, " edges"]]:
        return self.ptr, self.src

    def keys(self) -> Int[Tensor, " edges"]:
        return self.keys_with_sentinel[:-1]

    def in_degree(self) -> Int[Tensor, " rows"]:
        return self.ptr.diff().cpu()

    def rows(self, start: int, stop: int) -> EdgeSet:
        num_dst = self.shape[2]
        rows = [self._slice_rows(i * num_dst + start, i * num_dst + stop) for i in range(self.num_slices)]
        ends = torch.cat([ptr.diff() for ptr, _ in rows]).cumsum(0)
        edges = self.ordered_edges
        if edges is not None:
            is_inside = (edges[1] >= start) & (edges[1] < stop)
            edges = edges[:, is_inside] - edges.new_tensor([[0], [start]])
        src = torch.cat([src for _, src in rows])
        shape = (*self.shape[:2], stop - start, self.shape[3])
        return ChosenEdges(torch.cat([ends.new_zeros(1), ends]), src, shape, edges)

    def _slice_rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        ptr = self.ptr[start : stop + 1]
        begin, end = ptr[[0, -1]].tolist()
        return ptr - begin, self.src[begin:end]

    def select(self, batch: int, head: int) -> EdgeSet:
        if self.num_slices == 1:
            return self
        num_samples, num_heads, num_dst, num_src = self.shape
        # If only one sample is stored, all samples share its rows. The same applies to heads.
        start = (batch % num_samples * num_heads + head % num_heads) * num_dst
        ptr, src = self._slice_rows(start, start + num_dst)
        return ChosenEdges(ptr, src, (1, 1, num_dst, num_src))

    def transposed(self) -> EdgeSet:
        batch, heads, num_dst, num_src = self.shape
        if self.num_slices == 1:
            return ListedEdges(self._edge_list.flip(0).cpu(), num_src, num_dst)
        row = self.edge_row
        edge_slice, dst = row // max(num_dst, 1), row % max(num_dst, 1)
        key = ((edge_slice * num_src + self.src) * num_dst + dst).sort().values
        return ChosenEdges.from_rows(key // num_dst, key % num_dst, (batch, heads, num_src, num_dst))

    def restrict_to(self, other: EdgeSet, in_other: bool, batch_shape: tuple[int, int]) -> EdgeSet | None:
        batch, heads, num_dst, _ = self.shape
        if batch_shape != (batch, heads):
            return None
        row = self.edge_row
        edge_slice, dst = row // max(num_dst, 1), row % max(num_dst, 1)
        b, h = edge_slice // heads, edge_slice % heads
        is_selected = other.contains(b, h, dst, self.src.long()).expand(len(self.src)) == in_other
        if bool(is_selected.all()):
            return self
        edges = ChosenEdges.from_rows(row[is_selected], self.src[is_selected], self.shape)
        if self.ordered_edges is None:
            return edges
        src, dst = self.ordered_edges
        zero = torch.zeros_like(dst)
        is_selected = other.contains(zero, zero, dst, src).expand(len(dst)) == in_other
        return replace(edges, ordered_edges=self.ordered_edges[:, is_selected])

    def extract_lists(self, num_dst: int, num_src: int) -> tuple[EdgeSet, list[Int[Tensor, " pairs"]]]:
        if self.num_slices > 1:
            return self, []
        edge_index = torch.stack([self.src.long(), self.edge_row]).cpu()
        return ListedEdges(edge_index, *self.shape[2:]).extract_lists(num_dst, num_src)
