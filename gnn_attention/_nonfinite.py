"""Tokens that hold NaN or inf: dense kernels multiply a hidden value by weight 0, and 0 * NaN is NaN.

A kernel that visits pairs which are no edges is therefore run on cleaned tokens, and the receivers that do hear one of the
others, or are one, are made NaN afterwards (an edge carries a NaN, a non-edge carries nothing).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from gnn_attention._shapes import Bool, Tensor

__all__ = ["cleaned", "not_finite", "poisoned", "surely_finite"]


def surely_finite(*tensors: Tensor) -> bool:
    """One pass: a sum is finite only if everything is. While compiling, and under vmap, the question may not be asked, so: no."""
    if tensors[0].is_meta:
        return True
    if torch.compiler.is_compiling():
        return False
    try:
        return all(math.isfinite(_sum(x).item()) for x in tensors)
    except RuntimeError:  # torch.vmap's "data-dependent control flow"
        return False


def _sum(x: Tensor) -> Tensor:
    x = x.detach()
    return x.sum(dtype=torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x.sum()


def not_finite(x: Tensor) -> Bool[Tensor, "batch heads tokens"]:
    """The tokens with a channel that is NaN or inf."""
    return ~torch.isfinite(x).all(-1)


def cleaned(*tensors: Tensor) -> tuple[Tensor, ...]:
    """With 0 for what is not finite."""
    return tuple(torch.nan_to_num(x, 0.0, 0.0, 0.0) for x in tensors)


def poisoned(
    q: Tensor, k: Tensor, v: Tensor, hears: Callable[[Tensor], Tensor], hears_anyone: Tensor
) -> Bool[Tensor, "batch heads dst"]:
    """The receivers that hear a token which is not finite, or are one and hear anyone at all.

    ``hears(marked)`` tells which receivers ``[B, Hq, dst]`` have an edge from a marked sender ``[B, Hkv, src]``.
    """
    return hears(not_finite(k) | not_finite(v)) | (not_finite(q) & hears_anyone)
