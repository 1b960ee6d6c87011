"""Attention over a list of edges, forward and backward, on plain tensors without autograd.

The backward pass recomputes the weights from lse. Only edges are read, so that a non-edge has no
influence. Memory is needed for one head at a time (for all if each head has its own edges): two values
for each edge and a few rows for each token. To save memory, the softmax is computed in place, and a
row is divided by its total after the sum over its edges; ``edge_softmax.py`` divides each weight.
"""

from collections.abc import Sequence

import torch

from gnn_attention._support import devices
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.edge_ops.csr_primitives import Buffers, exponentiate, group_heads, sampled_products
from gnn_attention.edge_ops.edge_lists import EdgeRows
from gnn_attention.edge_ops.operators import incoming, products, row_sums, spread
from gnn_attention.edge_softmax import SAFE_LOGIT, accumulation_dtype, merge_weights, needs_no_shift

Receivers = Float[Tensor, "batch heads dst _"]
Senders = Float[Tensor, "batch kv_heads src _"]
PerReceiver = Float[Tensor, "batch heads dst"]


@torch.no_grad()
def forward(
    q: Receivers, k: Senders, v: Senders, edges: EdgeRows, scale: float, out: Receivers, lse: PerReceiver
) -> None:
    """Write ``out`` and ``lse`` of the softmax over ``edges``, in the dtype of lse.

    Unless ``edges.is_first``, the result is merged with the contents of ``out`` and ``lse``. A
    receiver without in-edges gets 0 and -inf.
    """
    buffers, groups = group_heads(edges, q.shape[:2], k.shape[1], lse.dtype)
    if edges.is_first and not groups:
        out.zero_()
        lse.fill_(-torch.inf)
    for kv_head, heads in groups:
        key, value = buffers.stage("k", k[kv_head]), buffers.stage("v", v[kv_head])
        # If heads are computed together, ``head`` is a slice of samples, and x[head] keeps all axes.
        for head in heads:
            sampled_products(buffers.matrix, buffers.stage("q", q[head]), key, scale)
            logits = buffers.matrix.values()
            mass, total, shift = exponentiate(buffers, logits)
            piece_lse = total.log().add_(shift).view(lse[head].shape)
            factor = total.reciprocal().masked_fill_(total == 0, 0.0).view(piece_lse.shape)
            sums = buffers.sum_incoming(mass, value).view(out[head].shape)
            if edges.is_first:
                torch.mul(sums, factor.unsqueeze(-1), out=out[head])
                lse[head].copy_(piece_lse)
                continue
            (old_weight, piece_weight), merged_lse = merge_weights(lse[head], piece_lse)
            piece_factor = (piece_weight * factor).unsqueeze(-1)
            torch.addcmul(out[head] * old_weight.unsqueeze(-1), sums, piece_factor, out=out[head])
            lse[head].copy_(merged_lse)


@torch.no_grad()
def backward(
    grad_out: Receivers,
    delta: PerReceiver,
    inputs: tuple[Receivers, Senders, Senders],
    lse: PerReceiver,
    edges: EdgeRows,
    scale: float,
    grads: Sequence[Tensor],
    add: bool = True,
) -> None:
    """Add the gradients of the ``inputs`` q, k and v to ``grads``, or write them if not ``add``.

    ``p = exp(scale q . k - lse)``, ``ds = p (grad_out . v - delta)`` and
    ``delta = sum(out * grad_out) - grad_lse``, with out and lse of all pieces. A receiver whose lse is
    infinite contributes nothing.
    """
    (q, k, v), (dq, dk, dv) = inputs, grads
    buffers, groups = group_heads(edges, q.shape[:2], k.shape[1], accumulation_dtype(q.dtype))
    for grad in grads if not add and not groups else ():
        grad.zero_()
    for kv_head, heads in groups:
        key, value = buffers.stage("k", k[kv_head]), buffers.stage("v", v[kv_head])
        sums: list[Tensor] = []
        for head in heads:
            receivers = grad_out[head], delta[head], q[head], lse[head]
            head_dq, *head_sums = _backward_head(buffers, receivers, key, value, scale)
            _write_or_add(head_dq, scale, dq[head], add)
            sums = [x.add_(y) for x, y in zip(sums, head_sums, strict=True)] if sums else head_sums
        _write_or_add(sums[0], scale, dk[kv_head], add)
        _write_or_add(sums[1], 1.0, dv[kv_head], add)


def _backward_head(
    buffers: Buffers, receivers: tuple[Tensor, Tensor, Tensor, Tensor], k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q and k, without the factor ``scale``, and of v, for one head or all.

    ``receivers`` are grad_out, delta, q and lse.
    """
    grad, delta, q, lse = receivers
    lse = lse.reshape(-1)
    # The second buffer holds the weights by sender, then the gradients of the logits. In the end,
    # the first buffer holds these gradients by sender.
    mass, grad_logits = buffers.matrix.values(), buffers.second_matrix.values()
    is_synchronous = lse.device.type not in devices.ASYNCHRONOUS
    is_infinite = lse.isinf() & (buffers.edges.ptr.diff() > 0)
    # Receivers that have in-edges but contribute nothing are rare: their mask is skipped if possible.
    excluded_mask = None if is_synchronous and not is_infinite.any() else is_infinite
    query = _zero_rows(buffers.stage("q", q), excluded_mask)
    sampled_products(buffers.matrix, query, k, scale)
    # The weight of an edge is its mass times the factor of its receiver.
    if is_synchronous and needs_no_shift(mass):
        mass.exp_()
        factor = (-lse).exp_()
    else:
        # As in the forward pass, small logits need no shift: their lse is at most SAFE_LOGIT + log(degree).
        degree = buffers.edges.ptr.diff().to(lse.dtype)
        shift = lse.masked_fill(lse.abs() <= SAFE_LOGIT + degree.log() + 1e-3, 0.0)
        mass.sub_(buffers.gather_by_dst(shift, grad_logits)).exp_()
        factor = (shift - lse).masked_fill_(lse.isinf(), 0.0).exp_()
    row_factor = factor.view(grad.shape[:-1]).unsqueeze(-1)
    grad = torch.mul(grad, row_factor, out=buffers.allocate("g", grad))
    grad = _zero_rows(grad.flatten(0, -2), excluded_mask)
    if excluded_mask is not None:
        mass.masked_fill_(excluded_mask.index_select(0, buffers.edges.dst), 0.0)
    dv = buffers.sum_outgoing(mass, grad, grad_logits)
    buffers.gather_by_dst(_zero_rows(delta.reshape(-1) * factor, excluded_mask), grad_logits)
    sampled_products(buffers.second_matrix, grad, v, beta=-1.0)
    grad_logits.mul_(mass)
    if excluded_mask is not None:
        grad_logits.masked_fill_(excluded_mask.index_select(0, buffers.edges.dst), 0.0)
    dq = _zero_rows(buffers.sum_incoming(grad_logits, k), excluded_mask)
    return dq, buffers.sum_outgoing(grad_logits, query, mass), dv


@torch.no_grad()
def jvp(
    tangents: Sequence[Tensor],
    inputs: Sequence[Tensor],
    lse: PerReceiver,
    edges: EdgeRows,
    scale: float,
    out_sums: Receivers,
    lse_sums: PerReceiver,
) -> None:
    """Add ``sum of dw v + p dv`` to ``out_sums``, and ``sum of dw`` to ``lse_sums``, over ``edges``.

    ``dw = p scale (dq . k + q . dk)``, with the weights ``p = exp(scale q . k - lse)``.
    """
    (q, k, v), (dq, dk, dv), tensors = inputs, tangents, edges.tensors
    weights = products(q, k, tensors, scale).sub_(spread(lse, tensors)).exp_()
    changes = products(dq, k, tensors, scale).add_(products(q, dk, tensors, scale)).mul_(weights)
    lse_sums += row_sums(changes, tensors)
    out_sums += incoming(changes, v, tensors)
    out_sums += incoming(weights, dv, tensors)


def _zero_rows(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x.masked_fill(mask if x.dim() == 1 else mask.unsqueeze(1), 0.0)


def _write_or_add(sums: Tensor, scale: float, grad: Tensor, add: bool) -> None:
    if add:
        grad.add_(sums.view(grad.shape), alpha=scale)
    else:
        torch.mul(sums.view(grad.shape), scale, out=grad)
