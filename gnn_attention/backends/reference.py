"""Attention edge by edge in float64 (float32 if the device has no better), within 2 GiB: the oracle.

Edges are processed in chunks of receivers, and the backward pass recomputes each chunk, so that a
causal graph of 2048 tokens with 8 heads of 64 channels fits. A call that needs more is refused.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gnn_attention import edge_softmax
from gnn_attention._support.autograd import recompute
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import message_passing
from gnn_attention.backends.backend import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.graph import TokenGraph, memoized

MAX_BYTES = 2 * 2**30
# The gathered tensors of a chunk take this many bytes, and the backward pass a few times as many. Buffers
# below 32 MiB would fragment glibc's heap, and the process would grow to 10 times the memory in use.
BYTES_PER_CHUNK = MAX_BYTES // 7


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    src, dst = call.graph.edges_on(call.q.device)
    # Edges are sorted by receiver, then sender, so that the result does not depend on their order.
    order = torch.argsort(dst * call.graph.num_src + src)
    if not isinstance(call.normaliser, str):
        # A function receives all edges, in the order of the graph.
        order = torch.arange(len(src), device=src.device)
    chunks = [(0, call.graph.num_dst, call.graph.num_edges)]
    limit = _max_chunk_edges(call)
    if call.graph.num_edges > limit:
        # In a program compiled for any batch size, the limit is symbolic, but it can be compared.
        max_edges = 1
        while 2 * max_edges <= limit:
            max_edges *= 2
        chunks = memoized(_split_rows, call.graph, max_edges)
    run_chunk = partial(recompute, _run_chunk) if len(chunks) > 1 else _run_chunk
    results: list[Any] = []
    for (start, stop, _), index in zip(chunks, torch.split(order, [n for *_, n in chunks]), strict=True):
        results.append(run_chunk(call, start, stop, src[index], dst[index], index))
    outs, lses = zip(*results, strict=True)
    out = torch.cat(outs, dim=2).to(call.q.dtype)
    if call.normaliser != "softmax":
        return out, None
    return out, torch.cat(lses, dim=2).to(edge_softmax.accumulation_dtype(call.q.dtype))


def unsupported_reason(call: AttentionCall) -> str | None:
    if not isinstance(call.normaliser, str) and call.graph.num_edges > _max_chunk_edges(call):
        return "a normaliser that is a function needs all edges at once; use backend='rows'"
    gib = bytes_needed(call) / 2**30
    limit = MAX_BYTES / 2**30
    if gib <= limit:
        return None
    return f"the reference would need about {gib:.1f} GiB, its limit is {limit:.0f} GiB"


def bytes_needed(call: AttentionCall) -> int:
    """Estimate the extra memory: edge lists, and the tensors gathered for the largest chunk."""
    chunk_edges = min(call.graph.num_edges, max(call.graph.max_in_degree, _max_chunk_edges(call)))
    return call.graph.num_edges * 64 + 4 * _bytes_per_edge(call) * chunk_edges


def _bytes_per_edge(call: AttentionCall) -> int:
    batch, heads, _, dim = call.q.shape
    return batch * heads * 2 * (dim + call.v.shape[-1] + 4) * _working_dtype(call.q).itemsize


def _working_dtype(q: Tensor) -> torch.dtype:
    # In float64 the only errors are those of rounding the inputs and the output.
    return torch.float32 if q.device.type == "mps" else torch.float64


def _max_chunk_edges(call: AttentionCall) -> int:
    return max(1, BYTES_PER_CHUNK // max(1, _bytes_per_edge(call)))


def _run_chunk(
    call: AttentionCall, start: int, stop: int, src: Tensor, dst: Tensor, index: Tensor
) -> tuple[Tensor, Tensor | None]:
    bias = None if call.bias is None else call.bias[..., index]
    chunk = replace(call, q=call.q[:, :, start:stop], bias=bias, with_lse=True)
    return message_passing.attend_along_edges(chunk, _working_dtype(call.q), src, dst, start, index)


def _split_rows(graph: TokenGraph, max_edges: int) -> list[tuple[int, int, int]]:
    """Split rows into chunks (start, stop, edges) with at most ``max_edges`` edges or a single row each."""
    chunks, start, num_edges = [], 0, 0
    for row, degree in enumerate(graph.in_degree().tolist()):
        if num_edges and num_edges + degree > max_edges:
            chunks.append((start, row, num_edges))
            start, num_edges = row, 0
        num_edges += degree
    return [*chunks, (start, graph.num_dst, num_edges)]


BACKEND = Backend(
    "reference",
    run,
    "edge by edge in float64 (float32 if the device has no float64), within 2 GiB: the oracle",
    unsupported_reason,
    bytes_needed,
    capabilities=message_passing.BACKEND.capabilities,
)
