"""Edge surgery: a run in which some edges are not there, or are there and say nothing.

======  =========================================  ====================================================================
cut     the graph without the edge                 the other in-edges of its receiver share the weight: softmax renormalises
mute    the edge with its message taken away       it keeps its weight, and nothing comes along it
======  =========================================  ====================================================================

A cut changes the graph that a layer is given. A muted edge is what a sink is: one more logit in its receiver's softmax, without
a value. So attention runs over the graph without it, on any backend, and each row is scaled by ``e^(lse_without - lse)``, the
share of the weight that was not muted. Both are exact, for gradients too: nothing is subtracted, a message that is not sent is
never read, and tokens x tokens is never made.
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
from gnn_attention.backends.call import Call
from gnn_attention.graph import TokenGraph
from gnn_attention.interpret.trace import pairs as trace_pairs
from gnn_attention.interpret.trace.interventions import Split, Surgery
from gnn_attention.layer import MessagePassingAttention

__all__ = ["Muting", "attention_layers", "check_unwatched", "exchanged", "muted_by", "operate"]

INPUTS = ("x", "g", "bias", "return_attention_weights")  # of a layer


def attention_layers(module: nn.Module) -> list[MessagePassingAttention]:
    """The attention layers inside a module, in the order of ``module.modules()``; ValueError without any, TypeError for none."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module that holds attention layers, got {type(module).__name__}")
    layers = [part for part in module.modules() if isinstance(part, MessagePassingAttention)]
    if not layers:
        raise ValueError(f"module must hold a MessagePassingAttention, got {type(module).__name__}, which has none")
    return layers


@contextmanager
def operate(module: nn.Module, *surgeries: Surgery) -> Iterator[nn.Module]:
    """Inside, the layers of ``module`` run with the given operations; leaving restores them, after exceptions too.

    Operations add up, and hold in all threads; while one is in such a block, any other that would enter one is refused
    (NotImplementedError). Every backend serves; a layer that walks (``backend=None``) runs through "auto" while edges are muted,
    and refuses a graph that differs by head. Set a backend before, not inside.

    Raises TypeError or IndexError before anything changes for what is no operation, or a layer or head that is not there;
    the layer's call raises ValueError for a pair that is no edge of its graph, NotImplementedError for a per-edge bias beside an
    operation on some heads (the graph then has no single list of edges), or where torch_geometric's hooks make the layer walk.

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
    for surgery in surgeries:
        _check_places(surgery, layers)
    with ExitStack() as stack:
        stack.enter_context(turn(layers, brief=False))
        for surgery in surgeries:
            split = Split(surgery)
            for number in range(len(layers)) if surgery.layers is None else surgery.layers:
                stack.enter_context(_cutting(layers[number], split) if surgery.kind == "cut" else _muting(layers[number], split))
        yield module


def _check_places(surgery: Surgery, layers: list[MessagePassingAttention]) -> None:
    if not isinstance(surgery, Surgery):
        raise TypeError(f"surgeries must be made by cut(...) or mute(...), got {type(surgery).__name__}")
    for layer in surgery.layers or ():
        if layer >= len(layers):
            raise IndexError(f"layers must be in 0 .. {len(layers) - 1}, the attention layers of the module, got {layer}")
    for layer in layers if surgery.layers is None else [layers[number] for number in surgery.layers]:
        for head in surgery.heads or ():
            if head >= layer.heads.num_heads:
                raise IndexError(f"heads must be in 0 .. {layer.heads.num_heads - 1}, got {head}")


@contextmanager
def exchanged(layer: MessagePassingAttention, backend: Backend) -> Iterator[None]:
    """Inside, the layer runs on another backend."""
    before, layer.backend = layer.backend, backend
    try:
        yield
    finally:
        layer.backend = before


@contextmanager
def _cutting(layer: MessagePassingAttention, split: Split) -> Iterator[None]:
    handle = layer.register_forward_pre_hook(partial(_without_edges, split), with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _muting(layer: MessagePassingAttention, split: Split) -> Iterator[None]:
    handle = layer.register_forward_pre_hook(partial(_checked, split), with_kwargs=True)
    try:
        with exchanged(layer, Muting.over(layer.backend, split)):
            yield
    finally:
        handle.remove()


def _given(layer: MessagePassingAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """A layer's inputs by name, the graph as one of ours; None where the layer itself will say what is wrong."""
    given = {**dict(zip(INPUTS, args, strict=False)), **kwargs}
    if given.get("g") is None and given.get("edge_index") is not None:  # the layer's other name for its graph
        given["g"] = given.pop("edge_index")
    pair = given.get("x")
    x_src, x_dst = pair if isinstance(pair, (tuple, list)) and len(pair) == 2 else (pair, pair)
    if not isinstance(x_src, Tensor) or not isinstance(x_dst, Tensor) or "g" not in given:
        return None
    return {**given, "g": layer._as_graph(given["g"], x_src, x_dst)}


def _without_edges(split: Split, layer: MessagePassingAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a layer is given instead: the graph without the edges that are cut, and the bias without theirs."""
    given = _given(layer, args, kwargs)
    if given is None:
        return None
    graph, heads, bias = given["g"], layer.heads.num_heads, given.get("bias")
    split.surgery.check(graph, heads)
    rest = split(graph, heads)[1]
    return (), {**given, "g": rest, "bias": _bias_of(rest, graph, bias) if isinstance(bias, Tensor) else bias}


def _checked(split: Split, layer: MessagePassingAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    check_unwatched(layer, "mute an edge")
    given = _given(layer, args, kwargs)
    if given is not None:
        split.surgery.check(given["g"], layer.heads.num_heads)


def check_unwatched(layer: MessagePassingAttention, what: str) -> None:
    """NotImplementedError where the layer walks whatever its backend, which no backend then sees."""
    if layer._is_watched():
        raise NotImplementedError(f"a hook or explainer of torch_geometric makes this layer walk: remove it to {what}")


def _bias_of(part: TokenGraph, graph: TokenGraph, bias: Tensor) -> Tensor:
    """The per-edge ``bias`` of ``graph`` for those of its edges that a part of it has."""
    if not bias.dim() or bias.shape[-1] != graph.num_edges or bias.shape[-1] == 1:
        return bias
    if trace_pairs.varies(part):
        raise NotImplementedError("bias beside an operation on some heads: operate on all heads, or give the bias as a score_mod")
    return bias[..., graph.positions_of(part.edge_index).to(bias.device)]


# -- muted edges ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Muting(Backend):
    """A backend whose calls run on another one, with some edges muted."""

    split: Split | None = None
    inner: str | Backend | None = None

    @classmethod
    def over(cls, inner: str | Backend | None, split: Split) -> Muting:
        """The edges of ``split`` muted over ``inner``."""
        name = inner.name if isinstance(inner, Backend) else inner or "auto"
        return cls(f"{name} with muted edges", partial(_run_muted, split, inner), split=split, inner=inner)


def muted_by(backend: Any, graph: TokenGraph, heads: int) -> list[TokenGraph]:
    """The edges that a layer's backend mutes: one graph for each operation."""
    found = []
    while isinstance(backend, Muting):
        assert backend.split is not None
        found.append(backend.split.surgery.touched(graph, heads))
        backend = backend.inner
    return found


def _run_muted(split: Split, inner: str | Backend | None, call: Call) -> tuple[Tensor, Tensor]:
    """``sum over the other in-edges of w_e v_src``, with the weights and the lse of all."""
    muted, rest = split(call.graph, call.q.shape[1])
    bias = None if call.bias is None else _bias_of(rest, call.graph, call.bias)
    options = (call.scale, call.score_mod, bias, call.sink_logits, call.dropout, inner or "auto")
    out, info = attend(call.q, call.k, call.v, rest, *options, return_info=True)
    out_all, lse = edges.merge(out, info.lse, out.new_zeros(()).expand_as(out), _lse_of(call, muted))
    return out_all.to(out.dtype), lse


def _lse_of(call: Call, muted: TokenGraph) -> Tensor:
    """``log sum of e^logit`` over the muted in-edges of each receiver."""
    pairs = trace_pairs.listing(muted, call.q.device)
    bias = None if call.bias is None else _bias_of(muted, call.graph, call.bias)
    logits = trace_pairs.logits(replace(call, graph=muted, bias=bias), pairs)
    return edges.softmax(logits, pairs[1], muted.num_dst)[1]
