"""Methods of :class:`TokenGraph` that return graphs: rows, slices, set operators, products and powers."""

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

# A TokenGraph, whose class is derived from GraphOperators.
Graph = Any
G = TypeVar("G", bound="GraphOperators")


@dataclass(eq=False, repr=False)
class GraphOperators(Frozen):
    """The fields of a :class:`TokenGraph`, and its methods that return graphs."""

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
        """Return the graph of receivers ``start .. stop - 1`` and all senders; IndexError if out of range.

        >>> from gnn_attention import TokenGraph
        >>> causal = TokenGraph.from_rule(lambda b, h, dst, src: src <= dst, 4)
        >>> causal.rows(2, 4).mask().int().tolist()
        [[1, 1, 1, 0], [1, 1, 1, 1]]
        """
        start, stop = checks.size("start", start), checks.size("stop", stop)
        if not start <= stop <= self.num_dst:
            raise IndexError(f"rows({start}, {stop}): expected start <= stop <= {self.num_dst} = num_dst")
        edges = self.edges.rows(start, stop)
        name = f"{text.parenthesize(self.name)}.rows({start}, {stop})"
        return replace(self, edges=edges, num_dst=stop - start, name=name, dst_offset=self.dst_offset + start)

    @not_compiled
    def select(self: G, batch: int = 0, head: int = 0) -> G:
        """Return the graph of one sample and one head; IndexError if out of range."""
        for argument, index, size in (("batch", batch, self.batch), ("head", head, self.heads)):
            checks.integer(argument, index)
            if size is not None and not 0 <= index < size:
                raise IndexError(f"{argument} must be in 0 .. {size - 1}, got {index}")
        if self.heads is None and self.batch is None:
            return self
        name = f"{text.parenthesize(self.name)}.select({batch}, {head})"
        edges = self.edges.select(batch if self.batch else 0, head if self.heads else 0)
        return replace(self, edges=edges, heads=None, batch=None, name=name)

    @not_compiled
    def coalesce(self: G) -> G:
        """Return the graph with the first copy of each edge, or ``self`` if no edge repeats."""
        edges = self.edges.unique_edges
        return self if edges is self.edges else replace(self, edges=edges)

    @property
    @not_compiled
    def T(self: G) -> G:
        """The graph with reversed edges: senders become receivers (S4.22 of docs/sources.md)."""
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
        edges = CombinedEdges(operator.invert, (self.edges.unique_edges,))
        return replace(self, edges=edges, name=f"~{text.parenthesize(self.name)}")

    def __matmul__(self: G, other: G) -> G:
        """Return the graph of two hops, first along ``other``, then along ``self``, stored as a list.

        Raises ValueError if the inner tokens do not match, or if a graph varies by head or sample.
        """
        if not isinstance(other, GraphOperators):
            return NotImplemented
        if (self.num_src, self.src_offset) != (other.num_dst, other.dst_offset):
            raise ValueError(
                f"graphs joined by @ must meet: expected {self.num_src} receivers from position "
                f"{self.src_offset} on, the senders of {self.name}, got {other!r}"
            )
        left, right = cast("tuple[Graph, Graph]", (self.coalesce(), other.coalesce()))
        sizes = self.num_dst, self.num_src, other.num_src
        edge_index = edge_list.product(left.edge_index, right.edge_index, *sizes)
        edges = ListedEdges(edge_index, self.num_dst, other.num_src)
        name = f"{text.parenthesize(self.name)} @ {text.parenthesize(other.name)}"
        return replace(self, edges=edges, num_src=other.num_src, name=name, src_offset=other.src_offset)

    def __pow__(self: G, hops: int) -> G:
        """Return the graph of exactly ``hops`` hops: ``g ** 2 == g @ g``; ValueError if not square."""
        hops = checks.size("the power of a graph", hops)
        if (self.num_dst, self.dst_offset) != (self.num_src, self.src_offset):
            raise ValueError(f"only a graph whose senders are its receivers has powers, got {self!r}")
        self_loops = torch.arange(self.num_dst, device="cpu").expand(2, -1)
        edges = ListedEdges(self_loops, self.num_dst, self.num_src)
        result = replace(self, edges=edges, heads=None, batch=None, name="loops")
        for _ in range(hops):
            result = result @ self
        base = text.parenthesize(self.name)
        return replace(result, name=f"({base}) ** {hops}" if base.startswith("~") else f"{base} ** {hops}")


@not_compiled
def _combine(left: G, right: G, symbol: str, operation: Callable[..., Any]) -> G:
    """Apply a set operator to the edges of two graphs with the same tokens."""
    if not isinstance(right, type(left)) and not isinstance(left, type(right)):
        return cast("G", NotImplemented)
    fields = ("num_dst", "num_src", "dst_offset", "src_offset")
    size_pairs = ((left.heads, right.heads), (left.batch, right.batch))
    has_same_tokens = all(getattr(left, field) == getattr(right, field) for field in fields)
    if not has_same_tokens or any(None not in pair and pair[0] != pair[1] for pair in size_pairs):
        raise ValueError(
            f"graphs joined by {symbol} must have the same tokens (number and position), heads and batch, "
            f"got {left!r} and {right!r}"
        )
    heads, batch = left.heads or right.heads, left.batch or right.batch
    operands = left.edges.unique_edges, right.edges.unique_edges
    edges = _combine_stored_edges(operands, symbol, (batch or 1, heads or 1), left)
    if edges is None:
        edges = CombinedEdges(operation, operands)
    name = f"{text.parenthesize(left.name)} {symbol} {text.parenthesize(right.name)}"
    return replace(left, edges=edges, heads=heads, batch=batch, name=name)


def _combine_stored_edges(
    operands: tuple[EdgeSet, EdgeSet], symbol: str, batch_shape: tuple[int, int], graph: Graph
) -> EdgeSet | None:
    """Combine edges into a list or chosen rows; None if a rule may add edges that are not stored."""
    left, right = operands
    if symbol in "&-":
        edges = left.restrict_to(right, symbol == "&", batch_shape)
        return right.restrict_to(left, True, batch_shape) if edges is None and symbol == "&" else edges
    left_list, right_list = left.listed(), right.listed()
    if batch_shape != (1, 1) or left_list is None or right_list is None:
        return None
    edge_index = torch.cat([left_list, right_list], dim=1)
    union = ListedEdges(edge_index, graph.num_dst, graph.num_src, "keep").unique_edges
    if symbol == "|":
        return union
    return union.restrict_to(CombinedEdges(operator.xor, operands), True, batch_shape)
