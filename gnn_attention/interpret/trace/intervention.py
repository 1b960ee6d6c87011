"""Interventions on edges: cut edges, mute, scale or patch their messages, in some layers and heads.

A cut removes edges from the graph of a layer, so that softmax renormalises the remaining weights.
Other interventions change the values of some edges and keep all weights: attention runs once over
these edges and once over the remaining edges, on any backend. The results are added with factors
``e^(lse_part - lse)``. No part is computed by subtraction, so outputs and gradients are exact. A
muted message is never read.
"""

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

Indices = int | Iterable[int] | None
Values = Float[Tensor, "batch kv_heads src value_dim"]
# Disjoint graphs (or Hugging Face layouts), each with the functions that change the values of its edges.
Parts = list[tuple[Any, tuple[Callable[[Any, Tensor], Tensor], ...]]]
# The parameters of a layer's forward.
FORWARD_PARAMETERS = ("x", "g", "bias", "return_attention_weights")


@dataclass(frozen=True, eq=False)
class Intervention:
    """The result of :func:`cut`, :func:`mute` and :func:`patch`: which edges change, and how.

    ``change(layer, first_position, v)`` returns the values that the edges carry instead of ``v``.
    The position of the first sender is an int, or a tensor with one position per sample. Without
    ``change`` the edges are cut.
    """

    kind: str
    edges: TokenGraph | Tensor | None = None
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    change: Callable[[int, int | Tensor, Values], Values] | None = None
    # The arguments and the result of the last call of split.
    _last_split: list[Any] = field(default_factory=list, repr=False)

    def select_edges(self, graph: TokenGraph, num_heads: int) -> TokenGraph:
        """Return the selected edges of ``graph``, which vary by head if not all heads are selected."""
        if isinstance(self.edges, Tensor):
            edges = TokenGraph.from_edges(self.edges, graph.num_dst, graph.num_src, coalesce=True)
            selected = replace(edges, dst_offset=graph.dst_offset, src_offset=graph.src_offset) & graph
        else:
            selected = graph if self.edges is None else self.edges & graph
        if self.heads is None or set(self.heads) == set(range(num_heads)):
            return selected
        head_rule = RuleEdges(symbols.any_of(symbols.head == index for index in self.heads))
        head_graph = replace(graph, edges=head_rule, heads=num_heads, batch=None)
        return replace(selected & head_graph, name=f"{selected.name} in some heads")

    def split(self, graph: TokenGraph, num_heads: int) -> tuple[TokenGraph, TokenGraph]:
        """Split ``graph`` into the selected and the remaining edges; the last result is cached."""
        last = list(self._last_split)
        if not last or last[0] is not graph or last[1] != num_heads:
            selected = self.select_edges(graph, num_heads)
            self._last_split[:] = last = [graph, num_heads, (selected, graph - selected)]
        graphs: tuple[TokenGraph, TokenGraph] = last[2]
        return graphs

    def split_edges(
        self, parts: Parts, split: Callable[[Any], tuple[Any, Any]], change: Callable[[Any, Tensor], Tensor]
    ) -> Parts:
        """Split each part into remaining and selected edges; the latter get one more change."""
        new_parts: Parts = []
        for part, changes in parts:
            selected, remaining = split(part)
            new_parts += [(remaining, changes), (selected, (*changes, change))]
        # Interventions rarely share edges, so most later parts are empty, and they are dropped.
        graphs: list[Any] = [getattr(part, "graph", part) for part, _ in new_parts]
        return [part for i, part in enumerate(new_parts) if i < 2 or graphs[i].num_edges]

    def check_edges(self, graph: TokenGraph, num_heads: int, columns: Tensor | None = None) -> None:
        """Raise ValueError or IndexError if a pair of ``columns`` (default: ``edges``) is not an edge."""
        columns = self.edges if columns is None and isinstance(self.edges, Tensor) else columns
        if columns is not None:
            pairs.check_edges(graph, columns, num_heads, self.heads, f"there is nothing to {self.kind}")

    def select_pairs(self, length: int, num_heads: int) -> TokenGraph:
        """Return a graph of the selected pairs. Its size rarely changes as a sequence grows."""
        if isinstance(self.edges, TokenGraph):
            num_dst, num_src = self.edges.num_dst, self.edges.num_src
        else:
            if self.edges is not None and self.edges.numel():
                length = max(length, int(self.edges.max()) + 1)
            num_dst = num_src = 1 << (length - 1).bit_length()
        return self.select_edges(TokenGraph.from_rule(all_pairs, num_dst, num_src), num_heads)


def cut(edges: Any = None, layers: Indices = None, heads: Indices = None) -> Intervention:
    """Remove edges: softmax renormalises the remaining weights of each receiver.

    ``edges`` is a list of ``(src, dst)``, one such pair, a tensor ``[2, K]``, None for all edges,
    or a :class:`TokenGraph` (edges that the layer's graph lacks are ignored). ``layers`` are
    indices of attention layers in the order of ``model.modules()``, and ``heads`` are indices of
    heads; None means all. Raises TypeError, ValueError or IndexError for other arguments.

    >>> import torch
    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns, trace
    >>> layer, x, graph = MessagePassingAttention(StandardHeads(8, 2)), torch.randn(5, 8), patterns.causal(5)
    >>> with trace.intervene(layer, trace.cut([(1, 3), (2, 3)])):
    ...     out = layer(x, graph)
    >>> removed = TokenGraph.from_edges(torch.tensor([[1, 2], [3, 3]]), 5)
    >>> torch.equal(out, layer(x, graph - removed)), torch.equal(out, layer(x, graph))
    (True, False)
    """
    return _make("cut", edges, layers, heads)


def mute(
    edges: Any = None, layers: Indices = None, heads: Indices = None, factor: float = 0.0
) -> Intervention:
    """Multiply the messages of edges by a factor: ``w_e (factor v_src)`` in place of ``w_e v_src``.

    Weights stay the same. With the default factor 0, the edges contribute nothing to the update:
    ``mute(heads=3)`` removes head 3 from the model. Edges, layers, heads and errors are those of
    :func:`cut`; a factor that is not a finite number raises TypeError or ValueError.

    >>> import torch
    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns, trace
    >>> layer = MessagePassingAttention(StandardHeads(8, 2)).double()
    >>> x, graph = torch.randn(5, 8).double(), patterns.causal(5)
    >>> with trace.intervene(layer, trace.mute(factor=2.0)):
    ...     doubled = layer(x, graph)
    >>> torch.allclose(doubled, 2 * layer(x, graph), rtol=0, atol=1e-12)
    True
    """
    change = partial(_scale, checks.number("factor", factor))
    return _make("scale" if factor else "mute", edges, layers, heads, change)


def patch(run: Any, edges: Any = None, layers: Indices = None, heads: Indices = None) -> Intervention:
    """Replace the messages of edges by those of another run, and keep the weights: ``w_e v'_src``.

    ``run`` is a result of :func:`record` for the same model, with one sample or the same number of
    samples. If it holds several calls of a layer, the last one is used. Senders are matched by
    position, not counting padding on the left; senders that the run lacks keep their own message.
    The other arguments and errors are those of :func:`cut`. Raises IndexError for layers that were
    not recorded. If the recorded values have another shape, calling the layer raises ValueError.
    Source: path patching, arXiv 2304.05969.

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
    intervention = _make("patch", edges, layers, heads, partial(_patch, sources))
    if missing := set(intervention.layers or ()) - set(sources):
        raise IndexError(f"layers must be among {sorted(sources)}, those of the run, got {sorted(missing)}")
    return replace(intervention, layers=intervention.layers or tuple(sorted(sources)))


def _make(kind: str, edges: Any, layers: Indices, heads: Indices, change: Any = None) -> Intervention:
    edges = edges if edges is None or isinstance(edges, TokenGraph) else pairs.read_pairs(edges)
    return Intervention(kind, edges, _read_indices("layers", layers), _read_indices("heads", heads), change)


def _read_indices(name: str, value: Indices) -> tuple[int, ...] | None:
    if value is None:
        return None
    values = value if isinstance(value, Iterable) else [value]
    return tuple(checks.sizes(name, values, any_order=True))


def _scale(factor: float, layer: int, first_position: int | Tensor, v: Values) -> Values:
    # Multiplying by 0 would keep NaN, and a muted message must never be read.
    return factor * v if factor else torch.zeros_like(v)


def _patch(sources: Mapping[int, LayerTrace], layer: int, first_position: int | Tensor, v: Values) -> Values:
    """Replace ``v`` by the recorded values of the same positions."""
    source = sources[layer]
    source_v = source.v.to(v)
    if source_v.shape[1::2] != v.shape[1::2] or len(source_v) not in (1, len(v)):
        shapes = f"{list(source_v.shape)} in the run and {list(v.shape)} here"
        raise ValueError(f"patch: values [B, heads, tokens, dim] of layer {layer} must fit, got {shapes}")
    # A first position below 0 means padding, which a trace moves behind the tokens.
    source_position = source.graph.src_offset - (0 if source._left_padding is None else source._left_padding)
    starts = (torch.as_tensor(x, device=v.device) for x in (first_position, source_position))
    start, source_start = (x.view(-1, 1) for x in starts)
    positions = torch.arange(v.shape[2], device=v.device) + start
    slots = positions - source_start.clamp(min=0)
    num_slots = source_v.shape[2] + source_start.clamp(max=0)
    is_recorded = (positions >= 0) & (slots >= 0) & (slots < num_slots)
    index = slots.clamp(0, source_v.shape[2] - 1)[:, None, :, None]
    replacement = source_v.expand(len(v), -1, -1, -1).gather(2, index.expand(v.shape))
    return torch.where(is_recorded[:, None, :, None], replacement, v)


def find_attention_layers(module: nn.Module) -> list[MessagePassingAttention]:
    checks.instance("module", module, nn.Module)
    layers = [part for part in module.modules() if isinstance(part, MessagePassingAttention)]
    if not layers:
        raise ValueError(f"module must hold a MessagePassingAttention, got {type(module).__name__}")
    return layers


@contextmanager
def intervene(module: nn.Module, *interventions: Intervention) -> Iterator[nn.Module]:
    """Apply interventions to the layers of ``module`` inside the context; leaving it restores them.

    Interventions combine, and changes to the same message apply in order. They apply in all
    threads: while one thread is inside the context, entering it from another raises
    NotImplementedError. Every backend is supported; set it before entering the context. A layer on
    the message-passing path runs through "auto" while messages are changed.

    In a Hugging Face model whose attention is ``"gnn_attention"``, interventions apply only in the
    thread or task that entered the context, including calls of ``generate()``. Positions exclude
    padding on the left. Layers are numbered by ``layer_idx``, and cross-attention is unchanged. A
    pair is checked in calls that contain both its tokens; a :class:`TokenGraph` must have the
    length of the sequences (else ValueError).

    TypeError for other arguments and IndexError for unknown layers or heads are raised before
    anything changes. A layer's call raises ValueError for a pair that is not an edge of its graph.
    It raises NotImplementedError if hooks force the message-passing path or a graph there varies by
    head. Interventions on some heads also raise NotImplementedError if the bias varies by edge.

    >>> import torch
    >>> from gnn_attention import model as lm
    >>> from gnn_attention.interpret.trace import cut, mute
    >>> model, tokens = lm.LanguageModel(lm.Config(vocabulary_size=300)), torch.tensor([[7, 8, 9]])
    >>> with intervene(model, cut([(0, 2)], layers=1), mute([(1, 2)], layers=0, heads=[0, 2])):
    ...     changed = model(tokens)
    >>> torch.equal(changed[:, :2], model(tokens)[:, :2]), torch.equal(changed[:, 2], model(tokens)[:, 2])
    (True, False)
    """
    for intervention in interventions:
        checks.instance("interventions", intervention, Intervention)
    with ExitStack() as stack:
        if transformer.is_transformer(module):
            for intervention in interventions:
                stack.enter_context(transformer.intervene(module, intervention))
        else:
            layers = find_attention_layers(module)
            # list_layers checks all indices before anything changes.
            layer_indices = [list_layers(intervention, layers) for intervention in interventions]
            stack.enter_context(lock_modules(layers, is_brief=False))
            for intervention, indices in zip(interventions, layer_indices, strict=True):
                for index in indices:
                    layer, hook = layers[index], partial(_check_and_cut, intervention)
                    stack.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True))
                    if intervention.change is not None:
                        backend = ChangedMessages.wrap(layer.backend, (intervention, index))
                        stack.enter_context(replace_backend(layer, backend))
        yield module


def operate(module: nn.Module, *interventions: Intervention) -> AbstractContextManager[nn.Module]:
    """Call :func:`intervene`. This is its old name, which this release still supports."""
    warnings.warn("trace.operate is now called trace.intervene", DeprecationWarning, stacklevel=2)
    return intervene(module, *interventions)


def list_layers(intervention: Intervention, layers: Sequence[MessagePassingAttention]) -> list[int]:
    """List the indices of an intervention's layers; IndexError for an unknown layer or head."""
    indices = list(range(len(layers)) if intervention.layers is None else intervention.layers)
    for index in indices:
        if index >= len(layers):
            raise IndexError(f"layers must be in 0 .. {len(layers) - 1}, the attention layers, got {index}")
        num_heads = layers[index].heads.num_heads
        if intervention.heads and max(intervention.heads) >= num_heads:
            raise IndexError(f"heads must be in 0 .. {num_heads - 1}, got {max(intervention.heads)}")
    return indices


@contextmanager
def replace_backend(layer: MessagePassingAttention, backend: str | Backend) -> Iterator[None]:
    old_backend, layer.backend = layer.backend, backend
    try:
        yield
    finally:
        layer.backend = old_backend


def _check_and_cut(intervention: Intervention, layer: Any, args: Any, kwargs: Any) -> Any:
    if intervention.change is not None:
        check_no_hooks(layer, f"{intervention.kind} an edge")
    inputs = {**dict(zip(FORWARD_PARAMETERS, args, strict=False)), **kwargs}
    if inputs.get("g") is None and inputs.get("edge_index") is not None:
        inputs["g"] = inputs.pop("edge_index")
    if inputs.get("g") is None or "x" not in inputs:
        # The layer itself raises the error.
        return None
    x_src, x_dst = read_states(inputs["x"], inputs["g"], inputs.get("size"), layer.heads.width)
    graph = convert_graph(inputs["g"], x_dst.shape[-2], x_src.shape[-2])
    intervention.check_edges(graph, layer.heads.num_heads)
    if intervention.change is not None:
        return None
    _, remaining = intervention.split(graph, layer.heads.num_heads)
    bias = pairs.restrict_bias(inputs.get("bias"), graph, remaining)
    return (), {**inputs, "g": remaining, "bias": bias}


def check_no_hooks(layer: MessagePassingAttention, purpose: str) -> None:
    """Raise NotImplementedError if the layer must take the message-passing path."""
    if layer.reason_for_messages() is not None:
        raise NotImplementedError(
            f"a hook, an explainer or an overridden step forces message passing: remove it to {purpose}"
        )
    if layer.edge_key is not None or layer.normaliser != "softmax":
        raise NotImplementedError(
            f"cannot {purpose} in a layer with edge_dim, num_edge_types or another normaliser than softmax"
        )


@dataclass(frozen=True)
class ChangedMessages(Backend):
    """Runs calls with changed messages on ``inner``; each intervention comes with a layer index."""

    interventions: tuple[tuple[Intervention, int], ...] = ()
    inner: str | Backend = "auto"

    @classmethod
    def wrap(cls, inner: str | Backend, *interventions: tuple[Intervention, int]) -> "ChangedMessages":
        if isinstance(inner, ChangedMessages):
            return cls.wrap(inner.inner, *inner.interventions, *interventions)
        name = f"{inner.name if isinstance(inner, Backend) else inner or 'auto'} with changed messages"
        run = partial(_run_changed, interventions, inner)
        return cls(name, run, interventions=interventions, inner=inner)


def split_call(interventions: Any, call: AttentionCall) -> list[tuple[TokenGraph, Tensor]]:
    """Split a call's graph by the values that its edges carry; unchanged values come first."""
    parts: Parts = [(call.graph, ())]
    for intervention, layer_index in interventions:
        split = partial(intervention.split, num_heads=call.q.shape[1])
        parts = intervention.split_edges(parts, split, partial(intervention.change, layer_index))
    offset = call.graph.src_offset
    return [(part, reduce(lambda v, change: change(offset, v), changes, call.v)) for part, changes in parts]


def _run_changed(interventions: Any, inner: str | Backend, call: AttentionCall) -> tuple[Tensor, Tensor]:
    calls = [
        replace(call, graph=graph, v=v, bias=pairs.restrict_bias(call.bias, call.graph, graph))
        for graph, v in split_call(interventions, call)
    ]
    return run_and_merge(call, calls, inner)
