"""Estimate the effect of every edge of every head on a metric of the logits, in one backward pass.

Let ``g`` be the gradient of the metric at a receiver's output ``o = sum_j w_j v_j``.

* A cut of edge j (softmax over the other edges) changes o by exactly ``w_j (o - v_j) / (1 - w_j)``.
* Muting edge j (the other weights stay) changes o by exactly ``-w_j v_j``.

To first order, the metric changes by the dot product of g with this change. If the receiver has no
other edge, a cut and muting both make o = 0. The slope ``w_j g (o - v_j)`` is minus the derivative
with respect to the edge's logit; slopes of edges that are cut together may be added. Outputs and
lse come from :func:`record`; weights are computed again, one head at a time. Sources: Nanda 2023
(attribution patching), Syed et al. 2023 (arXiv 2310.10348).
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from gnn_attention._support import checks, memory
from gnn_attention._support.checks import quote
from gnn_attention._support.locks import restrict_to_thread
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.edge_softmax import accumulation_dtype
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.edges import ChosenEdges
from gnn_attention.interpret.trace import transformer
from gnn_attention.interpret.trace.layer import LayerTrace
from gnn_attention.interpret.trace.run import Run, record

Metric = Callable[[Tensor], Tensor]
KINDS = ("cut", "mute", "slope")
# Weights are computed for this many receivers and all senders at once.
RECEIVERS_PER_CHUNK = 256


class Effect(NamedTuple):
    """The change of the metric when one edge of one head is removed."""

    layer: int
    head: int
    src: int
    dst: int
    change: float


@dataclass(frozen=True, eq=False)
class PrunedGraphs:
    """The pruned graph of each layer, which varies by head, for ``use_graph(model, pruned)``.

    ``count`` pairs of head and edge remain, and ``share`` is their fraction of all pairs.
    """

    graphs: Mapping[int, TokenGraph]
    count: int
    share: float

    def __repr__(self) -> str:
        counts = f"layers: {len(self.graphs)}, pairs of head and edge: {self.count:,}"
        return f"PrunedGraphs({counts}, {self.share:.1%})"

    def __call__(self, layer: int, head: int, length: int) -> TokenGraph | None:
        """Return the graph of all heads of a layer, or None for the model's own graph."""
        return self.graphs.get(layer)


@dataclass(frozen=True, eq=False)
class Attribution:
    """The edges of each layer, and the effect of each edge on the metric."""

    graphs: Mapping[int, TokenGraph]
    effects: Mapping[str, Mapping[int, Float[Tensor, "heads edges"]]]

    def __repr__(self) -> str:
        num_pairs = sum(scores.numel() for scores in next(iter(self.effects.values())).values())
        counts = f"layers: {len(self.graphs)}, pairs of head and edge: {num_pairs:,}"
        return f"Attribution({counts}, effects: {', '.join(self.effects)})"

    @property
    def layers(self) -> list[int]:
        return list(self.graphs)

    def edge_index(self, layer: int) -> Int[Tensor, "2 edges"]:
        """Return the edges of a layer, sorted by receiver, then sender. Row 0 holds the senders."""
        return self.graphs[self._check_layer(layer)].edge_index

    def scores(self, layer: int, without: str = "cut") -> Float[Tensor, "heads edges"]:
        """Return the effects "cut", "mute" or "slope" of a layer, in the order of :meth:`edge_index`."""
        return self.effects[checks.choice("without", without, KINDS)][self._check_layer(layer)]

    def top(self, k: int, without: str = "cut") -> list[Effect]:
        """Return the ``k`` effects with the largest absolute values, largest first."""
        effects: list[Effect] = []
        for layer in self.layers:
            scores = self.scores(layer, without)
            edge_index = self.edge_index(layer)
            indices = scores.abs().flatten().topk(min(checks.size("k", k), scores.numel())).indices
            for index in indices.tolist():
                head, edge = divmod(index, scores.shape[1])
                src, dst = edge_index[:, edge].tolist()
                effects.append(Effect(layer, head, src, dst, float(scores[head, edge])))
        return sorted(effects, key=lambda effect: -abs(effect.change))[:k]

    def keep(self, amount: float, at_least: int = 1, sinks: int = 1) -> PrunedGraphs:
        """Keep the edges with the largest absolute slopes, and prune the others, for ``use_graph``.

        Args:
            amount: how many pairs of head and edge remain, as a fraction (a float up to 1.0) or as a
                count (an int). If pairs with equal slopes do not all fit, all of them are removed.
            at_least: number of in-edges that each receiver keeps in each head, sinks included.
            sinks: number of leading tokens that keep all out-edges. These edges and those of
                at_least count towards the amount, but are kept even if they exceed it.

        >>> from gnn_attention import patterns
        >>> a = Attribution({0: patterns.causal(3)}, {"slope": {0: torch.tensor([[0, 1, 9, 1, 5, -2.0]])}})
        >>> pruned = a.keep(4, at_least=0)
        >>> a
        Attribution(layers: 1, pairs of head and edge: 6, effects: slope)
        >>> pruned
        PrunedGraphs(layers: 1, pairs of head and edge: 4, 66.7%)
        >>> pruned(0, 0, 3).mask().int().tolist()
        [[[1, 0, 0], [1, 1, 0], [1, 0, 0]]]
        """
        num_pairs = sum(self.scores(layer, "slope").numel() for layer in self.layers)
        is_fraction = isinstance(amount, float) and 0 <= amount <= 1
        is_count = isinstance(amount, int) and not isinstance(amount, bool) and 0 <= amount <= num_pairs
        if not (is_fraction or is_count):
            expected = f"a fraction (0.0 .. 1.0) or a count (0 .. {num_pairs:,})"
            raise ValueError(f"amount must be {expected}, got {checks.describe_type(amount)}")
        checks.size("at_least", at_least)
        checks.size("sinks", sinks)
        slopes = {layer: self._measure_slopes(layer, at_least, sinks) for layer in self.layers}
        all_slopes = torch.cat([sizes.flatten() for sizes in slopes.values()])
        num_removed = num_pairs - (round(amount * num_pairs) if is_fraction else int(amount))
        threshold = float(all_slopes.kthvalue(num_removed).values) if num_removed else -1.0
        is_kept = {layer: (sizes > threshold) | sizes.isinf() for layer, sizes in slopes.items()}
        count = sum(int(mask.count_nonzero()) for mask in is_kept.values())
        graphs = {layer: self._prune_graph(layer, mask) for layer, mask in is_kept.items()}
        return PrunedGraphs(graphs, count, count / num_pairs)

    def _measure_slopes(self, layer: int, at_least: int, sinks: int) -> Float[Tensor, "heads edges"]:
        """Return the absolute value of each slope, or infinity for an edge that must be kept."""
        graph = self.graphs[layer]
        src, dst = graph.edge_index
        sizes = self.scores(layer, "slope").float().abs()
        sizes[:, src < sinks] = torch.inf
        for head_sizes in sizes if at_least else ():
            matrix = head_sizes.new_full((graph.num_dst, graph.num_src), -1.0)
            matrix[dst, src] = head_sizes
            top_src = matrix.topk(min(at_least, graph.num_src), dim=1).indices
            matrix.scatter_(1, top_src, torch.inf)
            head_sizes.copy_(matrix[dst, src])
        return sizes

    def _prune_graph(self, layer: int, is_kept: Bool[Tensor, "heads edges"]) -> TokenGraph:
        graph = self.graphs[layer]
        num_heads = len(is_kept)
        src, dst = graph.edge_index
        head, edge = is_kept.nonzero().unbind(1)
        # ChosenEdges lists the senders of each receiver, so no backend has to search for edges.
        row = head * graph.num_dst + dst[edge]
        edges = ChosenEdges.from_rows(row, src[edge], (1, num_heads, graph.num_dst, graph.num_src))
        return TokenGraph(edges, graph.num_dst, graph.num_src, heads=num_heads, name="pruned")

    def _check_layer(self, layer: int) -> int:
        if layer not in self.graphs:
            raise ValueError(f"layer must be one of {self.layers}, got {quote(layer)}")
        return layer


def attribute(
    model: nn.Module,
    ids: Int[Tensor, "batch tokens"],
    metric: Metric,
    edges: TokenGraph | None = None,
    projections: int = 8,
    seed: int = 0,
) -> Attribution:
    """Estimate the change of ``metric(logits)`` when one edge of one head is removed.

    Args:
        model: a Hugging Face model whose attention is ``"gnn_attention"``, or a module with
            attention layers of this library that takes tokens, such as a :class:`LanguageModel`.
            Inside ``use_graph``, the model runs on that graph.
        ids: tokens ``[B, T]``, without padding. The effect of an edge is the change of the metric
            when the edge is removed from all samples at once.
        metric: a function of the logits ``[B, T, vocabulary]`` that returns a scalar, or a vector,
            such as the losses of all tokens, so that effects on its entries cannot cancel. The
            effect on a vector is the Euclidean norm of the effects on its entries. This norm is
            estimated by ``projections`` backward passes, each with random signs of the entries.
        edges: the edges whose effects are estimated. Default: every edge that the model's own graph
            has in any head. For an edge that a head lacks, the effect is minus the effect of adding it.
            In float32, the effects of an edge take 12 bytes for each layer and head.
        projections: number of backward passes for a vector.
        seed: seed of the random signs.

    Raises TypeError or ValueError for another model or metric, dropout in training mode, or too
    many edges.

    >>> from gnn_attention import model as lm
    >>> model, vocabulary = lm.load_trained()
    >>> ids = torch.tensor([vocabulary.encode("def read(self, size): return self.file")])
    >>> a = attribute(model, ids, lambda logits: logits[0, -2].log_softmax(-1)[ids[0, -1]])
    >>> a.layers, len(a.top(3)), round(a.keep(0.5).share, 2)
    ([0, 1], 3, 0.5)
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode(False), torch.enable_grad():
        run = _record_with_gradients(model, ids)
        traces = sorted(run.layers, key=lambda trace: trace.number)
        layer_indices = [trace.number for trace in traces]
        if len(set(layer_indices)) < len(layer_indices):
            raise ValueError(f"each layer must call attention once in a pass, got layers {layer_indices}")
        layers = [_LayerEffects.of(trace, edges) for trace in traces]
        value = metric(getattr(run.output, "logits", run.output))
        if not isinstance(value, Tensor) or value.dim() > 1 or not value.requires_grad:
            raise TypeError(f"metric must return a differentiable scalar or vector, got {quote(value)}")
        is_vector = value.dim() == 1
        num_passes = checks.size("projections", projections, 1) if is_vector else 1
        outputs = tuple(layer.trace.z for layer in layers)
        for index in reversed(range(num_passes)):
            signs = torch.randint(0, 2, value.shape, generator=generator).to(value) * 2 - 1
            scalar = (value * signs).sum() if is_vector else value
            gradients = torch.autograd.grad(scalar, outputs, retain_graph=index > 0, materialize_grads=True)
            for layer, gradient in zip(layers, gradients, strict=True):
                layer.add_effects(gradient, is_vector)
    for layer in layers:
        layer.effects.div_(num_passes)
        if is_vector:
            layer.effects.sqrt_()
    effects = {kind: {x.trace.number: x.effects[i] for x in layers} for i, kind in enumerate(KINDS)}
    return Attribution({layer.trace.number: layer.graph for layer in layers}, effects)


def prune(
    model: nn.Module,
    ids: Int[Tensor, "batch tokens"],
    metric: Metric,
    share: float,
    projections: int = 3,
    first: Attribution | None = None,
    watch: Callable[[float], None] = lambda share: None,
) -> PrunedGraphs:
    """Prune the model's graphs step by step to a ``share`` of the pairs of head and edge.

    For a share up to 0.15, the first step keeps 0.15 to 0.3 of the pairs, and each further step
    half as many. Each step computes all effects again on the graphs of the previous step, so a
    pruned edge may return. ``first`` holds the effects on the model's own graph, if they are
    already computed. ``watch`` is called with the share of each step after the first. The other
    arguments and errors are those of :func:`attribute`, ``Attribution.keep`` and ``use_graph``.
    """
    # ``gnn_attention.huggingface`` imports transformers, which is optional.
    from gnn_attention.huggingface import use_graph

    attribution = attribute(model, ids, metric, projections=projections) if first is None else first
    edges = attribution.graphs[attribution.layers[0]]
    shares = [share]
    while 0 < 2 * shares[0] <= 0.3:
        shares.insert(0, 2 * shares[0])
    pruned = attribution.keep(shares[0])
    for step, next_share in enumerate(shares[1:], 1):
        watch(next_share)
        with use_graph(model, pruned):
            attribution = attribute(model, ids, metric, edges, projections, seed=step)
        pruned = attribution.keep(next_share)
    return pruned


def _record_with_gradients(model: nn.Module, ids: Tensor) -> Run:
    """Record a run in which states require gradients, even if no parameter requires them."""
    checks.instance("model", model, nn.Module)
    options: dict[str, Any] = {"use_cache": False} if transformer.is_transformer(model) else {}
    with ExitStack() as hooks:
        for part in model.modules():
            if isinstance(part, nn.Embedding):
                # A model may change the clone in place, which autograd forbids for a leaf.
                require_grad = restrict_to_thread(lambda _, ids, states: states.requires_grad_().clone())
                hooks.enter_context(part.register_forward_hook(require_grad))
        return record(model, ids, **options)


@dataclass(eq=False)
class _LayerEffects:
    """Effects of the edges of ``graph``; ``is_edge`` marks those that the layer's graph has."""

    trace: LayerTrace
    graph: TokenGraph
    is_edge: Bool[Tensor, "samples heads edges"]
    effects: Float[Tensor, "kinds heads edges"]

    @classmethod
    def of(cls, trace: LayerTrace, edges: TokenGraph | None) -> "_LayerEffects":
        own_graph, call = trace.graph, trace.call
        if call.dropout:
            raise ValueError("attribute needs calls without dropout, which is random: call model.eval()")
        if call.bias is not None:
            raise ValueError("attribute needs layers without bias=: pass the bias as a score_mod")
        if trace._changed_values:
            raise ValueError("messages of some edges are changed: leave the context of trace.intervene")
        shape = own_graph.num_dst, own_graph.num_src
        if edges is None and not own_graph.varying_axes:
            edges = own_graph
        elif edges is None:
            edges = TokenGraph.from_distinct_edges(trace.edge_index, *shape, "attributed edges")
        if (edges.num_dst, edges.num_src) != shape or edges.varying_axes:
            raise ValueError(f"edges must be one graph over the tokens of {own_graph!r}, got {edges!r}")
        dtype, num_heads = accumulation_dtype(call.q.dtype), call.q.shape[1]
        memory.check("attribute", 3 * dtype.itemsize * num_heads * edges.num_edges, "ask for fewer edges")
        effects = torch.zeros(len(KINDS), num_heads, edges.num_edges, dtype=dtype)
        mask = own_graph.mask()
        src, dst = edges.edge_index
        is_edge = mask.view(*[1] * (4 - mask.dim()), *mask.shape)[:, :, dst, src]
        return cls(trace, edges, is_edge, effects)

    @torch.no_grad()
    def add_effects(self, gradient: Float[Tensor, "batch heads dst dim"], is_vector: bool) -> None:
        """Add the effects, summed over samples, or their squares if the metric is a vector."""
        gradient = gradient.to(self.effects.dtype)
        g_dot_o = (gradient * self.trace.z).sum(-1)
        chunk_of_edge = self.graph.edge_index[1] // RECEIVERS_PER_CHUNK
        chunks = torch.split(chunk_of_edge.argsort(stable=True), chunk_of_edge.bincount().tolist())
        for (chunk_index, edges), head in product(enumerate(chunks), range(gradient.shape[1])):
            rows = slice(chunk_index * RECEIVERS_PER_CHUNK, (chunk_index + 1) * RECEIVERS_PER_CHUNK)
            src, dst = self.graph.edge_index[:, edges]
            row = dst % RECEIVERS_PER_CHUNK
            ratio = self._weight_ratios(head, rows)[:, row, src]
            g_dot_v = (gradient[:, head, rows] @ self._select_head(self.trace.v, head).mT)[:, row, src]
            slope = g_dot_o[:, head, dst] - g_dot_v
            is_edge = self.is_edge[:, min(head, self.is_edge.shape[1] - 1), edges]
            # The other weights sum to 1 - w. An added edge of ratio r divides them by 1 + r.
            remaining = torch.where(is_edge, 1 - ratio, 1 + ratio)
            # For a receiver's only edge, 1 - w is rounding error, and a cut has the effect of muting.
            is_only = remaining < 4 * torch.finfo(remaining.dtype).eps
            cut = torch.where(is_only, -g_dot_v, slope / remaining.masked_fill(is_only, 1.0))
            mute = torch.where(is_edge, -g_dot_v, -g_dot_v / (1 + ratio))
            for effects, change in zip(self.effects, (cut, mute, slope), strict=True):
                effect = (ratio * change).sum(0)
                effects[head, edges] += effect.square() if is_vector else effect

    def _weight_ratios(self, head: int, rows: slice) -> Float[Tensor, "batch rows src"]:
        """Return ``exp(logit - lse)`` of all pairs. For an edge, this is its weight."""
        call = self.trace.call
        q, k = call.q[:, head, rows].to(self.effects.dtype), self._select_head(call.k, head)
        dst, src = torch.arange(call.q.shape[2])[rows].view(-1, 1), torch.arange(k.shape[1])
        head_call = replace(call, first_head=call.first_head + head)
        logits = head_call.apply_score_mod((q * call.scale @ k.mT).unsqueeze(1), dst, src).squeeze(1)
        # The lse of an isolated receiver is -inf and is replaced by 0, so that ratios are finite.
        lse = self.trace.lse[:, head, rows]
        return (logits - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()

    def _select_head(self, x: Tensor, head: int) -> Float[Tensor, "batch src dim"]:
        return x[:, head // (self.effects.shape[1] // x.shape[1])].to(self.effects.dtype)
