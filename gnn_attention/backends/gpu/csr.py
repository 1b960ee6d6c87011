"""A graph as rows for a GPU: the senders of each receiver (CSR), and the transpose, in 8 bytes an edge.

A graph that differs by sample or head becomes one graph: the tokens of all its slices stand one after the
other, so that one launch computes all of them. Everything is sorted and counted on the device of the call.

Rows of many edges are listed in chunks, so that no program works long after all others: each chunk leaves a
partial result in a workspace, and these are added in the order of the list. The chunks are so few that a
workspace is small (:data:`MOST_CHUNKS`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.backends.call import one_of
from gnn_attention.backends.plan.csr import order_by_receiver, pointers
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.neighbours import Neighbours, neighbours_of

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


def rows_of(
    graph: TokenGraph, device: torch.device, for_edges: bool = False, group: int = 1
) -> tuple[Side, Side]:
    """The in-edges of receivers and the out-edges of senders on a device; memoized.

    Of a graph that differs by sample or head the rows are ``(sample, head, token)`` in this order, without
    an axis by which the graph does not differ; ``group`` query heads share the senders of one key/value
    head. ``for_edges``: with ``position``, 4 bytes more an edge.

    >>> graph = TokenGraph.from_edges(torch.tensor([[2, 0, 1], [1, 0, 1]]), 3)
    >>> receivers, senders = rows_of(graph, torch.device("cpu"), for_edges=True)
    >>> receivers.ptr.tolist(), receivers.others.tolist()
    ([0, 1, 3, 3], [0, 1, 2])
    >>> senders.ptr.tolist(), senders.others.tolist(), senders.position.tolist()
    ([0, 1, 2, 3], [0, 1, 1], [0, 1, 2])
    """
    receivers, senders = memoized(_sides, graph, device, group)
    if for_edges:
        position = memoized(_positions, graph, device, group)
        senders = senders._replace(position=position)
    return receivers, senders


def order_of(graph: TokenGraph, device: torch.device) -> Int[Tensor, " edges"] | None:
    """Where each edge of the rows stands in ``graph.edge_index``; None if they stand in the same order."""
    order: Tensor | None = memoized(_order, graph, device)[0]
    return order


def bytes_of(graph: TokenGraph, for_edges: bool = False) -> int:
    """The storage of the rows, without building them."""
    slices = (graph.batch or 1) * (graph.heads or 1)
    edges, num_dst, num_src = graph.num_edges, slices * graph.num_dst, slices * graph.num_src
    wide = 4 if edges + STEP < 2**31 else 8
    each = (4 if num_src < 2**31 else 8) + (4 if num_dst < 2**31 else 8) + (wide if for_edges else 0)
    return edges * each + (num_dst + num_src + 2) * wide


def hands_over(num_edges: int, heads: int, itemsize: int) -> bool:
    """Whether the receivers' backward pass writes p and ds for the senders', which else computes them again.

    They are two numbers for each edge and head, at most :data:`MOST_HANDED` bytes.

    >>> [hands_over(edges, heads=8, itemsize=4) for edges in (2**22, 2**22 + 1)]
    [True, False]
    """
    return 2 * itemsize * heads * num_edges <= MOST_HANDED


def _sides(graph: TokenGraph, device: torch.device, group: int) -> tuple[Side, Side]:
    slices = (graph.batch or 1) * (graph.heads or 1)
    num_dst, num_src = slices * graph.num_dst, slices // _shared(graph, group) * graph.num_src
    src, dst = _sorted_edges(graph, device, group)
    senders = _narrowed(src, num_src)
    order = senders.sort(stable=True).indices
    receivers = _narrowed(dst, num_dst)[order]
    return _side(dst, num_dst, senders), _side(src, num_src, receivers)


def _shared(graph: TokenGraph, group: int) -> int:
    """How many slices of the graph share their senders: the query heads of a group, where heads differ."""
    return 1 if graph.heads is None else group


def _side(own: Tensor, count: int, others: Tensor) -> Side:
    ptr = _narrowed(pointers(own, count), own.numel() + STEP)
    limit = _limit(ptr)
    return Side(ptr, others, *_chunks(ptr, limit), others.new_empty(0), limit)


def _sorted_edges(graph: TokenGraph, device: torch.device, group: int = 1) -> Tensor:
    """Senders and receivers of all edges, by receiver, then sender."""
    chosen = neighbours_of(graph.rule)
    if chosen is not None:
        return _one_after_another(graph, _chosen_slices(chosen, device), group)
    if graph.heads is not None or graph.batch is not None:
        return _one_after_another(graph, _slices_of(graph, device), group)
    # what is put on the device here does not stay there
    edges, order = graph.edge_index.to(device), order_of(graph, device)
    return edges if order is None else edges[:, order]


def _slices_of(graph: TokenGraph, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The number of the slice, the sender and the receiver of every edge of a graph that varies."""
    heads = graph.heads or 1
    slices = [divmod(number, heads) for number in range((graph.batch or 1) * heads)]
    edges = [one_of(graph, b, h).edges_on(device) for b, h in slices]
    counts = torch.tensor([part.shape[1] for part in edges], device=device)
    number = torch.repeat_interleave(counts, output_size=sum(part.shape[1] for part in edges))
    src, dst = torch.cat(edges, 1)
    return number, src, dst


def _chosen_slices(chosen: Neighbours, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The same of chosen rows, which are counted through all slices: nothing leaves their device."""
    ptr, src = chosen.ptr.to(device), chosen.src.to(device, torch.int64)
    row = torch.repeat_interleave(ptr.diff(), output_size=src.numel())
    num_dst = chosen.shape[2]
    return row.div(num_dst, rounding_mode="floor"), src, row.remainder(num_dst)


def _one_after_another(graph: TokenGraph, slices: tuple[Tensor, Tensor, Tensor], group: int) -> Tensor:
    """Edges of all slices as one graph over their tokens; heads of a group have their senders in common."""
    number, src, dst = slices
    of_senders = number.div(_shared(graph, group), rounding_mode="floor")
    return torch.stack([of_senders * graph.num_src + src, number * graph.num_dst + dst])


def _order(graph: TokenGraph, device: torch.device) -> tuple[Tensor | None]:
    """In a tuple, since a compiler takes only one bare tensor of :func:`memoized` for a constant."""
    src, dst = graph.edge_index.to(device)
    return (order_by_receiver(src, dst, graph.num_src),)


def _positions(graph: TokenGraph, device: torch.device, group: int) -> Tensor:
    order = rows_of(graph, device, group=group)[0].others.sort(stable=True).indices
    return _narrowed(order, order.numel() + STEP)


def _narrowed(index: Tensor, end: int) -> Tensor:
    """As int32 where all numbers below ``end`` fit."""
    return index.to(torch.int32 if end <= 2**31 else torch.int64)


def _chunks(ptr: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``long``, ``first``, ``chunk_row`` and ``chunk_start`` of a :class:`Side`."""
    degree = ptr.diff().long()
    long = (degree > limit).nonzero().squeeze(1)
    counts = _ceil_div(degree[long], limit)
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    row = long.repeat_interleave(counts)
    within = torch.arange(len(row), device=ptr.device) - first[:-1].repeat_interleave(counts)
    start = ptr[row] + (within * limit).to(ptr.dtype)
    return _narrowed(long, len(degree)), first.int(), _narrowed(row, len(degree)), start


def _limit(ptr: Tensor) -> int:
    """The least power of two, from :data:`CHUNK` on, with which the chunks of all longer rows are few."""
    degree, limit = ptr.diff().long(), CHUNK
    while int(_ceil_div(degree[degree > limit], limit).sum()) > MOST_CHUNKS:
        limit *= 2
    return limit


def _ceil_div(x: Tensor, by: int) -> Tensor:
    return (x + by - 1).div(by, rounding_mode="floor")
