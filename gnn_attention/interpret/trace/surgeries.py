"""Interventions on edges: which edges, in which layers and heads, and a run in which they are changed.

======  =========================================  ==========================================================
cut     the graph without the edge                 softmax renormalises the receiver's remaining weights
mute    the edge with its message taken away       its weight stays, and nothing comes along it
scale   the message times a factor                 its weight stays
patch   the message of another run                 its weight stays, as this run's q and k make it
======  =========================================  ==========================================================

A cut changes the graph of a layer. The others change the values along some edges: attention runs over these
edges and over the rest, on any backend, and the two are added with their shares ``e^(lse_part - lse)`` of the
softmax. All are exact, for gradients too: nothing is subtracted, and what is not sent is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.call import made_of
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.intervals.arithmetic import evaluate
from gnn_attention.graph.rules import Rule, everyone
from gnn_attention.interpret.trace import pairs
from gnn_attention.interpret.trace.layer import LayerTrace

Numbers = int | Iterable[int] | None
Values = Float[Tensor, "batch kv_heads src value_dim"]
# the position of a sample's first sender, of all or of each
First = int | Tensor
# edges, or a place of them, with the changes that the values along them take
Parts = list[tuple[Any, tuple[Callable[[Any, Tensor], Tensor], ...]]]


@dataclass(frozen=True, eq=False)
class Surgery:
    """The result of :func:`cut`, :func:`mute`, :func:`scale` and :func:`patch`: which edges, and the change.

    ``change(layer, first, v)`` are the values that the edges carry instead of ``v``, whose first sender has
    the position ``first``; None: the edges are cut.
    """

    kind: str
    edges: TokenGraph | Tensor | None = None
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    change: Callable[[int, First, Values], Values] | None = None

    def selection(self, graph: TokenGraph, num_heads: int) -> TokenGraph:
        """The chosen edges of ``graph``: a graph that differs by head if not all heads are chosen."""
        part = self._in_chosen_heads(graph)
        if self._in_all_heads(num_heads):
            return part
        rule = partial(_in_heads, part.rule, self.heads or ())
        return replace(part, rule=rule, heads=num_heads, name=f"{part.name} in some heads", _listed=None)

    def split(self, graph: TokenGraph, num_heads: int) -> tuple[TokenGraph, TokenGraph]:
        """:meth:`selection` and the rest of ``graph``; the other heads share ``graph`` and its plans."""
        selection = self.selection(graph, num_heads)
        rest = graph - selection
        if self._in_all_heads(num_heads) or graph.varying_axes:
            return selection, rest
        part, chosen = self._in_chosen_heads(graph), [head in (self.heads or ()) for head in range(num_heads)]
        without, nothing = graph - part, part & ~part
        made_of(selection, [[part if is_chosen else nothing for is_chosen in chosen]])
        return selection, made_of(rest, [[without if is_chosen else graph for is_chosen in chosen]])

    def divided(
        self, parts: Parts, split: Callable[[Any], tuple[Any, Any]], change: Callable[[Any, Tensor], Tensor]
    ) -> Parts:
        """Disjoint parts, the first unchanged: of each the rest, and the chosen edges once more changed."""
        found: Parts = []
        for part, changes in parts:
            chosen, rest = split(part)
            found += [(rest, changes), (chosen, (*changes, change))]
        # what two interventions share is mostly nothing
        return [*found[:2], *(piece for piece in found[2:] if _has_edges(piece[0]))]

    def check(self, graph: TokenGraph, num_heads: int) -> None:
        """ValueError or IndexError for a listed pair that is no edge."""
        if isinstance(self.edges, Tensor):
            self.check_listed(graph, self.edges, num_heads)

    def check_listed(self, graph: TokenGraph, listed: Tensor, num_heads: int) -> None:
        """:meth:`check` of some of the pairs, or of other numbers for them."""
        pairs.check_edges(graph, listed, num_heads, self.heads, f"there is nothing to {self.kind}")

    def over(self, length: int, num_heads: int) -> TokenGraph:
        """The chosen pairs of whole sequences: of a size for this length and longer ones."""
        size = 1 << (self._pairs_end(length) - 1).bit_length()
        given = self.edges if isinstance(self.edges, TokenGraph) else None
        sizes = (size, size) if given is None else (given.num_dst, given.num_src)
        return self.selection(TokenGraph.from_rule(everyone, sizes[0], sizes[1]), num_heads)

    def _pairs_end(self, length: int) -> int:
        listed = self.edges if isinstance(self.edges, Tensor) and self.edges.numel() else None
        return length if listed is None else max(length, int(listed.max()) + 1)

    def _in_all_heads(self, num_heads: int) -> bool:
        return self.heads is None or set(self.heads) == set(range(num_heads))

    def _in_chosen_heads(self, graph: TokenGraph) -> TokenGraph:
        if not isinstance(self.edges, Tensor):
            return graph if self.edges is None else self.edges & graph
        part = TokenGraph.from_edges(self.edges, graph.num_dst, graph.num_src, coalesce=True, name="some")
        return replace(part, dst_offset=graph.dst_offset, src_offset=graph.src_offset) & graph


def _has_edges(part: Any) -> bool:
    graph: TokenGraph = getattr(part, "own", part)
    return graph.num_edges > 0


def _in_heads(inner: Rule, heads: tuple[int, ...], b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    chosen = h < 0
    for head in heads:
        chosen = chosen | (h == head)
    return chosen & evaluate(inner, b, h, dst, src)


def cut(edges: Any = None, layers: Numbers = None, heads: Numbers = None) -> Surgery:
    """Remove edges: softmax renormalises a receiver's remaining weights; without in-edges it is isolated.

    ``edges``: a list of ``(src, dst)``, one such pair, a tensor ``[2, K]``, a :class:`TokenGraph` (its edges,
    as far as the layer's graph has them), or None: every edge. ``layers``: numbers of the attention layers,
    in the order of ``model.modules()``; ``heads``: numbers of the heads; None: all. Raises TypeError,
    ValueError or IndexError for other arguments.

    >>> import torch
    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns, trace
    >>> layer, x, graph = MessagePassingAttention(StandardHeads(8, 2)), torch.randn(5, 8), patterns.causal(5)
    >>> with trace.operate(layer, trace.cut([(1, 3), (2, 3)])):
    ...     out = layer(x, graph)
    >>> gone = TokenGraph.from_edges(torch.tensor([[1, 2], [3, 3]]), 5)
    >>> torch.equal(out, layer(x, graph - gone)), torch.equal(out, layer(x, graph))
    (True, False)
    """
    return _surgery("cut", edges, layers, heads)


def mute(edges: Any = None, layers: Numbers = None, heads: Numbers = None) -> Surgery:
    """Take the messages of edges away: all weights stay, what the edges carried is missing from the update.

    Arguments and errors are those of :func:`cut`; ``mute(heads=3)`` takes head 3 out of the model.
    """
    return _surgery("mute", edges, layers, heads, _silent)


def scale(factor: float, edges: Any = None, layers: Numbers = None, heads: Numbers = None) -> Surgery:
    """Multiply the messages of edges by a factor: ``w_e (factor v_src)`` in place of ``w_e v_src``.

    Edges, layers, heads and errors are those of :func:`cut`; TypeError or ValueError for a factor that is no
    finite number.

    >>> import torch
    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns, trace
    >>> layer = MessagePassingAttention(StandardHeads(8, 2)).double()
    >>> x, graph = torch.randn(5, 8).double(), patterns.causal(5)
    >>> with trace.operate(layer, trace.scale(2.0)):
    ...     twice = layer(x, graph)
    >>> torch.allclose(twice, 2 * layer(x, graph), rtol=0, atol=1e-12)
    True
    """
    return _surgery("scale", edges, layers, heads, partial(_scaled, checks.number("factor", factor)))


def patch(run: Any, edges: Any = None, layers: Numbers = None, heads: Numbers = None) -> Surgery:
    """Replace the messages of edges by those of another run: ``w_e v'_src``, the weight as it is.

    ``run`` is a result of :func:`record` of the same model, of one sample or as many; of several calls of a
    layer the last counts. Senders are found by their position, without padding on the left; those that
    the run lacks keep their own message. The other arguments and errors are those of :func:`cut`;
    IndexError for layers that the run has not recorded, or a listed sender that it lacks. The call raises
    ValueError for values of another shape. Source: path patching, arXiv 2304.05969.

    >>> import torch
    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns, trace
    >>> layer, x = MessagePassingAttention(StandardHeads(8, 2)).double(), torch.randn(2, 5, 8).double()
    >>> other = trace.record(layer, x[0], patterns.causal(5))
    >>> with trace.operate(layer, trace.patch(other, (0, 4))):
    ...     changed = layer(x[1], patterns.causal(5))
    >>> difference = (changed - layer(x[1], patterns.causal(5))).abs().amax(1)
    >>> (difference > 1e-12).tolist()
    [False, False, False, False, True]
    """
    calls = getattr(run, "layers", ())
    if not calls or not all(isinstance(call, LayerTrace) for call in calls):
        raise TypeError(f"run must be a result of trace.record, got {checks.described(run)}")
    for call in calls:
        call.check_whole("patch")
    sources = {call.number: call for call in calls}
    surgery = _surgery("patch", edges, layers, heads, partial(_patched, sources))
    missing = set(surgery.layers or ()) - set(sources)
    if missing:
        raise IndexError(f"layers must be among {sorted(sources)}, which the run has, got {sorted(missing)}")
    found = replace(surgery, layers=surgery.layers or tuple(sorted(sources)))
    _check_senders(found, sources)
    return found


def _surgery(kind: str, edges: Any, layers: Numbers, heads: Numbers, change: Any = None) -> Surgery:
    edges = edges if edges is None or isinstance(edges, TokenGraph) else pairs.as_pairs(edges)
    return Surgery(kind, edges, _numbers("layers", layers), _numbers("heads", heads), change)


def _silent(layer: int, first: First, v: Values) -> Values:
    return torch.zeros_like(v)


def _scaled(factor: float, layer: int, first: First, v: Values) -> Values:
    return factor * v


def _patched(sources: Mapping[int, LayerTrace], layer: int, first: First, v: Values) -> Values:
    """``v`` with the values of the same positions of a recorded call, where it has them."""
    source = sources[layer]
    given = source.v.to(v)
    if given.shape[1::2] != v.shape[1::2] or len(given) not in (1, len(v)):
        got = f"{list(given.shape)} in the run and {list(v.shape)} here"
        raise ValueError(f"patch: the values [B, heads, tokens, dim] of layer {layer} are {got}")
    positions = torch.arange(v.shape[2], device=v.device) + _column(first, v)
    slots = positions - _column(source.first, v)
    there = (positions >= 0) & (slots >= 0) & (slots < _column(source.num_own, v))
    index = slots.clamp(0, given.shape[2] - 1)[:, None, :, None]
    taken = given.expand(len(v), -1, -1, -1).gather(2, index.expand(v.shape))
    return torch.where(there[:, None, :, None], taken, v)


def _column(first: First, v: Tensor) -> Tensor:
    return torch.as_tensor(first, device=v.device).view(-1, 1)


def _check_senders(surgery: Surgery, sources: Mapping[int, LayerTrace]) -> None:
    if not isinstance(surgery.edges, Tensor) or not surgery.edges.numel():
        return
    last = int(surgery.edges[0].max())
    for layer in surgery.layers or ():
        source = sources[layer]
        end = int(torch.as_tensor(source.first + source.num_own).max())
        if last >= end:
            raise IndexError(f"edges: sender {last} is not in the run, whose layer {layer} has {end} tokens")


def _numbers(name: str, value: Numbers) -> tuple[int, ...] | None:
    if value is None:
        return None
    values = value if isinstance(value, Iterable) else [value]
    return tuple(checks.sizes(name, values, any_order=True))
