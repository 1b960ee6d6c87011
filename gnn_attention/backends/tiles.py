"""Attention on the tiles of a graph: dense kernels on rectangles that contain edges.

The plan is computed once for each graph (``plan.planner``). A plain call is one fused operator on views of
the tokens. A call with a score_mod, bias or dropout runs as separate operators, on a few rectangles at a
time. ``mixed`` runs plain calls on well filled tiles and a list of all other edges, in one plan.
"""

from dataclasses import replace
from functools import partial

from gnn_attention._support import memory
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.backend import Backend, Capabilities
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.cpu import attention_op
from gnn_attention.backends.cpu.dense_blocks_eager import rectangle_attention
from gnn_attention.backends.plan.plan import unpack_plan
from gnn_attention.backends.plan.planner import packed_plan
from gnn_attention.backends.plan.work import mask_bytes, mixed_work
from gnn_attention.edge_ops.edge_lists import select_slice
from gnn_attention.graph import memoized

MAX_MASK_BYTES = 2**32  # Masks take at most 4 GiB.
MAX_EDGES = 2**28  # A list of this many edges, outside of well filled tiles, takes a few GiB.


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    if call.is_plain:
        return attention_op.run_plan(call, "tiles")
    plan = unpack_plan(*memoized(packed_plan, call.graph, "whole rows", call.q.device))
    return rectangle_attention(call, plan)


def unsupported_reason(call: AttentionCall) -> str | None:
    num_bytes = memoized(mask_bytes, select_slice(call.graph, 0, 0))
    if num_bytes <= MAX_MASK_BYTES:
        return memory.shortage(num_bytes)
    gib, limit = num_bytes / 2**30, MAX_MASK_BYTES / 2**30
    return (
        f"the masks of its many thinly filled tiles would need {gib:.1f} GiB, the limit is {limit:.0f} GiB; "
        "use backend='rows'"
    )


def bytes_needed(call: AttentionCall) -> int:
    """Estimate the extra memory: one call of the kernel, or the logits of a few rectangles."""
    return 2**26 if call.is_plain else 2**28


def _mixed_unsupported_reason(call: AttentionCall) -> str | None:
    num_edges = memoized(mixed_work, select_slice(call.graph, 0, 0)).edges
    if num_edges <= MAX_EDGES:
        return None
    return f"{num_edges} edges are left outside of well filled tiles, the limit is {MAX_EDGES}"


def _mixed_bytes_needed(call: AttentionCall) -> int:
    return 2**27


BACKEND = Backend(
    "tiles",
    run,
    "dense kernels on the tiles that hold edges: for structured and block-sparse graphs",
    unsupported_reason,
    bytes_needed,
    recomputes=True,
    capabilities=Capabilities(
        devices=("cpu", "meta"),
        normalisers="elementwise",
        varying_graphs=False,
        cached=True,
        visits_non_edges=True,
        instead="backend='flex' or 'rows'",
    ),
)
MIXED = Backend(
    "mixed",
    partial(attention_op.run_plan, kind="mixed"),
    "tiles where they are well filled, rows for all other edges",
    _mixed_unsupported_reason,
    _mixed_bytes_needed,
    recomputes=True,
    capabilities=replace(
        BACKEND.capabilities,
        score_mod=False,
        bias=False,
        dropout=False,
        normalisers="softmax",
        instead="backend='tiles' or 'rows'",
    ),
)
