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
from gnn_attention.backends.call import one_of
from gnn_attention.backends.plan.csr import order_by_receiver, pointers
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.neighbours import neighbours_of

Packed = tuple[list[Tensor], list[int]]

MOST_EDGES = 2**33  # 96 GiB of graph
MOST_CHUNKS = 2**14  # of one side: with 512 channels in float32 a workspace of 32 MiB
MOST_HANDED = 2**28  # bytes of p and ds from the receivers' pass to the senders'
CHUNK = 1024  # edges, the least that are worth a program of their own
STEP = 2**16  # by which the last step of a program may run over the last edge: int32 ends that far off


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
    """The in-edges of receivers and the out-edges of senders on a device; memoized.

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
    return memoized(_rows, graph, device, group)


def sides_of(tensors: Sequence[Tensor], limits: Sequence[int]) -> tuple[Side, Side]:
    """The rows of receivers and those of senders."""
    half = len(tensors) // 2
    return Side._make([*tensors[:half], limits[0]]), Side._make([*tensors[half:], limits[1]])


def order_of(graph: TokenGraph, device: torch.device) -> Int[Tensor, " edges"] | None:
    """Where each edge of the rows stands in ``graph.edge_index``; None if they stand in the same order."""
    order: Tensor | None = memoized(_order, graph, device)[0]
    return order


def hands_over(num_edges: int, heads: int, itemsize: int) -> bool:
    """Whether the receivers' backward pass writes p and ds for the senders', which else computes them again.

    They are two numbers for each edge and head, at most :data:`MOST_HANDED` bytes.

    >>> [hands_over(edges, heads=8, itemsize=4) for edges in (2**22, 2**22 + 1)]
    [True, False]
    """
    return 2 * itemsize * heads * num_edges <= MOST_HANDED


def _rows(graph: TokenGraph, device: torch.device, group: int) -> Packed:
    slices, chosen = (graph.batch or 1) * (graph.heads or 1), neighbours_of(graph.rule)
    # the number of the slice, the sender and the receiver of every edge, by receiver, then sender
    if chosen is not None:
        # rows are counted through all slices: nothing leaves their device
        ptr, src = chosen.ptr.to(device), chosen.src.to(device, torch.int64)
        row = torch.repeat_interleave(ptr.diff(), output_size=src.numel())
        number, dst = row.div(graph.num_dst, rounding_mode="floor"), row.remainder(graph.num_dst)
    elif graph.heads is None and graph.batch is None:
        # what is put on the device here does not stay there
        (src, dst), order = graph.edge_index.to(device), order_of(graph, device)
        src, dst = (src, dst) if order is None else (src[order], dst[order])
        number = dst.new_zeros(1)
    else:
        pairs = [(b, h) for b in range(graph.batch or 1) for h in range(graph.heads or 1)]
        edges = [one_of(graph, b, h).edges_on(device) for b, h in pairs]
        counts = torch.tensor([part.shape[1] for part in edges], device=device)
        number = torch.repeat_interleave(counts, output_size=sum(part.shape[1] for part in edges))
        src, dst = torch.cat(edges, 1)
    # the query heads of a group share their senders where heads differ
    shared = 1 if graph.heads is None else group
    src, dst = number.div(shared, rounding_mode="floor") * graph.num_src + src, number * graph.num_dst + dst
    order = src.int().sort(stable=True).indices
    receivers = _side(dst, slices * graph.num_dst, src.int(), src.new_empty(0, dtype=torch.int32))
    position = _narrowed(order, order.numel() + STEP)
    senders = _side(src, slices // shared * graph.num_src, dst.int()[order], position)
    return [*receivers[:-1], *senders[:-1]], [receivers.limit, senders.limit]


def _side(own: Tensor, count: int, others: Tensor, position: Tensor) -> Side:
    ptr = _narrowed(pointers(own, count), own.numel() + STEP)
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


def _order(graph: TokenGraph, device: torch.device) -> tuple[Tensor | None]:
    """In a tuple, since a compiler takes only one bare tensor of :func:`memoized` for a constant."""
    src, dst = graph.edge_index.to(device)
    return (order_by_receiver(src, dst, graph.num_src),)


def _narrowed(index: Tensor, end: int) -> Tensor:
    """As int32 where all numbers below ``end`` fit."""
    return index.to(torch.int32 if end <= 2**31 else torch.int64)


def _ceil_div(x: Tensor, by: int) -> Tensor:
    return (x + by - 1).div(by, rounding_mode="floor")
