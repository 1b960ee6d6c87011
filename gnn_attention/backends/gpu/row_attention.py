"""Attention in the Triton kernel over rows of edges, except custom score_mods and some normalisers.

The kernel runs on CUDA tensors. If Python was started with ``TRITON_INTERPRET=1``, it also runs on
CPU tensors, slowly, for tests and trial runs.
"""

import importlib.util
import os

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import failures
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.gpu import ops, score_terms
from gnn_attention.backends.gpu.csr import MAX_EDGES, MAX_WORKSPACE_BYTES, pack_sides
from gnn_attention.backends.gpu.problem import Problem
from gnn_attention.edge_ops.edge_lists import merge_slices, split_slices
from gnn_attention.edge_ops.normalisers import ELEMENTWISE
from gnn_attention.edge_softmax import accumulation_dtype
from gnn_attention.graph import memoized

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_CHANNELS = 512  # A head has at most this many channels.
MAX_FEATURES = 128
DEVICES = ("cuda", "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",)
HAS_TRITON = importlib.util.find_spec("triton") is not None


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Compute ``out [B, Hq, dst, Dv]`` in the dtype of q and ``lse [B, Hq, dst]`` of a softmax.

    If the graph varies by sample or head, the call must be plain. These axes are folded into the
    token axis, so that one launch computes all slices.
    """
    graph = call.graph
    softcap, bias = score_terms.make_cap_and_bias(call)
    q = merge_slices(call.q, graph)
    dtype, edge_type = accumulation_dtype(q.dtype), None
    r, a = q.new_empty(*q.shape[:3], 0, dtype=dtype), q.new_empty(q.shape[0], 1, 0, 0, dtype=dtype)
    if call.features is not None:
        r, a, edge_type = call.features.kernel_inputs(q.to(dtype), graph)
    k, v = merge_slices(call.k, graph), merge_slices(call.v, graph)
    bias = q.new_empty(q.shape[0], 0, 0, dtype=dtype) if bias is None else bias
    offsets = graph.dst_offset, graph.src_offset, call.first_sample, call.first_head
    options = call.scale, softcap, call.dropout, call.seed, *offsets, edge_type, str(call.normaliser)
    problem = Problem(q, k, v, r, a, bias, *options)
    group_size = 1 if graph.heads is None else call.q.shape[1] // call.k.shape[1]
    out, sums, lse = ops.attention(problem, memoized(pack_sides, graph, call.q.device, group_size))
    if call.features is not None and r.shape[3]:
        # The backward pass of the kernel needs its output.
        out = call.features.add_sums(out.clone(), sums)
    out = split_slices(out, graph, *call.q.shape[:2])
    lse = split_slices(lse.unsqueeze(-1), graph, *call.q.shape[:2]).squeeze(-1)
    out, lse = call.with_sinks(out, lse)
    return out.to(call.q.dtype), lse if call.normaliser == "softmax" else None


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return why the kernel cannot compute a call, or None if it can."""
    if call.q.device.type not in DEVICES:
        return f"the kernel runs on {DEVICES[0]}, q is on {call.q.device}"
    if not HAS_TRITON:
        return "the kernel needs Triton, which comes with torch for CUDA: pip install triton"
    if call.q.dtype not in DTYPES:
        return f"the kernel does not support {call.q.dtype}"
    width = max(call.q.shape[3], call.v.shape[3])
    if width > MAX_CHANNELS:
        return f"the kernel supports heads of at most {MAX_CHANNELS} channels, got {width}"
    if call.graph.num_edges > MAX_EDGES:
        return f"the kernel supports at most {MAX_EDGES} edges, got {call.graph.num_edges}"
    if call.normaliser not in ("softmax", *ELEMENTWISE):
        return f"the kernel does not support normaliser={call.normaliser!r}"
    num_features = 0 if call.features is None else call.features.num_types * call.features.attr.shape[1]
    if num_features > MAX_FEATURES:
        return (
            f"the kernel supports at most {MAX_FEATURES} features of all types of edges, got {num_features}"
        )
    return score_terms.unsupported_reason(call) or failures.reason("rows", call)


def bytes_needed(call: AttentionCall) -> int:
    """Bound the bytes that a call needs for rows of the graph, a workspace, and values of edges.

    A bias, score_mod or features take a few values for each sample, head and edge. A score_mod also
    computes indices of tokens, and two values for each head and edge for the gradient of its table.
    """
    graph = call.graph
    batch, heads = call.q.shape[:2]
    itemsize = accumulation_dtype(call.q.dtype).itemsize
    num_slices = (graph.batch or 1) * (graph.heads or 1)
    num_values = 2 if call.features is None else 4 + call.features.attr.shape[1] // heads
    edge_bytes = 12 if call.is_plain else 44 + num_values * itemsize * heads * (1 + batch)
    row_bytes = 4 * (num_slices * (graph.num_dst + graph.num_src) + 2)
    return edge_bytes * graph.num_edges + row_bytes + MAX_WORKSPACE_BYTES
