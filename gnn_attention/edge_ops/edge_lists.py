"""Lists of edges in CSR form, with the transpose. Their int32 indices allow fewer than 2^31 edges.

A graph that varies by sample or head becomes a single list. The tokens of its slices are numbered
one slice after another, and :func:`merge_slices` arranges the tokens of q, k and v in this order.
"""

from dataclasses import dataclass, field

import torch

from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.derived import receiver_order, slices


@dataclass(frozen=True, eq=False)
class EdgeRows:
    """Edges sorted by receiver, and the same edges sorted by sender.

    The in-edges of receiver i are the entries ``ptr[i] .. ptr[i + 1] - 1`` of ``src`` and ``dst``.
    The out-edges of sender j are the entries ``out_ptr[j] .. out_ptr[j + 1] - 1`` of ``out_dst``,
    and ``out_position`` has their indices in ``src``. If ``is_first``, no earlier piece of a plan
    has these receivers.
    """

    ptr: Int[Tensor, " receivers_plus_one"]
    src: Int[Tensor, " edges"]
    dst: Int[Tensor, " edges"]
    out_ptr: Int[Tensor, " senders_plus_one"]
    out_dst: Int[Tensor, " edges"]
    out_position: Int[Tensor, " edges"]
    is_first: bool = field(default=True, kw_only=True)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.ptr, self.src, self.dst, self.out_ptr, self.out_dst, self.out_position]


def edge_rows(graph: TokenGraph, device: torch.device, group_size: int = 1) -> EdgeRows:
    """Return the edges of a graph on a device, sorted by receiver, then sender; the result is cached.

    Rows are ordered by sample, head and token. An axis along which the graph does not vary is left
    out. ``group_size`` query heads share the senders of one key/value head.
    """
    return EdgeRows(*memoized(list_edges, graph, device, group_size))


def list_edges(graph: TokenGraph, device: torch.device, group_size: int = 1) -> tuple[Tensor, ...]:
    """Compute the tensors of :func:`edge_rows`, without the cache."""
    chosen_rows = graph.edges.pointers()
    if chosen_rows is None and graph.heads is None and graph.batch is None:
        src, dst = graph.edges_on(device)
        order = memoized(receiver_order, graph)[0]
        order = None if order is None else order.to(device)
        return tuple(_build_rows(src, dst, order, graph.num_src, graph.num_dst).tensors)
    num_slices = (graph.batch or 1) * (graph.heads or 1)
    group_size = 1 if graph.heads is None else group_size
    num_src = num_slices // group_size * graph.num_src
    num_dst = num_slices * graph.num_dst
    if chosen_rows is not None:
        # A selector nearly always stores its rows on the call's device, so nothing is copied.
        ptr, src = (x.to(device) for x in chosen_rows)
        row = torch.repeat_interleave(ptr.diff(), output_size=len(src))
    else:
        edges = [select_slice(graph, b, h).edge_index.to(device) for b, h in slices(graph)]
        src = torch.cat([slice_src for slice_src, _ in edges])
        row = torch.cat([slice_dst + i * graph.num_dst for i, (_, slice_dst) in enumerate(edges)])
    src = src + row.div(group_size * graph.num_dst, rounding_mode="floor") * graph.num_src
    order = None if chosen_rows is not None else _sort_order(src, row, num_src)
    return tuple(_build_rows(src, row, order, num_src, num_dst).tensors)


def edge_order(graph: TokenGraph, device: torch.device) -> Int[Tensor, " edges"]:
    """Return the index in ``graph.edge_index`` of each edge of :func:`edge_rows`."""
    permutation = edge_permutation(graph, device)
    return permutation[0] if permutation else memoized(_count_up, graph, device)[0]


def edge_permutation(graph: TokenGraph, device: torch.device) -> tuple[Tensor, ...]:
    """Return :func:`edge_order` and its inverse, or ``()`` if ``graph.edge_index`` is sorted already.

    A graph of several slices has no ``edge_index``: its edges are in the order of :func:`edge_rows`.
    """
    return memoized(_edge_permutation, graph, device)


def _edge_permutation(graph: TokenGraph, device: torch.device) -> tuple[Tensor, ...]:
    num_slices = (graph.batch or 1) * (graph.heads or 1)
    order = None if num_slices > 1 else memoized(receiver_order, graph)[0]
    return () if order is None else (order.to(device), order.argsort().to(device))


def _count_up(graph: TokenGraph, device: torch.device) -> tuple[Tensor]:
    return (torch.arange(graph.num_edges, device=device),)


def sort_edges(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> EdgeRows:
    """Sort the edges ``src -> dst`` by receiver, then sender."""
    return _build_rows(src, dst, _sort_order(src, dst, num_src), num_src, num_dst)


def sort_by_row(row: Int[Tensor, " edges"], num_rows: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return edges to ``row`` that each have their own sender, and their order with its inverse."""
    sorted_row = row.sort(stable=True)
    bounds = torch.arange(num_rows + 1, device=row.device)
    ptr = torch.searchsorted(sorted_row.values, bounds).int()
    orders = [sorted_row.indices, sorted_row.indices.argsort()]
    return with_own_senders(ptr, sorted_row.values.int()), orders


def with_own_senders(ptr: Int[Tensor, " rows_plus_one"], dst: Int[Tensor, " edges"]) -> list[Tensor]:
    """Return the tensors of EdgeRows in which edge e is the only edge of sender e."""
    index = torch.arange(dst.numel() + 1, dtype=dst.dtype, device=dst.device)
    return [ptr, index[:-1], dst, index, dst, index[:-1]]


def _sort_order(src: Tensor, dst: Tensor, num_src: int) -> Int[Tensor, " edges"] | None:
    """Return the order that sorts edges by receiver, then sender, or None if they are sorted already."""
    key = dst.long() * num_src + src
    return None if bool((key[1:] > key[:-1]).all()) else key.sort().indices


def _build_rows(src: Tensor, dst: Tensor, order: Tensor | None, num_src: int, num_dst: int) -> EdgeRows:
    src, dst = src.int(), dst.int()
    if order is not None:
        src, dst = src.index_select(0, order), dst.index_select(0, order)
    out_position = src.sort(stable=True).indices
    ptr, out_ptr = _make_ptr(dst, num_dst), _make_ptr(src, num_src)
    return EdgeRows(ptr, src, dst, out_ptr, dst.index_select(0, out_position), out_position.int())


def _make_ptr(row: Tensor, num_rows: int) -> Int[Tensor, " rows_plus_one"]:
    """Return where the entries of each row begin, and where the last row ends."""
    ends = torch.bincount(row, minlength=num_rows).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).int()


def merge_slices(x: Float[Tensor, "batch heads tokens dim"], graph: TokenGraph) -> Float[Tensor, "..."]:
    """Merge the axes along which the graph varies (samples, heads) into the axis of tokens."""
    batch, heads, tokens, width = x.shape
    if graph.heads is None and graph.batch is None:
        return x
    if graph.heads is None:
        return x.transpose(0, 1).reshape(1, heads, batch * tokens, width)
    if graph.batch is None:
        return x.reshape(batch, 1, heads * tokens, width)
    return x.reshape(1, 1, batch * heads * tokens, width)


def split_slices(
    x: Float[Tensor, "..."], graph: TokenGraph, batch: int, heads: int
) -> Float[Tensor, "batch heads dst dim"]:
    """Undo :func:`merge_slices` for a result that has a row for each token of each slice."""
    width = x.shape[-1]
    if graph.heads is None and graph.batch is not None:
        return x.reshape(heads, batch, -1, width).transpose(0, 1)
    return x if graph.heads is None else x.reshape(batch, heads, -1, width)


def select_slice(graph: TokenGraph, batch: int, head: int) -> TokenGraph:
    """Return ``graph.select(batch, head)``, which is cached with the graph."""
    if graph.batch is None and graph.heads is None:
        return graph
    memoized(_select_slices, graph)
    graph_slice: TokenGraph = graph._slices[batch if graph.batch else 0][head if graph.heads else 0]
    return graph_slice


def _select_slices(graph: TokenGraph) -> bool:
    # A graph cannot be a constant of a compiled program, so a program reads slices from this list.
    graph_slices = [[graph.select(b, h) for h in range(graph.heads or 1)] for b in range(graph.batch or 1)]
    graph._slices[:] = graph_slices
    return True
