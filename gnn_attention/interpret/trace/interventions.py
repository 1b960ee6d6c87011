"""Interventions on edges, as values: which edges, in which layers and heads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.call import made_of
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.intervals.arithmetic import evaluate
from gnn_attention.graph.rules import Rule
from gnn_attention.interpret.trace import pairs

Numbers = int | Iterable[int] | None


@dataclass(frozen=True, eq=False)
class Surgery:
    """The result of :func:`cut` and :func:`mute`: which edges, in which layers and heads."""

    kind: str
    edges: TokenGraph | Tensor | None = None
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None

    def selection(self, graph: TokenGraph, num_heads: int) -> TokenGraph:
        """The chosen edges of ``graph``: a graph that differs by head if not all heads are chosen.

        >>> import torch
        >>> graph = TokenGraph.from_edges(torch.tensor([[0, 0, 1], [0, 1, 1]]), 2)
        >>> cut([(0, 1)], heads=1).selection(graph, 2).mask().int().tolist()
        [[[0, 0], [0, 0]], [[0, 0], [1, 0]]]
        """
        part = self._in_chosen_heads(graph)
        if self._in_all_heads(num_heads):
            return part
        rule = partial(_in_heads, part.rule, self.heads or ())
        return replace(part, rule=rule, heads=num_heads, name=f"{part.name} in some heads", _listed=None)

    def split(self, graph: TokenGraph, num_heads: int) -> tuple[TokenGraph, TokenGraph]:
        """:meth:`selection` and the rest of ``graph``; the other heads share ``graph`` and its plans."""
        selection = self.selection(graph, num_heads)
        rest = graph - selection
        if self._in_all_heads(num_heads) or pairs.varies(graph):
            return selection, rest
        part, chosen = self._in_chosen_heads(graph), [head in (self.heads or ()) for head in range(num_heads)]
        without, nothing = graph - part, part & ~part
        made_of(selection, [[part if is_chosen else nothing for is_chosen in chosen]])
        return selection, made_of(rest, [[without if is_chosen else graph for is_chosen in chosen]])

    def check(self, graph: TokenGraph, num_heads: int) -> None:
        """ValueError or IndexError for a listed pair that is no edge."""
        if isinstance(self.edges, Tensor):
            pairs.check_edges(graph, self.edges, num_heads, self.heads, f"there is nothing to {self.kind}")

    def _in_all_heads(self, num_heads: int) -> bool:
        return self.heads is None or set(self.heads) == set(range(num_heads))

    def _in_chosen_heads(self, graph: TokenGraph) -> TokenGraph:
        if not isinstance(self.edges, Tensor):
            return graph if self.edges is None else self.edges & graph
        part = TokenGraph.from_edges(self.edges, graph.num_dst, graph.num_src, coalesce=True, name="some")
        return replace(part, dst_offset=graph.dst_offset, src_offset=graph.src_offset) & graph


def _in_heads(inner: Rule, heads: tuple[int, ...], b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    chosen = h < 0
    for head in heads:
        chosen = chosen | (h == head)
    return chosen & evaluate(inner, b, h, dst, src)


def cut(edges: Any = None, layers: Numbers = None, heads: Numbers = None) -> Surgery:
    """Remove edges: softmax renormalises a receiver's remaining weights; without in-edges it is isolated.

    Args:
        edges: a list of ``(src, dst)``, one such pair, a tensor ``[2, K]``, a :class:`TokenGraph` (its edges,
            as far as the layer's graph has them), or None: every edge.
        layers: numbers of the attention layers, in the order of ``model.modules()``; None: all.
        heads: numbers of the heads; None: all.

    Raises TypeError, ValueError or IndexError for other arguments.

    >>> import torch
    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns
    >>> from gnn_attention.interpret.trace import operate
    >>> layer, x, graph = MessagePassingAttention(StandardHeads(8, 2)), torch.randn(5, 8), patterns.causal(5)
    >>> with operate(layer, cut([(1, 3), (2, 3)])):
    ...     out = layer(x, graph)
    >>> gone = TokenGraph.from_edges(torch.tensor([[1, 2], [3, 3]]), 5)
    >>> torch.equal(out, layer(x, graph - gone)), torch.equal(out, layer(x, graph))
    (True, False)
    """
    return _surgery("cut", edges, layers, heads)


def mute(edges: Any = None, layers: Numbers = None, heads: Numbers = None) -> Surgery:
    """Take the messages of edges away: all weights stay, what the edges carried is missing from the update.

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


def _surgery(kind: str, edges: Any, layers: Numbers, heads: Numbers) -> Surgery:
    edges = edges if edges is None or isinstance(edges, TokenGraph) else pairs.as_pairs(edges)
    return Surgery(kind, edges, _numbers("layers", layers), _numbers("heads", heads))


def _numbers(name: str, value: Numbers) -> tuple[int, ...] | None:
    if value is None:
        return None
    return tuple(checks.sizes(name, value)) if isinstance(value, Iterable) else (checks.size(name, value),)
