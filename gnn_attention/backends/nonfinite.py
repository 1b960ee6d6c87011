"""Tokens that hold NaN or inf: dense kernels multiply a hidden value by weight 0, and 0 * NaN is NaN.

A kernel that visits pairs which are no edges is therefore run on cleaned tokens, and the receivers that
attend to one of the others, or are one, are made NaN afterwards: an edge carries a NaN, a non-edge nothing.

On a CPU the numbers are looked at first. A GPU would have to be waited for: there an eager call is always
repaired, by marks that stay on the device, and a compiled program or CUDA graph is not, nor is a call whose
caller promised finite numbers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.backends.call import AttentionCall

HALF = {torch.float16, torch.bfloat16}
ASYNCHRONOUS = ("cuda",)  # devices whose numbers the host would wait for
Run = Callable[[AttentionCall], tuple[Tensor, Tensor | None]]
Reached = Callable[[AttentionCall, Tensor], Tensor]


def surely_finite(*tensors: Tensor) -> bool:
    """One pass over each: a sum is finite only if everything is; False in a program, which cannot ask."""
    if tensors[0].is_meta:
        return True
    if is_program(tensors[0]):
        return False
    try:
        for x in tensors:
            x = x.detach() if x.requires_grad else x
            if not math.isfinite((x.sum(dtype=torch.float32) if x.dtype in HALF else x.sum()).item()):
                return False
    except RuntimeError:  # torch.vmap's "data-dependent control flow"
        return False
    return True


def may_ask(x: Tensor) -> bool:
    """False where a program must not depend on numbers: while it is compiled, and on a GPU."""
    return not torch.compiler.is_compiling() and x.device.type not in ASYNCHRONOUS


def is_checked(call: AttentionCall) -> bool:
    """False where no token is looked at: by the caller's promise, and in a program for a GPU."""
    return not call.finite and (call.q.device.type not in ASYNCHRONOUS or not is_program(call.q))


def is_program(x: Tensor) -> bool:
    """True while what is called is compiled, or recorded as a CUDA graph."""
    if torch.compiler.is_compiling() or x.device.type not in ASYNCHRONOUS:
        return torch.compiler.is_compiling()
    cuda: Any = torch.cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


def contained(
    call: AttentionCall, run: Run, reached: Reached, hides_logits: bool = False
) -> tuple[Tensor, Tensor | None]:
    """``run(call)``, which visits non-edges, but these carry nothing; ``reached`` as in :func:`poisoned`.

    ``hides_logits``: on a GPU ``run`` replaces the logits of non-edges, whatever they are.
    """
    given = call.q, call.k, call.v
    if not is_checked(call) or given[0].is_meta or (may_ask(given[0]) and surely_finite(*given)):
        return run(call)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    # in a backward pass the NaN of a key would be multiplied by weights 0
    if hides_logits and not learns and given[0].device.type in ASYNCHRONOUS:
        k, v = marked_keys(call.k, call.v)
        return run(replace(call, k=k, v=v))
    return on_cleaned(call, run, reached)


def marked_keys(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """``(k, v)`` where what is not finite in v is 0, and the key of its token NaN: the logit carries it."""
    bad = ~_are_finite(v).unsqueeze(-1)
    return k.masked_fill(bad, torch.nan), v.masked_fill(bad, 0.0)


def on_cleaned(call: AttentionCall, run: Run, reached: Reached) -> tuple[Tensor, Tensor | None]:
    given = call.q, call.k, call.v
    marks = marked(*given)
    q, k, v = (x.masked_fill(bad.unsqueeze(-1), 0.0) for x, bad in zip(given, marks, strict=True))
    out, lse = run(replace(call, q=q, k=k, v=v))
    bad = poisoned(marks, partial(reached, call), call.has_in_edges)
    lse = None if lse is None else lse.masked_fill(bad, torch.nan)
    return out.masked_fill(bad.unsqueeze(-1), torch.nan), lse


def cleaned(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.nan_to_num(x, 0.0, 0.0, 0.0) for x in tensors)


def marked(*tensors: Tensor) -> list[Bool[Tensor, "batch heads tokens"]]:
    """Which tokens are not finite."""
    return [~_are_finite(x) for x in tensors]


def poisoned(
    marks: Sequence[Tensor], reached: Callable[[Tensor], Tensor], has_in_edges: Tensor
) -> Bool[Tensor, "batch heads dst"]:
    """The receivers that attend to a marked token of q, k or v, or are one and have in-edges.

    ``reached(marked)``: which receivers ``[B, Hq, dst]`` have an edge from a marked sender ``[B, Hkv, src]``.
    """
    of_q, of_k, of_v = marks
    return reached(of_k | of_v) | (of_q & has_in_edges)


def _are_finite(x: Tensor) -> Bool[Tensor, "batch heads tokens"]:
    """Which tokens are finite; on a GPU in one pass over x, without another tensor of its size."""
    x = x.detach()
    # a norm of no channels has no value, and a program may be for any number of them
    if x.device.type not in ASYNCHRONOUS or not x.shape[-1]:
        return torch.isfinite(x).all(-1)
    largest: Tensor = torch.linalg.vector_norm(x, math.inf, -1)
    return largest < math.inf


def spoiled(lse: Tensor) -> Bool[Tensor, "batch heads dst"]:
    """The receivers whose softmax is not one: a logit was NaN, or +infinity, of which all weights are NaN."""
    # in a backward pass over non-edges 0 times their NaN would reach senders: they take no part
    return lse.isnan() | (lse == torch.inf)
