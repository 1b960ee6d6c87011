"""Tokens that hold NaN or inf: dense kernels multiply a hidden value by weight 0, and 0 * NaN is NaN.

A kernel that visits pairs which are no edges is therefore run on cleaned tokens, and the receivers that do
hear one of the others, or are one, are made NaN afterwards (an edge carries a NaN, a non-edge carries
nothing).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from gnn_attention._support.shapes import Bool, Tensor


def surely_finite(*tensors: Tensor) -> bool:
    """One pass over each: a sum is finite only if everything is. A GPU is asked once for all; where nobody
    may ask, no.
    """
    if tensors[0].is_meta:
        return True
    if not may_ask(tensors[0]):
        return False
    try:
        if tensors[0].is_cuda:
            return math.isfinite(sum(map(_sum, tensors[1:]), _sum(tensors[0])).item())
        return all(math.isfinite(_sum(x).item()) for x in tensors)
    except RuntimeError:  # torch.vmap's "data-dependent control flow"
        return False


def may_ask(x: Tensor) -> bool:
    """False where the program must not depend on numbers: while it is compiled, or recorded as a CUDA
    graph.
    """
    return not torch.compiler.is_compiling() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _sum(x: Tensor) -> Tensor:
    x = x.detach() if x.requires_grad else x
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

    ``hears(marked)`` tells which receivers ``[B, Hq, dst]`` have an edge from a marked sender
    ``[B, Hkv, src]``.
    """
    return hears(not_finite(k) | not_finite(v)) | (not_finite(q) & hears_anyone)


def spoiled(lse: Tensor) -> Bool[Tensor, "batch heads dst"]:
    """The receivers whose softmax is not one: a logit was NaN, or +infinity, of which all weights are NaN.

    They take no part in a backward pass over pairs that are no edges: 0 times their NaN would reach senders
    they do not hear.

    >>> spoiled(torch.tensor([0.0, torch.nan, torch.inf, -torch.inf])).tolist()
    [False, True, True, False]
    """
    return lse.isnan() | (lse == torch.inf)
