"""Differentiable maps between rows of tokens and values of edges, as operators of torch.

``edges`` are the tensors of an :class:`EdgeRows`, and values of edges ``[B, Hq, E]`` are in its
order. Each map is linear in every tensor, and its derivatives are maps of the same kinds:

* ``products(q, k, edges, scale) -> [B, Hq, E]``: ``s_e = scale q_dst . k_src``
* ``incoming(w, v, edges) -> [B, Hq, dst, D]``: ``y_dst = sum over in-edges of w_e v_src``
* ``outgoing(w, x, edges, kv_heads) -> [B, Hkv, src, D]``: ``y_src = sum over out-edges of w_e x_dst``,
  also summed over the query heads of a group
* ``row_sums(s, edges) -> [B, Hq, dst]``: ``t_dst = sum over in-edges of s_e``
* ``spread(t, edges) -> [B, Hq, E]``: ``s_e = t_dst``
* ``running_sums(s, edges, reverse) -> [B, Hq, E]``: the sum of the in-edges of dst up to e, or from e on
* ``permute(s, [order, inverse]) -> [B, Hq, E]``: ``s[..., order]``

:func:`softmax` is the only function that is not linear. The maps compute in the dtype of their
inputs. They have derivatives of every order, forward mode too, and rules for compilers,
``torch.export`` and ``torch.vmap``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from gnn_attention import edge_softmax
from gnn_attention._support.autograd import derivative_order, has_forward_derivative
from gnn_attention._support.custom_op import linear_operator, operator, save_all
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.edge_ops.csr_primitives import Buffers, exponentiate, group_heads, sampled_products
from gnn_attention.edge_ops.edge_lists import EdgeRows, edge_permutation
from gnn_attention.edge_softmax import SAFE_LOGIT
from gnn_attention.graph import TokenGraph

Edges = Sequence[Tensor]
CHUNK = 2**16  # Sums over heads are computed for this many edges at once.


def _products(q: Tensor, k: Tensor, tensors: Edges, scale: float) -> Tensor:
    result = q.new_empty(*q.shape[:2], tensors[1].numel())
    buffers, groups = group_heads(EdgeRows(*tensors), q.shape[:2], k.shape[1], q.dtype)
    for kv_head, heads in groups:
        key = buffers.stage("k", k[kv_head])
        for head in heads:
            sampled_products(buffers.matrix, buffers.stage("q", q[head]), key, scale)
            result[head] = buffers.matrix.values().view(result[head].shape)
    return result


def _incoming(weights: Tensor, v: Tensor, tensors: Edges) -> Tensor:
    result = v.new_zeros(*weights.shape[:2], tensors[0].numel() - 1, v.shape[3])
    buffers, groups = group_heads(EdgeRows(*tensors), weights.shape[:2], v.shape[1], v.dtype)
    for kv_head, heads in groups:
        value = buffers.stage("v", v[kv_head])
        for head in heads:
            sums = buffers.sum_incoming(weights[head].reshape(-1), value)
            result[head] = sums.view(result[head].shape)
    return result


def _outgoing(weights: Tensor, x: Tensor, tensors: Edges, kv_heads: int) -> Tensor:
    result = x.new_zeros(weights.shape[0], kv_heads, tensors[3].numel() - 1, x.shape[3])
    if kv_heads == 1 and tensors[2].numel() and tensors[4].data_ptr() == tensors[2].data_ptr():
        # Each edge has its own sender, so the sums are over heads only.
        first_row = torch.arange(weights.shape[1], device=x.device) * x.shape[2]
        chunks = (torch.split(y, CHUNK, axis) for y, axis in ((tensors[2], 0), (weights, 2), (result, 2)))
        for dst, values, part in zip(*chunks, strict=True):
            index = dst.long().unsqueeze(1) + first_row
            for sample, rows in enumerate(x.flatten(1, 2)):
                w = values[sample].t().contiguous()
                part[sample, 0] = functional.embedding_bag(index, rows, mode="sum", per_sample_weights=w)
        return result
    buffers, groups = group_heads(EdgeRows(*tensors), weights.shape[:2], kv_heads, x.dtype)
    for kv_head, heads in groups:
        for head in heads:
            rows = buffers.stage("x", x[head])
            sums = buffers.sum_outgoing(weights[head].reshape(-1), rows, buffers.matrix.values())
            result[kv_head] += sums.view(result[kv_head].shape)
    return result


def _map_heads(
    values: Tensor, tensors: Edges, result: Tensor, compute: Callable[[Buffers, Tensor], Tensor]
) -> Tensor:
    """Write ``compute(buffers, values of a head)`` to ``result`` for one head, or all, at a time."""
    buffers, groups = group_heads(EdgeRows(*tensors), values.shape[:2], values.shape[1], values.dtype)
    for _, heads in groups:
        for head in heads:
            result[head] = compute(buffers, values[head].reshape(-1)).view(result[head].shape)
    return result


def _new_rows(values: Tensor, tensors: Edges, value: float) -> Float[Tensor, "batch heads dst"]:
    return values.new_full((*values.shape[:2], tensors[0].numel() - 1), value)


def _row_sums(values: Tensor, tensors: Edges) -> Tensor:
    return _map_heads(values, tensors, _new_rows(values, tensors, 0.0), Buffers.sum_rows)


def _spread(x: Tensor, tensors: Edges) -> Tensor:
    def gather(buffers: Buffers, x: Tensor) -> Tensor:
        return buffers.gather_by_dst(x, buffers.matrix.values())

    return _map_heads(x, tensors, x.new_empty(*x.shape[:2], tensors[1].numel()), gather)


def _running_sums(values: Tensor, tensors: Edges, reverse: bool) -> Tensor:
    max_degree = int(tensors[0].diff().max()) if tensors[0].numel() > 1 else 0
    return _running_sums_formula(values, tensors, reverse, max_degree)


def _permute(values: Tensor, orders: Edges) -> Tensor:
    """Return ``values[..., order]``; ``orders`` are the order and its inverse."""
    return values.index_select(2, orders[0])


# Compilers read shapes from these formulas, and differentiate them inside the transforms of torch.func.
def _products_formula(q: Tensor, k: Tensor, edges: Edges, scale: float) -> Tensor:
    k = edge_softmax.per_query_head(k, q.shape[1])
    return (q.index_select(2, edges[2]) * k.index_select(2, edges[1])).sum(-1) * scale


def _incoming_formula(weights: Tensor, v: Tensor, edges: Edges) -> Tensor:
    v = edge_softmax.per_query_head(v, weights.shape[1])
    return _add_rows(weights.unsqueeze(-1) * v.index_select(2, edges[1]), edges[2], edges[0].numel() - 1)


def _outgoing_formula(weights: Tensor, x: Tensor, edges: Edges, kv_heads: int) -> Tensor:
    rows = weights.unsqueeze(-1) * x.index_select(2, edges[2])
    total = _add_rows(rows, edges[1], edges[3].numel() - 1)
    return total.reshape(len(total), kv_heads, -1, *total.shape[2:]).sum(2)


def _row_sums_formula(values: Tensor, edges: Edges) -> Tensor:
    return _add_rows(values, edges[2], edges[0].numel() - 1)


def _spread_formula(x: Tensor, edges: Edges) -> Tensor:
    return x.index_select(2, edges[2])


def _running_sums_formula(
    values: Tensor, edges: Edges, reverse: bool, max_degree: int | None = None
) -> Tensor:
    """Add the sums of the last 1, 2, 4, ... edges, so that no sum leaves the in-edges of its receiver."""
    ptr, dst = edges[0], edges[2]
    index = torch.arange(dst.numel(), device=dst.device)
    # The number of in-edges of the same receiver before the edge, or after it.
    num_others = ptr.index_select(0, dst + 1) - 1 - index if reverse else index - ptr.index_select(0, dst)
    # An operator must not return its argument, even if no receiver has two in-edges.
    values, step = values.clone(), 1
    while step < (dst.numel() if max_degree is None else max_degree):
        shifted = values[..., step:] if reverse else values[..., :-step]
        shifted = functional.pad(shifted, (0, step) if reverse else (step, 0))
        values = values + shifted.masked_fill(num_others < step, 0.0)
        step *= 2
    return values


def _add_rows(rows: Tensor, index: Tensor, num_rows: int) -> Tensor:
    shape = *rows.shape[:2], num_rows, *rows.shape[3:]
    return rows.new_zeros(shape).index_add(2, index, rows)


def _products_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    q, k, *edges = ctx.saved_tensors
    grad = grad if ctx.options[0] == 1.0 else grad * ctx.options[0]
    return incoming(grad, k, edges), outgoing(grad, q, edges, k.shape[1]), [None] * len(edges), None


def _incoming_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    weights, v, *edges = ctx.saved_tensors
    return products(grad, v, edges, 1.0), outgoing(weights, grad, edges, v.shape[1]), [None] * len(edges)


def _outgoing_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    weights, x, *edges = ctx.saved_tensors
    return products(x, grad, edges, 1.0), incoming(weights, grad, edges), [None] * len(edges), None


def _row_sums_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    _, *edges = ctx.saved_tensors
    return spread(grad, edges), [None] * len(edges)


def _spread_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    _, *edges = ctx.saved_tensors
    return row_sums(grad, edges), [None] * len(edges)


def _running_sums_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    _, *edges = ctx.saved_tensors
    return running_sums(grad, edges, not ctx.options[0]), [None] * len(edges), None


def _permute_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    _, order, inverse = ctx.saved_tensors
    return permute(grad, [inverse, order]), [None, None]


def _softmax(logits: Tensor, tensors: Edges) -> tuple[Tensor, Tensor]:
    weights, lse = torch.empty_like(logits), _new_rows(logits, tensors, -torch.inf)
    buffers, groups = group_heads(EdgeRows(*tensors), logits.shape[:2], logits.shape[1], logits.dtype)
    for _, heads in groups:
        for head in heads:
            values = buffers.matrix.values().copy_(logits[head].reshape(-1))
            mass, total, shift = exponentiate(buffers, values)
            lse[head] = total.log().add_(shift).view(lse[head].shape)
            factor = total.reciprocal().masked_fill_(total == 0, 0.0)
            factor = buffers.gather_by_dst(factor, buffers.second_matrix.values())
            torch.mul(mass.view(weights[head].shape), factor.view(weights[head].shape), out=weights[head])
    return weights, lse


def _new_softmax(logits: Tensor, tensors: Edges) -> tuple[Tensor, Tensor]:
    return torch.empty_like(logits), _new_rows(logits, tensors, 0.0)


def _save_weights(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[0], *inputs[1])


def _softmax_grad(ctx: Any, grad_weights: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    weights, *edges = ctx.saved_tensors
    weighted_grad = weights * grad_weights
    correction = spread(grad_lse - row_sums(weighted_grad, edges), edges)
    return torch.addcmul(weighted_grad, weights, correction), [None] * len(edges)


def _largest(values: Tensor, tensors: Edges) -> Tensor:
    return _map_heads(values, tensors, _new_rows(values, tensors, -torch.inf), Buffers.max_rows)


def _largest_formula(values: Tensor, edges: Edges) -> Tensor:
    result = _new_rows(values, edges, -torch.inf)
    return result.scatter_reduce(2, edges[2].long().expand(values.shape), values, "amax")


def _shares(values: Tensor, edges: Edges) -> Tensor:
    """Return 1 / n for the n in-edges of a receiver that have its largest value, and 0 for others."""
    is_largest = (values == spread(largest(values, edges), edges)).to(values.dtype)
    return is_largest / spread(row_sums(is_largest, edges), edges).clamp(min=1.0)


def _largest_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    values, *edges = ctx.saved_tensors
    return _shares(values, edges) * spread(grad, edges), [None] * len(edges)


def _largest_jvp(arguments: Sequence[Any], outputs: Any, tangents: Sequence[Any]) -> Tensor:
    values, edges = arguments
    return row_sums(_shares(values, edges) * tangents[0], edges)


def _sparsemax_support(values: Tensor, tensors: Edges) -> Tensor:
    """Return 1 for edges with a weight, else 0; the largest value of each receiver is 0.

    Source: Michelot 1986, "A finite algorithm for finding the projection of a point onto the simplex".
    """
    # The comparisons are negated, so that every edge to a receiver of a NaN has a weight, which is NaN.
    in_support, num_edges = ~(values <= -1.0), -1
    while num_edges != (num_edges := int(in_support.sum())):
        size = _row_sums(in_support.to(values.dtype), tensors)
        total = _row_sums(values.masked_fill(~in_support, 0.0), tensors)
        in_support = in_support & ~(values <= _spread((total - 1.0) / size, tensors))
    return in_support.to(values.dtype)


def _new_values(values: Tensor, tensors: Edges) -> Tensor:
    return torch.empty_like(values)


def _no_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.zeros_like(grad), [None] * 6


def softmax(
    logits: Float[Tensor, "batch heads edges"], edges: Edges
) -> tuple[Float[Tensor, "batch heads edges"], Float[Tensor, "batch heads dst"]]:
    """Compute the softmax over the in-edges of each receiver, and lse; 0 and -inf if no logit is finite."""
    if derivative_order([logits]) < 2 and not has_forward_derivative([logits]):
        weights, lse = _SOFTMAX(logits, edges)
        return weights, lse
    # A shift changes nothing but rounding, so it is a constant.
    shift = largest(logits.detach(), edges)
    shift = shift.masked_fill((shift.abs() <= SAFE_LOGIT) | (shift == -torch.inf), 0.0)
    mass = (logits - spread(shift, edges)).exp()
    total = row_sums(mass, edges)
    is_empty = total == 0
    total = total.masked_fill(is_empty, 1.0)
    lse = (shift + total.log()).masked_fill(is_empty, -torch.inf)
    return mass * spread(total.reciprocal(), edges), lse


def sort_values(values: Float[Tensor, "_ _ edges"], graph: TokenGraph) -> Float[Tensor, "_ _ edges"]:
    """Return values of edges that are in the order of ``graph.edge_index`` in that of EdgeRows."""
    orders = edge_permutation(graph, values.device)
    return permute(values, orders) if orders else values


def restore_order(values: Float[Tensor, "_ _ edges"], graph: TokenGraph) -> Float[Tensor, "_ _ edges"]:
    """Undo :func:`sort_values`."""
    orders = edge_permutation(graph, values.device)
    return permute(values, orders[::-1]) if orders else values


Operator = Callable[..., Tensor]
VALUES = "(Tensor values, Tensor[] edges) -> Tensor"
PRODUCTS = "(Tensor q, Tensor k, Tensor[] edges, float scale) -> Tensor"
INCOMING = "(Tensor weights, Tensor v, Tensor[] edges) -> Tensor"
OUTGOING = "(Tensor weights, Tensor x, Tensor[] edges, int kv_heads) -> Tensor"
RUNNING = "(Tensor values, Tensor[] edges, bool reverse) -> Tensor"
products: Operator = linear_operator("edge_products", PRODUCTS, _products, _products_grad, _products_formula)
incoming: Operator = linear_operator("edge_incoming", INCOMING, _incoming, _incoming_grad, _incoming_formula)
outgoing: Operator = linear_operator("edge_outgoing", OUTGOING, _outgoing, _outgoing_grad, _outgoing_formula)
row_sums: Operator = linear_operator("edge_row_sums", VALUES, _row_sums, _row_sums_grad, _row_sums_formula)
spread: Operator = linear_operator("edge_spread", VALUES, _spread, _spread_grad, _spread_formula)
running_sums: Operator = linear_operator(
    "edge_running_sums", RUNNING, _running_sums, _running_sums_grad, _running_sums_formula
)
permute: Operator = linear_operator("edge_permute", VALUES, _permute, _permute_grad, _permute)
SOFTMAX = "(Tensor values, Tensor[] edges) -> (Tensor, Tensor)"
_SOFTMAX = operator("edge_softmax", SOFTMAX, _softmax, _new_softmax, _softmax_grad, _save_weights)
largest: Operator = operator(
    "edge_largest",
    VALUES,
    _largest,
    _largest_formula,
    _largest_grad,
    save_all,
    _largest_jvp,
    _largest_formula,
)
# Its result is constant, so a compiler needs no formula to differentiate it.
sparsemax_support: Operator = operator(
    "edge_sparsemax_support",
    VALUES,
    _sparsemax_support,
    _new_values,
    _no_gradient,
    save_all,
    jvp=lambda arguments, outputs, tangents: torch.zeros_like(outputs[0]),
    formula=lambda *arguments: torch.ops.gnn_attention.edge_sparsemax_support(*arguments),
)
