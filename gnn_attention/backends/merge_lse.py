"""Results over disjoint sets of in-edges joined by log-sum-exp, each for a range of the receivers, in float32
or better.

``lse = log sum_p e^(lse_p)``, the share of part p is ``s_p = e^(lse_p) / sum_p e^(lse_p)`` and
``out = sum_p s_p out_p``. The gradient is written out, so that nothing is kept but the parts themselves:
``d_out_p = s_p g`` and ``d_lse_p = s_p (g . out_p - g . out + g_lse)``.

Shares are a softmax over the parts, and sum to 1 but for a rounding. As ``e^(lse_p - lse)`` they would sum to
1 but for the rounding of lse, which is larger the larger lse is: a receiver with all its weight on one edge
would not hear quite that, and the difference ``g . v - g . out`` in its gradient, 0 in truth, would be as
large as that rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.edges import accumulation_dtype

Result = tuple[Tensor, Tensor]


def merged(
    results: Sequence[Result], firsts: Sequence[int], num_dst: int
) -> tuple[Float[Tensor, "batch heads dst dim"], Float[Tensor, "batch heads dst"]]:
    """One result from some, of which part p holds the receivers ``firsts[p] ..``; both in float32 or float64.

    A receiver in no part gets 0 and -inf. There must be a part. A receiver whose lse is NaN passes no
    gradient on to other parts.

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
        shares, lse = _shares(firsts, num_dst, flat[1::2])
        out = flat[0].new_zeros((*flat[0].shape[:2], num_dst, flat[0].shape[3]), dtype=lse.dtype)
        for first, share, part_out in zip(firsts, shares, flat[::2], strict=True):
            out[:, :, first : first + share.shape[2]] += part_out * share.unsqueeze(-1)
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep the parts."""
        ctx.firsts, ctx.num_dst = inputs[:2]
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        """The gradients of the parts; those who hear nobody in one, or are NaN, take no part."""
        flat = ctx.saved_tensors
        shares, _ = _shares(ctx.firsts, ctx.num_dst, flat[1::2])
        products = []
        for first, part_out in zip(ctx.firsts, flat[::2], strict=True):
            products.append((grad_out[:, :, first : first + part_out.shape[2]] * part_out).sum(-1))
        delta = _delta(ctx.firsts, shares, products, grad_lse)
        grads = []
        for first, share, product, dtypes in zip(ctx.firsts, shares, products, _dtypes(flat), strict=True):
            rows = slice(first, first + share.shape[2])
            weighted = torch.where((share > 0).unsqueeze(-1), share.unsqueeze(-1) * grad_out[:, :, rows], 0.0)
            slope = torch.where(share > 0, share * (product - delta[:, :, rows]), 0.0)
            grads += [weighted.to(dtypes[0]), slope.to(dtypes[1])]
        return None, None, *grads


def _delta(
    firsts: Sequence[int], shares: Sequence[Tensor], products: Sequence[Tensor], grad_lse: Tensor
) -> Tensor:
    """``g . out - g_lse``, from the same of the parts."""
    delta = -grad_lse
    for first, share, product in zip(firsts, shares, products, strict=True):
        delta = delta + _among_all(
            torch.where(share > 0, share * product, 0.0), first, grad_lse.shape[2], 0.0
        )
    return delta


def _dtypes(flat: Sequence[Tensor]) -> list[tuple[torch.dtype, torch.dtype]]:
    return [(out.dtype, lse.dtype) for out, lse in zip(flat[::2], flat[1::2], strict=True)]


def _shares(firsts: Sequence[int], num_dst: int, parts: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The share of each part in what its receivers hear, 0 where nobody is heard at all; and lse of all
    together.
    """
    dtype = accumulation_dtype(parts[0].dtype)
    tops = [
        _among_all(part.detach().to(dtype), first, num_dst, -torch.inf)
        for first, part in zip(firsts, parts, strict=True)
    ]
    top = functools.reduce(torch.maximum, tops)
    top = top.masked_fill(top == -torch.inf, 0.0)
    masses = [
        (part.to(dtype) - top.narrow(2, first, part.shape[2])).exp()
        for first, part in zip(firsts, parts, strict=True)
    ]
    total = functools.reduce(
        torch.add, [_among_all(mass, first, num_dst, 0.0) for first, mass in zip(firsts, masses, strict=True)]
    )
    whole = total.masked_fill(total == 0, 1.0)
    shares = [
        mass / whole.narrow(2, first, mass.shape[2]) for first, mass in zip(firsts, masses, strict=True)
    ]
    return shares, (top + whole.log()).masked_fill(total == 0, -torch.inf)


def _among_all(x: Tensor, first: int, num_dst: int, value: float) -> Tensor:
    """The numbers of the receivers ``first ..`` among all, with ``value`` for the others."""
    return functional.pad(x, (first, num_dst - first - x.shape[2]), value=value)
