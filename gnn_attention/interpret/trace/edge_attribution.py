"""What every edge of every head does to a metric of a model's logits, to first order, in one backward pass.

Let ``g`` be the gradient of the metric at a receiver's output ``o = sum_j w_j v_j``. Without the edge j

* cut (the softmax is over the other edges): o changes by ``w_j (o - v_j) / (1 - w_j)``, exactly;
* muted (the other weights stay): o changes by ``-w_j v_j``, exactly;

and the metric by g times that, to first order in the change of o. The only edge of a receiver leaves 0 in
both. The slope ``w_j g (o - v_j)``, less the derivative by the edge's logit, adds up over edges that are cut
together. Outputs, logits and their sums are those of :func:`record`; weights are computed again, one head at
a time. Sources: Nanda 2023 (attribution patching), Syed et al. 2023 (arXiv 2310.10348).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from gnn_attention._support import checks, memory
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
ROWS = 256  # receivers whose pairs with all senders are computed at once


class Effect(NamedTuple):
    """What the metric changes by without one edge of one head."""

    layer: int
    head: int
    src: int
    dst: int
    change: float


@dataclass(frozen=True, eq=False)
class PrunedGraphs:
    """The graph of each layer, one for each of its heads: what ``use_graph(model, pruned)`` takes.

    ``share`` is that of pairs of head and edge which are left.
    """

    graphs: Mapping[int, TokenGraph]
    count: int
    share: float

    def __repr__(self) -> str:
        counts = f"layers: {len(self.graphs)}, pairs of head and edge: {self.count:,}"
        return f"PrunedGraphs({counts}, {self.share:.1%})"

    def __call__(self, layer: int, head: int, length: int) -> TokenGraph | None:
        """The graph of all heads of a layer, the same for each ``head``; None: the model's own."""
        return self.graphs.get(layer)


@dataclass(frozen=True, eq=False)
class Attribution:
    """By layer: its edges, and the change of the metric if one is cut or muted, and its slope."""

    graphs: Mapping[int, TokenGraph]
    effects: Mapping[str, Mapping[int, Float[Tensor, "heads edges"]]]

    def __repr__(self) -> str:
        pairs = sum(scores.numel() for scores in next(iter(self.effects.values())).values())
        counts = f"layers: {len(self.graphs)}, pairs of head and edge: {pairs:,}"
        return f"Attribution({counts}, effects: {', '.join(self.effects)})"

    @property
    def layers(self) -> list[int]:
        return list(self.graphs)

    def edge_index(self, layer: int) -> Int[Tensor, "2 edges"]:
        """The edges of a layer, by receiver, then sender; row 0 senders."""
        return self.graphs[self._check_layer(layer)].edge_index

    def scores(self, layer: int, without: str = "cut") -> Float[Tensor, "heads edges"]:
        """The change of the metric without an edge, beside :meth:`edge_index`: "cut", "mute" or "slope"."""
        return self.effects[checks.choice("without", without, KINDS)][self._check_layer(layer)]

    def top(self, k: int, without: str = "cut") -> list[Effect]:
        """The ``k`` effects of the largest size, over all layers and heads, the largest first."""
        effects: list[Effect] = []
        for layer in self.layers:
            scores, pairs = self.scores(layer, without), self.edge_index(layer)
            best = scores.abs().flatten().topk(min(checks.size("k", k), scores.numel())).indices
            for place in best.tolist():
                head, edge = divmod(place, scores.shape[1])
                src, dst = pairs[:, edge].tolist()
                effects.append(Effect(layer, head, src, dst, float(scores[head, edge])))
        return sorted(effects, key=lambda effect: -abs(effect.change))[:k]

    def keep(self, amount: float, at_least: int = 1, sinks: int = 1) -> PrunedGraphs:
        """The graphs of the edges whose slopes are largest in size, for ``use_graph``.

        The slope holds for many cuts at once.

        Args:
            amount: a share of all pairs of head and edge (a float up to 1.0), or their count (an int). Equal
                effects that would exceed it are left out together.
            at_least: edges that each receiver has in each head, sinks among them: its own largest effects.
            sinks: first tokens that all receivers keep. These and at_least count towards the amount, and stay
                where they alone exceed it (short texts).

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
        pairs = sum(self.scores(layer, "slope").numel() for layer in self.layers)
        is_share = isinstance(amount, float) and 0 <= amount <= 1
        is_count = isinstance(amount, int) and not isinstance(amount, bool) and 0 <= amount <= pairs
        if not (is_share or is_count):
            raise ValueError(
                f"amount must be a share of all pairs (0.0 .. 1.0) or their count (an int up to {pairs:,}), "
                f"got {checks.describe_type(amount)}"
            )
        checks.size("at_least", at_least)
        checks.size("sinks", sinks)
        sizes = {n: self._sizes(n, at_least, sinks) for n in self.layers}
        every = torch.cat([size.flatten() for size in sizes.values()])
        left_out = pairs - (round(amount * pairs) if is_share else int(amount))
        largest_left_out = float(every.kthvalue(left_out).values) if left_out else -1.0
        kept = {n: (size > largest_left_out) | size.isinf() for n, size in sizes.items()}
        count = sum(int(chosen.count_nonzero()) for chosen in kept.values())
        graphs = {n: self._graph(n, chosen) for n, chosen in kept.items()}
        return PrunedGraphs(graphs, count, count / pairs)

    def _sizes(self, layer: int, at_least: int, sinks: int) -> Float[Tensor, "heads edges"]:
        """The sizes of effects; infinite where an edge must stay."""
        graph = self.graphs[layer]
        src, dst = graph.edge_index
        sizes = self.scores(layer, "slope").float().abs()
        sizes[:, src < sinks] = torch.inf
        for size in sizes if at_least else ():
            table = size.new_full((graph.num_dst, graph.num_src), -1.0)
            table[dst, src] = size
            best = table.topk(min(at_least, graph.num_src), dim=1).indices
            table.scatter_(1, best, torch.inf)
            size.copy_(table[dst, src])
        return sizes

    def _graph(self, layer: int, chosen: Bool[Tensor, "heads edges"]) -> TokenGraph:
        graph = self.graphs[layer]
        (src, dst), (head, edge) = graph.edge_index, chosen.nonzero().unbind(1)
        # Rows of senders, which no backend has to look for in a table.
        row, shape = head * graph.num_dst + dst[edge], (1, len(chosen), graph.num_dst, graph.num_src)
        edges = ChosenEdges.from_rows(row, src[edge], shape)
        return TokenGraph(edges, *shape[2:], heads=len(chosen), name="pruned")

    def _check_layer(self, layer: int) -> int:
        if layer not in self.graphs:
            raise ValueError(f"layer must be one of {self.layers}, got {checks.quote(layer)}")
        return layer


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
        model: a Hugging Face model whose attention is ``"gnn_attention"``, or a module of our attention
            layers that takes tokens, such as a :class:`LanguageModel`. Under ``use_graph``, the model along
            that graph.
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
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode(False), torch.enable_grad():
        run = _record_with_gradients(model, ids)
        traces = sorted(run.layers, key=lambda trace: trace.number)
        numbers = [trace.number for trace in traces]
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"attribute: a layer's attention was called twice in one pass: layers {numbers}")
        layers = [_Layer.of(trace, edges) for trace in traces]
        value = metric(getattr(run.output, "logits", run.output))
        if not isinstance(value, Tensor) or value.dim() > 1 or not value.requires_grad:
            got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"metric(logits) must be a scalar or vector that depends on the logits, got {got}"
            )
        is_vector = value.dim() == 1
        count = checks.size("projections", projections, 1) if is_vector else 1
        outputs = tuple(layer.trace.z for layer in layers)
        for left in reversed(range(count)):
            signs = torch.randint(0, 2, value.shape, generator=generator).to(value) * 2 - 1
            scalar = (value * signs).sum() if is_vector else value
            gradients = torch.autograd.grad(scalar, outputs, retain_graph=left > 0, materialize_grads=True)
            for layer, gradient in zip(layers, gradients, strict=True):
                layer.add(gradient, is_vector)
    for layer in layers:
        layer.effects.div_(count)
        if is_vector:
            layer.effects.sqrt_()
    effects = {kind: {x.trace.number: x.effects[at] for x in layers} for at, kind in enumerate(KINDS)}
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


def _record_with_gradients(model: nn.Module, ids: Tensor) -> Run:
    """The run of a model in which autograd follows the states, whether or not parameters are trained."""
    checks.instance("model", model, nn.Module)
    options: dict[str, Any] = {"use_cache": False} if transformer.is_transformer(model) else {}
    with ExitStack() as hooks:
        for part in model.modules():
            if isinstance(part, nn.Embedding):
                # A copy, since a model may write into its states.
                follow = restrict_to_thread(lambda _, ids, states: states.requires_grad_().clone())
                hooks.enter_context(part.register_forward_hook(follow))
        return record(model, ids, **options)


@dataclass(eq=False)
class _Layer:
    """The edges of an attention layer, and their effects so far."""

    trace: LayerTrace
    graph: TokenGraph
    has: Bool[Tensor, "samples heads edges"]
    effects: Float[Tensor, "kinds heads edges"]

    @classmethod
    def of(cls, trace: LayerTrace, edges: TokenGraph | None) -> _Layer:
        """Without effects yet. ValueError for a call that has none, or edges over other tokens."""
        own, call = trace.graph, trace.call
        if call.dropout:
            raise ValueError("attribute: dropout is random: call model.eval()")
        if call.bias is not None:
            raise ValueError("attribute: a bias beside edges, give it as a score_mod")
        if trace._changed:
            raise ValueError("attribute: messages of some edges are changed: leave the block of intervene")
        sizes = own.num_dst, own.num_src
        if edges is None and not own.varying_axes:
            edges = own
        elif edges is None:
            edges = TokenGraph.from_distinct_edges(trace.edge_index, *sizes, "attributed edges")
        if (edges.num_dst, edges.num_src) != sizes or edges.varying_axes:
            raise ValueError(f"edges must be a graph over the tokens of {own!r}, got {edges!r}")
        dtype, heads = accumulation_dtype(call.q.dtype), call.q.shape[1]
        memory.check("attribute", 3 * dtype.itemsize * heads * edges.num_edges, "ask for fewer edges")
        effects = torch.zeros(len(KINDS), heads, edges.num_edges, dtype=dtype)
        mask, (src, dst) = own.mask(), edges.edge_index
        has = mask.view(*[1] * (4 - mask.dim()), *mask.shape)[:, :, dst, src]
        return cls(trace, edges, has, effects)

    @torch.no_grad()
    def add(self, gradient: Float[Tensor, "batch heads dst dim"], is_part: bool) -> None:
        """Effects summed over samples: squared where the gradient is of a part of a vector."""
        gradient = gradient.to(self.effects.dtype)
        own, block = (gradient * self.trace.z).sum(-1), self.graph.edge_index[1] // ROWS
        parts = torch.split(block.argsort(stable=True), block.bincount().tolist())
        for (number, edges), head in product(enumerate(parts), range(gradient.shape[1])):
            rows, (src, dst) = slice(number * ROWS, (number + 1) * ROWS), self.graph.edge_index[:, edges]
            ratio, v = self._ratio(head, rows)[:, dst % ROWS, src], self._of_senders(self.trace.v, head)
            message = (gradient[:, head, rows] @ v.mT)[:, dst % ROWS, src]
            gap = own[:, head, dst] - message
            has = self.has[:, min(head, self.has.shape[1] - 1), edges]
            # An edge that is there leaves 1 - w to the others; one that joins takes r / (1 + r).
            rest = torch.where(has, 1 - ratio, 1 + ratio)
            # Beside the only edge of a receiver rounding is left: nothing attends, as if it were muted.
            alone = rest < 4 * torch.finfo(rest.dtype).eps
            cuts = torch.where(alone, -message, gap / rest.masked_fill(alone, 1.0))
            mutes = torch.where(has, -message, -message / (1 + ratio))
            for effects, change in zip(self.effects, (cuts, mutes, gap), strict=True):
                mine = (ratio * change).sum(0)
                effects[head, edges] += mine.square() if is_part else mine

    def _ratio(self, head: int, rows: slice) -> Float[Tensor, "batch rows src"]:
        """``exp(logit - lse)`` of some receivers and all senders: the weight of an edge that is there."""
        call = self.trace.call
        q, k = call.q[:, head, rows].to(self.effects.dtype), self._of_senders(call.k, head)
        dst, src = torch.arange(call.q.shape[2])[rows].view(-1, 1), torch.arange(k.shape[1])
        of_head = replace(call, first_head=call.first_head + head)
        logits = of_head.apply_score_mod((q * call.scale @ k.mT).unsqueeze(1), dst, src).squeeze(1)
        # A receiver without edges has no sum: its lse counts as 0.
        lse = self.trace.lse[:, head, rows]
        return (logits - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()

    def _of_senders(self, table: Tensor, head: int) -> Float[Tensor, "batch src dim"]:
        return table[:, head // (self.effects.shape[1] // table.shape[1])].to(self.effects.dtype)
