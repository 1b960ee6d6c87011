"""Differentiable products and sums over a list of edges, for calls that compute more between them.

Three bilinear maps connect values of edges ``[B, Hq, E]`` (receiver by receiver) and rows of
tokens, and the derivatives of each are maps of the same three kinds:

* ``products(q, k, edges) -> [B, Hq, E]``: ``w_e = q_dst . k_src``
* ``incoming(w, v, edges) -> [B, Hq, dst, D]``: ``y_dst = sum over in-edges of w_e v_src``
* ``outgoing(w, x, edges, kv_heads) -> [B, Hkv, src, D]``: ``y_src = sum over out-edges of w_e x_dst``,
  also summed over the query heads of a group

``edges`` are the tensors of :class:`plan.plan.EdgeRows`. The maps are registered with torch for
compilers, ``torch.export`` and ``torch.vmap``, and can be differentiated any number of times. The
softmax between them is in ``edge_softmax.py``. The maps compute in the dtype of their inputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

from gnn_attention._support.custom_op import operator
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.cpu.csr_primitives import group_heads, sampled_products
from gnn_attention.backends.plan.plan import EdgeRows


def _products(q: Tensor, k: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    result = _new_products(q, k, tensors).zero_()
    buffers, groups = group_heads(EdgeRows(*tensors), q.shape[:2], k.shape[1], q.dtype)
    for kv_head, heads in groups:
        key = buffers.stage("k", k[kv_head])
        for head in heads:
            sampled_products(buffers.matrix, buffers.stage("q", q[head]), key)
            result[head] = buffers.matrix.values().view(result[head].shape)
    return result


def _incoming(weights: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    result = _new_incoming(weights, v, tensors).zero_()
    buffers, groups = group_heads(EdgeRows(*tensors), weights.shape[:2], v.shape[1], v.dtype)
    for kv_head, heads in groups:
        value = buffers.stage("v", v[kv_head])
        for head in heads:
            sums = buffers.sum_incoming(weights[head].reshape(-1), value)
            result[head] = sums.view(result[head].shape)
    return result


def _outgoing(weights: Tensor, x: Tensor, tensors: Sequence[Tensor], kv_heads: int) -> Tensor:
    result = _new_outgoing(weights, x, tensors, kv_heads).zero_()
    buffers, groups = group_heads(EdgeRows(*tensors), weights.shape[:2], kv_heads, x.dtype)
    for kv_head, heads in groups:
        for head in heads:
            rows = buffers.stage("x", x[head])
            sums = buffers.sum_outgoing(weights[head].reshape(-1), rows, buffers.matrix.values())
            result[kv_head] += sums.view(result[kv_head].shape)
    return result


def _new_products(q: Tensor, k: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    return q.new_empty(*q.shape[:2], tensors[1].numel())


def _new_incoming(weights: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    return v.new_empty(*weights.shape[:2], tensors[0].numel() - 1, v.shape[3])


def _new_outgoing(weights: Tensor, x: Tensor, tensors: Sequence[Tensor], kv_heads: int) -> Tensor:
    return x.new_empty(weights.shape[0], kv_heads, tensors[3].numel() - 1, x.shape[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2], *inputs[2])


def _products_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    q, k, *edges = ctx.saved_tensors
    return incoming(grad, k, edges), outgoing(grad, q, edges, k.shape[1]), [None] * len(edges)


def _incoming_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    weights, v, *edges = ctx.saved_tensors
    return products(grad, v, edges), outgoing(weights, grad, edges, v.shape[1]), [None] * len(edges)


def _outgoing_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    weights, x, *edges = ctx.saved_tensors
    return products(x, grad, edges), incoming(weights, grad, edges), [None] * len(edges), None


PRODUCTS = "(Tensor q, Tensor k, Tensor[] edges) -> Tensor"
INCOMING = "(Tensor weights, Tensor v, Tensor[] edges) -> Tensor"
OUTGOING = "(Tensor weights, Tensor x, Tensor[] edges, int kv_heads) -> Tensor"
Operator = Callable[..., Tensor]
products: Operator = operator("edge_products", PRODUCTS, _products, _new_products, _products_grad, _save)
incoming: Operator = operator("edge_incoming", INCOMING, _incoming, _new_incoming, _incoming_grad, _save)
outgoing: Operator = operator("edge_outgoing", OUTGOING, _outgoing, _new_outgoing, _outgoing_grad, _save)
