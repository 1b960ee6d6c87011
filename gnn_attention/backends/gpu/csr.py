"""A graph as rows for a GPU: the senders of each receiver (CSR), and the transpose, in 12 bytes an edge.

A graph that differs by sample or head becomes one graph: the tokens of all its slices stand one after the
other, so that one launch computes all of them. Everything is sorted and counted on the device of the call.

Rows of many edges are listed in chunks, so that no program works long after all others: each chunk leaves a
partial result in a workspace, and these are added in the order of the list. The chunks are so few that a
workspace is small (:data:`MOST_CHUNKS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.backends.plan.csr import list_edges
from gnn_attention.backends.plan.plan import EdgeRows, Packed
from gnn_attention.graph import TokenGraph

MOST_CHUNKS = 2**14  # of one side: with 512 channels in float32 a workspace of 32 MiB
CHUNK = 1024  # edges, the least that are worth a program of their own
# int32 numbers the edges, and the last step of a program may run over the last of them by so many
STEP = 2**16
MOST_EDGES = 2**31 - STEP


class Side(NamedTuple):
    """What one pass reads: row i has the entries ``ptr[i] .. ptr[i + 1] - 1`` of ``others``.

    Rows of more than ``limit`` entries are the ``long`` ones: long row n has the chunks ``first[n] ..
    first[n + 1] - 1``; chunk c has at most ``limit`` entries of row ``chunk_row[c]``, from
    ``chunk_start[c]`` on. ``position`` says where each entry of a sender stands by receiver; it is empty for
    receivers.
    """

    ptr: Int[Tensor, " rows_and_one"]
    others: Int[Tensor, " edges"]
    long: Int[Tensor, " long"]
    first: Int[Tensor, " long_and_one"]
    chunk_row: Int[Tensor, " chunks"]
    chunk_start: Int[Tensor, " chunks"]
    position: Int[Tensor, " edges_or_none"]
    limit: int


def rows_of(graph: TokenGraph, device: torch.device, group: int = 1) -> Packed:
    """The in-edges of receivers and the out-edges of senders on a device.

    They come as tensors and integers, which cross into a custom operator; :func:`sides_of` reads them. Of a
    graph that differs by sample or head the rows are ``(sample, head, token)`` in this order, without an axis
    by which the graph does not differ; ``group`` query heads share the senders of one key/value head.

    >>> graph = TokenGraph.from_edges(torch.tensor([[2, 0, 1], [1, 0, 1]]), 3)
    >>> receivers, senders = sides_of(*rows_of(graph, torch.device("cpu")))
    >>> receivers.ptr.tolist(), receivers.others.tolist()
    ([0, 1, 3, 3], [0, 1, 2])
    >>> senders.ptr.tolist(), senders.others.tolist(), senders.position.tolist()
    ([0, 1, 2, 3], [0, 1, 1], [0, 1, 2])
    """
    edges = EdgeRows(*list_edges(graph, device, group))
    receivers = _side(edges.ptr, edges.src, edges.src.new_empty(0))
    senders = _side(edges.out_ptr, edges.out_dst, edges.out_position)
    return [*receivers[:-1], *senders[:-1]], [receivers.limit, senders.limit]


def sides_of(tensors: Sequence[Tensor], limits: Sequence[int]) -> tuple[Side, Side]:
    half = len(tensors) // 2
    return Side._make([*tensors[:half], limits[0]]), Side._make([*tensors[half:], limits[1]])


def _side(ptr: Tensor, others: Tensor, position: Tensor) -> Side:
    degree, limit = ptr.diff().long(), CHUNK
    # the least power of two, from CHUNK on, with which the chunks of all longer rows are few
    while int(_ceil_div(degree[degree > limit], limit).sum()) > MOST_CHUNKS:
        limit *= 2
    long = (degree > limit).nonzero().squeeze(1)
    counts = _ceil_div(degree[long], limit)
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    row = long.repeat_interleave(counts)
    within = torch.arange(len(row), device=ptr.device) - first[:-1].repeat_interleave(counts)
    start = ptr[row] + (within * limit).to(ptr.dtype)
    return Side(ptr, others, long.int(), first.int(), row.int(), start, position, limit)


def _ceil_div(x: Tensor, by: int) -> Tensor:
    return (x + by - 1).div(by, rounding_mode="floor")
