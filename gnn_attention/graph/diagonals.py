"""Graphs whose edges depend on ``dst - src`` alone (windows, strides): one table of diagonals for any box.

With ``before[t]`` diagonals below t that are edges and ``twice`` its running sum, the edges of a box are a
sum of four terms, and a column has an edge if the diagonals that it crosses have one. No pair is visited.
"""

from __future__ import annotations

from typing import NamedTuple

from gnn_attention._support.memo import memoized
from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph.regions import quadtree
from gnn_attention.graph.regions.quadtree import Boxes, decompose, profile, ragged, root, running_sums
from gnn_attention.graph.token_graph import TokenGraph

# longer than any side: boxes are evaluated and none is cut
LARGEST = 2**40


class Diagonals(NamedTuple):
    """Sums over the diagonals of a graph: t holds the pairs with ``dst - src = t - num_src + 1``."""

    num_src: int
    before: Int[Tensor, " diagonals"]
    twice: Int[Tensor, " diagonals"]

    def edges(self, boxes: Boxes) -> Int[Tensor, " boxes"]:
        top, left = boxes.dst + self.num_src, boxes.src
        bottom, right = top + boxes.height, left + boxes.width
        lower = self.twice[bottom - left] - self.twice[bottom - right]
        return lower - self.twice[top - left] + self.twice[top - right]

    def columns(self, boxes: Boxes) -> tuple[Bool[Tensor, " columns"], Tensor, Tensor]:
        """For every column of the boxes: has it an edge in the box, its box, its number in the box."""
        box, column = ragged(boxes.width)
        first = (boxes.dst - boxes.src)[box] - column + self.num_src - 1
        return self.before[first + boxes.height[box]] > self.before[first], box, column


def diagonals(graph: TokenGraph) -> Diagonals | None:
    """The sums of a structured graph that depends on ``dst - src`` alone; None for any other."""
    edge: Tensor | None = memoized(_edge_of_each, graph)
    if edge is None:
        return None
    before = running_sums(edge)
    return Diagonals(graph.num_src, before, running_sums(before))


def _edge_of_each(graph: TokenGraph) -> Tensor | None:
    if graph.listed_edges is not None or graph.heads or graph.batch or not graph.num_dst or not graph.num_src:
        return None
    pieces = list(decompose(graph.rule, root(graph.shape4), leaf=LARGEST))
    if len(pieces) != 1 or pieces[0].kind != quadtree.DIFFERENCE:
        return None
    return profile(graph.rule, pieces[0])[0].clone()
