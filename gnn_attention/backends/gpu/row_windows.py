"""Row windows: a graph as groups of neighbouring receivers, with the senders that any of them attends to.

A window of ``size`` receivers lists its senders once, each with a word whose bit r says that the r-th
receiver of the window attends to it: 4 + size / 8 bytes for each sender of a window. Where neighbours share
senders (grids in Hilbert order, meshes), a kernel reads a sender once for all of them. The transpose has
windows of senders in the same way, for the gradients of k and v.
"""

from __future__ import annotations

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.gpu import chunks
from gnn_attention.backends.gpu.csr import row_pointers
from gnn_attention.backends.gpu.formats import Blocks
from gnn_attention.graph import TokenGraph, memoized

WORDS = {16: torch.int16, 32: torch.int32, 64: torch.int64}  # by receivers of a window


def windows_of(
    graph: TokenGraph, device: torch.device, size: int = 64, with_numbers: bool = False
) -> tuple[Blocks, Blocks]:
    """The windows of a plain graph on a device, and of its transpose; memoized, in ``O(E log E)``.

    ``size`` is 16, 32 or 64. ``with_numbers`` adds what numbers the edges, where a call has a tensor with an
    entry for each. ValueError for a graph that differs by head or sample.

    >>> graph = TokenGraph.from_edges(torch.tensor([[5, 0, 5, 9], [0, 1, 1, 16]]), 20)
    >>> found, _ = windows_of(graph, torch.device("cpu"), 16)
    >>> found.items[:, :3].tolist(), found.other.tolist(), found.words.tolist()
    ([[0, 0, 2], [1, 2, 3]], [0, 5, 9], [2, 3, 1])
    """
    form: tuple[Blocks, Blocks] = memoized(_lowered, graph, device, size)
    return chunks.with_edge_numbers(form, graph, device, _lowered, size) if with_numbers else form


def _lowered(graph: TokenGraph, device: torch.device, size: int) -> tuple[Blocks, Blocks]:
    src, dst = graph.edge_index.to(device)  # not edges_on, which would cache 16 bytes an edge there
    receivers = _side(dst, src, graph.num_dst, graph.num_src, size)
    return receivers, _side(src, dst, graph.num_src, graph.num_dst, size)


def _side(own: Tensor, other: Tensor, num_own: int, num_other: int, size: int) -> Blocks:
    many = max(num_other, 1)
    pairs, which = torch.unique(own // size * many + other, return_inverse=True)
    bit = torch.ones_like(own) << (own % size)
    words = torch.zeros_like(pairs).index_add_(0, which, bit)  # each bit once: the sum is their union
    ptr = row_pointers(pairs // many, -(-num_own // size))
    return chunks.blocks(ptr, (pairs % many).int(), words.to(WORDS[size]), num_own, size, 1)
