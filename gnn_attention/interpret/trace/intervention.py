"""Interventions on edges: which edges, in which layers and heads, and a run in which they are changed.

======  =========================================  ==========================================================
cut     the graph without the edge                 softmax renormalises the receiver's remaining weights
mute    the edge with its message taken away       its weight stays, and nothing comes along it, or a part
patch   the message of another run                 its weight stays, as this run's q and k make it
======  =========================================  ==========================================================

A cut changes the graph of a layer. The others change the values along some edges: attention runs over these
edges and over the rest, on any backend, and the two are added with their shares ``e^(lse_part - lse)`` of the
softmax. All are exact, for gradients too: nothing is subtracted, and what is not sent is never read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import nn

from gnn_attention._support import checks
from gnn_attention._support.locks import lock_modules
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.attend import run_and_merge
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.graph import TokenGraph, symbols
from gnn_attention.graph.edges import RuleEdges
from gnn_attention.graph.rules import all_pairs
from gnn_attention.interpret.trace import pairs, transformer
from gnn_attention.interpret.trace.layer import LayerTrace
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.layer._torch_geometric import convert_graph, read_states

Numbers = int | Iterable[int] | None
Values = Float[Tensor, "batch kv_heads src value_dim"]
# Disjoint edges, or a place of them, with the changes that the values along them take.
Parts = list[tuple[Any, tuple[Callable[[Any, Tensor], Tensor], ...]]]
# The arguments of a layer.
INPUTS = ("x", "g", "bias", "return_attention_weights")


@dataclass(frozen=True, eq=False)
class Intervention:
    """The result of :func:`cut`, :func:`mute` and :func:`patch`: which edges, and the change.

    ``change(layer, first, v)`` are the values that the edges carry instead of ``v``, whose first sender has
    the position ``first`` (of each sample, or of all); None: the edges are cut.
    """

    kind: str
    edges: TokenGraph | Tensor | None = None
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    change: Callable[[int, int | Tensor, Values], Values] | None = None
    # The last graph that was split, its number of heads, and the two parts.
    _last: list[Any] = field(default_factory=list, repr=False)

    def selection(self, graph: TokenGraph, num_heads: int) -> TokenGraph:
        """The chosen edges of ``graph``: a graph that differs by head if not all heads are chosen."""
        if isinstance(self.edges, Tensor):
            sizes = graph.num_dst, graph.num_src
            part = TokenGraph.from_edges(self.edges, *sizes, coalesce=True, name="some")
            part = replace(part, dst_offset=graph.dst_offset, src_offset=graph.src_offset) & graph
        else:
            part = graph if self.edges is None else self.edges & graph
        if self.heads is None or set(self.heads) == set(range(num_heads)):
            return part
        chosen = RuleEdges(symbols.any_of(symbols.head == number for number in self.heads))
        in_heads = replace(graph, edges=chosen, heads=num_heads, batch=None)
        return replace(part & in_heads, name=f"{part.name} in some heads")

    def split(self, graph: TokenGraph, num_heads: int) -> tuple[TokenGraph, TokenGraph]:
        """:meth:`selection` and the rest of ``graph``, cached for the last graph."""
        last = list(self._last)
        if not last or last[0] is not graph or last[1] != num_heads:
            selection = self.selection(graph, num_heads)
            self._last[:] = last = [graph, num_heads, (selection, graph - selection)]
        parts: tuple[TokenGraph, TokenGraph] = last[2]
        return parts

    def split_edges(
        self, parts: Parts, split: Callable[[Any], tuple[Any, Any]], change: Callable[[Any, Tensor], Tensor]
    ) -> Parts:
        """Disjoint parts, the first unchanged: of each the rest, and the chosen edges once more changed."""
        pieces: Parts = []
        for part, changes in parts:
            chosen, rest = split(part)
            pieces += [(rest, changes), (chosen, (*changes, change))]
        # The edges that two interventions share are mostly none; of a layout the graph is ``graph``.
        graphs: list[Any] = [getattr(part, "graph", part) for part, _ in pieces[2:]]
        return pieces[:2] + [piece for piece, g in zip(pieces[2:], graphs, strict=True) if g.num_edges]

    def check(self, graph: TokenGraph, num_heads: int, listed: Tensor | None = None) -> None:
        """ValueError or IndexError for a listed pair that is no edge; ``listed``: other numbers for them."""
        listed = self.edges if listed is None and isinstance(self.edges, Tensor) else listed
        if listed is not None:
            pairs.check_edges(graph, listed, num_heads, self.heads, f"there is nothing to {self.kind}")

    def over(self, length: int, num_heads: int) -> TokenGraph:
        """The chosen pairs of whole sequences: of a size for this length and longer ones."""
        if isinstance(self.edges, Tensor) and self.edges.numel():
            length = max(length, int(self.edges.max()) + 1)
        size = 1 << (length - 1).bit_length()
        sizes = (size, size)
        if isinstance(self.edges, TokenGraph):
            sizes = (self.edges.num_dst, self.edges.num_src)
        return self.selection(TokenGraph.from_rule(all_pairs, *sizes), num_heads)


def cut(edges: Any = None, layers: Numbers = None, heads: Numbers = None) -> Intervention:
    """Remove edges: softmax renormalises a receiver's remaining weights; without in-edges it is isolated.

    ``edges``: a list of ``(src, dst)``, one such pair, a tensor ``[2, K]``, a :class:`TokenGraph` (its edges,
    as far as the layer's graph has them), or None: every edge. ``layers``: numbers of the attention layers,
    in the order of ``model.modules()``; ``heads``: numbers of the heads; None: all. Raises TypeError,
    ValueError or IndexError for other arguments.

    >>> import torch
    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns, trace
    >>> layer, x, graph = MessagePassingAttention(StandardHeads(8, 2)), torch.randn(5, 8), patterns.causal(5)
    >>> with trace.intervene(layer, trace.cut([(1, 3), (2, 3)])):
    ...     out = layer(x, graph)
    >>> gone = TokenGraph.from_edges(torch.tensor([[1, 2], [3, 3]]), 5)
    >>> torch.equal(out, layer(x, graph - gone)), torch.equal(out, layer(x, graph))
    (True, False)
    """
    return _intervention("cut", edges, layers, heads)


def mute(
    edges: Any = None, layers: Numbers = None, heads: Numbers = None, factor: float = 0.0
) -> Intervention:
    """Multiply the messages of edges by a factor: ``w_e (factor v_src)`` in place of ``w_e v_src``.

    By default they are taken away: all weights stay, what the edges carried is missing from the update;
    ``mute(heads=3)`` takes head 3 out of the model. Edges, layers, heads and errors are those of :func:`cut`;
    TypeError or ValueError for a factor that is no finite number.

    >>> import torch
    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns, trace
    >>> layer = MessagePassingAttention(StandardHeads(8, 2)).double()
    >>> x, graph = torch.randn(5, 8).double(), patterns.causal(5)
    >>> with trace.intervene(layer, trace.mute(factor=2.0)):
    ...     twice = layer(x, graph)
    >>> torch.allclose(twice, 2 * layer(x, graph), rtol=0, atol=1e-12)
    True
    """
    change = partial(_scale_values, checks.number("factor", factor))
    return _intervention("scale" if factor else "mute", edges, layers, heads, change)


def patch(run: Any, edges: Any = None, layers: Numbers = None, heads: Numbers = None) -> Intervention:
    """Replace the messages of edges by those of another run: ``w_e v'_src``, the weight as it is.

    ``run`` is a result of :func:`record` of the same model, of one sample or as many; of several calls of a
    layer the last counts. Senders are found by their position, without padding on the left; those that
    the run lacks keep their own message. The other arguments and errors are those of :func:`cut`;
    IndexError for layers that the run has not recorded. The call raises ValueError for values of another
    shape. Source: path patching, arXiv 2304.05969.

    >>> import torch
    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns, trace
    >>> layer, x = MessagePassingAttention(StandardHeads(8, 2)).double(), torch.randn(2, 5, 8).double()
    >>> other = trace.record(layer, x[0], patterns.causal(5))
    >>> with trace.intervene(layer, trace.patch(other, (0, 4))):
    ...     changed = layer(x[1], patterns.causal(5))
    >>> difference = (changed - layer(x[1], patterns.causal(5))).abs().amax(1)
    >>> (difference > 1e-12).tolist()
    [False, False, False, False, True]
    """
    calls = getattr(run, "layers", ())
    if not calls or not all(isinstance(call, LayerTrace) for call in calls):
        raise TypeError(f"run must be a result of trace.record, got {checks.describe_type(run)}")
    sources = {call.number: call for call in calls}
    made = _intervention("patch", edges, layers, heads, partial(_patch_values, sources))
    made = replace(made, layers=made.layers or tuple(sorted(sources)))
    if missing := set(made.layers or ()) - set(sources):
        raise IndexError(f"layers must be among {sorted(sources)}, which the run has, got {sorted(missing)}")
    return made


def _intervention(kind: str, edges: Any, layers: Numbers, heads: Numbers, change: Any = None) -> Intervention:
    edges = edges if edges is None or isinstance(edges, TokenGraph) else pairs.as_pairs(edges)
    return Intervention(kind, edges, _numbers("layers", layers), _numbers("heads", heads), change)


def _numbers(name: str, value: Numbers) -> tuple[int, ...] | None:
    if value is None:
        return None
    values = value if isinstance(value, Iterable) else [value]
    return tuple(checks.sizes(name, values, any_order=True))


def _scale_values(factor: float, layer: int, first: int | Tensor, v: Values) -> Values:
    # 0 takes NaN away too: what is muted is never read.
    return factor * v if factor else torch.zeros_like(v)


def _patch_values(sources: Mapping[int, LayerTrace], layer: int, first: int | Tensor, v: Values) -> Values:
    """``v`` with the values of the same positions of a recorded call, where it has them."""
    source = sources[layer]
    given = source.v.to(v)
    if given.shape[1::2] != v.shape[1::2] or len(given) not in (1, len(v)):
        raise ValueError(
            f"patch: the values [B, heads, tokens, dim] of layer {layer} are {list(given.shape)} in the run "
            f"and {list(v.shape)} here"
        )
    # The positions of the first slots. Slots of padding, before 0, stand behind the tokens of the source.
    source_first = source.graph.src_offset - (0 if source._left is None else source._left)
    start, source_start = (torch.as_tensor(x, device=v.device).view(-1, 1) for x in (first, source_first))
    positions = torch.arange(v.shape[2], device=v.device) + start
    slots = positions - source_start.clamp(min=0)
    there = (positions >= 0) & (slots >= 0) & (slots < given.shape[2] + source_start.clamp(max=0))
    index = slots.clamp(0, given.shape[2] - 1)[:, None, :, None]
    taken = given.expand(len(v), -1, -1, -1).gather(2, index.expand(v.shape))
    return torch.where(there[:, None, :, None], taken, v)


def attention_layers(module: nn.Module) -> list[MessagePassingAttention]:
    """The attention layers of a module, in the order of ``module.modules()``; ValueError without any."""
    checks.instance("module", module, nn.Module)
    layers = [part for part in module.modules() if isinstance(part, MessagePassingAttention)]
    if not layers:
        got = type(module).__name__
        raise ValueError(f"module must hold a MessagePassingAttention, got {got}, which has none")
    return layers


@contextmanager
def intervene(module: nn.Module, *interventions: Intervention) -> Iterator[nn.Module]:
    """Inside, the layers of ``module`` run with the given interventions; leaving restores them.

    Interventions add up, those of one edge's message in their order, and hold in all threads; while one
    thread is inside, another that would enter gets NotImplementedError. In a Hugging Face model whose
    attention is ``"gnn_attention"`` they hold in the context that entered, in ``generate()`` too: positions
    count a sample's own tokens, not padding on its left, layers are by ``layer_idx``, cross-attention is
    unchanged; a listed pair is checked in the call that has both its ends, a :class:`TokenGraph` must be as
    long as the sequences (ValueError).

    Every backend is supported; a layer on the message-passing path (``backend="message_passing"``)
    runs through "auto" while messages are changed. Set a backend before, not inside.

    Raises TypeError or IndexError before anything changes for other arguments, or an unknown layer or head;
    the layer's call raises ValueError for a pair that is no edge of its graph, NotImplementedError for a
    graph that differs by head on the message-passing path, for a per-edge bias with an intervention on some
    heads (the graph then has no single edge list), or where hooks force the message-passing path.

    >>> import torch
    >>> from gnn_attention import model as lm
    >>> from gnn_attention.interpret.trace import cut, mute
    >>> model, tokens = lm.LanguageModel(lm.Config(vocabulary_size=300)), torch.tensor([[7, 8, 9]])
    >>> with intervene(model, cut([(0, 2)], layers=1), mute([(1, 2)], layers=0, heads=[0, 2])):
    ...     changed = model(tokens)
    >>> torch.equal(changed[:, :2], model(tokens)[:, :2]), torch.equal(changed[:, 2], model(tokens)[:, 2])
    (True, False)
    """
    for one in interventions:
        checks.instance("interventions", one, Intervention)
    with ExitStack() as stack:
        if transformer.is_transformer(module):
            for one in interventions:
                stack.enter_context(transformer.intervene(module, one))
        else:
            layers = attention_layers(module)
            chosen = [(one, number) for one in interventions for number in checked_layers(one, layers)]
            stack.enter_context(lock_modules(layers, brief=False))
            for one, number in chosen:
                layer, hook = layers[number], partial(_checked_inputs, one)
                stack.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True))
                if one.change is not None:
                    backend = Changing.over(layer.backend, (one, number))
                    stack.enter_context(backend_replaced(layer, backend))
        yield module


def operate(module: nn.Module, *interventions: Intervention) -> AbstractContextManager[nn.Module]:
    """The old name of :func:`intervene`, for this release."""
    warnings.warn("trace.operate is now called trace.intervene", DeprecationWarning, stacklevel=2)
    return intervene(module, *interventions)


def checked_layers(one: Intervention, layers: Sequence[MessagePassingAttention]) -> list[int]:
    """The layers of an intervention; IndexError for a layer or head that there is not."""
    numbers = list(range(len(layers)) if one.layers is None else one.layers)
    for number in numbers:
        if number >= len(layers):
            raise IndexError(f"layers must be in 0 .. {len(layers) - 1}, the attention layers, got {number}")
        most = layers[number].heads.num_heads - 1
        if one.heads and max(one.heads) > most:
            raise IndexError(f"heads must be in 0 .. {most}, got {max(one.heads)}")
    return numbers


@contextmanager
def backend_replaced(layer: MessagePassingAttention, backend: str | Backend) -> Iterator[None]:
    before, layer.backend = layer.backend, backend
    try:
        yield
    finally:
        layer.backend = before


def _checked_inputs(one: Intervention, layer: MessagePassingAttention, args: Any, kwargs: Any) -> Any:
    """The arguments without the edges that are cut; None, which changes nothing, for changed messages."""
    if one.change is not None:
        check_no_hooks(layer, f"{one.kind} an edge")
    inputs = {**dict(zip(INPUTS, args, strict=False)), **kwargs}
    if inputs.get("g") is None and inputs.get("edge_index") is not None:
        inputs["g"] = inputs.pop("edge_index")
    if inputs.get("g") is None or "x" not in inputs:
        return None  # The layer itself will raise.
    x_src, x_dst = read_states(inputs["x"], inputs["g"], inputs.get("size"), layer.heads.width)
    graph = convert_graph(inputs["g"], x_dst.shape[-2], x_src.shape[-2])
    one.check(graph, layer.heads.num_heads)
    if one.change is not None:
        return None
    _, rest = one.split(graph, layer.heads.num_heads)
    return (), {**inputs, "g": rest, "bias": pairs.bias_of(rest, graph, inputs.get("bias"))}


def check_no_hooks(layer: MessagePassingAttention, what: str) -> None:
    """NotImplementedError where the layer takes the message-passing path whatever its backend."""
    if layer.reason_for_messages() is not None:
        raise NotImplementedError(
            f"a hook, an explainer or an overridden step forces the message-passing path: remove it to {what}"
        )


@dataclass(frozen=True)
class Changing(Backend):
    """Runs calls on another backend, with the messages of some edges changed: (intervention, layer) each."""

    steps: tuple[tuple[Intervention, int], ...] = ()
    inner: str | Backend = "auto"

    @classmethod
    def over(cls, inner: str | Backend, *steps: tuple[Intervention, int]) -> Changing:
        if isinstance(inner, Changing):
            return cls.over(inner.inner, *inner.steps, *steps)
        name = f"{inner.name if isinstance(inner, Backend) else inner or 'auto'} with changed messages"
        return cls(name, partial(_run_changed, steps, inner), steps=steps, inner=inner)


def with_values(steps: Any, call: AttentionCall) -> list[tuple[TokenGraph, Tensor]]:
    """Disjoint edges of a call, those with unchanged messages first, and the values that they carry."""
    parts: Parts = [(call.graph, ())]
    for one, number in steps:
        parts = one.split_edges(
            parts, partial(one.split, num_heads=call.q.shape[1]), partial(one.change, number)
        )
    first = call.graph.src_offset
    return [(part, reduce(lambda v, change: change(first, v), changes, call.v)) for part, changes in parts]


def _run_changed(steps: Any, inner: str | Backend, call: AttentionCall) -> tuple[Tensor, Tensor]:
    parts = [
        replace(call, graph=graph, v=v, bias=pairs.bias_of(graph, call.graph, call.bias))
        for graph, v in with_values(steps, call)
    ]
    return run_and_merge(call, parts, inner)
