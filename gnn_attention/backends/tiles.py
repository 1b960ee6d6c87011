"""Attention along the tiles of a graph: dense kernels on the rectangles with edges, and nothing elsewhere.

The plan is computed once for each graph (``plan.planner``). A plain call runs in one fused operator on views
of the tokens; one with a score_mod, a bias or dropout is written out, a few rectangles at a time. ``mixed``
takes plain calls along well filled tiles and a list of all other edges, pieces of one plan.
"""

from dataclasses import replace
from functools import partial

from gnn_attention._support import memory
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.backend import Backend, Capabilities
from gnn_attention.backends.call import AttentionCall, one_of
from gnn_attention.backends.cpu import attention_op
from gnn_attention.backends.cpu.dense_blocks_eager import rectangle_attention
from gnn_attention.backends.plan.plan import unpack_plan
from gnn_attention.backends.plan.planner import packed_plan
from gnn_attention.backends.plan.work import mask_bytes, mixed_work
from gnn_attention.graph import memoized

MASK_LIMIT = 2**32  # bytes
MOST_EDGES = 2**28  # outside of well filled tiles, whose list takes some GiB


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    if call.is_plain:
        return attention_op.run_plan(call, "tiles")
    plan = unpack_plan(*memoized(packed_plan, call.graph, "whole rows", call.q.device))
    return rectangle_attention(call, plan)


def unsupported_reason(call: AttentionCall) -> str | None:
    needed = memoized(mask_bytes, one_of(call.graph, 0, 0))
    if needed <= MASK_LIMIT:
        return memory.shortage(needed)
    what, limit = "the masks of its many thinly filled tiles", f"the limit is {MASK_LIMIT / 2**30:.0f} GiB"
    return f"{what} would need {needed / 2**30:.1f} GiB, {limit}; use backend='rows'"


def bytes_needed(call: AttentionCall) -> int:
    """An estimate of the extra memory: what one call of the kernel takes, or one part of the logits."""
    return 2**26 if call.is_plain else 2**28


def _long_list(call: AttentionCall) -> str | None:
    edges_left = memoized(mixed_work, one_of(call.graph, 0, 0)).edges
    if edges_left <= MOST_EDGES:
        return None
    return f"{edges_left} edges are left outside of well filled tiles, the limit is {MOST_EDGES}"


def _bytes_of_mixed(call: AttentionCall) -> int:
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
        double_backward=False,
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
    _long_list,
    _bytes_of_mixed,
    recomputes=True,
    capabilities=replace(
        BACKEND.capabilities,
        score_mod=False,
        bias=False,
        dropout=False,
        instead="backend='tiles' or 'rows'",
    ),
)
