"""Tokens with NaN or inf: an edge carries them, a non-edge carries nothing (docs/semantics.md, 3).

If a kernel visits non-edges, ``attend`` checks that tokens are finite, since 0 times NaN is NaN.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.autograd import forward_ad

from gnn_attention._support import devices
from gnn_attention._support.autograd import recompute
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import rows
from gnn_attention.backends.call import AttentionCall, any_needs_gradients

HALF_DTYPES = {torch.float16, torch.bfloat16}
MAX_EDGES = 2**22  # Lists of this many edges take about 100 MB; graphs with more edges are split.
Result = tuple[Tensor, Tensor | None]


def contain(run: Callable[[AttentionCall], Result], call: AttentionCall) -> Result:
    """Return ``run(call)``, or run the call edge by edge if a token has NaN or inf."""
    out, lse = run(call)
    is_opaque = torch.compiler.is_compiling() or call.q.device.type in ("meta", *devices.ASYNCHRONOUS)
    if is_opaque or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return out, lse
    # NaN and inf in v reach the output, so it is checked if it is smaller and nothing needs gradients.
    is_small = out.numel() < call.v.numel() and not any_needs_gradients((call.q, call.k, call.v))
    values = out if is_small else call.v
    return (out, lse) if _are_finite(call.q, call.k, values) else _run_edge_by_edge(call)


def _are_finite(*tensors: Tensor) -> bool:
    """Check each tensor in one pass: a sum is finite only if all its terms are."""
    try:
        for x in tensors:
            x = x.detach() if x.requires_grad else x
            if not math.isfinite((x.sum(dtype=torch.float32) if x.dtype in HALF_DTYPES else x.sum()).item()):
                return False
    except RuntimeError:  # While torch traces, tensors have no values.
        return True
    return True


def _run_edge_by_edge(call: AttentionCall) -> Result:
    """Run the call edge by edge, in ranges of receivers whose lists of edges fit into memory."""
    graph, bias = call.graph, call.bias
    middle = graph.num_dst // 2
    if graph.num_edges <= MAX_EDGES or not middle:
        return recompute(rows.run, replace(call, with_lse=True))  # type: ignore[no-any-return]
    results = []
    for start, stop in ((0, middle), (middle, graph.num_dst)):
        if call.bias is not None:
            dst = graph.edges_on(call.q.device)[1]
            bias = call.bias[..., (dst >= start) & (dst < stop)]
        q = call.q[:, :, start:stop]
        results.append(_run_edge_by_edge(replace(call, q=q, graph=graph.rows(start, stop), bias=bias)))
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, 2), None if lses[0] is None else torch.cat(lses, 2)
