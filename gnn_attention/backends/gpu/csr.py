"""A graph in CSR form, with its transpose, for a GPU. Each edge takes 12 bytes.

If a graph varies by sample or head, the tokens of its slices are numbered one slice after another,
so that one launch computes all slices. Rows are built on the device of q.

Long rows are split into chunks, so that no program runs long after all others. The partial results
of chunks are combined in order. At most :data:`MAX_CHUNKS` chunks keep their workspace small.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.backends.plan.plan import Packed
from gnn_attention.edge_ops.edge_lists import EdgeRows, list_edges
from gnn_attention.graph import TokenGraph

MAX_CHUNKS = 2**14  # Results of this many chunks take 32 MiB for a head of 512 float32 channels.
MAX_WORKSPACE_BYTES = 2**26  # Chunk results take at most this much, unless one slice takes more.
MIN_CHUNK_SIZE = 1024  # Rows of at most this many edges are never split.
# Edge indices are int32, and the last step of a program may compute indices up to 2^16 past the end.
MAX_EDGES = 2**31 - 2**16


class Side(NamedTuple):
    """The rows of one pass: row i has the entries ``ptr[i] .. ptr[i + 1] - 1`` of ``neighbours``.

    Rows longer than ``chunk_size`` are split: row ``long_row[n]`` has the chunks ``first_chunk[n]
    .. first_chunk[n + 1] - 1``. Chunk c has at most ``chunk_size`` entries of row ``chunk_row[c]``,
    from ``chunk_start[c]`` on. Entry n of senders' rows is entry ``position[n]`` of receivers'.
    """

    ptr: Int[Tensor, " rows_plus_one"]
    neighbours: Int[Tensor, " edges"]
    long_row: Int[Tensor, " long_rows"]
    first_chunk: Int[Tensor, " long_rows_plus_one"]
    chunk_row: Int[Tensor, " chunks"]
    chunk_start: Int[Tensor, " chunks"]
    position: Int[Tensor, " edges_or_zero"]
    chunk_size: int


def pack_sides(graph: TokenGraph, device: torch.device, group_size: int = 1) -> Packed:
    """Pack the in-edges of receivers and the out-edges of senders for a custom operator.

    Rows are numbered as in :func:`gnn_attention.edge_ops.edge_lists.edge_rows`.

    >>> graph = TokenGraph.from_edges(torch.tensor([[2, 0, 1], [1, 0, 1]]), 3)
    >>> receivers, senders = unpack_sides(*pack_sides(graph, torch.device("cpu")))
    >>> receivers.ptr.tolist(), receivers.neighbours.tolist()
    ([0, 1, 3, 3], [0, 1, 2])
    >>> senders.ptr.tolist(), senders.neighbours.tolist(), senders.position.tolist()
    ([0, 1, 2, 3], [0, 1, 1], [0, 1, 2])
    """
    edges = EdgeRows(*list_edges(graph, device, group_size))
    receivers = _split_long_rows(edges.ptr, edges.src, edges.src.new_empty(0))
    senders = _split_long_rows(edges.out_ptr, edges.out_dst, edges.out_position)
    return [*receivers[:-1], *senders[:-1]], [receivers.chunk_size, senders.chunk_size]


def unpack_sides(tensors: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Side, Side]:
    half = len(tensors) // 2
    return Side._make([*tensors[:half], sizes[0]]), Side._make([*tensors[half:], sizes[1]])


def _split_long_rows(ptr: Tensor, neighbours: Tensor, position: Tensor) -> Side:
    chunk_size = MIN_CHUNK_SIZE
    degree = ptr.diff().long()
    # The size of chunks doubles until all longer rows together have at most MAX_CHUNKS chunks.
    while int(_ceil_div(degree[degree > chunk_size], chunk_size).sum()) > MAX_CHUNKS:
        chunk_size *= 2
    long_row = (degree > chunk_size).nonzero().squeeze(1)
    num_chunks = _ceil_div(degree[long_row], chunk_size)
    first_chunk = torch.cat([num_chunks.new_zeros(1), num_chunks.cumsum(0)])
    row = long_row.repeat_interleave(num_chunks)
    index = torch.arange(len(row), device=ptr.device) - first_chunk[:-1].repeat_interleave(num_chunks)
    start = ptr[row] + (index * chunk_size).to(ptr.dtype)
    return Side(ptr, neighbours, long_row.int(), first_chunk.int(), row.int(), start, position, chunk_size)


def _ceil_div(dividend: Tensor, divisor: int) -> Tensor:
    return (dividend + divisor - 1).div(divisor, rounding_mode="floor")
