"""Results over disjoint sets of in-edges joined by log-sum-exp, each for a range of the receivers.

``lse = log sum_p e^(lse_p)``, the share of part p is ``s_p = e^(lse_p) / sum_p e^(lse_p)``
(``edge_softmax.shares``) and ``out = sum_p s_p out_p``. The gradient is written out, so that nothing is
saved but the parts themselves: ``d_out_p = s_p g`` and ``d_lse_p = s_p (g . out_p - g . out + g_lse)``.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from gnn_attention import edge_softmax
from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.call import AttentionCall

Result = tuple[Tensor, Tensor]


def in_merge_dtype(call: AttentionCall) -> AttentionCall:
    """On a CPU halves become float32, in which its kernels compute anyway, so that a part is not rounded.

    On CUDA halves stay halves, for the sake of the matrix units.
    """
    wide = call.q.dtype if call.q.device.type != "cpu" else edge_softmax.accumulation_dtype(call.q.dtype)
    return replace(call, q=call.q.to(wide), k=call.k.to(wide), v=call.v.to(wide))


def merged(
    results: Sequence[Result], firsts: Sequence[int], num_dst: int
) -> tuple[Float[Tensor, "batch heads dst dim"], Float[Tensor, "batch heads dst"]]:
    """One result from some, of which part p has the receivers ``firsts[p] ..``; both in float32 or float64.

    A receiver in no part gets 0 and -inf. There must be a part. A receiver whose lse is NaN passes no
    gradient on to other parts.
    """
    checks.check_order("results", results)
    checks.check_order("firsts", firsts)
    flat = [x for result in results for x in result]
    out, lse = _Merged.apply(tuple(firsts), num_dst, *flat)  # type: ignore[no-untyped-call]
    return out, lse


class _Merged(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(firsts: tuple[int, ...], num_dst: int, *flat: Tensor) -> tuple[Tensor, Tensor]:
        share, lse = _shares(firsts, num_dst, flat[1::2])
        out = flat[0].new_zeros((*flat[0].shape[:2], num_dst, flat[0].shape[3]), dtype=lse.dtype)
        for first, part, of_part in zip(firsts, flat[::2], share, strict=True):
            rows = slice(first, first + part.shape[2])
            out[:, :, rows] += part * of_part[..., rows, None]
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.firsts, ctx.num_dst = inputs[:2]
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        outs, lses, num_dst = ctx.saved_tensors[::2], ctx.saved_tensors[1::2], ctx.num_dst
        share, _ = _shares(ctx.firsts, num_dst, lses)
        taken = share > 0  # not where lse is -inf or NaN
        rows = [slice(first, first + out.shape[2]) for first, out in zip(ctx.firsts, outs, strict=True)]
        products = [(grad_out[:, :, row] * out).sum(-1) for row, out in zip(rows, outs, strict=True)]
        product = torch.stack(_among_all(products, ctx.firsts, num_dst, 0.0))
        delta = torch.where(taken, share * product, 0.0).sum(0) - grad_lse
        slopes = torch.where(taken, share * (product - delta), 0.0)
        grads: list[Tensor] = []
        for p, row in enumerate(rows):
            weighted = share[p, ..., row, None] * grad_out[:, :, row]
            weighted = torch.where(taken[p, ..., row, None], weighted, 0.0)
            grads += [weighted.to(outs[p].dtype), slopes[p, ..., row].to(lses[p].dtype)]
        return None, None, *grads


def _shares(firsts: Sequence[int], num_dst: int, lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The share of each part for all receivers ``[parts, batch, heads, dst]``, and lse of all together."""
    dtype = edge_softmax.accumulation_dtype(lses[0].dtype)
    return edge_softmax.shares(_among_all([lse.to(dtype) for lse in lses], firsts, num_dst, -torch.inf))


def _among_all(parts: Sequence[Tensor], firsts: Sequence[int], num_dst: int, value: float) -> list[Tensor]:
    """The numbers of the receivers ``first ..`` of each part among all, with ``value`` for the others."""
    ends = [(first, num_dst - first - x.shape[2]) for first, x in zip(firsts, parts, strict=True)]
    return [functional.pad(x, end, value=value) for x, end in zip(parts, ends, strict=True)]
