"""Attention in the Triton kernel over rows of edges, with all options of this library in the kernel.

It serves CUDA tensors. Where Python was started with ``TRITON_INTERPRET=1`` it serves CPU tensors too,
slowly, for tests and rehearsals.
"""

import importlib.util
import os

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import failures
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.gpu import ops, score_terms
from gnn_attention.backends.gpu.csr import MOST_EDGES, rows_of
from gnn_attention.backends.gpu.problem import Problem
from gnn_attention.backends.plan.csr import fold, unfold
from gnn_attention.edge_softmax import accumulation_dtype
from gnn_attention.graph import memoized

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WIDEST = 512  # channels of a head
WORKSPACE = 2**26  # bytes of partial results of long rows
DEVICES = ("cuda", "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",)
INSTALLED = importlib.util.find_spec("triton") is not None


def run(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """``out [B, Hq, dst, Dv]`` in the dtype of q and ``lse [B, Hq, dst]`` in float32 or float64.

    A graph that differs by sample or head is computed in one launch, where the axes by which it does are
    folded into that of the tokens; the call is plain then.
    """
    graph = call.graph
    softcap, bias = score_terms.cap_and_bias(call)
    problem = Problem(
        q=fold(call.q, graph),
        k=fold(call.k, graph),
        v=fold(call.v, graph),
        scale=call.scale,
        softcap=softcap,
        bias=bias,
        dropout=call.dropout,
        seed=call.seed,
        dst_offset=graph.dst_offset,
        src_offset=graph.src_offset,
        first_sample=call.first_sample,
        first_head=call.first_head,
    )
    group = 1 if graph.heads is None else call.q.shape[1] // call.k.shape[1]
    out, lse = ops.attention(problem, memoized(rows_of, graph, call.q.device, group))
    return call.with_sinks(unfold(out, call), unfold(lse.unsqueeze(-1), call).squeeze(-1))


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why the kernel does not serve the call, or None; torch operators do what it does not."""
    if call.q.device.type not in DEVICES:
        return f"the kernel runs on {DEVICES[0]}, q is on {call.q.device}"
    if not INSTALLED:
        return "the kernel needs Triton, which comes with torch for CUDA: pip install triton"
    if call.q.dtype not in DTYPES:
        return f"the kernel has no {call.q.dtype}"
    width = max(call.q.shape[3], call.v.shape[3])
    if width > WIDEST:
        return f"the kernel takes heads of at most {WIDEST} channels, got {width}"
    if call.graph.num_edges > MOST_EDGES:
        return f"the kernel takes at most {MOST_EDGES} edges, got {call.graph.num_edges}"
    return score_terms.unsupported_reason(call) or failures.reason("rows", call)


def bytes_needed(call: AttentionCall) -> int:
    """The extra memory, at most: the rows of the graph, a workspace, and numbers of edges in both passes.

    A bias and what a score_mod adds are a number of each edge and head, which has a gradient; a score_mod
    makes positions and, for the gradient of its table, two numbers of each head.
    """
    graph, edges, (batch, heads) = call.graph, call.graph.num_edges, call.q.shape[:2]
    slices, wide = (graph.batch or 1) * (graph.heads or 1), accumulation_dtype(call.q.dtype).itemsize
    rows = 12 * edges + 4 * (slices * (graph.num_dst + graph.num_src) + 2)
    if call.is_plain:
        return rows + WORKSPACE
    return rows + WORKSPACE + (32 + 2 * wide * heads * (1 + batch)) * edges
