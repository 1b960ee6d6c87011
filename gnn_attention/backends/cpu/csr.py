"""Attention along a list of edges, forward and backward: plain tensors in and out, no autograd.

The forward pass is products, softmax, weighted sums; the backward pass computes the weights again from lse.
Only edges are ever read: what a non-edge holds, NaN too, cannot leak. Memory beyond the results is that of
one head: two numbers for each edge and a few rows for each token. So the softmax is in place and never
normalised edge by edge, unlike that of ``edge_softmax.py``: what belongs to a receiver is applied to its row.
"""

from collections.abc import Sequence

import torch

from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends import nonfinite
from gnn_attention.backends.cpu.csr_primitives import Head, batches, row_maxima, row_sums, sampled_products
from gnn_attention.backends.plan.plan import Edges
from gnn_attention.edge_softmax import REACH, accumulation_dtype, shares, within_reach

Receivers = Float[Tensor, "batch heads dst _"]
Senders = Float[Tensor, "batch kv_heads src _"]
PerReceiver = Float[Tensor, "batch heads dst"]


@torch.no_grad()
def forward(
    q: Receivers, k: Senders, v: Senders, edges: Edges, scale: float, out: Receivers, lse: PerReceiver
) -> None:
    """Write ``out`` and ``lse`` of the softmax over ``edges``, merged with theirs unless ``edges.fresh``.

    A receiver without in-edges gets 0 and -inf. The arithmetic is in the dtype of lse.
    """
    groups = batches(edges, q.shape[:2], k.shape[1], lse.dtype)
    if edges.fresh and not groups:
        out.zero_()
        lse.fill_(-torch.inf)
    for shared, heads in groups:
        work, _ = heads[0]
        key, value = work.staged("k", k[shared]), work.staged("v", v[shared])
        for work, head in heads:
            _forward_head(work, q[head], key, value, scale, out[head], lse[head])


@torch.no_grad()
def backward(
    grad_out: Receivers,
    delta: PerReceiver,
    ends: tuple[Receivers, Senders, Senders],
    lse: PerReceiver,
    edges: Edges,
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
    groups = batches(edges, q.shape[:2], k.shape[1], accumulation_dtype(q.dtype))
    for x in results if not add and not groups else ():
        x.zero_()
    for shared, heads in groups:
        work, _ = heads[0]
        key, value = work.staged("k", k[shared]), work.staged("v", v[shared])
        sums: list[Tensor] = []
        for work, at in heads:
            of_q, *of_ends = _backward_head(work, grad_out[at], delta[at], q[at], key, value, lse[at], scale)
            _deliver(of_q, scale, dq[at], add)
            sums = [total.add_(x) for total, x in zip(sums, of_ends, strict=True)] if sums else of_ends
        _deliver(sums[0], scale, dk[shared], add)
        _deliver(sums[1], 1.0, dv[shared], add)


def _forward_head(
    work: Head, q: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor, lse: Tensor
) -> None:
    """One head, or all of a folded list: ``q``, ``out`` and ``lse`` then have axes of samples and heads."""
    sampled_products(_zeroed(work.first), work.staged("q", q), key, scale)
    logits = work.first.values()
    shift = _shift(work, logits)
    mass = logits.exp_()
    total = row_sums(work.first, work.in_pieces)
    lse_here = total.log().add_(shift).view(lse.shape)
    share = total.reciprocal().masked_fill_(total == 0, 0.0).view(lse.shape)
    sums = work.incoming(mass, value).view(out.shape)
    if work.edges.fresh:
        torch.mul(sums, share.unsqueeze(-1), out=out)
        lse.copy_(lse_here)
        return
    (before, here), lse_of_both = shares((lse, lse_here))
    torch.addcmul(out * before.unsqueeze(-1), sums, (here * share).unsqueeze(-1), out=out)
    lse.copy_(lse_of_both)


def _shift(work: Head, logits: Tensor) -> Tensor | float:
    """Subtract what exp cannot reach, and return it: each receiver's largest logit, unless that is small."""
    # a receiver's result must not depend, not even by a rounding, on others: so 0 for all if all are small
    if logits.device.type not in nonfinite.ASYNCHRONOUS and within_reach(logits):
        return 0.0
    top = row_maxima(work.edges.ptr, logits)
    top.masked_fill_((top.abs() <= REACH) | (top == -torch.inf), 0.0)
    logits.sub_(work.by_edge(top, work.second.values()))
    return top


def _zeroed(matrix: Tensor) -> Tensor:
    # 0 times a NaN that an earlier head left would be NaN
    matrix.values().zero_()
    return matrix


def _backward_head(
    work: Head, grad: Tensor, delta: Tensor, q: Tensor, key: Tensor, value: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q and key (but for the scale) and of value, of one head or of all of a folded list."""
    # of two buffers the second has weights by sender, then slopes; the first at last slopes by sender
    mass, slopes, lse = work.first.values(), work.second.values(), lse.reshape(-1)
    excluded = _excluded(work, lse)
    query = _without(excluded, work.staged("q", q))
    sampled_products(_zeroed(work.first), query, key, scale)
    factor = _mass(work, mass, lse)
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


def _mass(work: Head, logits: Tensor, lse: Tensor) -> Tensor:
    """Turn logits into ``mass`` and return a factor for each receiver: its weights are ``mass * factor``."""
    if logits.device.type not in nonfinite.ASYNCHRONOUS and within_reach(logits):
        logits.exp_()
        return (-lse).exp_()
    # as in _shift a receiver's own numbers decide: small logits have an lse of at most REACH + log(in-degree)
    degree = (work.edges.ptr[1:] - work.edges.ptr[:-1]).to(lse.dtype)
    shift = lse.masked_fill(lse.abs() <= REACH + degree.log() + 1e-3, 0.0)
    logits.sub_(work.by_edge(shift, work.second.values())).exp_()
    return (shift - lse).masked_fill_(lse.isinf(), 0.0).exp_()


def _excluded(work: Head, lse: Tensor) -> Tensor | None:
    """Receivers with in-edges that must contribute nothing; None if there surely are none, as usual."""
    excluded = lse.isinf() & work.has_in_edges
    return excluded if lse.device.type in nonfinite.ASYNCHRONOUS or excluded.any() else None


def _without(excluded: Tensor | None, x: Tensor) -> Tensor:
    return x if excluded is None else x.masked_fill(excluded if x.dim() == 1 else excluded.unsqueeze(1), 0.0)


def _deliver(sums: Tensor, scale: float, result: Tensor, add: bool) -> None:
    if add:
        result.add_(sums.view(result.shape), alpha=scale)
    else:
        torch.mul(sums.view(result.shape), scale, out=result)
