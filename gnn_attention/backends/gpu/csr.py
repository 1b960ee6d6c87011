"""A graph as rows for a GPU: the senders of each receiver (CSR), and the transpose, in 8 bytes an edge.

Rows of many edges are listed in chunks, so that no program works long after all others: each chunk leaves a
partial result in a workspace, and these are added in the order of the list. The chunks are so few that a
workspace is small (:data:`MOST_CHUNKS`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.backends.plan.csr import order_by_receiver, pointers
from gnn_attention.graph import TokenGraph, memoized

MOST_EDGES = 2**33  # 64 GiB of graph
MOST_CHUNKS = 2**14  # of one side: with 512 channels in float32 a workspace of 32 MiB
MOST_HANDED = 2**28  # bytes of p and ds from the receivers' pass to the senders'
CHUNK = 1024  # edges, the least that are worth a program of their own
STEP = 2**16  # by which the last step of a program may run over the last edge: int32 ends that far off


class Side(NamedTuple):
    """What one pass reads: row i has the entries ``ptr[i] .. ptr[i + 1] - 1`` of ``others``.

    Rows of more than ``limit`` entries are the ``long`` ones: long row n has the chunks ``first[n] ..
    first[n + 1] - 1``; chunk c has at most ``limit`` entries of row ``chunk_row[c]``, from
    ``chunk_start[c]`` on. ``position`` says where each entry stands by receiver; it is empty for receivers,
    and for senders unless something is given for each edge.
    """

    ptr: Int[Tensor, " rows_and_one"]
    others: Int[Tensor, " edges"]
    long: Int[Tensor, " long"]
    first: Int[Tensor, " long_and_one"]
    chunk_row: Int[Tensor, " chunks"]
    chunk_start: Int[Tensor, " chunks"]
    position: Int[Tensor, " edges_or_none"]
    limit: int


def rows_of(graph: TokenGraph, device: torch.device, for_edges: bool = False) -> tuple[Side, Side]:
    """The in-edges of receivers and the out-edges of senders of a plain graph on a device; memoized.

    ``for_edges``: with ``position``, 4 bytes more an edge.

    >>> graph = TokenGraph.from_edges(torch.tensor([[2, 0, 1], [1, 0, 1]]), 3)
    >>> receivers, senders = rows_of(graph, torch.device("cpu"), for_edges=True)
    >>> receivers.ptr.tolist(), receivers.others.tolist()
    ([0, 1, 3, 3], [0, 1, 2])
    >>> senders.ptr.tolist(), senders.others.tolist(), senders.position.tolist()
    ([0, 1, 2, 3], [0, 1, 1], [0, 1, 2])
    """
    receivers, senders = memoized(_lowered, graph, device)
    if for_edges:
        senders = senders._replace(position=memoized(_positions, graph, device))
    return receivers, senders


def order_of(graph: TokenGraph, device: torch.device) -> Int[Tensor, " edges"] | None:
    """Where each edge of the rows stands in ``graph.edge_index``; None if they stand in the same order."""
    order: Tensor | None = memoized(_order, graph, device)[0]
    return order


def bytes_of(graph: TokenGraph, for_edges: bool = False) -> int:
    """The storage of the rows, without building them."""
    narrow = [4 if count < 2**31 else 8 for count in (graph.num_src, graph.num_dst, graph.num_edges + STEP)]
    each = narrow[0] + narrow[1] + (narrow[2] if for_edges else 0)
    return graph.num_edges * each + (graph.num_dst + graph.num_src + 2) * narrow[2]


def hands_over(num_edges: int, heads: int, itemsize: int) -> bool:
    """Whether the receivers' backward pass writes p and ds for the senders', which else computes them again.

    They are two numbers for each edge and head, at most :data:`MOST_HANDED` bytes.

    >>> [hands_over(edges, heads=8, itemsize=4) for edges in (2**22, 2**22 + 1)]
    [True, False]
    """
    return 2 * itemsize * heads * num_edges <= MOST_HANDED


def edge_numbers(graph: TokenGraph, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Where the edges of each receiver and sender begin, and the place by receiver of each edge by sender."""
    # made anew, so that rows are not cached on the device as well
    src, dst = _sorted_edges(graph, device)
    order = _narrowed(src.sort(stable=True).indices, graph.num_edges + STEP)
    return row_pointers(dst, graph.num_dst), row_pointers(src, graph.num_src), order


def _lowered(graph: TokenGraph, device: torch.device) -> tuple[Side, Side]:
    src, dst = _sorted_edges(graph, device)
    others = _narrowed(src, graph.num_src)
    out = others.sort(stable=True).indices
    out_others = _narrowed(dst, graph.num_dst)[out]
    return _side(dst, graph.num_dst, others), _side(src, graph.num_src, out_others)


def _side(own: Tensor, count: int, others: Tensor) -> Side:
    ptr = row_pointers(own, count)
    limit = _limit(ptr)
    return Side(ptr, others, *_chunks(ptr, limit), others.new_empty(0), limit)


def _sorted_edges(graph: TokenGraph, device: torch.device) -> Tensor:
    """By receiver, then sender. What is put on the device for that does not stay there."""
    edges, order = graph.edge_index.to(device), order_of(graph, device)
    return edges if order is None else edges[:, order]


def _order(graph: TokenGraph, device: torch.device) -> tuple[Tensor | None]:
    """In a tuple, since a compiler takes only one bare tensor of :func:`memoized` for a constant."""
    src, dst = graph.edge_index.to(device)
    return (order_by_receiver(src, dst, graph.num_src),)


def _positions(graph: TokenGraph, device: torch.device) -> Tensor:
    order = rows_of(graph, device)[0].others.sort(stable=True).indices
    return _narrowed(order, graph.num_edges + STEP)


def row_pointers(index: Tensor, count: int) -> Int[Tensor, " rows_and_one"]:
    """Where the entries of each row begin, in 4 bytes where these are enough."""
    return _narrowed(pointers(index, count), index.numel() + STEP)


def _narrowed(index: Tensor, end: int) -> Tensor:
    """As int32 where all numbers below ``end`` fit."""
    return index.to(torch.int32 if end <= 2**31 else torch.int64)


def _chunks(ptr: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``long``, ``first``, ``chunk_row`` and ``chunk_start`` of a :class:`Side`."""
    degree = ptr.diff().long()
    long = (degree > limit).nonzero().squeeze(1)
    counts = ceil_div(degree[long], limit)
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    row = long.repeat_interleave(counts)
    within = torch.arange(len(row), device=ptr.device) - first[:-1].repeat_interleave(counts)
    start = ptr[row] + (within * limit).to(ptr.dtype)
    return _narrowed(long, len(degree)), first.int(), _narrowed(row, len(degree)), start


def _limit(ptr: Tensor) -> int:
    """The least power of two, from :data:`CHUNK` on, with which the chunks of all longer rows are few."""
    degree, limit = ptr.diff().long(), CHUNK
    while int(ceil_div(degree[degree > limit], limit).sum()) > MOST_CHUNKS:
        limit *= 2
    return limit


def ceil_div(x: Tensor, by: int | Tensor) -> Tensor:
    return (x + by - 1).div(by, rounding_mode="floor")
