"""Attention along the tiles of a graph: dense kernels on the rectangles with edges, and nothing elsewhere.

The plan is computed once for each graph (``plan.planner``). A plain call runs in one fused operator on views
of the tokens; one with a score_mod, a bias or dropout is written out, a few rectangles at a time. Time goes
with the cells of the rectangles.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from gnn_attention._support import memory
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import nonfinite
from gnn_attention.backends.backend import Backend
from gnn_attention.backends.call import AttentionCall, one_of
from gnn_attention.backends.capabilities import Capabilities
from gnn_attention.backends.cpu import attention_op
from gnn_attention.backends.cpu.dense_blocks_eager import formula
from gnn_attention.backends.plan.plan import Packed, unpacked
from gnn_attention.backends.plan.planner import mask_bytes, packed_plan
from gnn_attention.graph import memoized

MASK_LIMIT = 2**32  # bytes


def run(call: AttentionCall) -> tuple[Tensor, Tensor]:
    return attention_op.along_plan(call, "tiles") if call.is_plain else _run_written_out(call)


def unsupported_reason(call: AttentionCall) -> str | None:
    needed: int = memoized(mask_bytes, one_of(call.graph, 0, 0))
    if needed <= MASK_LIMIT:
        return None if call.q.device.type == "cuda" else memory.shortage(needed)
    return (
        f"the masks of its many thinly filled tiles would need {needed / 2**30:.1f} GiB, the limit is "
        f"{MASK_LIMIT / 2**30:.0f} GiB; use backend='rows'"
    )


def bytes_needed(call: AttentionCall) -> int:
    """An estimate of the extra memory: what one call of the kernel takes, or one part of the logits."""
    return 2**26 if call.is_plain else 2**28


def _run_written_out(call: AttentionCall) -> tuple[Tensor, Tensor]:
    plan = packed_plan("whole rows", call.graph, call.q.device)
    if nonfinite.surely_finite(call.q, call.k, call.v):
        return formula(call, unpacked(*plan))
    q, k, v = nonfinite.cleaned(call.q, call.k, call.v)
    out, lse = formula(replace(call, q=q, k=k, v=v), unpacked(*plan))
    reached = partial(_reached, call, plan)
    bad = nonfinite.poisoned(call.q, call.k, call.v, reached, call.has_in_edges)
    return out.masked_fill(bad.unsqueeze(-1), torch.nan), lse.masked_fill(bad, torch.nan)


def _reached(call: AttentionCall, plan: Packed, marked: Tensor) -> Tensor:
    """Which receivers attend to a marked sender: attention with equal weights to the marks."""
    marks = marked.to(torch.float32).unsqueeze(-1)
    q = marks.new_zeros(*call.q.shape[:3], 1)
    return attention_op.attention(q, torch.zeros_like(marks), marks, plan, 1.0)[0].squeeze(-1) > 0


BACKEND = Backend(
    "tiles",
    run,
    "dense kernels on the tiles that hold edges: for structured and block-sparse graphs",
    unsupported_reason,
    bytes_needed,
    recomputes=True,
    capabilities=Capabilities(double_backward=False, varying_graphs=False, cached=True),
)
