"""Interventions on edges: which edges, in which layers and heads, and a run in which they are cut or muted.

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

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from gnn_attention import edges as edge_functions
from gnn_attention._support import checks
from gnn_attention._support.locks import turn
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall, made_of
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.intervals.arithmetic import evaluate
from gnn_attention.graph.rules import Rule, everyone
from gnn_attention.interpret.trace import pairs, transformer
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.layer.attention import fitting_graph, state_pair

Numbers = int | Iterable[int] | None
# the arguments of a layer
INPUTS = ("x", "g", "bias", "return_attention_weights")


@dataclass(frozen=True, eq=False)
class Surgery:
    """The result of :func:`cut` and :func:`mute`: which edges, in which layers and heads."""

    kind: str
    edges: TokenGraph | Tensor | None = None
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None

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
    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns
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
    """
    return _surgery("mute", edges, layers, heads)


def _surgery(kind: str, edges: Any, layers: Numbers, heads: Numbers) -> Surgery:
    edges = edges if edges is None or isinstance(edges, TokenGraph) else pairs.as_pairs(edges)
    return Surgery(kind, edges, _numbers("layers", layers), _numbers("heads", heads))


def _numbers(name: str, value: Numbers) -> tuple[int, ...] | None:
    if value is None:
        return None
    return tuple(checks.sizes(name, value)) if isinstance(value, Iterable) else (checks.size(name, value),)


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

    Interventions add up and hold in all threads; while one thread is inside, another that would enter gets
    NotImplementedError. In a Hugging Face model whose attention is ``"gnn_attention"`` they hold in the
    context that entered, in ``generate()`` too: positions count a sample's own tokens, not padding on its
    left, layers are by ``layer_idx``, cross-attention is unchanged; a listed pair is checked in the call
    that has both its ends, a :class:`TokenGraph` must be as long as the sequences (ValueError).

    Every backend is supported; a layer on the message-passing path (``backend=None``)
    runs through "auto" while edges are muted. Set a backend before, not inside.

    Raises TypeError or IndexError before anything changes for other arguments, or an unknown layer or head;
    the layer's call raises ValueError for a pair that is no edge of its graph, NotImplementedError for a
    graph that differs by head on the message-passing path, for a per-edge bias with an intervention on some
    heads (the graph then has no single edge list), or where hooks force the message-passing path.

    >>> import torch
    >>> from gnn_attention import model as lm
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
    chosen = [(LastSplit(surgery), _checked_layers(surgery, layers)) for surgery in surgeries]
    with ExitStack() as stack:
        stack.enter_context(turn(layers, brief=False))
        for split, numbers in chosen:
            for number in numbers:
                stack.enter_context(_operated_layer(layers[number], split))
        yield module


def _check_kind(surgery: Any) -> None:
    if not isinstance(surgery, Surgery):
        raise TypeError(f"surgeries must be made by cut(...) or mute(...), got {type(surgery).__name__}")


def _checked_layers(surgery: Surgery, layers: list[MessagePassingAttention]) -> list[int]:
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
def backend_replaced(layer: MessagePassingAttention, backend: str | Backend | None) -> Iterator[None]:
    before, layer.backend = layer.backend, backend
    try:
        yield
    finally:
        layer.backend = before


@contextmanager
def _operated_layer(layer: MessagePassingAttention, split: LastSplit) -> Iterator[None]:
    backend = layer.backend if split.surgery.kind == "cut" else Muting.over(layer.backend, split)
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
    # without the edges that are cut; None, which changes nothing, where some are muted
    is_mute, inputs = split.surgery.kind == "mute", _inputs(layer, args, kwargs)
    if is_mute:
        check_no_hooks(layer, "mute an edge")
    if inputs is not None:
        split.surgery.check(inputs["g"], layer.heads.num_heads)
    if inputs is None or is_mute:
        return None
    graph = inputs["g"]
    _, rest = split(graph, layer.heads.num_heads)
    return (), {**inputs, "g": rest, "bias": _bias_of(rest, graph, inputs.get("bias"))}


def check_no_hooks(layer: MessagePassingAttention, what: str) -> None:
    """NotImplementedError where the layer takes the message-passing path whatever its backend."""
    if layer._is_watched():
        reason = "a hook or explainer of torch_geometric forces the message-passing path"
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
    chosen = pairs.union(muted, call.q.device)
    part = replace(call, graph=muted, bias=_bias_of(muted, call.graph, call.bias))
    muted_lse = edge_functions.softmax(pairs.logits(part, chosen), chosen[1], muted.num_dst)[1]
    out_all, lse = edge_functions.merge(out, info.lse, out.new_zeros(()).expand_as(out), muted_lse)
    return out_all.to(out.dtype), lse
