"""Results over disjoint sets of in-edges joined by log-sum-exp, each for a range of the receivers, in float32 or better.

``lse = log sum_p e^(lse_p)`` and ``out = sum_p e^(lse_p - lse) out_p``. The gradient is written out, so that nothing is kept but
the parts themselves: ``s_p = e^(lse_p - lse)``, ``d_out_p = s_p g``, ``d_lse_p = s_p (g . out_p - g . out + g_lse)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from gnn_attention._shapes import Float, Tensor
from gnn_attention.edges import accumulation_dtype

__all__ = ["merged"]

Result = tuple[Tensor, Tensor]


def merged(
    results: Sequence[Result], firsts: Sequence[int], num_dst: int
) -> tuple[Float[Tensor, "batch heads dst dim"], Float[Tensor, "batch heads dst"]]:
    """One result from some, of which part p holds the receivers ``firsts[p] ..``; both in float32 or float64.

    A receiver in no part gets 0 and -inf. There must be a part. A receiver whose lse is NaN passes no gradient on to other parts.

    >>> a = torch.ones(1, 1, 3, 1), torch.zeros(1, 1, 3)
    >>> b = torch.full((1, 1, 1, 1), 3.0), torch.zeros(1, 1, 1)
    >>> out, lse = merged([a, b], firsts=[0, 2], num_dst=4)
    >>> out.flatten().tolist(), [round(number, 4) for number in lse.flatten().tolist()]
    ([1.0, 1.0, 2.0, 0.0], [0.0, 0.0, 0.6931, -inf])
    """
    flat = [x for result in results for x in result]
    out, lse = _Merged.apply(tuple(firsts), num_dst, *flat)  # type: ignore[no-untyped-call]
    return out, lse


class _Merged(torch.autograd.Function):
    """The rule above, for autograd, ``torch.func`` and compilers."""

    generate_vmap_rule = True

    @staticmethod
    def forward(firsts: tuple[int, ...], num_dst: int, *flat: Tensor) -> tuple[Tensor, Tensor]:
        """The merged out and lse, in float32 or better."""
        dtype = accumulation_dtype(flat[0].dtype)
        lse = flat[1].new_full((*flat[1].shape[:2], num_dst), -torch.inf, dtype=dtype)
        out = flat[0].new_zeros((*flat[0].shape[:2], num_dst, flat[0].shape[3]), dtype=dtype)
        for first, _, part_lse in _parts(firsts, flat):
            rows = slice(first, first + part_lse.shape[2])
            lse[:, :, rows] = torch.logaddexp(lse[:, :, rows], part_lse.to(dtype))
        for first, part_out, part_lse in _parts(firsts, flat):
            share = _share(part_lse, lse.narrow(2, first, part_lse.shape[2]))
            out[:, :, first : first + part_lse.shape[2]] += part_out * share.unsqueeze(-1)
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep the parts and lse."""
        ctx.firsts = inputs[0]
        ctx.save_for_backward(*inputs[2:], output[1])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        """The gradients of the parts; those who hear nobody in one, or are NaN, take no part."""
        *flat, lse = ctx.saved_tensors
        shares, products = [], []
        for first, part_out, part_lse in _parts(ctx.firsts, flat):
            rows = slice(first, first + part_lse.shape[2])
            shares.append(_share(part_lse, lse[:, :, rows]))
            products.append((grad_out[:, :, rows] * part_out).sum(-1))
        delta = _delta(ctx.firsts, shares, products, grad_lse)
        grads = []
        for first, share, product, dtypes in zip(ctx.firsts, shares, products, _dtypes(flat), strict=True):
            rows = slice(first, first + share.shape[2])
            weighted = torch.where((share > 0).unsqueeze(-1), share.unsqueeze(-1) * grad_out[:, :, rows], 0.0)
            slope = torch.where(share > 0, share * (product - delta[:, :, rows]), 0.0)
            grads += [weighted.to(dtypes[0]), slope.to(dtypes[1])]
        return None, None, *grads


def _delta(firsts: Sequence[int], shares: Sequence[Tensor], products: Sequence[Tensor], grad_lse: Tensor) -> Tensor:
    """``g . out - g_lse``, from the same of the parts."""
    delta, num_dst = -grad_lse, grad_lse.shape[2]
    for first, share, product in zip(firsts, shares, products, strict=True):
        ends = first, num_dst - first - share.shape[2]
        delta = delta + functional.pad(torch.where(share > 0, share * product, 0.0), ends)
    return delta


def _dtypes(flat: Sequence[Tensor]) -> list[tuple[torch.dtype, torch.dtype]]:
    return [(out.dtype, lse.dtype) for out, lse in zip(flat[::2], flat[1::2], strict=True)]


def _parts(firsts: Sequence[int], flat: Sequence[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
    return zip(firsts, flat[::2], flat[1::2], strict=True)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """``e^(part - whole)``, 0 where nobody is heard at all."""
    return (part - whole.masked_fill(whole == -torch.inf, torch.inf)).exp()
