"""Operations on edges, as values: which edges, in which layers and heads, and the graph in two that follows from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.call import made_of
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.intervals.arithmetic import ask
from gnn_attention.graph.rules import Rule
from gnn_attention.interpret.trace import pairs

__all__ = ["Split", "Surgery", "cut", "mute"]


@dataclass(frozen=True, eq=False)
class Surgery:
    """What :func:`cut` and :func:`mute` return: which edges, in which layers and heads, and what happens to them."""

    kind: str
    edges: TokenGraph | Tensor | None = None
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None

    def touched(self, graph: TokenGraph, num_heads: int) -> TokenGraph:
        """The edges of ``graph`` that the operation is about: a graph that differs by head if not all heads are.

        >>> import torch
        >>> graph = TokenGraph.from_edges(torch.tensor([[0, 0, 1], [0, 1, 1]]), 2)
        >>> cut([(0, 1)], heads=1).touched(graph, 2).mask().int().tolist()
        [[[0, 0], [0, 0]], [[0, 0], [1, 0]]]
        """
        part = self.in_any_head(graph)
        if self._in_all_heads(num_heads):
            return part
        assert self.heads is not None
        rule = partial(_in_heads, part.rule, self.heads)
        return replace(part, rule=rule, heads=num_heads, name=f"{part.name} in some heads", _listed=None)

    def split(self, graph: TokenGraph, num_heads: int) -> tuple[TokenGraph, TokenGraph]:
        """:meth:`touched` and the rest of ``graph``. Heads that are not operated on keep ``graph`` itself and its plans."""
        touched = self.touched(graph, num_heads)
        rest = graph - touched
        if self._in_all_heads(num_heads) or pairs.varies(graph):
            return touched, rest
        part, operated = self.in_any_head(graph), [head in (self.heads or ()) for head in range(num_heads)]
        without, nothing = graph - part, part & ~part
        made_of(touched, [[part if operated[head] else nothing for head in range(num_heads)]])
        return touched, made_of(rest, [[without if operated[head] else graph for head in range(num_heads)]])

    def in_any_head(self, graph: TokenGraph) -> TokenGraph:
        """The edges of ``graph`` that the operation is about in the heads that it is about."""
        return graph if self.edges is None else self._as_graph(graph) & graph

    def check(self, graph: TokenGraph, num_heads: int) -> None:
        """ValueError or IndexError for a listed pair that is no edge."""
        if isinstance(self.edges, Tensor):
            chosen = None if self.heads is None else list(self.heads)
            pairs.check_edges(graph, self.edges, num_heads, chosen, f"there is nothing to {self.kind}")

    def _in_all_heads(self, num_heads: int) -> bool:
        return self.heads is None or set(self.heads) == set(range(num_heads))

    def _as_graph(self, graph: TokenGraph) -> TokenGraph:
        if not isinstance(self.edges, Tensor):
            assert self.edges is not None
            return self.edges
        listed = TokenGraph.from_edges(self.edges, graph.num_dst, graph.num_src, coalesce=True, name="some")
        return replace(listed, dst_offset=graph.dst_offset, src_offset=graph.src_offset)


def _in_heads(inner: Rule, heads: tuple[int, ...], b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    chosen = h < 0
    for head in heads:
        chosen = chosen | (h == head)
    return chosen & ask(inner, b, h, dst, src)


def cut(edges: Any = None, layers: int | Iterable[int] | None = None, heads: int | Iterable[int] | None = None) -> Surgery:
    """The edges are not there: the weights of a receiver's other in-edges grow to a sum of 1; without any it hears nobody.

    Args:
        edges: a list of ``(src, dst)``, one such pair, a tensor ``[2, K]``, a :class:`TokenGraph` (its edges, as far as the
            layer's graph has them), or None: every edge.
        layers: numbers of the attention layers, in the order of ``model.modules()``; None: all.
        heads: numbers of the heads; None: all.

    Raises TypeError, ValueError or IndexError for what is none of these.

    >>> import torch
    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns
    >>> from gnn_attention.interpret.trace import operate
    >>> layer, x, graph = MessagePassingAttention(StandardHeads(8, 2)), torch.randn(5, 8), patterns.causal(5)
    >>> with operate(layer, cut([(1, 3), (2, 3)])):
    ...     found = layer(x, graph)
    >>> gone = TokenGraph.from_edges(torch.tensor([[1, 2], [3, 3]]), 5)
    >>> torch.equal(found, layer(x, graph - gone)), torch.equal(found, layer(x, graph))
    (True, False)
    """
    return _surgery("cut", edges, layers, heads)


def mute(edges: Any = None, layers: int | Iterable[int] | None = None, heads: int | Iterable[int] | None = None) -> Surgery:
    """The edges keep their weight and say nothing: all other weights stay, and what the edges carried is missing from the update.

    Arguments and errors are those of :func:`cut`; ``mute(heads=3)`` takes head 3 out of the model.

    >>> import torch
    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns
    >>> from gnn_attention.interpret.trace import operate
    >>> layer, x = MessagePassingAttention(StandardHeads(8, 2)), torch.randn(5, 8)
    >>> with operate(layer, mute()):
    ...     layer(x, patterns.causal(5)).abs().max().item()
    0.0
    """
    return _surgery("mute", edges, layers, heads)


def _surgery(kind: str, which: Any, layers: Any, heads: Any) -> Surgery:
    which = which if which is None or isinstance(which, TokenGraph) else pairs.as_pairs(which)
    return Surgery(kind, which, _numbers("layers", layers), _numbers("heads", heads))


def _numbers(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    return tuple(checks.sizes(name, value)) if isinstance(value, Iterable) else (checks.size(name, value),)


class Split:
    """A graph in two, what an operation is about and the rest: worked out once for the graph that came last."""

    def __init__(self, surgery: Surgery) -> None:
        self.surgery = surgery
        self._last: tuple[TokenGraph, int, TokenGraph, TokenGraph] | None = None

    def __call__(self, graph: TokenGraph, num_heads: int) -> tuple[TokenGraph, TokenGraph]:
        last = self._last
        if last is None or last[0] is not graph or last[1] != num_heads:
            self._last = last = (graph, num_heads, *self.surgery.split(graph, num_heads))
        return last[2], last[3]
