"""Differentiable products and sums over a list of edges, for calls that do something between them.

Three bilinear maps between numbers of edges ``[B, Hq, E]`` (receiver by receiver) and rows of tokens, whose
derivatives are each other:

* ``products(q, k, edges) -> [B, Hq, E]``: ``w_e = q_dst . k_src``
* ``incoming(w, v, edges) -> [B, Hq, dst, D]``: ``y_dst = sum over in-edges of w_e v_src``, 0 over none
* ``outgoing(w, x, edges, kv_heads) -> [B, Hkv, src, D]``: ``y_src = sum over out-edges of w_e x_dst``, and
  over the query heads of a group

``edges`` are the tensors of :class:`plan.plan.Edges`. Each map is registered with torch, so that compilers,
``torch.export`` and ``torch.vmap`` take it as it is, and can be differentiated any number of times. The
softmax between them is that of ``edge_softmax.py``. They compute in the dtype that comes in.
"""

from collections.abc import Callable, Sequence
from typing import Any

from gnn_attention._support.custom_op import operator
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.cpu.csr_primitives import batches, sampled_products
from gnn_attention.backends.plan.plan import EdgeRows


def _products(q: Tensor, k: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    result = _new_products(q, k, tensors).zero_()
    work, groups = batches(EdgeRows(*tensors), q.shape[:2], k.shape[1], q.dtype)
    for shared, heads in groups:
        key = work.stage("k", k[shared])
        for head in heads:
            sampled_products(work.first, work.stage("q", q[head]), key)
            result[head] = work.first.values().view(result[head].shape)
    return result


def _incoming(weights: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    result = _new_incoming(weights, v, tensors).zero_()
    work, groups = batches(EdgeRows(*tensors), weights.shape[:2], v.shape[1], v.dtype)
    for shared, heads in groups:
        value = work.stage("v", v[shared])
        for head in heads:
            result[head] = work.incoming(weights[head].reshape(-1), value).view(result[head].shape)
    return result


def _outgoing(weights: Tensor, x: Tensor, tensors: Sequence[Tensor], kv_heads: int) -> Tensor:
    result = _new_outgoing(weights, x, tensors, kv_heads).zero_()
    work, groups = batches(EdgeRows(*tensors), weights.shape[:2], kv_heads, x.dtype)
    for shared, heads in groups:
        for head in heads:
            rows, spare = work.stage("x", x[head]), work.first.values()
            sums = work.outgoing(weights[head].reshape(-1), rows, spare)
            result[shared] += sums.view(result[shared].shape)
    return result


def _new_products(q: Tensor, k: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    return q.new_empty(*q.shape[:2], tensors[1].numel())


def _new_incoming(weights: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    return v.new_empty(*weights.shape[:2], tensors[0].numel() - 1, v.shape[3])


def _new_outgoing(weights: Tensor, x: Tensor, tensors: Sequence[Tensor], kv_heads: int) -> Tensor:
    return x.new_empty(weights.shape[0], kv_heads, tensors[3].numel() - 1, x.shape[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2], *inputs[2])


def _products_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    q, k, *edges = ctx.saved_tensors
    return incoming(grad, k, edges), outgoing(grad, q, edges, k.shape[1]), [None] * len(edges)


def _incoming_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    weights, v, *edges = ctx.saved_tensors
    return products(grad, v, edges), outgoing(weights, grad, edges, v.shape[1]), [None] * len(edges)


def _outgoing_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    weights, x, *edges = ctx.saved_tensors
    return products(x, grad, edges), incoming(weights, grad, edges), [None] * len(edges), None


OF_PAIRS = "(Tensor q, Tensor k, Tensor[] edges) -> Tensor"
OF_IN_EDGES = "(Tensor weights, Tensor v, Tensor[] edges) -> Tensor"
OF_OUT_EDGES = "(Tensor weights, Tensor x, Tensor[] edges, int kv_heads) -> Tensor"
products: Callable[..., Tensor] = operator(
    "edge_products", OF_PAIRS, _products, _new_products, _products_backward, _save
)
incoming: Callable[..., Tensor] = operator(
    "edge_incoming", OF_IN_EDGES, _incoming, _new_incoming, _incoming_backward, _save
)
outgoing: Callable[..., Tensor] = operator(
    "edge_outgoing", OF_OUT_EDGES, _outgoing, _new_outgoing, _outgoing_backward, _save
)
