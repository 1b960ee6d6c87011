"""A graph as a list of edges receiver by receiver, with its transpose, in int32 (for fewer than 2^31)."""

from itertools import pairwise

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.backends.plan.plan import Edges
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.derived import receiver_order
from gnn_attention.graph.neighbours import neighbours_of


def edges_of(graph: TokenGraph, device: torch.device) -> Edges:
    """The edges of a plain or chosen graph on a device, by receiver, then sender; cached."""
    tensors = memoized(_lowered, graph, device)
    if graph.heads is None and graph.batch is None:
        return Edges(*tensors)
    chosen = neighbours_of(graph.rule)
    assert chosen is not None
    return Edges(*tensors, slices=chosen.shape[:2])


def order_of(graph: TokenGraph, device: torch.device) -> Int[Tensor, " edges"]:
    """Where each edge of :func:`edges_of` is in ``graph.edge_index``."""
    return memoized(_order, graph, device)[0]


def sorted_edges(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> tuple[Edges, Tensor]:
    """The edges ``src -> dst`` by receiver, then sender; and where each stood before."""
    order = order_by_receiver(src, dst, num_src)
    edges = _edges_in_order(src, dst, order, num_src, num_dst)
    return edges, torch.arange(len(src), device=src.device) if order is None else order


def _edges_in_order(src: Tensor, dst: Tensor, order: Tensor | None, num_src: int, num_dst: int) -> Edges:
    src, dst = src.int(), dst.int()
    if order is not None:
        src, dst = src.index_select(0, order), dst.index_select(0, order)
    out_position = src.sort(stable=True).indices
    ptr, out_ptr = pointers(dst, num_dst).int(), pointers(src, num_src).int()
    return Edges(ptr, src, dst, out_ptr, dst.index_select(0, out_position), out_position.int())


def order_by_receiver(src: Tensor, dst: Tensor, num_src: int) -> Int[Tensor, " edges"] | None:
    """The order of edges by receiver, then sender; None if they stand in it."""
    key = dst.long() * num_src + src
    return None if bool((key[1:] > key[:-1]).all()) else key.sort().indices


def pointers(index: Tensor, count: int) -> Int[Tensor, " rows_and_one"]:
    """Where the entries of each of ``count`` rows begin, and where the last ends."""
    ends = torch.bincount(index, minlength=count).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends])


def _lowered(graph: TokenGraph, device: torch.device) -> tuple[Tensor, ...]:
    chosen = neighbours_of(graph.rule)
    if chosen is None:
        (src, dst), order = graph.edges_on(device), memoized(receiver_order, graph)[0]
        order = None if order is None else order.to(device)
        return tuple(_edges_in_order(src, dst, order, graph.num_src, graph.num_dst).tensors)
    ptr, src = chosen.ptr.to(device), chosen.src.to(device, torch.int32)
    dst = torch.arange(graph.num_dst, dtype=torch.int32, device=device).repeat(chosen.slices)
    dst = torch.repeat_interleave(dst, ptr.diff(), output_size=len(src))
    out_dst, out_position, count = torch.empty_like(src), torch.empty_like(src), []
    # each slice for itself: its numbers are few, which makes sorting quick, and lie close together
    for i, j in pairwise(chosen.bounds):
        out_position[i:j] = src[i:j].sort(stable=True).indices
        torch.index_select(dst[i:j], 0, out_position[i:j], out=out_dst[i:j])
        count.append(torch.bincount(src[i:j], minlength=graph.num_src))
    out_ptr = torch.cat([ptr.new_zeros(1), torch.cat(count).cumsum(0)])
    return ptr.int(), src, dst, out_ptr.int(), out_dst, out_position


def _order(graph: TokenGraph, device: torch.device) -> tuple[Tensor]:
    order = memoized(receiver_order, graph)[0]
    return (torch.arange(graph.num_edges, device=device) if order is None else order.to(device),)
