"""Attention along a list of edges, forward and backward, one head at a time: plain tensors in and out, no
autograd.

The forward pass is products, softmax, weighted sums; the backward pass computes the weights again from lse
and uses the same two operations, with the list sender by sender for the gradients of k and v. Only edges are
ever read: what a non-edge holds, NaN too, cannot leak. Memory beyond the results is that of one head: two
numbers for each edge and a few rows for each token.

Softmax needs a shift that keeps exp in range: the largest logit of each receiver, or one number for all where
logits lie close together. What belongs to a receiver is then applied to its row, and nothing to its edges but
exp.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.cpu import head_batching as folding
from gnn_attention.backends.cpu.csr_primitives import Head, row_maxima, row_sums, sampled_products
from gnn_attention.backends.plan.plan import Edges
from gnn_attention.edges import accumulation_dtype, shares

REACH = 8.0  # exp(+-8) is far from both ends of float32, and the exponent has few roundings


@torch.no_grad()
def forward(
    q: Float[Tensor, "batch heads dst dim"],
    k: Float[Tensor, "batch kv_heads src dim"],
    v: Float[Tensor, "batch kv_heads src value_dim"],
    edges: Edges,
    scale: float,
    out: Float[Tensor, "batch heads dst value_dim"],
    lse: Float[Tensor, "batch heads dst"],
) -> None:
    """Write ``out`` and ``lse`` of the softmax over ``edges``; merge with what they hold unless
    ``edges.fresh``.

    Merging is that of :func:`gnn_attention.edges.merge`: exact over disjoint sets of edges. A receiver
    without in-edges gets 0 and -inf. The arithmetic is in the dtype of lse, whatever those of q and out.
    """
    slices = q.shape[0] * q.shape[1]
    if not edges.src.numel() or not slices:
        if edges.fresh:
            out.zero_()
            lse.fill_(-torch.inf)
    elif folding.worth_folding(edges, slices):
        work = Head(folding.folded(edges, slices, k.shape[0] * k.shape[1]), lse.dtype)
        _forward_head(work, q, work.staged("k", k), work.staged("v", v), scale, out, lse)
    else:
        _forward_heads(q, k, v, edges, scale, out, lse)


@torch.no_grad()
def backward(
    grad_out: Float[Tensor, "batch heads dst value_dim"],
    delta: Float[Tensor, "batch heads dst"],
    q: Float[Tensor, "batch heads dst dim"],
    k: Float[Tensor, "batch kv_heads src dim"],
    v: Float[Tensor, "batch kv_heads src value_dim"],
    lse: Float[Tensor, "batch heads dst"],
    edges: Edges,
    scale: float,
    dq: Float[Tensor, "batch heads dst dim"],
    dk: Float[Tensor, "batch kv_heads src dim"],
    dv: Float[Tensor, "batch kv_heads src value_dim"],
    add: bool = True,
) -> None:
    """Add the gradients over ``edges`` to ``dq``, ``dk`` and ``dv``; with ``add=False`` write them, to all of
    each.

    ``p = exp(scale q . k - lse)`` and ``ds = p (grad_out . v - delta)`` with the out and lse of all pieces
    together and ``delta = sum(out * grad_out) - grad_lse``. A receiver whose lse is infinite contributes
    nothing.
    """
    slices = q.shape[0] * q.shape[1]
    if not edges.src.numel() or not slices:
        for x in () if add else (dq, dk, dv):
            x.zero_()
    elif folding.worth_folding(edges, slices):
        work = Head(folding.folded(edges, slices, k.shape[0] * k.shape[1]), accumulation_dtype(q.dtype))
        key, value = work.staged("k", k), work.staged("v", v)
        d_key, d_value = _backward_head(work, grad_out, delta, q, key, value, lse, scale, dq, add)
        _deliver(d_key, scale, dk, add)
        _deliver(d_value, 1.0, dv, add)
    else:
        _backward_heads(grad_out, delta, q, k, v, lse, edges, scale, (dq, dk, dv), add)


def _forward_heads(
    q: Tensor, k: Tensor, v: Tensor, edges: Edges, scale: float, out: Tensor, lse: Tensor
) -> None:
    work, group = Head(edges, lse.dtype), q.shape[1] // k.shape[1]
    for sample in range(q.shape[0]):
        for head in range(q.shape[1]):
            if head % group == 0:
                key, value = (
                    work.staged("k", k[sample, head // group]),
                    work.staged("v", v[sample, head // group]),
                )
            _forward_head(work, q[sample, head], key, value, scale, out[sample, head], lse[sample, head])


def _forward_head(
    work: Head, q: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor, lse: Tensor
) -> None:
    """One head, or all of a folded list: ``q``, ``out`` and ``lse`` have then the axes of samples and
    heads.
    """
    sampled_products(_zeroed(work.first), work.staged("q", q), key, scale)
    logits = work.first.values()
    shift = _shift(work, logits)
    mass = logits.exp_()
    total = row_sums(work.first)
    found = total.log().add_(shift)
    share = total.reciprocal().masked_fill_(total == 0, 0.0)
    sums, share, found = (
        work.incoming(mass, value).view(out.shape),
        share.view(lse.shape),
        found.view(lse.shape),
    )
    if work.edges.fresh:
        torch.mul(sums, share.unsqueeze(-1), out=out)
        lse.copy_(found)
    else:
        _merge(out, lse, sums, share, found)


def _merge(out: Tensor, lse: Tensor, sums: Tensor, share: Tensor, found: Tensor) -> None:
    """``out`` and ``lse`` joined with ``sums * share`` and ``found``, as in ``edges.merge``, in place."""
    before, now, total = shares(lse, found, (lse == -torch.inf) & (found == -torch.inf))
    torch.addcmul(out * before.unsqueeze(-1), sums, (now * share).unsqueeze(-1), out=out)
    lse.copy_(total)


def _shift(work: Head, logits: Tensor) -> Tensor | float:
    """Subtract from the logits what keeps exp in range, and return it: for each receiver its largest logit,
    unless that is small.

    What a receiver gets must not depend, not even by a rounding, on what others hear: so 0 for all, if all
    are small.
    """
    if _all_small(logits):
        return 0.0
    top = row_maxima(work.edges.ptr, logits)
    top.masked_fill_((top.abs() <= REACH) | (top == -torch.inf), 0.0)
    logits.sub_(work.by_edge(top, work.second.values()))
    return top


def _all_small(logits: Tensor) -> bool:
    """Whether exp of all of them is far from both ends of float32 (what is not finite is not small)."""
    low, high = logits.aminmax()
    return low.item() >= -REACH and high.item() <= REACH


def _zeroed(matrix: Tensor) -> Tensor:
    """The matrix with finite numbers in it: 0 times a NaN that an earlier head left would be NaN."""
    matrix.values().zero_()
    return matrix


def _backward_heads(
    grad_out: Tensor,
    delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    edges: Edges,
    scale: float,
    results: Sequence[Tensor],
    add: bool,
) -> None:
    """Head by head; those of a key/value head are summed over its group before they are delivered."""
    dq, dk, dv = results
    work, group = Head(edges, accumulation_dtype(q.dtype)), q.shape[1] // k.shape[1]
    for sample in range(q.shape[0]):
        for kv_head in range(k.shape[1]):
            key, value = (work.staged(name, x[sample, kv_head]) for name, x in (("k", k), ("v", v)))
            sums: list[Tensor] = []
            for head in range(kv_head * group, (kv_head + 1) * group):
                at = sample, head
                d_key, d_value = _backward_head(
                    work, grad_out[at], delta[at], q[at], key, value, lse[at], scale, dq[at], add
                )
                sums = [d_key, d_value] if not sums else [sums[0].add_(d_key), sums[1].add_(d_value)]
            _deliver(sums[0], scale, dk[sample, kv_head], add)
            _deliver(sums[1], 1.0, dv[sample, kv_head], add)


def _backward_head(
    work: Head,
    grad: Tensor,
    delta: Tensor,
    q: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    scale: float,
    dq: Tensor,
    add: bool,
) -> tuple[Tensor, Tensor]:
    """One head, or all of a folded list: deliver the gradient of q; return those of key (but for the scale)
    and value.

    Two buffers of edges serve all: the second holds weights by sender, then slopes; the first at last slopes
    by sender.
    """
    mass, slopes, lse = work.first.values(), work.second.values(), lse.reshape(-1)
    silent = _silent(work, lse)
    query = _silenced(work.staged("q", q), silent)
    sampled_products(_zeroed(work.first), query, key, scale)
    factor = _mass(work, mass, lse)
    gradient = torch.mul(grad, factor.view(grad.shape[:-1]).unsqueeze(-1), out=work.buffer("g", grad))
    gradient = _silenced(gradient.flatten(0, -2), silent)
    if silent is not None:
        mass.masked_fill_(silent[work.edges.dst], 0.0)
    d_value = work.outgoing(mass, gradient, slopes)
    work.by_edge(_silenced(delta.reshape(-1) * factor, silent), slopes)
    sampled_products(work.second, gradient, value, beta=-1.0)
    slopes.mul_(mass)
    if silent is not None:
        slopes.masked_fill_(silent[work.edges.dst], 0.0)
    _deliver(_silenced(work.incoming(slopes, key), silent), scale, dq, add)
    return work.outgoing(slopes, query, mass), d_value


def _mass(work: Head, logits: Tensor, lse: Tensor) -> Tensor:
    """Turn logits into ``mass`` and return a factor for each receiver, so that its weights are
    ``mass * factor``.

    As in :func:`_shift` a receiver's own numbers decide: its lse is at most REACH + log(in-degree) if its
    logits are small.
    """
    if _all_small(logits):
        logits.exp_()
        return (-lse).exp_()
    degree = (work.edges.ptr[1:] - work.edges.ptr[:-1]).to(lse.dtype)
    shift = lse.masked_fill(lse.abs() <= REACH + degree.log() + 1e-3, 0.0)
    logits.sub_(work.by_edge(shift, work.second.values())).exp_()
    return (shift - lse).masked_fill_(lse.isinf(), 0.0).exp_()


def _silent(work: Head, lse: Tensor) -> Tensor | None:
    """Receivers with in-edges that must contribute nothing; None if there are none (in all but extreme
    inputs).
    """
    silent = lse.isinf() & work.heard
    return silent if silent.any() else None


def _silenced(x: Tensor, silent: Tensor | None) -> Tensor:
    """``x`` with 0 for these receivers."""
    return x if silent is None else x.masked_fill(silent if x.dim() == 1 else silent.unsqueeze(1), 0.0)


def _deliver(sums: Tensor, scale: float, result: Tensor, add: bool) -> None:
    if add:
        result.add_(sums.view(result.shape), alpha=scale)
    else:
        torch.mul(sums.view(result.shape), scale, out=result)
