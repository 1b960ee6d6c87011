"""Graphs made of graphs: rows, one head, the set operators, two hops and powers of :class:`TokenGraph`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch

from gnn_attention._support import checks
from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.memo import Frozen
from gnn_attention.graph import edge_list, rules, text
from gnn_attention.graph.edges import CombinedEdges, EdgeSet, ListedEdges

# A TokenGraph, whose class is derived from the one below.
Graph = Any
G = TypeVar("G", bound="GraphOperators")


@dataclass(eq=False, repr=False)
class GraphOperators(Frozen):
    """The fields of a :class:`TokenGraph`, and its methods that make graphs."""

    edges: EdgeSet
    num_dst: int
    num_src: int
    heads: int | None = None
    batch: int | None = None
    name: str = "graph"
    dst_offset: int = 0
    src_offset: int = 0

    @not_compiled
    def rows(self: G, start: int, stop: int) -> G:
        """The receivers ``start .. stop - 1`` over all senders, as in a decoding step; else IndexError.

        >>> from gnn_attention import TokenGraph
        >>> causal = TokenGraph.from_rule(lambda b, h, dst, src: src <= dst, 4)
        >>> causal.rows(2, 4).mask().int().tolist()
        [[1, 1, 1, 0], [1, 1, 1, 1]]
        """
        start, stop = checks.size("start", start), checks.size("stop", stop)
        if not start <= stop <= self.num_dst:
            expected = f"0 <= start <= stop <= num_dst = {self.num_dst}"
            raise IndexError(f"rows({start}, {stop}): expected {expected}")
        name = f"{text.parenthesize(self.name)}.rows({start}, {stop})"
        first = self.dst_offset + start
        return replace(
            self, edges=self.edges.rows(start, stop), num_dst=stop - start, name=name, dst_offset=first
        )

    @not_compiled
    def select(self: G, batch: int = 0, head: int = 0) -> G:
        """The graph of one sample and one head, as a plain graph. IndexError where there is none."""
        for word, index, count in (("batch", batch, self.batch), ("head", head, self.heads)):
            checks.position(word, index)
            if count is not None and not 0 <= index < count:
                raise IndexError(f"{word} must be in 0 .. {count - 1}, got {index}")
        if self.heads is None and self.batch is None:
            return self
        name = f"{text.parenthesize(self.name)}.select({batch}, {head})"
        edges = self.edges.select(batch if self.batch else 0, head if self.heads else 0)
        return replace(self, edges=edges, heads=None, batch=None, name=name)

    @not_compiled
    def coalesce(self: G) -> G:
        """The graph with each edge once, the first of its copies: this one if it has no parallel edges."""
        distinct = self.edges.distinct
        return self if distinct is self.edges else replace(self, edges=distinct)

    @property
    @not_compiled
    def T(self: G) -> G:
        """Every edge reversed: senders become receivers (seed S4.22)."""
        return replace(
            self,
            edges=self.edges.transposed(),
            num_dst=self.num_src,
            num_src=self.num_dst,
            dst_offset=self.src_offset,
            src_offset=self.dst_offset,
            name=f"{text.parenthesize(self.name)}.T",
        )

    def __or__(self: G, other: G) -> G:
        return _combine(self, other, "|", operator.or_)

    def __and__(self: G, other: G) -> G:
        return _combine(self, other, "&", operator.and_)

    def __sub__(self: G, other: G) -> G:
        return _combine(self, other, "-", rules.difference)

    def __xor__(self: G, other: G) -> G:
        return _combine(self, other, "^", operator.xor)

    @not_compiled
    def __invert__(self: G) -> G:
        edges = CombinedEdges(operator.invert, (self.edges.distinct,))
        return replace(self, edges=edges, name=f"~{text.parenthesize(self.name)}")

    def __matmul__(self: G, other: G) -> G:
        """Two hops, the boolean product of the masks: first along ``other``, then along ``self``.

        The result carries its edges. ValueError if the middle tokens or the heads or samples differ.
        """
        if not isinstance(other, GraphOperators):
            return NotImplemented
        if (self.num_src, self.src_offset) != (other.num_dst, other.dst_offset):
            wanted = f"{self.num_src} receivers from {self.src_offset} on, the senders of {self.name}"
            got = f"{other.num_dst} receivers of {other!r}"
            raise ValueError(f"graphs joined by @ must meet: expected {wanted}, got {got}")
        sizes = self.num_dst, self.num_src, other.num_src
        left, right = cast("tuple[Graph, Graph]", (self.coalesce(), other.coalesce()))
        edges = ListedEdges(edge_list.product(left.edge_index, right.edge_index, *sizes), sizes[0], sizes[2])
        name = f"{text.parenthesize(self.name)} @ {text.parenthesize(other.name)}"
        return replace(self, edges=edges, num_src=other.num_src, name=name, src_offset=other.src_offset)

    def __pow__(self: G, hops: int) -> G:
        """Exactly ``hops`` hops: ``g ** 2 == g @ g``, ``g ** 0`` the self loops. ValueError unless square."""
        hops = checks.size("the power of a graph", hops)
        if (self.num_dst, self.dst_offset) != (self.num_src, self.src_offset):
            raise ValueError(f"only a square graph has powers, with the same tokens twice, got {self!r}")
        loops = torch.arange(self.num_dst, device="cpu").expand(2, -1)
        edges = ListedEdges(loops, self.num_dst, self.num_src)
        result = replace(self, edges=edges, heads=None, batch=None, name="loops")
        for _ in range(hops):
            result = result @ self
        base = text.parenthesize(self.name)
        return replace(result, name=f"({base}) ** {hops}" if base.startswith("~") else f"{base} ** {hops}")


@not_compiled
def _combine(left: G, right: G, sign: str, join: Callable[..., Any]) -> G:
    """The graph whose edges are the set operator ``join`` of those of both.

    It keeps its edges as a list or as rows where the pairs of the operands that are stored hold them all.
    """
    if not isinstance(right, type(left)) and not isinstance(left, type(right)):
        return cast("G", NotImplemented)
    _check_same_nodes(left, right, sign)
    name = f"{text.parenthesize(left.name)} {sign} {text.parenthesize(right.name)}"
    heads, batch = left.heads or right.heads, left.batch or right.batch
    edges = _join_stored(left.edges.distinct, right.edges.distinct, sign, (batch or 1, heads or 1), left)
    if edges is None:
        edges = CombinedEdges(join, (left.edges.distinct, right.edges.distinct))
    return replace(left, edges=edges, heads=heads, batch=batch, name=name)


def _join_stored(
    left: EdgeSet, right: EdgeSet, sign: str, slices: tuple[int, int], graph: Graph
) -> EdgeSet | None:
    """The combination, found at the stored pairs alone; None where a rule has edges besides."""
    if sign in "&-":
        edges = left.restricted_to(right, sign == "&", slices)
        return right.restricted_to(left, True, slices) if edges is None and sign == "&" else edges
    first, second = left.listed(), right.listed()
    if slices != (1, 1) or first is None or second is None:
        return None
    union = ListedEdges(torch.cat([first, second], dim=1), graph.num_dst, graph.num_src, "keep").distinct
    if sign == "|":
        return union
    return union.restricted_to(CombinedEdges(operator.xor, (left, right)), True, slices)


def _check_same_nodes(left: Graph, right: Graph, sign: str) -> None:
    nodes = ("num_dst", "num_src", "dst_offset", "src_offset")
    sizes = ((left.heads, right.heads), (left.batch, right.batch))
    same = all(getattr(left, name) == getattr(right, name) for name in nodes)
    if not same or any(None not in pair and pair[0] != pair[1] for pair in sizes):
        expected = f"graphs joined by {sign} must have the same nodes (number and position), heads and batch"
        raise ValueError(f"{expected}, got {left!r} and {right!r}")
