"""What callers and torch_geometric hand to the layer, read in one place."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch_geometric import EdgeIndex
from torch_geometric.utils import is_sparse, is_torch_sparse_tensor
from torch_geometric.utils.sparse import set_sparse_value

from gnn_attention import convert, edge_softmax
from gnn_attention._support import checks
from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.graph import TokenGraph


def one_graph(g: Any, edge_index: Any) -> Any:
    """The graph that was given under one of its two names; TypeError for none or both."""
    if (g is None) == (edge_index is None):
        got = "none" if g is None else "both g and edge_index"
        raise TypeError(f"the layer needs one graph, a TokenGraph or PyG's edge_index, got {got}")
    return edge_index if g is None else g


def read_states(x: Any, g: Any, size: Any, width: int | None) -> tuple[Tensor, Tensor]:
    """``(x_src, x_dst)``, with states of 0 and this width (None: the senders') in place of PyG's None."""
    if isinstance(x, (tuple, list)) and len(x) == 2 and x[1] is None and isinstance(x[0], Tensor):
        x_src, _ = state_pair(x[0])
        num_dst = _known_receivers(g) if size is None else _check_size(size, x_src.shape[-2], None)
        width = x_src.shape[-1] if width is None else width
        x = x_src, x_src.new_zeros(*x_src.shape[:-2], num_dst, width)
    x_src, x_dst = state_pair(x)
    if size is not None:
        _check_size(size, x_src.shape[-2], x_dst.shape[-2])
    return x_src, x_dst


def state_pair(x: Any) -> tuple[Tensor, Tensor]:
    """``(x_src, x_dst)`` of states, or of a pair of them; TypeError or ValueError for anything else."""
    pair = tuple(x) if isinstance(x, (tuple, list)) else (x, x)
    x_src, x_dst = pair if len(pair) == 2 else (pair, pair)
    if not isinstance(x_src, Tensor) or not isinstance(x_dst, Tensor):
        got = ", ".join(type(states).__name__ for states in pair)
        raise TypeError(f"x must be a tensor [N, d] or [B, T, d], or a pair (x_src, x_dst), got {got}")
    if x_src.dim() not in (2, 3) or x_src.shape[:-2] != x_dst.shape[:-2] or x_src.dim() != x_dst.dim():
        shapes = f"{list(x_src.shape)} and {list(x_dst.shape)}"
        raise ValueError(f"x must be [N, d] or [B, T, d] (both of a pair alike), got {shapes}")
    return x_src, x_dst


def fitting_graph(g: Any, num_dst: int, num_src: int) -> TokenGraph:
    """``g``, or the graph of what torch_geometric has; ValueError where it does not fit the states."""
    graph = g if isinstance(g, TokenGraph) else convert.from_pyg(g, num_dst, num_src)
    if (graph.num_src, graph.num_dst) != (num_src, num_dst):
        raise ValueError(f"{graph!r} does not fit x with {num_src} senders and {num_dst} receivers")
    return graph


def nodes(x: Tensor, call: AttentionCall, batched: bool) -> Tensor:
    """q, k or v of the call as ``[B, N, H, D]``, or without a batch ``[N, H, D]``, in the dtype of sums."""
    x = edge_softmax.per_query_head(x, int(call.q.shape[1]))
    x = x.to(torch.promote_types(x.dtype, torch.float32)).transpose(1, 2)
    return x if batched else x.squeeze(0)


def batch_of(x: Tensor) -> Tensor:
    """States ``[B, T, d]``: one sample of states without a batch."""
    return x if x.dim() == 3 else x.unsqueeze(0)


def with_edges(g: Any, graph: TokenGraph, weights: Tensor) -> tuple[Any, Tensor]:
    """The edges in the form they came in, and their weights: the values of a sparse adjacency, as in PyG."""
    if isinstance(g, TokenGraph):
        return graph.edges_on(weights.device), weights
    if not is_torch_sparse_tensor(g) or weights.dim() != 2:
        return g, weights
    if g.layout == torch.sparse_coo:  # as stored, which need not be sorted
        size = (*g.shape, weights.shape[1])
        return torch.sparse_coo_tensor(g._indices(), weights, size, is_coalesced=g.is_coalesced()), weights
    return set_sparse_value(g, weights), weights


def replace_none(backend: str | Backend | None) -> str | Backend:
    """The backend, "message_passing" for None, of which the caller's caller is warned."""
    if backend is not None:
        return backend
    message = "backend=None is deprecated: write backend='message_passing'"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return "message_passing"


def _check_size(size: Any, num_src: int, num_dst: int | None) -> int:
    """The receivers of PyG's ``size``; TypeError or ValueError unless it is that of the states."""
    sizes = checks.sizes("size", size) if isinstance(size, Iterable) else []
    if len(sizes) != 2 or sizes[0] != num_src or num_dst not in (None, sizes[1]):
        receivers = "any number" if num_dst is None else num_dst
        raise ValueError(
            f"size must be (senders, receivers) = ({num_src}, {receivers}), as x has them, got {quoted(size)}"
        )
    return sizes[1]


def _known_receivers(g: Any) -> int:
    """The number of receivers that a graph knows by itself; ValueError for an edge_index, which does not."""
    if isinstance(g, TokenGraph):
        return g.num_dst
    number = g.sparse_size(1) if isinstance(g, EdgeIndex) else None
    number = g.size(0) if is_sparse(g) else number
    if number is None:
        raise ValueError(
            "x=(x_src, None) does not say how many receivers there are: give size=(senders, receivers)"
        )
    return int(number)
