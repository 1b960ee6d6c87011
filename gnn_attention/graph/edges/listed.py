"""Edges that are stored as a list ``[2, E]``, and the score_mod that counts repeated edges."""

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

# NumPy sorts lists of at most this many edges, without the permutation, which few of them need.
MAX_NUMPY_SORT_EDGES = 2**14
# An edge that occurs several times in a list raises an error, is merged, or is kept.
Parallel = Literal["error", "merge", "keep"]


@dataclass(eq=False)
class ListedEdges(EdgeSet):
    """The edges of the list ``edge_index [2, E]``, int64 on the CPU; their order is kept.

    With ``parallel="keep"`` an edge may repeat, as in a multigraph. Masks, set operators and
    comparisons count it once. Otherwise the caller promises that the edges are distinct.
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
        """The permutation that sorts the edges by receiver, then sender; None if they are sorted."""
        return self._sorted_edges[1]

    @cached_property
    def sorted_keys(self) -> Int[Tensor, " edges"]:
        """``dst * num_src + src`` of every edge in ascending order."""
        if self.count() > MAX_NUMPY_SORT_EDGES:
            return self._sorted_edges[0]
        # NumPy sorts the keys in a third of the time that torch takes.
        keys = edge_list.edge_keys(self.edge_index, self.num_src)
        edge_list.numpy_view(keys).sort()
        return keys

    @cached_property
    def has_parallel_edges(self) -> bool:  # type: ignore[override]
        return self.parallel == "keep" and not edge_list.is_increasing(self.sorted_keys)

    @cached_property
    def unique_edges(self) -> ListedEdges:
        """The edges, with only the first copy of each."""
        if not self.has_parallel_edges:
            # From now on, rows and the transpose do not search for parallel edges.
            self.parallel = "error"
            return self
        keys, order = edge_list.edge_keys(self.edge_index, self.num_src).sort(stable=True)
        is_first_copy = torch.ones_like(keys, dtype=torch.bool)
        is_first_copy[1:] = keys[1:] != keys[:-1]
        index = order[is_first_copy].sort().values
        return ListedEdges(self.edge_index[:, index], self.num_dst, self.num_src)

    @cached_property
    def keys_with_sentinel(self) -> Int[Tensor, " edges_plus_one"]:
        """The sorted, distinct keys, followed by the largest int64."""
        return torch.cat([torch.unique_consecutive(self.sorted_keys), rules.SENTINEL_KEY])

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return partial(rules.is_listed, self.keys_with_sentinel, self.num_src)

    def count(self) -> int:
        return int(self.edge_index.shape[1])

    def listed(self) -> Int[Tensor, "2 edges"]:
        return self.edge_index

    def keys(self) -> Int[Tensor, " edges"]:
        return self.keys_with_sentinel[:-1]

    def in_degree(self) -> Int[Tensor, " rows"]:
        return torch.bincount(self.edge_index[1], minlength=self.num_dst)

    def rows(self, start: int, stop: int) -> EdgeSet:
        src, dst = self.edge_index[:, (self.edge_index[1] >= start) & (self.edge_index[1] < stop)]
        return ListedEdges(torch.stack([src, dst - start]), stop - start, self.num_src, self.parallel)

    def select(self, batch: int, head: int) -> EdgeSet:
        return self

    def transposed(self) -> EdgeSet:
        return ListedEdges(self.edge_index.flip(0), self.num_src, self.num_dst, self.parallel)

    def restrict_to(self, other: EdgeSet, in_other: bool, batch_shape: tuple[int, int]) -> EdgeSet | None:
        if batch_shape != (1, 1):
            return None
        src, dst = edges = self.unique_edges.edge_index
        zero = torch.zeros_like(dst)
        is_in_other = other.contains(zero, zero, dst, src).expand(len(dst))
        return ListedEdges(edges[:, is_in_other == in_other], self.num_dst, self.num_src)

    def extract_lists(self, num_dst: int, num_src: int) -> tuple[EdgeSet, list[Int[Tensor, " pairs"]]]:
        # A sender beyond the last one of the list would have the key of another pair.
        if num_src > self.num_src:
            return self, []
        dst, src = self.keys() // max(self.num_src, 1), self.keys() % max(self.num_src, 1)
        is_inside = src < num_src
        return RuleEdges(rules.no_pair), [dst[is_inside] * num_src + src[is_inside]]


@dataclass(frozen=True, eq=False)
class log_count:  # noqa: N801 (named like the score_mods of score_mods.py)
    """The score_mod ``score + log m`` for pairs that occur m times in a slice of a graph.

    ``keys`` holds the sorted keys ``r * num_src + src`` of pairs with m > 1, where r is the row,
    and then the largest int64. ``logs`` holds log m for each of these pairs, and then 0.
    """

    keys: Int[Tensor, " repeated_pairs_plus_one"]
    logs: Float[Tensor, " repeated_pairs_plus_one"]
    shape: Shape

    @classmethod
    def from_keys(cls, keys: Int[Tensor, " entries"], shape: Shape) -> log_count:
        """Count how often each of the sorted ``keys`` occurs."""
        unique_keys, counts = torch.unique_consecutive(keys, return_counts=True)
        is_repeated = counts > 1
        logs = torch.nn.functional.pad(counts[is_repeated].double().log(), (0, 1))
        return cls(torch.cat([unique_keys[is_repeated], rules.SENTINEL_KEY.to(keys.device)]), logs, shape)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        keys, logs = self.keys.to(score.device), self.logs.to(score.device, score.dtype)
        key = rules.row_index(self.shape, b, h, dst).to(torch.int64) * self.shape[3] + src
        index = torch.searchsorted(keys, key)
        return score + torch.where(keys[index] == key, logs[index], 0.0)
