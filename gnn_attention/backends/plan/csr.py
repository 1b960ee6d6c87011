"""A graph as a list of edges receiver by receiver, with its transpose, in int32 (for fewer than 2^31)."""

from __future__ import annotations

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.backends.plan.plan import Edges
from gnn_attention.graph import TokenGraph, memoized


def edges_of(graph: TokenGraph, device: torch.device) -> Edges:
    """The edges of a plain graph on a device, by receiver, then sender; cached."""
    return Edges(*memoized(_lowered, graph, device)[:-1])


def order_of(graph: TokenGraph, device: torch.device) -> Int[Tensor, " edges"]:
    """Where each edge of :func:`edges_of` is in ``graph.edge_index``."""
    return memoized(_lowered, graph, device)[-1]


def sorted_edges(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> tuple[Edges, Tensor]:
    """The edges ``src -> dst`` by receiver, then sender; and where each stood before."""
    found = order_by_receiver(src, dst, num_src)
    order = torch.arange(len(src), device=src.device) if found is None else found
    src, dst = src[order].int(), dst[order].int()
    out_position = src.sort(stable=True).indices
    ptr, out_ptr = pointers(dst, num_dst).int(), pointers(src, num_src).int()
    return Edges(ptr, src, dst, out_ptr, dst[out_position], out_position.int()), order


def order_by_receiver(src: Tensor, dst: Tensor, num_src: int) -> Int[Tensor, " edges"] | None:
    """The order of edges by receiver, then sender; None if they stand in it."""
    key = dst.long() * num_src + src
    return None if bool((key[1:] > key[:-1]).all()) else key.sort().indices


def pointers(index: Tensor, count: int) -> Int[Tensor, " rows_and_one"]:
    """Where the entries of each of ``count`` rows begin, and where the last ends."""
    ends = torch.bincount(index, minlength=count).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends])


def _lowered(graph: TokenGraph, device: torch.device) -> tuple[Tensor, ...]:
    src, dst = graph.edges_on(device)
    found, order = sorted_edges(src, dst, graph.num_src, graph.num_dst)
    return *found.tensors, order
