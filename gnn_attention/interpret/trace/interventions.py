"""A run in which edges are cut, or their messages changed: ``operate``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from gnn_attention._support import checks
from gnn_attention._support.locks import turn
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.attend import attended_in_parts
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.graph import TokenGraph
from gnn_attention.interpret.trace import transformer
from gnn_attention.interpret.trace.surgeries import Parts, Surgery
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.layer._torch_geometric import fitting_graph, state_pair

# the arguments of a layer
INPUTS = ("x", "g", "bias", "return_attention_weights")


def attention_layers(module: nn.Module) -> list[MessagePassingAttention]:
    """The attention layers of a module, in the order of ``module.modules()``; ValueError without any."""
    checks.instance("module", module, nn.Module)
    layers = [part for part in module.modules() if isinstance(part, MessagePassingAttention)]
    if not layers:
        got = type(module).__name__
        raise ValueError(f"module must hold a MessagePassingAttention, got {got}, which has none")
    return layers


@contextmanager
def operate(module: nn.Module, *surgeries: Surgery) -> Iterator[nn.Module]:
    """Inside, the layers of ``module`` run with the given interventions; leaving restores them.

    Interventions add up, those of one edge's message in their order, and hold in all threads; while one
    thread is inside, another that would enter gets
    NotImplementedError. In a Hugging Face model whose attention is ``"gnn_attention"`` they hold in the
    context that entered, in ``generate()`` too: positions count a sample's own tokens, not padding on its
    left, layers are by ``layer_idx``, cross-attention is unchanged; a listed pair is checked in the call
    that has both its ends, a :class:`TokenGraph` must be as long as the sequences (ValueError).

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
    >>> with operate(model, cut([(0, 2)], layers=1), mute([(1, 2)], layers=0, heads=[0, 2])):
    ...     changed = model(tokens)
    >>> torch.equal(changed[:, :2], model(tokens)[:, :2]), torch.equal(changed[:, 2], model(tokens)[:, 2])
    (True, False)
    """
    if transformer.is_transformer(module):
        for surgery in surgeries:
            _check_kind(surgery)
        with transformer.operating(module, surgeries):
            yield module
        return
    layers = attention_layers(module)
    chosen = [(LastSplit(surgery), checked_layers(surgery, layers)) for surgery in surgeries]
    with ExitStack() as stack:
        stack.enter_context(turn(layers, brief=False))
        for split, numbers in chosen:
            for number in numbers:
                stack.enter_context(_operated_layer(layers[number], number, split))
        yield module


def _check_kind(surgery: Any) -> None:
    if not isinstance(surgery, Surgery):
        expected = "cut(...), mute(...), scale(...) or patch(...)"
        raise TypeError(f"surgeries must be made by {expected}, got {type(surgery).__name__}")


def checked_layers(surgery: Surgery, layers: list[MessagePassingAttention]) -> list[int]:
    _check_kind(surgery)
    numbers = list(range(len(layers)) if surgery.layers is None else surgery.layers)
    for number in numbers:
        if number >= len(layers):
            raise IndexError(f"layers must be in 0 .. {len(layers) - 1}, the attention layers, got {number}")
        most = layers[number].heads.num_heads - 1
        if surgery.heads and max(surgery.heads) > most:
            raise IndexError(f"heads must be in 0 .. {most}, got {max(surgery.heads)}")
    return numbers


class LastSplit:
    """:meth:`Surgery.split`, cached for the last graph."""

    def __init__(self, surgery: Surgery) -> None:
        self.surgery = surgery
        self._last: tuple[TokenGraph, int, TokenGraph, TokenGraph] | None = None

    def __call__(self, graph: TokenGraph, num_heads: int) -> tuple[TokenGraph, TokenGraph]:
        last = self._last
        if last is None or last[0] is not graph or last[1] != num_heads:
            self._last = last = (graph, num_heads, *self.surgery.split(graph, num_heads))
        return last[2:]


@contextmanager
def backend_replaced(layer: MessagePassingAttention, backend: str | Backend) -> Iterator[None]:
    before, layer.backend = layer.backend, backend
    try:
        yield
    finally:
        layer.backend = before


@contextmanager
def _operated_layer(layer: MessagePassingAttention, number: int, split: LastSplit) -> Iterator[None]:
    change = split.surgery.change
    backend = layer.backend
    if change is not None:
        backend = Changing.over(backend, (split, partial(change, number)))
    hook = partial(_checked_inputs, split)
    with layer.register_forward_pre_hook(hook, with_kwargs=True), backend_replaced(layer, backend):
        yield


def _inputs(layer: MessagePassingAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # by name, the graph as a TokenGraph; None where the layer itself will raise
    inputs = {**dict(zip(INPUTS, args, strict=False)), **kwargs}
    if inputs.get("g") is None and inputs.get("edge_index") is not None:
        inputs["g"] = inputs.pop("edge_index")
    pair = inputs.get("x")
    ends = pair if isinstance(pair, (tuple, list)) and len(pair) == 2 else (pair, pair)
    if "g" not in inputs or not all(isinstance(x, Tensor) for x in ends):
        return None
    x_src, x_dst = state_pair(ends)
    return {**inputs, "g": fitting_graph(inputs["g"], x_dst.shape[-2], x_src.shape[-2])}


def _checked_inputs(split: LastSplit, layer: MessagePassingAttention, args: Any, kwargs: Any) -> Any:
    # without the edges that are cut; None, which changes nothing, where messages are changed
    changes, inputs = split.surgery.change is not None, _inputs(layer, args, kwargs)
    if changes:
        check_no_hooks(layer, f"{split.surgery.kind} an edge")
    if inputs is not None:
        split.surgery.check(inputs["g"], layer.heads.num_heads)
    if inputs is None or changes:
        return None
    graph = inputs["g"]
    _, rest = split(graph, layer.heads.num_heads)
    return (), {**inputs, "g": rest, "bias": _bias_of(rest, graph, inputs.get("bias"))}


def check_no_hooks(layer: MessagePassingAttention, what: str) -> None:
    """NotImplementedError where the layer takes the message-passing path whatever its backend."""
    if layer.watcher() is not None:
        reason = "a hook, an explainer or an overridden step forces the message-passing path"
        raise NotImplementedError(f"{reason}: remove it to {what}")


def _bias_of(part: TokenGraph, graph: TokenGraph, bias: Any) -> Any:
    # of the edges of a part, where it is one number for each edge of the whole
    per_edge = isinstance(bias, Tensor) and bias.dim() and bias.shape[-1] == graph.num_edges != 1
    if not per_edge:
        return bias
    if part.varying_axes:
        advice = "operate on all heads, or give it as a score_mod"
        raise NotImplementedError(f"bias with an operation on some heads: {advice}")
    return bias[..., graph.positions_of(part.edge_index).to(bias.device)]


@dataclass(frozen=True)
class Changing(Backend):
    """Runs calls on another backend, with the messages of some edges changed."""

    steps: tuple[tuple[LastSplit, Callable[[Any, Tensor], Tensor]], ...] = ()
    inner: str | Backend = "auto"

    @classmethod
    def over(cls, inner: str | Backend, *steps: tuple[LastSplit, Any]) -> Changing:
        if isinstance(inner, Changing):
            return cls.over(inner.inner, *inner.steps, *steps)
        name = f"{inner.name if isinstance(inner, Backend) else inner or 'auto'} with changed messages"
        return cls(name, partial(_run_changed, steps, inner), steps=steps, inner=inner)


def changed_values(
    backend: Any, graph: TokenGraph, v: Float[Tensor, "batch heads src dim"], heads: int
) -> Sequence[tuple[TokenGraph, Tensor]]:
    """Disjoint edges with the values that a layer's backend lets them carry instead of ``v``."""
    if not isinstance(backend, Changing):
        return ()
    return _divided(backend.steps, graph, v, heads)[1:]


def _divided(steps: Any, graph: TokenGraph, v: Tensor, heads: int) -> list[tuple[TokenGraph, Tensor]]:
    parts: Parts = [(graph, ())]
    for split, change in steps:
        parts = split.surgery.divided(parts, partial(split, num_heads=heads), change)
    first, found = graph.src_offset, []
    for part, changes in parts:
        values = v
        for change in changes:
            values = change(first, values)
        found.append((part, values))
    return found


def _run_changed(steps: Any, inner: str | Backend, call: AttentionCall) -> tuple[Tensor, Tensor]:
    parts = [
        replace(call, graph=graph, v=v, bias=_bias_of(graph, call.graph, call.bias))
        for graph, v in _divided(steps, call.graph, call.v, call.q.shape[1])
    ]
    return attended_in_parts(call, parts, inner)
