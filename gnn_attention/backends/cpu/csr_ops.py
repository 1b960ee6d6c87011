"""Differentiable operators over a list of edges: the parts of attention, for calls that do something between
them.

Five linear or bilinear maps between numbers of edges ``[B, Hq, E]`` (receiver by receiver), numbers of
receivers ``[B, Hq, dst]`` and rows of tokens, whose derivatives are each other, and the softmax over
in-edges, whose derivatives are made of them:

============  ===============================================  ========================================================
products      ``w_e = q_dst . k_src``                          its derivatives are incoming and outgoing sums
incoming      ``y_dst = sum over in-edges of w_e v_src``
outgoing      ``y_src = sum over out-edges of w_e x_dst``      also over the query heads of a group
by_edge       ``w_e = x_dst``                                  its derivative is total, and the reverse
total         ``x_dst = sum over in-edges of w_e``
softmax       ``w_e = exp(l_e) / total``                       and the logarithm of the total, -inf over none; sinks, one more
                                                               logit of a receiver without an edge, are in the
                                                               total
============  ===============================================  ========================================================

Each is registered with torch under its name, so that compilers, ``torch.export`` and ``torch.vmap`` take it
as it is, and can be differentiated any number of times. They compute in the dtype that comes in: callers
bring float32 or better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gnn_attention._support.custom_op import operator
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.cpu import head_batching as folding
from gnn_attention.backends.cpu.csr_primitives import Head, row_maxima, row_sums, sampled_products
from gnn_attention.backends.plan.plan import Edges


def tensors_of(edges: Edges) -> list[Tensor]:
    """A list of edges as the operators take it."""
    return [edges.ptr, edges.src, edges.dst, edges.out_ptr, edges.out_dst, edges.out_position]


def _edges(tensors: Sequence[Tensor]) -> Edges:
    ptr, src, dst, out_ptr, out_dst, out_position = tensors
    return Edges(ptr, src, dst, out_ptr, out_dst, out_position)


def products(
    q: Float[Tensor, "batch heads dst dim"],
    k: Float[Tensor, "batch kv_heads src dim"],
    edges: Sequence[Tensor],
) -> Float[Tensor, "batch heads edges"]:
    """``q_dst . k_src`` for every edge."""
    result: Tensor = _PRODUCTS(q, k, list(edges))
    return result


def incoming(
    weights: Float[Tensor, "batch heads edges"],
    v: Float[Tensor, "batch kv_heads src dim"],
    edges: Sequence[Tensor],
) -> Float[Tensor, "batch heads dst dim"]:
    """What each receiver hears: ``sum of weights_e v_src`` over its in-edges, 0 over none."""
    result: Tensor = _INCOMING(weights, v, list(edges))
    return result


def outgoing(
    weights: Float[Tensor, "batch heads edges"],
    x: Float[Tensor, "batch heads dst dim"],
    edges: Sequence[Tensor],
    kv_heads: int,
) -> Float[Tensor, "batch kv_heads src dim"]:
    """``sum of weights_e x_dst`` over each sender's out-edges and the query heads of its group."""
    result: Tensor = _OUTGOING(weights, x, list(edges), kv_heads)
    return result


def by_edge(
    x: Float[Tensor, "batch heads dst"], edges: Sequence[Tensor]
) -> Float[Tensor, "batch heads edges"]:
    """``x_dst`` for every edge."""
    result: Tensor = _BY_EDGE(x, list(edges))
    return result


def total(
    weights: Float[Tensor, "batch heads edges"], edges: Sequence[Tensor]
) -> Float[Tensor, "batch heads dst"]:
    """The sum of ``weights_e`` over the in-edges of each receiver."""
    result: Tensor = _TOTAL(weights, list(edges))
    return result


def softmax(
    logits: Float[Tensor, "batch heads edges"],
    edges: Sequence[Tensor],
    sink_logits: Float[Tensor, " heads"] | None = None,
) -> tuple[Float[Tensor, "batch heads edges"], Float[Tensor, "batch heads dst"]]:
    """Weights and lse over in-edges, as :func:`gnn_attention.edges.softmax` gives them, for edges receiver by
    receiver.
    """
    sinks = logits.new_zeros(*logits.shape[:2], 0)
    if sink_logits is not None:
        every = sink_logits.to(logits.dtype).view(1, -1, 1)
        sinks = torch.where(edges[0].diff() > 0, every, -torch.inf).expand(logits.shape[0], -1, -1)
    weights, lse = _SOFTMAX(logits, sinks, list(edges))
    return weights, lse


def _products(q: Tensor, k: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    if (small := _as_one_head(tensors, q, k.shape[1])) is not None:
        return _products(folding.flat(q), folding.flat(k), small).view(*q.shape[:2], -1)
    result, work = q.new_zeros(*q.shape[:2], tensors[1].numel()), Head(_edges(tensors), q.dtype)
    for sample, head, kv_head in _heads(q, tensors, k.shape[1]):
        work.first.values().zero_()
        sampled_products(work.first, work.staged("q", q[sample, head]), work.staged("k", k[sample, kv_head]))
        result[sample, head] = work.first.values()
    return result


def _incoming(weights: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    receivers = tensors[0].numel() - 1
    if (small := _as_one_head(tensors, weights, v.shape[1])) is not None:
        return _incoming(weights.reshape(1, 1, -1), folding.flat(v), small).view(
            *weights.shape[:2], receivers, v.shape[3]
        )
    result, work = v.new_zeros(*weights.shape[:2], receivers, v.shape[3]), Head(_edges(tensors), v.dtype)
    for sample, head, kv_head in _heads(weights, tensors, v.shape[1]):
        value = work.staged("v", v[sample, kv_head])
        result[sample, head] = work.incoming(weights[sample, head].contiguous(), value)
    return result


def _outgoing(weights: Tensor, x: Tensor, tensors: Sequence[Tensor], kv_heads: int) -> Tensor:
    senders = tensors[3].numel() - 1
    if (small := _as_one_head(tensors, weights, kv_heads)) is not None:
        sums = _outgoing(weights.reshape(1, 1, -1), folding.flat(x), small, 1)
        return sums.view(weights.shape[0], kv_heads, senders, x.shape[3])
    result, work = (
        x.new_zeros(weights.shape[0], kv_heads, senders, x.shape[3]),
        Head(_edges(tensors), x.dtype),
    )
    for sample, head, kv_head in _heads(weights, tensors, kv_heads):
        rows, spare = work.staged("x", x[sample, head]), work.first.values()
        result[sample, kv_head] += work.outgoing(weights[sample, head].contiguous(), rows, spare)
    return result


def _spread(x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    return x.index_select(2, tensors[2])


def _total(weights: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    if (small := _as_one_head(tensors, weights, weights.shape[1])) is not None:
        return _total(weights.reshape(1, 1, -1), small).view(*weights.shape[:2], -1)
    result, work = (
        weights.new_zeros(*weights.shape[:2], tensors[0].numel() - 1),
        Head(_edges(tensors), weights.dtype),
    )
    for sample, head, _ in _heads(weights, tensors, weights.shape[1]):
        work.first.values().copy_(weights[sample, head])
        result[sample, head] = row_sums(work.first)
    return result


def _softmax(logits: Tensor, sinks: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """``sinks`` is ``[B, Hq, dst]``, -inf where nobody is heard, or ``[B, Hq, 0]`` for none."""
    if (small := _as_one_head(tensors, logits, logits.shape[1])) is not None:
        weights, lse = _softmax(logits.reshape(1, 1, -1), sinks.reshape(1, 1, -1), small)
        return weights.view(logits.shape), lse.view(*logits.shape[:2], -1)
    lse = logits.new_full((*logits.shape[:2], tensors[0].numel() - 1), -torch.inf)
    weights, work = logits.new_empty(logits.shape), Head(_edges(tensors), logits.dtype)
    for sample, head, _ in _heads(logits, tensors, logits.shape[1]):
        mass, spread = work.first.values().copy_(logits[sample, head]), work.second.values()
        top = row_maxima(work.edges.ptr, mass)
        top = torch.maximum(top, sinks[sample, head]) if sinks.shape[2] else top
        top.masked_fill_(top == -torch.inf, 0.0)
        mass.sub_(work.by_edge(top, spread)).exp_()
        sums = row_sums(work.first)
        sums = sums.add_((sinks[sample, head] - top).exp_()) if sinks.shape[2] else sums
        torch.add(sums.log(), top, out=lse[sample, head])
        torch.div(mass, work.by_edge(sums.masked_fill_(sums == 0, 1.0), spread), out=weights[sample, head])
    return weights, lse


def _as_one_head(tensors: Sequence[Tensor], x: Tensor, kv_heads: int) -> list[Tensor] | None:
    """The list for all samples and heads of ``x`` at once, if they are best taken so."""
    edges, slices = _edges(tensors), x.shape[0] * x.shape[1]
    if not edges.src.numel() or not folding.worth_folding(edges, slices):
        return None
    return tensors_of(folding.folded(edges, slices, x.shape[0] * kv_heads))


def _heads(x: Tensor, tensors: Sequence[Tensor], kv_heads: int) -> Iterator[tuple[int, int, int]]:
    """(sample, query head, key/value head) for each of ``x``; none if there are no edges."""
    group = x.shape[1] // kv_heads
    if tensors[1].numel():
        for sample in range(x.shape[0]):
            yield from ((sample, head, head // group) for head in range(x.shape[1]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep what the derivative is made of: the two factors of a product, or the list of edges alone."""
    factors = [x for x in inputs if isinstance(x, Tensor)]
    listed = next(x for x in inputs if isinstance(x, Sequence))
    ctx.save_for_backward(*(factors if len(factors) == 2 else []), *listed)


def _keep_weights(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, inputs[1], *inputs[2])


def _products_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    q, k, *edges = ctx.saved_tensors
    return incoming(grad, k, edges), outgoing(grad, q, edges, k.shape[1]), [None] * len(edges)


def _incoming_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    weights, v, *edges = ctx.saved_tensors
    return products(grad, v, edges), outgoing(weights, grad, edges, v.shape[1]), [None] * len(edges)


def _outgoing_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    weights, x, *edges = ctx.saved_tensors
    return products(x, grad, edges), incoming(weights, grad, edges), [None] * len(edges), None


def _spread_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    edges = ctx.saved_tensors
    return total(grad, edges), [None] * len(edges)


def _total_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    edges = ctx.saved_tensors
    return by_edge(grad, edges), [None] * len(edges)


def _softmax_backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    weights, lse, sinks, *edges = ctx.saved_tensors
    base = total(weights * grad, edges) - grad_lse
    grad_sinks = torch.zeros_like(sinks)
    if sinks.shape[2]:
        silent = (lse == -torch.inf) | (sinks == -torch.inf)
        grad_sinks = -(sinks - lse).masked_fill(silent, -torch.inf).exp() * base.masked_fill(silent, 0.0)
    return weights * (grad - by_edge(base, edges)), grad_sinks, [None] * len(edges)


_PRODUCTS = operator(
    "edge_products",
    "(Tensor q, Tensor k, Tensor[] edges) -> Tensor",
    _products,
    lambda q, k, edges: q.new_empty(*q.shape[:2], edges[1].numel()),
    _products_backward,
    _keep,
)
_INCOMING = operator(
    "edge_incoming",
    "(Tensor weights, Tensor v, Tensor[] edges) -> Tensor",
    _incoming,
    lambda weights, v, edges: v.new_empty(*weights.shape[:2], edges[0].numel() - 1, v.shape[3]),
    _incoming_backward,
    _keep,
)
_OUTGOING = operator(
    "edge_outgoing",
    "(Tensor weights, Tensor x, Tensor[] edges, int kv_heads) -> Tensor",
    _outgoing,
    lambda weights, x, edges, kv_heads: x.new_empty(
        weights.shape[0], kv_heads, edges[3].numel() - 1, x.shape[3]
    ),
    _outgoing_backward,
    _keep,
)
_BY_EDGE = operator(
    "edge_spread",
    "(Tensor x, Tensor[] edges) -> Tensor",
    _spread,
    lambda x, edges: x.new_empty(*x.shape[:2], edges[1].numel()),
    _spread_backward,
    _keep,
)
_TOTAL = operator(
    "edge_total",
    "(Tensor weights, Tensor[] edges) -> Tensor",
    _total,
    lambda weights, edges: weights.new_empty(*weights.shape[:2], edges[0].numel() - 1),
    _total_backward,
    _keep,
)
_SOFTMAX = operator(
    "edge_softmax",
    "(Tensor logits, Tensor sinks, Tensor[] edges) -> (Tensor, Tensor)",
    _softmax,
    lambda logits, sinks, edges: (
        logits.new_empty(logits.shape),
        logits.new_empty(*logits.shape[:2], edges[0].numel() - 1),
    ),
    _softmax_backward,
    _keep_weights,
)
