"""A graph as a list of edges receiver by receiver, with its transpose, in int32 (for fewer than 2^31).

A graph that differs by sample or head is one list, too: the tokens of all its samples and heads stand one
after the other, and :func:`fold` brings those of a call into this order.
"""

import torch

from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.backends.call import AttentionCall, select_slice
from gnn_attention.backends.plan.plan import EdgeRows
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.derived import receiver_order


def edges_of(graph: TokenGraph, device: torch.device, group: int = 1) -> EdgeRows:
    """The edges of a graph on a device, by receiver, then sender; cached.

    Of a graph that differs by sample or head the rows are ``(sample, head, token)`` in this order, without an
    axis by which the graph does not differ. ``group`` query heads share the senders of one key/value head.
    """
    return EdgeRows(*memoized(list_edges, graph, device, group))


def list_edges(graph: TokenGraph, device: torch.device, group: int = 1) -> tuple[Tensor, ...]:
    """The tensors of :func:`edges_of`, which are not cached."""
    chosen, order = graph.edges.pointers(), None
    if chosen is None and graph.heads is None and graph.batch is None:
        (src, row), order = graph.edges_on(device), memoized(receiver_order, graph)[0]
        order = None if order is None else order.to(device)
        return tuple(_edges_in_order(src, row, order, graph.num_src, graph.num_dst).tensors)
    slices, shared = (graph.batch or 1) * (graph.heads or 1), 1 if graph.heads is None else group
    num_src, num_dst = slices // shared * graph.num_src, slices * graph.num_dst
    if chosen is not None:
        # Nothing leaves the device on which the senders were chosen.
        ptr, src = (x.to(device) for x in chosen)
        row = torch.repeat_interleave(ptr.diff(), output_size=len(src))
    else:
        parts = [select_slice(graph, b, h) for b in range(graph.batch or 1) for h in range(graph.heads or 1)]
        edges = [part.edge_index.to(device) for part in parts]
        src = torch.cat([part[0] for part in edges])
        row = torch.cat([part[1] + number * graph.num_dst for number, part in enumerate(edges)])
    src = src + row.div(shared * graph.num_dst, rounding_mode="floor") * graph.num_src
    order = None if chosen is not None else order_by_receiver(src, row, num_src)
    return tuple(_edges_in_order(src, row, order, num_src, num_dst).tensors)


def order_of(graph: TokenGraph, device: torch.device) -> Int[Tensor, " edges"]:
    """Where each edge of :func:`edges_of` is in ``graph.edge_index``."""
    return memoized(_order, graph, device)[0]


def _order(graph: TokenGraph, device: torch.device) -> tuple[Tensor]:
    order = memoized(receiver_order, graph)[0]
    return (torch.arange(graph.num_edges, device=device) if order is None else order.to(device),)


def sorted_edges(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> EdgeRows:
    """The edges ``src -> dst`` by receiver, then sender."""
    return _edges_in_order(src, dst, order_by_receiver(src, dst, num_src), num_src, num_dst)


def order_by_receiver(src: Tensor, dst: Tensor, num_src: int) -> Int[Tensor, " edges"] | None:
    """The order of edges by receiver, then sender; None if they stand in it."""
    key = dst.long() * num_src + src
    return None if bool((key[1:] > key[:-1]).all()) else key.sort().indices


def _edges_in_order(src: Tensor, dst: Tensor, order: Tensor | None, num_src: int, num_dst: int) -> EdgeRows:
    src, dst = src.int(), dst.int()
    if order is not None:
        src, dst = src.index_select(0, order), dst.index_select(0, order)
    out_position = src.sort(stable=True).indices
    ptr, out_ptr = pointers(dst, num_dst).int(), pointers(src, num_src).int()
    return EdgeRows(ptr, src, dst, out_ptr, dst.index_select(0, out_position), out_position.int())


def pointers(index: Tensor, count: int) -> Int[Tensor, " rows_and_one"]:
    """Where the entries of each of ``count`` rows begin, and where the last ends."""
    ends = torch.bincount(index, minlength=count).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends])


def fold(x: Float[Tensor, "batch heads tokens dim"], graph: TokenGraph) -> Float[Tensor, "..."]:
    """``x`` with the axes by which the graph differs, in this order, in the axis of the tokens."""
    batch, heads, tokens, width = x.shape
    if graph.heads is None and graph.batch is None:
        return x
    if graph.heads is None:
        return x.transpose(0, 1).reshape(1, heads, batch * tokens, width)
    if graph.batch is None:
        return x.reshape(batch, 1, heads * tokens, width)
    return x.reshape(1, 1, batch * heads * tokens, width)


def unfold(x: Float[Tensor, "..."], call: AttentionCall) -> Float[Tensor, "batch heads dst dim"]:
    """The reverse of :func:`fold`, for a result of the receivers of a call."""
    graph, (batch, heads, tokens, _), width = call.graph, call.q.shape, x.shape[-1]
    if graph.heads is None and graph.batch is not None:
        return x.reshape(heads, batch, tokens, width).transpose(0, 1)
    return x if graph.heads is None else x.reshape(batch, heads, tokens, width)
