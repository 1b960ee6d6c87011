"""Attention along a list of edges, forward and backward: plain tensors in and out, no autograd.

The forward pass is products, softmax, weighted sums; the backward pass computes the weights again from lse.
Only edges are ever read, so that a non-edge carries nothing. Memory beyond the results is that of
one head (of all, where each has edges of its own): two numbers an edge and a few rows a token. So the softmax
is in place and never normalised edge by edge, unlike that of ``edge_softmax.py``: what belongs to a receiver
is applied to its row.
"""

from collections.abc import Sequence

import torch

from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends import devices
from gnn_attention.backends.cpu.csr_primitives import Head, batches, row_sums, sampled_products
from gnn_attention.backends.plan.plan import EdgeRows
from gnn_attention.edge_softmax import SAFE_LOGIT, accumulation_dtype, needs_no_shift, shares

Receivers = Float[Tensor, "batch heads dst _"]
Senders = Float[Tensor, "batch kv_heads src _"]
PerReceiver = Float[Tensor, "batch heads dst"]


@torch.no_grad()
def forward(
    q: Receivers, k: Senders, v: Senders, edges: EdgeRows, scale: float, out: Receivers, lse: PerReceiver
) -> None:
    """Write ``out`` and ``lse`` of the softmax over ``edges``, merged with theirs unless ``edges.fresh``.

    A receiver without in-edges gets 0 and -inf. The arithmetic is in the dtype of lse.
    """
    asks = q.device.type not in devices.ASYNCHRONOUS
    work, groups = batches(edges, q.shape[:2], k.shape[1], lse.dtype)
    if edges.fresh and not groups:
        out.zero_()
        lse.fill_(-torch.inf)
    for shared, heads in groups:
        key, value = work.stage("k", k[shared]), work.stage("v", v[shared])
        # one head, or all of a folded list: what has its index has axes of samples and heads then
        for head in heads:
            sampled_products(work.first, work.stage("q", q[head]), key, scale)
            logits = work.first.values()
            shift: Tensor | float = 0.0
            # Each receiver's largest logit is subtracted, unless exp can reach it. No result may depend on
            # other receivers, not even by a rounding: so all logits stay as they are if all are small.
            if not asks or not needs_no_shift(logits):
                ptr, initial = work.edges.ptr, -torch.inf
                shift = torch.segment_reduce(logits, "max", offsets=ptr, initial=initial, unsafe=True)
                shift.masked_fill_((shift.abs() <= SAFE_LOGIT) | (shift == -torch.inf), 0.0)
                logits.sub_(work.by_edge(shift, work.second.values()))
            mass = logits.exp_()
            total = row_sums(work.edges.ptr, mass, work.in_pieces)
            here = total.log().add_(shift).view(lse[head].shape)
            share = total.reciprocal().masked_fill_(total == 0, 0.0).view(here.shape)
            sums = work.incoming(mass, value).view(out[head].shape)
            if edges.fresh:
                torch.mul(sums, share.unsqueeze(-1), out=out[head])
                lse[head].copy_(here)
                continue
            (before, added), lse_of_both = shares(lse[head], here)
            torch.addcmul(
                out[head] * before.unsqueeze(-1), sums, (added * share).unsqueeze(-1), out=out[head]
            )
            lse[head].copy_(lse_of_both)


@torch.no_grad()
def backward(
    grad_out: Receivers,
    delta: PerReceiver,
    ends: tuple[Receivers, Senders, Senders],
    lse: PerReceiver,
    edges: EdgeRows,
    scale: float,
    results: Sequence[Tensor],
    add: bool = True,
) -> None:
    """Add the gradients of the ``ends`` (q, k, v) over ``edges`` to ``results``; write them if not ``add``.

    ``p = exp(scale q . k - lse)`` and ``ds = p (grad_out . v - delta)`` with the out and lse of all pieces
    together and ``delta = sum(out * grad_out) - grad_lse``. A receiver whose lse is infinite contributes
    nothing.
    """
    (q, k, v), (dq, dk, dv) = ends, results
    work, groups = batches(edges, q.shape[:2], k.shape[1], accumulation_dtype(q.dtype))
    for x in results if not add and not groups else ():
        x.zero_()
    for shared, heads in groups:
        key, value = work.stage("k", k[shared]), work.stage("v", v[shared])
        sums: list[Tensor] = []
        for at in heads:
            of_q, *of_ends = _backward_head(work, grad_out[at], delta[at], q[at], key, value, lse[at], scale)
            _deliver(of_q, scale, dq[at], add)
            sums = [total.add_(x) for total, x in zip(sums, of_ends, strict=True)] if sums else of_ends
        _deliver(sums[0], scale, dk[shared], add)
        _deliver(sums[1], 1.0, dv[shared], add)


def _backward_head(
    work: Head, grad: Tensor, delta: Tensor, q: Tensor, key: Tensor, value: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q and key (but for the scale) and of value, of one head or of all of a folded list."""
    # of two buffers the second has weights by sender, then slopes; the first at last slopes by sender
    mass, slopes, lse = work.first.values(), work.second.values(), lse.reshape(-1)
    asks = lse.device.type not in devices.ASYNCHRONOUS
    infinite = lse.isinf() & (work.edges.ptr.diff() > 0)
    # receivers with in-edges that must contribute nothing: usually there are none
    excluded = None if asks and not infinite.any() else infinite
    query = _without(excluded, work.stage("q", q))
    sampled_products(work.first, query, key, scale)
    # the weights of a receiver are mass * factor
    if asks and needs_no_shift(mass):
        mass.exp_()
        factor = (-lse).exp_()
    else:
        # as there its own numbers decide; small logits have an lse of at most SAFE_LOGIT + log(degree)
        degree = work.edges.ptr.diff().to(lse.dtype)
        shift = lse.masked_fill(lse.abs() <= SAFE_LOGIT + degree.log() + 1e-3, 0.0)
        mass.sub_(work.by_edge(shift, slopes)).exp_()
        factor = (shift - lse).masked_fill_(lse.isinf(), 0.0).exp_()
    gradient = torch.mul(grad, factor.view(grad.shape[:-1]).unsqueeze(-1), out=work.buffer("g", grad))
    gradient = _without(excluded, gradient.flatten(0, -2))
    if excluded is not None:
        mass.masked_fill_(excluded.index_select(0, work.edges.dst), 0.0)
    d_value = work.outgoing(mass, gradient, slopes)
    work.by_edge(_without(excluded, delta.reshape(-1) * factor), slopes)
    sampled_products(work.second, gradient, value, beta=-1.0)
    slopes.mul_(mass)
    if excluded is not None:
        slopes.masked_fill_(excluded.index_select(0, work.edges.dst), 0.0)
    d_query = _without(excluded, work.incoming(slopes, key))
    return d_query, work.outgoing(slopes, query, mass), d_value


def _without(excluded: Tensor | None, x: Tensor) -> Tensor:
    return x if excluded is None else x.masked_fill(excluded if x.dim() == 1 else excluded.unsqueeze(1), 0.0)


def _deliver(sums: Tensor, scale: float, result: Tensor, add: bool) -> None:
    if add:
        result.add_(sums.view(result.shape), alpha=scale)
    else:
        torch.mul(sums.view(result.shape), scale, out=result)
