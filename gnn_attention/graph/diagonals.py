"""Graphs whose edges depend on ``dst - src`` alone: windows, strides, causal ones. One table of diagonals
answers for any box.

With ``before[t]`` edges on the diagonals below t and ``twice`` its running sum, the rows of a box add up to
four terms, and a column is attended to if the diagonals that it crosses hold an edge: no pair is visited, and
no diagonal more than once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gnn_attention._support.memo import memoized
from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph.regions.quadtree import DIFFERENCE, Boxes, decompose, profile, ragged, root
from gnn_attention.graph.token_graph import TokenGraph

LARGEST = 2**40  # longer than any side: as the leaf of a cover, boxes are evaluated and none is cut


class Diagonals(NamedTuple):
    """Sums over the diagonals of a graph: t holds the pairs with ``dst - src = t - num_src + 1``."""

    num_src: int
    before: Int[Tensor, " diagonals"]
    twice: Int[Tensor, " diagonals"]

    def edges(self, boxes: Boxes) -> Int[Tensor, " boxes"]:
        """How many edges each box holds."""
        top, left = boxes.dst + self.num_src, boxes.src
        bottom, right = top + boxes.height, left + boxes.width
        return (
            self.twice[bottom - left]
            - self.twice[top - left]
            - self.twice[bottom - right]
            + self.twice[top - right]
        )

    def columns(
        self, boxes: Boxes
    ) -> tuple[Bool[Tensor, " columns"], Int[Tensor, " columns"], Int[Tensor, " columns"]]:
        """For every column of the boxes: has it an edge in the box, its box, its number in the box."""
        box, column = ragged(boxes.width)
        first = (boxes.dst - boxes.src)[box] - column + self.num_src - 1
        return self.before[first + boxes.height[box]] > self.before[first], box, column


def diagonals(graph: TokenGraph) -> Diagonals | None:
    """The sums of a structured graph that depends on ``dst - src`` alone; None for any other.

    >>> from gnn_attention import patterns
    >>> from gnn_attention.graph.regions.quadtree import root
    >>> graph = patterns.window(1_000_000, 4096)
    >>> int(diagonals(graph).edges(root((1, 1, 1_000_000, 1_000_000)))) == graph.num_edges
    True
    """
    edge: Tensor | None = memoized(_edge_of_each, graph)
    if edge is None:
        return None
    nothing = torch.zeros(1, dtype=torch.int64, device="cpu")
    before = torch.cat([nothing, edge.cumsum(0)])
    return Diagonals(graph.num_src, before, torch.cat([nothing, before.cumsum(0)]))


def _edge_of_each(graph: TokenGraph) -> Tensor | None:
    if graph.listed_edges is not None or graph.heads or graph.batch or not graph.num_dst or not graph.num_src:
        return None
    pieces = list(decompose(graph.rule, root(graph.shape4), leaf=LARGEST))
    if len(pieces) != 1 or pieces[0].kind != DIFFERENCE:
        return None
    return profile(graph.rule, pieces[0])[0].clone()
