"""Tokens that hold NaN or inf: dense kernels multiply a hidden value by weight 0, and 0 * NaN is NaN.

A kernel that visits pairs which are no edges is therefore run on cleaned tokens, and the receivers that
attend to one of the others, or are one, are made NaN afterwards: an edge carries a NaN, a non-edge nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.backends.call import AttentionCall

HALF = {torch.float16, torch.bfloat16}
Run = Callable[[AttentionCall], tuple[Tensor, Tensor | None]]
Reached = Callable[[AttentionCall, Tensor], Tensor]


def surely_finite(*tensors: Tensor) -> bool:
    """One pass over each: a sum is finite only if everything is; False where :func:`may_ask` is."""
    if tensors[0].is_meta:
        return True
    if not may_ask(tensors[0]):
        return False
    try:
        # a GPU waits once for all
        if tensors[0].is_cuda:
            return math.isfinite(sum(map(_sum, tensors[1:]), _sum(tensors[0])).item())
        for x in tensors:
            total = _sum(x) if x.requires_grad or x.dtype in HALF else x.sum()
            if not math.isfinite(total.item()):
                return False
    except RuntimeError:  # torch.vmap's "data-dependent control flow"
        return False
    return True


def may_ask(x: Tensor) -> bool:
    """False where a program must not depend on numbers: while it is compiled, or recorded as a CUDA graph."""
    return not torch.compiler.is_compiling() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _sum(x: Tensor) -> Tensor:
    x = x.detach() if x.requires_grad else x
    return x.sum(dtype=torch.float32) if x.dtype in HALF else x.sum()


def contained(call: AttentionCall, run: Run, reached: Reached) -> tuple[Tensor, Tensor | None]:
    """``run(call)``, which visits non-edges, but these carry nothing; ``reached`` as in :func:`poisoned`."""
    return run(call) if surely_finite(call.q, call.k, call.v) else on_cleaned(call, run, reached)


def on_cleaned(call: AttentionCall, run: Run, reached: Reached) -> tuple[Tensor, Tensor | None]:
    q, k, v = cleaned(call.q, call.k, call.v)
    out, lse = run(replace(call, q=q, k=k, v=v))
    bad = poisoned(call.q, call.k, call.v, partial(reached, call), call.has_in_edges)
    lse = None if lse is None else lse.masked_fill(bad, torch.nan)
    return out.masked_fill(bad.unsqueeze(-1), torch.nan), lse


def cleaned(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.nan_to_num(x, 0.0, 0.0, 0.0) for x in tensors)


def poisoned(
    q: Tensor, k: Tensor, v: Tensor, reached: Callable[[Tensor], Tensor], has_in_edges: Tensor
) -> Bool[Tensor, "batch heads dst"]:
    """The receivers that attend to a token which is not finite, or are one and have in-edges.

    ``reached(marked)``: which receivers ``[B, Hq, dst]`` have an edge from a marked sender ``[B, Hkv, src]``.
    """
    of_q, of_k, of_v = (~torch.isfinite(x).all(-1) for x in (q, k, v))
    return reached(of_k | of_v) | (of_q & has_in_edges)


def spoiled(lse: Tensor) -> Bool[Tensor, "batch heads dst"]:
    """The receivers whose softmax is not one: a logit was NaN, or +infinity, of which all weights are NaN."""
    # in a backward pass over non-edges 0 times their NaN would reach senders: they take no part
    return lse.isnan() | (lse == torch.inf)
