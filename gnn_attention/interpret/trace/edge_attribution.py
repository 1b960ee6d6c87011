"""What every edge of every head does to a metric of a model's logits, to first order, in one backward pass.

Let ``g`` be the gradient of the metric at a receiver's output ``o = sum_j w_j v_j``. Without the edge j

* cut (the softmax is over the other edges): o changes by ``w_j (o - v_j) / (1 - w_j)``, exactly;
* muted (the other weights stay): o changes by ``-w_j v_j``, exactly;

and the metric by g times that, to first order in the change of o. The only edge of a receiver leaves 0 in
both. The slope ``w_j g (o - v_j)``, less the derivative by the edge's logit, adds up over edges that are cut
together. Weights are computed again, one head and some rows at a time: nothing of tokens x tokens x heads is
made but bool masks. Sources: Nanda 2023 (attribution patching), Syed et al. 2023 (arXiv 2310.10348).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from gnn_attention._support import checks, memory
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.graph import TokenGraph
from gnn_attention.interpret.trace.edge_effects import KINDS, Attribution, PrunedGraphs
from gnn_attention.model import LanguageModel

Metric = Callable[[Tensor], Tensor]
# Receivers whose logits and effects are there at once.
ROWS = 256


def attribute(
    model: nn.Module,
    ids: Int[Tensor, "batch tokens"],
    metric: Metric,
    edges: TokenGraph | None = None,
    projections: int = 8,
    seed: int = 0,
) -> Attribution:
    """The change of ``metric(logits)`` if one edge is cut or muted: for all layers, heads and edges.

    Args:
        model: a Hugging Face model whose attention is ``"gnn_attention"``, or a :class:`LanguageModel`. Under
            ``use_graph``, the model along that graph.
        ids: tokens ``[B, T]``, texts of one length without padding; effects are of an edge in all samples at
            once.
        metric: of the logits ``[B, T, vocabulary]``, a scalar; or a vector of parts, such as the losses of
            all tokens, whose effects would cancel in a sum. An effect is then the root of the sum of squares
            over parts, estimated with random signs of the parts in ``projections`` backward passes.
        edges: whose effects; None for all of the model's own graph (those of any head). For an edge that a
            head's graph lacks, the effect is that of not adding it. Memory: 12 bytes (in float32) for each of
            them, layer and head.
        projections: backward passes for a vector.
        seed: of the signs.

    TypeError or ValueError for another model or metric, dropout in training mode, and too many edges.

    >>> from gnn_attention import model as lm
    >>> model, vocabulary = lm.load_trained()
    >>> ids = torch.tensor([vocabulary.encode("def read(self, size): return self.file")])
    >>> a = attribute(model, ids, lambda logits: logits[0, -2].log_softmax(-1)[ids[0, -1]])
    >>> a.layers, len(a.top(3)), round(a.keep(0.5).share, 2)
    ([0, 1], 3, 0.5)
    """
    recording = _Recording(edges)
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode(False), torch.enable_grad():
        value = metric(_logits_of(model, ids, recording))
        if not isinstance(value, Tensor) or value.dim() > 1 or not value.requires_grad:
            got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"metric(logits) must be a scalar or vector that depends on the logits, got {got}"
            )
        recording.squared = value.dim() == 1
        count = checks.size("projections", projections, 1) if recording.squared else 1
        for left in reversed(range(count)):
            signs = torch.randint(0, 2, value.shape, generator=generator).to(value) * 2 - 1
            scalar = (value * signs).sum() if recording.squared else value
            torch.autograd.grad(scalar, recording.anchor, retain_graph=left > 0)
    return recording.attribution(count)


def prune(
    model: nn.Module,
    ids: Int[Tensor, "batch tokens"],
    metric: Metric,
    share: float,
    projections: int = 3,
    first: Attribution | None = None,
    watch: Callable[[float], None] = lambda share: None,
) -> PrunedGraphs:
    """The graphs with a ``share`` of the pairs of head and edge, in steps in which at most half are cut.

    Effects are computed again along the graphs of the step before, those of the edges it has cut included, so
    that an edge may come back. ``first`` are the effects along the model's own graph, where they are known;
    ``watch`` is called with the share of each step. Other arguments and errors are those of
    :func:`attribute` and ``Attribution.keep``; the model must be one for ``use_graph``.
    """
    # Optional: it needs transformers.
    from gnn_attention.huggingface import use_graph

    whole = attribute(model, ids, metric, projections=projections) if first is None else first
    shares = [share]
    while 0 < 2 * shares[0] <= 0.3:
        shares.insert(0, 2 * shares[0])
    pruned = whole.keep(shares[0])
    edges = whole.graphs[whole.layers[0]]
    for step, next_share in enumerate(shares[1:], 1):
        watch(next_share)
        with use_graph(model, pruned):
            again = attribute(model, ids, metric, edges, projections, seed=step)
        pruned = again.keep(next_share)
    return pruned


def _logits_of(model: nn.Module, ids: Tensor, recording: _Recording) -> Tensor:
    if isinstance(model, LanguageModel):
        before = model.backend
        try:
            model.backend = recording.backend(None)
            logits: Tensor = model(ids)
        finally:
            model.backend = before
        return logits
    if getattr(getattr(model, "config", None), "_attn_implementation", None) != "gnn_attention":
        expected = 'a transformers model after set_attn_implementation("gnn_attention"), or a LanguageModel'
        raise TypeError(f"model must be {expected}, got {type(model).__name__}")
    # Optional: it needs transformers.
    from gnn_attention.huggingface import attending

    with attending(recording.backend):
        return torch.as_tensor(model(ids, use_cache=False).logits)


@dataclass(eq=False)
class _Layer:
    """The edges of an attention layer, and their effects so far."""

    graph: TokenGraph
    asked: Bool[Tensor, "dst src"]
    has: Bool[Tensor, "samples heads dst src"]
    effects: Float[Tensor, "kinds heads edges"]


@dataclass(eq=False)
class _Recording:
    edges: TokenGraph | None
    squared: bool = False
    # A number on which nothing depends: autograd goes through all layers for it, and not for parameters.
    anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    layers: dict[int, _Layer] = field(default_factory=dict)
    called: list[int] = field(default_factory=list)

    def backend(self, module: nn.Module | None) -> Backend:
        """That of a module; where it has no number, of the layers in the order of their calls."""
        number = getattr(module, "layer_idx", None)
        return Backend("attribute", lambda call: self._run(number, call), unsupported_reason=_unsupported)

    def _run(self, number: int | None, call: AttentionCall) -> tuple[Tensor, None]:
        number = len(self.called) if number is None else int(number)
        if number in self.called:
            raise ValueError(f"attribute: attention of layer {number} was called twice in one pass")
        self.called.append(number)
        if number not in self.layers:
            self.layers[number] = self._layer(call)
        rest = (self.anchor, call, self.layers[number], self)
        return _Attended.apply(call.q, call.k, call.v, *rest), None  # type: ignore[no-untyped-call]

    def _layer(self, call: AttentionCall) -> _Layer:
        has, heads = call.graph.mask(), call.q.shape[1]
        has = has.view(*[1] * (4 - has.dim()), *has.shape)
        asked = has.flatten(0, 1).any(0) if self.edges is None else self.edges.mask()
        if asked.shape != has.shape[2:]:
            raise ValueError(f"edges must be a graph over the tokens of {call.graph!r}, got {self.edges!r}")
        graph = next((x.graph for x in self.layers.values() if torch.equal(x.asked, asked)), None)
        if graph is None:
            pairs, sizes = asked.nonzero().T.flip(0).contiguous(), (asked.shape[0], asked.shape[1])
            graph = TokenGraph.from_distinct_edges(pairs, *sizes, "attributed edges")
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        memory.check("attribute", 3 * dtype.itemsize * heads * graph.num_edges, "ask for fewer edges")
        effects = torch.zeros(len(KINDS), heads, graph.num_edges, dtype=dtype)
        return _Layer(graph, asked, has, effects)

    def add(self, layer: _Layer, at: _Piece, ratio: Tensor, gap: Tensor, message: Tensor) -> None:
        """Effects summed over samples; ``ratio`` is exp(logit - lse): the weight of an edge that is there."""
        has = at.of(layer.has)
        # An edge that is there leaves 1 - w to the others; one that joins takes r / (1 + r).
        rest = torch.where(has, 1 - ratio, 1 + ratio)
        # What is left beside the only edge of a receiver is rounding: nothing attends, as if it were muted.
        alone = rest < 4 * torch.finfo(rest.dtype).eps
        cuts = torch.where(alone, -message, gap / rest.masked_fill(alone, 1.0))
        mutes = torch.where(has, -message, -message / (1 + ratio))
        for effects, change in zip(layer.effects, (cuts, mutes, gap), strict=True):
            mine = (ratio * change).sum(0).flatten()[at.places]
            effects[at.head, at.edges] += mine.square() if self.squared else mine

    def attribution(self, count: int) -> Attribution:
        """Means over ``count`` backward passes."""
        layers = dict(sorted(self.layers.items()))
        for layer in layers.values():
            layer.effects.div_(count)
            if self.squared:
                layer.effects.sqrt_()
        effects = {kind: {n: x.effects[at] for n, x in layers.items()} for at, kind in enumerate(KINDS)}
        return Attribution({n: x.graph for n, x in layers.items()}, effects)


def _unsupported(call: AttentionCall) -> str | None:
    if call.dropout:
        return "dropout is random: call model.eval()"
    return None if call.bias is None else "a bias beside edges, give it as a score_mod"


class _Piece(NamedTuple):
    """One head and some receivers, with the senders up to the last that any of them has."""

    head: int
    rows: slice
    columns: slice
    edges: slice  # of these receivers in the layer's list
    places: Int[Tensor, " edges"]  # of these edges in rows x columns
    receiving: tuple[Any, ...]  # the index of their queries
    sending: tuple[Any, ...]  # the index of the keys of these senders

    def of(self, table: Tensor) -> Tensor:
        """``[samples or 1, rows, columns]`` of a table ``[samples or 1, heads or 1, dst, src]``."""
        return table[:, self.head if table.shape[1] > 1 else 0, self.rows, self.columns]


def _pieces(call: AttentionCall, layer: _Layer) -> Iterator[_Piece]:
    heads, num_dst = call.q.shape[1:3]
    group, first = heads // call.k.shape[1], 0
    for start in range(0, num_dst, ROWS):
        rows = slice(start, min(start + ROWS, num_dst))
        there = (layer.asked[rows] | layer.has[:, :, rows].flatten(0, 1).any(0)).any(0).nonzero()
        columns = slice(0, int(there[-1]) + 1 if len(there) else 1)
        places = layer.asked[rows, columns].flatten().nonzero().flatten()
        edges = slice(first, first := first + len(places))
        for head in range(heads):
            receiving, sending = (slice(None), head, rows), (slice(None), head // group, columns)
            yield _Piece(head, rows, columns, edges, places, receiving, sending)


def _raw(call: AttentionCall, at: _Piece) -> Float[Tensor, "batch rows columns"]:
    q, k = _wide(call.q[at.receiving]), _wide(call.k[at.sending])
    return (q * call.scale) @ k.mT


def _modified(call: AttentionCall, at: _Piece, raw: Tensor) -> Tensor:
    dst = torch.arange(at.rows.start, at.rows.stop).view(-1, 1)
    of_head = replace(call, first_head=call.first_head + at.head)
    return of_head.modified(raw.unsqueeze(1), dst, torch.arange(at.columns.stop)).squeeze(1)


def _through_score_mod(call: AttentionCall, at: _Piece, raw: Tensor, slope: Tensor) -> Tensor:
    if call.score_mod is None:
        return slope
    with torch.enable_grad():
        raw = raw.detach().requires_grad_()
        return torch.autograd.grad(_modified(call, at, raw), raw, slope)[0]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Attended(torch.autograd.Function):
    """Attention whose backward pass adds the effects of its edges to the layer's."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, anchor: Tensor, *rest: Any) -> Tensor:
        call, layer, recording = rest
        out = _wide(q).new_empty(*q.shape[:3], v.shape[-1])
        lse = out.new_empty(q.shape[:3])
        for at in _pieces(call, layer):
            logits = _modified(call, at, _raw(call, at)).masked_fill(~at.of(layer.has), -torch.inf)
            total = logits.logsumexp(-1)
            if call.sink_logits is not None:
                total = total.logaddexp(_wide(call.sink_logits[at.head]))
            # A receiver without edges gets 0.
            lse[at.receiving] = total = total.masked_fill(total == -torch.inf, 0.0)
            out[at.receiving] = (logits - total.unsqueeze(-1)).exp_() @ _wide(v[at.sending])
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call, ctx.layer, ctx.recording = call, layer, recording
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        call, layer, g = ctx.call, ctx.layer, _wide(gradients[0])
        slopes = [torch.zeros_like(_wide(x)) for x in (q, k, v)]
        own = (g * out).sum(-1)
        for at in _pieces(call, layer):
            raw, message = _raw(call, at), g[at.receiving] @ _wide(v[at.sending]).mT
            weights = (_modified(call, at, raw) - lse[at.receiving].unsqueeze(-1)).exp_()
            gap = own[at.receiving].unsqueeze(-1) - message
            ctx.recording.add(layer, at, weights, gap, message)
            weights = weights.masked_fill(~at.of(layer.has), 0.0)
            slopes[2][at.sending] += weights.mT @ g[at.receiving]
            slope = _through_score_mod(call, at, raw, weights.mul_(gap).neg_()) * call.scale
            slopes[0][at.receiving] = slope @ _wide(k[at.sending])
            slopes[1][at.sending] += slope.mT @ _wide(q[at.receiving])
        return *(slope.to(q.dtype) for slope in slopes), torch.zeros(()), None, None, None
