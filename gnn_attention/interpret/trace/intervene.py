"""Interventions applied: a run in which edges are cut or muted.

======  =========================================  ==========================================================
cut     the graph without the edge                 softmax renormalises the receiver's remaining weights
mute    the edge with its message taken away       its weight stays, and nothing comes along it
======  =========================================  ==========================================================

A cut changes the graph of a layer. A muted edge acts as a sink: one more logit in its receiver's softmax,
without a value. So attention runs over the graph without it, on any backend, and each row is scaled by
``e^(lse_without - lse)``, the share of the weight that was not muted. Both are exact, for gradients too:
nothing is subtracted, and a message that is not sent is never read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from gnn_attention import edges
from gnn_attention._support.locks import turn
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.graph import TokenGraph
from gnn_attention.interpret.trace import pairs as trace_pairs
from gnn_attention.interpret.trace.interventions import Surgery
from gnn_attention.layer import MessagePassingAttention

# the arguments of a layer
INPUTS = ("x", "g", "bias", "return_attention_weights")


def attention_layers(module: nn.Module) -> list[MessagePassingAttention]:
    """The attention layers of a module, in the order of ``module.modules()``; ValueError without any."""
    got = type(module).__name__
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module that holds attention layers, got {got}")
    layers = [part for part in module.modules() if isinstance(part, MessagePassingAttention)]
    if not layers:
        raise ValueError(f"module must hold a MessagePassingAttention, got {got}, which has none")
    return layers


@contextmanager
def operate(module: nn.Module, *surgeries: Surgery) -> Iterator[nn.Module]:
    """Inside, the layers of ``module`` run with the given interventions; leaving restores them.

    Interventions add up and hold in all threads; while one thread is inside, another that would enter gets
    NotImplementedError. Every backend is supported; a layer on the message-passing path (``backend=None``)
    runs through "auto" while edges are muted. Set a backend before, not inside.

    Raises TypeError or IndexError before anything changes for arguments that are no interventions, or an
    unknown layer or head; the layer's call raises ValueError for a pair that is no edge of its graph,
    NotImplementedError for a graph that differs by head on the message-passing path, for a per-edge bias with
    an intervention on some heads (the graph then has no single edge list), or where torch_geometric's hooks
    force the message-passing path.

    >>> import torch
    >>> from gnn_attention import model as lm
    >>> from gnn_attention.interpret.trace import cut, mute
    >>> model, tokens = lm.LanguageModel(lm.Config(vocabulary_size=300)), torch.tensor([[7, 8, 9]])
    >>> with operate(model, cut([(0, 2)], layers=1), mute([(1, 2)], layers=0, heads=[0, 2])):
    ...     changed = model(tokens)
    >>> torch.equal(changed[:, :2], model(tokens)[:, :2]), torch.equal(changed[:, 2], model(tokens)[:, 2])
    (True, False)
    """
    layers = attention_layers(module)
    chosen = [(LastSplit(surgery), _checked_layers(surgery, layers)) for surgery in surgeries]
    with ExitStack() as stack:
        stack.enter_context(turn(layers, brief=False))
        for split, numbers in chosen:
            for number in numbers:
                stack.enter_context(_operated_layer(layers[number], split))
        yield module


def _checked_layers(surgery: Surgery, layers: list[MessagePassingAttention]) -> list[int]:
    if not isinstance(surgery, Surgery):
        raise TypeError(f"surgeries must be made by cut(...) or mute(...), got {type(surgery).__name__}")
    numbers = list(range(len(layers)) if surgery.layers is None else surgery.layers)
    for number in numbers:
        if number >= len(layers):
            expected = f"0 .. {len(layers) - 1}, the attention layers of the module"
            raise IndexError(f"layers must be in {expected}, got {number}")
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
        return last[2], last[3]


@contextmanager
def backend_replaced(layer: MessagePassingAttention, backend: str | Backend | None) -> Iterator[None]:
    before, layer.backend = layer.backend, backend
    try:
        yield
    finally:
        layer.backend = before


@contextmanager
def _operated_layer(layer: MessagePassingAttention, split: LastSplit) -> Iterator[None]:
    is_cut = split.surgery.kind == "cut"
    backend = layer.backend if is_cut else Muting.over(layer.backend, split)
    hook = partial(_without_edges if is_cut else _check_muted, split)
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
    return {**inputs, "g": layer._as_graph(inputs["g"], *ends)}


def _without_edges(split: LastSplit, layer: MessagePassingAttention, args: Any, kwargs: Any) -> Any:
    inputs = _inputs(layer, args, kwargs)
    if inputs is None:
        return None
    graph, heads, bias = inputs["g"], layer.heads.num_heads, inputs.get("bias")
    split.surgery.check(graph, heads)
    _, rest = split(graph, heads)
    return (), {**inputs, "g": rest, "bias": _bias_of(rest, graph, bias)}


def _check_muted(split: LastSplit, layer: MessagePassingAttention, args: Any, kwargs: Any) -> None:
    check_no_hooks(layer, "mute an edge")
    inputs = _inputs(layer, args, kwargs)
    if inputs is not None:
        split.surgery.check(inputs["g"], layer.heads.num_heads)


def check_no_hooks(layer: MessagePassingAttention, what: str) -> None:
    """NotImplementedError where the layer takes the message-passing path whatever its backend."""
    if layer._is_watched():
        path = "keeps this layer on the message-passing path"
        raise NotImplementedError(f"a hook or explainer of torch_geometric {path}: remove it to {what}")


def _bias_of(part: TokenGraph, graph: TokenGraph, bias: Any) -> Any:
    # of the edges of a part, where it is one number for each edge of the whole
    per_edge = isinstance(bias, Tensor) and bias.dim() and bias.shape[-1] == graph.num_edges != 1
    if not per_edge:
        return bias
    if trace_pairs.varies(part):
        advice = "operate on all heads, or give the bias as a score_mod"
        raise NotImplementedError(f"bias with an operation on some heads: {advice}")
    return bias[..., graph.positions_of(part.edge_index).to(bias.device)]


@dataclass(frozen=True)
class Muting(Backend):
    """Runs calls on another backend, with some edges muted."""

    split: LastSplit | None = None
    inner: str | Backend | None = None

    @classmethod
    def over(cls, inner: str | Backend | None, split: LastSplit) -> Muting:
        name = inner.name if isinstance(inner, Backend) else inner or "auto"
        return cls(f"{name} with muted edges", partial(_run_muted, split, inner), split=split, inner=inner)


def muted_graphs(backend: Any, graph: TokenGraph, heads: int) -> Iterator[TokenGraph]:
    """The edges that a layer's backend mutes: one graph for each intervention."""
    while isinstance(backend, Muting):
        assert backend.split is not None
        yield backend.split.surgery.selection(graph, heads)
        backend = backend.inner


def _run_muted(split: LastSplit, inner: str | Backend | None, call: AttentionCall) -> tuple[Tensor, Tensor]:
    # sum over the other in-edges of w_e v_src, with the weights and the lse of all
    muted, rest = split(call.graph, call.q.shape[1])
    bias = _bias_of(rest, call.graph, call.bias)
    options = (call.scale, call.score_mod, bias, call.sink_logits, call.dropout, inner or "auto")
    out, info = attend(call.q, call.k, call.v, rest, *options, return_info=True)
    out_all, lse = edges.merge(out, info.lse, out.new_zeros(()).expand_as(out), _lse_of(call, muted))
    return out_all.to(out.dtype), lse


def _lse_of(call: AttentionCall, muted: TokenGraph) -> Tensor:
    pairs = trace_pairs.union(muted, call.q.device)
    part = replace(call, graph=muted, bias=_bias_of(muted, call.graph, call.bias))
    return edges.softmax(trace_pairs.logits(part, pairs), pairs[1], muted.num_dst)[1]
