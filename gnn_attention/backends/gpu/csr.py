"""A graph as rows for a GPU (CSR and its transpose), in 12 bytes for each edge.

A graph that differs by sample or head becomes one graph: the tokens of its slices are numbered one
slice after another, so that one launch computes all. Rows are built on the device of the call.

Long rows are split into chunks, so that no program runs long after all others. There are few chunks
(:data:`MOST_CHUNKS`), so the workspace of their partial results, which are combined in order, is small.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.backends.plan.csr import list_edges
from gnn_attention.backends.plan.plan import EdgeRows, Packed
from gnn_attention.graph import TokenGraph

MOST_CHUNKS = 2**14  # A side has at most this many; at 512 channels in float32 their results take 32 MiB.
WORKSPACE = 2**26  # A launch makes at most this many bytes of chunk results, unless one slice has more.
CHUNK = 1024  # Rows of at most this many edges are never split.
# Edge indices are int32, and the last step of a program may compute indices up to 2^16 past the end.
MOST_EDGES = 2**31 - 2**16


class Side(NamedTuple):
    """What one pass reads: row i has the entries ``ptr[i] .. ptr[i + 1] - 1`` of ``neighbours``.

    A row of more than ``limit`` entries, ``long_row[n]``, has the chunks ``first_chunk[n] ..
    first_chunk[n + 1] - 1``. Chunk c has at most ``limit`` entries of row ``chunk_row[c]``, from
    ``chunk_start[c]`` on. In rows of senders, ``position`` is the index among those of receivers.
    """

    ptr: Int[Tensor, " rows_and_one"]
    neighbours: Int[Tensor, " edges"]
    long_row: Int[Tensor, " long"]
    first_chunk: Int[Tensor, " long_and_one"]
    chunk_row: Int[Tensor, " chunks"]
    chunk_start: Int[Tensor, " chunks"]
    position: Int[Tensor, " edges_or_none"]
    limit: int


def pack_sides(graph: TokenGraph, device: torch.device, group: int = 1) -> Packed:
    """Pack the in-edges of receivers and the out-edges of senders for a custom operator.

    Rows are those of :func:`gnn_attention.backends.plan.csr.edge_rows`.

    >>> graph = TokenGraph.from_edges(torch.tensor([[2, 0, 1], [1, 0, 1]]), 3)
    >>> receivers, senders = unpack_sides(*pack_sides(graph, torch.device("cpu")))
    >>> receivers.ptr.tolist(), receivers.neighbours.tolist()
    ([0, 1, 3, 3], [0, 1, 2])
    >>> senders.ptr.tolist(), senders.neighbours.tolist(), senders.position.tolist()
    ([0, 1, 2, 3], [0, 1, 1], [0, 1, 2])
    """
    edges = EdgeRows(*list_edges(graph, device, group))
    receivers = _split_long_rows(edges.ptr, edges.src, edges.src.new_empty(0))
    senders = _split_long_rows(edges.out_ptr, edges.out_dst, edges.out_position)
    return [*receivers[:-1], *senders[:-1]], [receivers.limit, senders.limit]


def unpack_sides(tensors: Sequence[Tensor], limits: Sequence[int]) -> tuple[Side, Side]:
    half = len(tensors) // 2
    return Side._make([*tensors[:half], limits[0]]), Side._make([*tensors[half:], limits[1]])


def _split_long_rows(ptr: Tensor, neighbours: Tensor, position: Tensor) -> Side:
    degree, limit = ptr.diff().long(), CHUNK
    # The limit doubles until longer rows have at most MOST_CHUNKS chunks in all.
    while int(_ceil_div(degree[degree > limit], limit).sum()) > MOST_CHUNKS:
        limit *= 2
    long_row = (degree > limit).nonzero().squeeze(1)
    counts = _ceil_div(degree[long_row], limit)
    first_chunk = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    row = long_row.repeat_interleave(counts)
    number = torch.arange(len(row), device=ptr.device) - first_chunk[:-1].repeat_interleave(counts)
    start = ptr[row] + (number * limit).to(ptr.dtype)
    return Side(ptr, neighbours, long_row.int(), first_chunk.int(), row.int(), start, position, limit)


def _ceil_div(x: Tensor, divisor: int) -> Tensor:
    return (x + divisor - 1).div(divisor, rounding_mode="floor")
