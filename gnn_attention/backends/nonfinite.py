"""Tokens that hold NaN or inf: an edge carries them, a non-edge carries nothing (docs/semantics.md, 3).

A kernel that visits non-edges assumes finite tokens, because 0 times NaN is NaN: ``attend`` looks once.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.autograd import forward_ad

from gnn_attention._support.autograd import recompute
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import devices, rows
from gnn_attention.backends.call import AttentionCall, any_needs_gradients

HALF = {torch.float16, torch.bfloat16}
MOST_EDGES = 2**22  # of a range of receivers, whose lists take some 100 MB
Result = tuple[Tensor, Tensor | None]


def contain(run: Callable[[AttentionCall], Result], call: AttentionCall) -> Result:
    """``run(call)``; where a token is not finite and can be seen, the same call edge by edge."""
    out, lse = run(call)
    unseen = torch.compiler.is_compiling() or call.q.device.type in ("meta", *devices.ASYNCHRONOUS)
    if unseen or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return out, lse
    # Without gradients a value that the kernel visited shows in the output, which is short in decoding.
    is_short = out.numel() < call.v.numel() and not any_needs_gradients((call.q, call.k, call.v))
    shown = out if is_short else call.v
    return (out, lse) if _are_finite(call.q, call.k, shown) else _along_edges(call)


def _are_finite(*tensors: Tensor) -> bool:
    """One pass over each: a sum is finite only if everything is."""
    try:
        for x in tensors:
            x = x.detach() if x.requires_grad else x
            if not math.isfinite((x.sum(dtype=torch.float32) if x.dtype in HALF else x.sum()).item()):
                return False
    except RuntimeError:  # of tensors without numbers, while torch traces
        return True
    return True


def _along_edges(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The call by the formula over its edges, in ranges of receivers whose lists of edges fit into memory."""
    graph, bias, half = call.graph, call.bias, call.graph.num_dst // 2
    if graph.num_edges <= MOST_EDGES or not half:
        return recompute(rows.run, replace(call, with_lse=True))  # type: ignore[no-any-return]
    parts = []
    for start, stop in ((0, half), (half, graph.num_dst)):
        if call.bias is not None:
            dst = graph.edges_on(call.q.device)[1]
            bias = call.bias[..., (dst >= start) & (dst < stop)]
        q, receivers = call.q[:, :, start:stop], graph.rows(start, stop)
        parts.append(_along_edges(replace(call, q=q, graph=receivers, bias=bias)))
    (out, lse), (more_out, more_lse) = parts
    return torch.cat([out, more_out], 2), torch.cat([lse, more_lse], 2)
