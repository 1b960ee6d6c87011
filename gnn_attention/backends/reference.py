"""Attention edge by edge: gather the two ends of every edge, score, softmax over in-edges, weigh, sum.

Inputs are upcast to float64 (float32 where the device has no better) before they are gathered. Edges are
taken receiver by receiver in chunks, and each chunk is recomputed for its gradient, so that a causal graph of
2048 tokens with 8 heads of 64 stays within 2 GB; what cannot is refused with the estimate.
"""

from dataclasses import replace
from typing import Any

import torch

from gnn_attention import edge_softmax
from gnn_attention._support.autograd import recompute
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.backend import Backend, Capabilities
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.message_passing import attend_along
from gnn_attention.graph import TokenGraph, memoized

MEMORY_LIMIT = 2 * 2**30
# Of gathered tensors at a time, half of it at least; the backward pass holds a few times that. Chunks are
# large so that their buffers, about a quarter each, are mapped and unmapped whole: smaller ones than 32 MiB
# leave glibc's heap in pieces, and the process 10 times larger than what is in use.
CHUNK_BYTES = MEMORY_LIMIT // 7


def run(call: AttentionCall) -> tuple[Tensor, Tensor]:
    src, dst = call.graph.edges_on(call.q.device)
    # by receiver, then sender: the same sums however edges are listed
    order = torch.argsort(dst * call.graph.num_src + src)
    rows, room = [(0, call.graph.num_dst, call.graph.num_edges)], _most_edges(call)
    if call.graph.num_edges > room:
        # a program that is compiled for any number of samples may only compare it
        most = 1
        while 2 * most <= room:
            most *= 2
        rows = memoized(_chunks_of_rows, call.graph, most)
    parts: list[Any] = []
    listed = torch.split(order, [count for *_, count in rows])
    for (start, stop, _), chosen in zip(rows, listed, strict=True):
        given = call, start, stop, src[chosen], dst[chosen], chosen
        parts.append(recompute(_some_rows, *given) if len(rows) > 1 else _some_rows(*given))
    out, lse = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    return out.to(call.q.dtype), lse.to(edge_softmax.accumulation_dtype(call.q.dtype))


def unsupported_reason(call: AttentionCall) -> str | None:
    needed = bytes_needed(call)
    if needed <= MEMORY_LIMIT:
        return None
    limit = f"its limit is {MEMORY_LIMIT / 2**30:.0f} GiB"
    return f"the reference would need about {needed / 2**30:.1f} GiB, {limit}"


def bytes_needed(call: AttentionCall) -> int:
    """The extra memory, estimated: edge lists, and a chunk or the in-edges of one receiver."""
    at_once = min(call.graph.num_edges, max(call.graph.max_in_degree, _most_edges(call)))
    return call.graph.num_edges * 64 + 4 * _bytes_per_edge(call) * at_once


def _bytes_per_edge(call: AttentionCall) -> int:
    batch, heads, _, dim = call.q.shape
    return batch * heads * 2 * (dim + call.v.shape[-1] + 4) * _working_dtype(call.q).itemsize


def _working_dtype(q: Tensor) -> torch.dtype:
    # its errors should be those of its inputs and its output alone
    return torch.float32 if q.device.type == "mps" else torch.float64


def _most_edges(call: AttentionCall) -> int:
    return max(1, CHUNK_BYTES // max(1, _bytes_per_edge(call)))


def _some_rows(
    call: AttentionCall, start: int, stop: int, src: Tensor, dst: Tensor, chosen: Tensor
) -> tuple[Tensor, Tensor | None]:
    bias = None if call.bias is None else call.bias[..., chosen]
    part = replace(call, q=call.q[:, :, start:stop], bias=bias, with_lse=True)
    return attend_along(part, _working_dtype(call.q), src, dst, start)


def _chunks_of_rows(graph: TokenGraph, most: int) -> list[tuple[int, int, int]]:
    """(first row, end row, edges) of runs of rows with at most ``most`` edges, or of one fuller row."""
    chunks, start, count = [], 0, 0
    for row, degree in enumerate(graph.in_degree().tolist()):
        if count and count + degree > most:
            chunks.append((start, row, count))
            start, count = row, 0
        count += degree
    return [*chunks, (start, graph.num_dst, count)]


BACKEND = Backend(
    "reference",
    run,
    "edge by edge in float64, or float32 where there is no better, within 2 GiB: the oracle",
    unsupported_reason,
    bytes_needed,
    capabilities=Capabilities(
        varying_graphs=False, cached=True, parallel_edges="kept", instead="backend='auto'"
    ),
)
