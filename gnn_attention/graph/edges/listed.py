"""A list of edges ``[2, E]``, and how often an edge stands in one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import torch

from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.graph import edge_list, rules
from gnn_attention.graph.edges.edge_set import EdgeSet
from gnn_attention.graph.edges.rule import RuleEdges
from gnn_attention.graph.rules import Rule, Shape

# edges of a list whose order is not needed where it is used once
SHORT = 2**14
# What to do with an edge that stands several times in a list.
Parallel = Literal["error", "merge", "keep"]


@dataclass(eq=False)
class ListedEdges(EdgeSet):
    """The edges ``edge_index [2, E]`` in this order, int64 on the CPU.

    With ``parallel="keep"`` an edge may stand several times, each with a place of its own, as in a
    multigraph. Masks, set operators and comparisons see each edge once. Otherwise the list is trusted to hold
    each edge once.
    """

    edge_index: Int[Tensor, "2 edges"]
    num_dst: int
    num_src: int
    parallel: Parallel = "error"

    @cached_property
    def _sorted_edges(self) -> tuple[Tensor, Tensor | None]:
        return edge_list.sort_by_receiver(self.edge_index, self.num_src)

    @property
    def order(self) -> Int[Tensor, " edges"] | None:
        """The order of the edges by receiver, then sender; None for a list that stands in it."""
        return self._sorted_edges[1]

    @cached_property
    def sorted_keys(self) -> Int[Tensor, " edges"]:
        """``dst * num_src + src`` of every edge in ascending order."""
        if self.count() > SHORT:
            return self._sorted_edges[0]
        # NumPy sorts numbers alone in a third of the time, and few edges need no order for one use.
        keys = edge_list.keys_of(self.edge_index, self.num_src)
        edge_list.numbers(keys).sort()
        return keys

    @cached_property
    def has_parallel_edges(self) -> bool:  # type: ignore[override]
        return self.parallel == "keep" and not edge_list.ascends(self.sorted_keys)

    @cached_property
    def distinct(self) -> ListedEdges:
        """The first of each edge."""
        if not self.has_parallel_edges:
            # Rows and the transpose need not be searched for copies again.
            self.parallel = "error"
            return self
        first = edge_list.first_of_each(edge_list.keys_of(self.edge_index, self.num_src))
        return ListedEdges(self.edge_index[:, first], self.num_dst, self.num_src)

    @cached_property
    def table(self) -> Int[Tensor, " edges_and_one"]:
        """The keys in ascending order, each once, and the largest int64."""
        return torch.cat([torch.unique_consecutive(self.sorted_keys), rules.LAST_KEY])

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return partial(rules.is_listed, self.table, self.num_src)

    def count(self) -> int:
        return int(self.edge_index.shape[1])

    def listed(self) -> Int[Tensor, "2 edges"]:
        return self.edge_index

    def keys(self) -> Int[Tensor, " edges"]:
        return self.table[:-1]

    def in_degree(self) -> Int[Tensor, " rows"]:
        return torch.bincount(self.edge_index[1], minlength=self.num_dst)

    def rows(self, start: int, stop: int) -> EdgeSet:
        src, dst = self.edge_index[:, (self.edge_index[1] >= start) & (self.edge_index[1] < stop)]
        return ListedEdges(torch.stack([src, dst - start]), stop - start, self.num_src, self.parallel)

    def select(self, batch: int, head: int) -> EdgeSet:
        return self

    def transposed(self) -> EdgeSet:
        return ListedEdges(self.edge_index.flip(0), self.num_src, self.num_dst, self.parallel)

    def restricted_to(self, other: EdgeSet, is_edge: bool, slices: tuple[int, int]) -> EdgeSet | None:
        if slices != (1, 1):
            return None
        src, dst = edges = self.distinct.edge_index
        inside = other.contains(torch.zeros_like(dst), torch.zeros_like(dst), dst, src).expand(len(dst))
        return ListedEdges(edges[:, inside == is_edge], self.num_dst, self.num_src)

    def without_lists(self, num_dst: int, num_src: int) -> tuple[EdgeSet, list[Int[Tensor, " pairs"]]]:
        # For more senders than the list has, its keys would be those of other pairs.
        if num_src > self.num_src:
            return self, []
        dst, src = self.keys() // max(self.num_src, 1), self.keys() % max(self.num_src, 1)
        inside = src < num_src
        return RuleEdges(rules.no_pair), [dst[inside] * num_src + src[inside]]


@dataclass(frozen=True, eq=False)
class log_count:  # noqa: N801 (a score_mod, named as those of score_mods)
    """``score + log m`` where src stands m times for dst, of sample b and head h of a graph of this shape.

    ``keys`` are ``r * num_src + src`` of the pairs with m > 1, ascending, and the largest int64; ``logs``
    theirs.
    """

    keys: Int[Tensor, " repeated_and_one"]
    logs: Float[Tensor, " repeated_and_one"]
    shape: Shape

    @classmethod
    def of(cls, keys: Int[Tensor, " entries"], shape: Shape) -> log_count:
        """By how often each of the ascending ``keys`` stands."""
        once, number = torch.unique_consecutive(keys, return_counts=True)
        often = number > 1
        logs = torch.nn.functional.pad(number[often].double().log(), (0, 1))
        return cls(torch.cat([once[often], rules.LAST_KEY.to(keys.device)]), logs, shape)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        keys, logs = self.keys.to(score.device), self.logs.to(score.device, score.dtype)
        key = rules.row_of(self.shape, b, h, dst).to(torch.int64) * self.shape[3] + src
        place = torch.searchsorted(keys, key)
        return score + torch.where(keys[place] == key, logs[place], 0.0)
