"""Products and weighted sums over a list of edges, for one head, in plain torch functions.

Products (one number for each edge, of its two ends) are ``torch.sparse.sampled_addmm``; weighted sums (one
row for each token) are ``embedding_bag``. Both read the rows of edges only. A bag adds its rows one after the
other, so that its error grows with their number: the rows of a hub are summed in pieces, and then the pieces.

Many heads of few edges cost less together: as one head of a larger graph, the graph repeated along the
diagonal, where the query heads of a group attend to the same senders.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from types import EllipsisType
from typing import Any, TypeVar

import torch
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from gnn_attention._support.locks import accept_sparse_matrices
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.backends.plan.csr import sorted_edges
from gnn_attention.backends.plan.plan import EdgeRows

LONGEST = 64  # rows that are added one after the other
MOST_EDGES = 10**5  # of all heads taken together; above, one head at a time is as fast and takes less memory
MOST_CACHED = 4  # of what is made of each list of edges, such as repeated lists

T = TypeVar("T")
Rows = Float[Tensor, "*heads tokens dim"]
Index = tuple[int, int] | EllipsisType
Pieces = tuple[Int[Tensor, " pieces_and_one"], Int[Tensor, " rows_and_one"]]


def sampled_products(
    matrix: Tensor,
    left: Float[Tensor, "dst dim"],
    right: Float[Tensor, "src dim"],
    alpha: float = 1.0,
    beta: float = 0.0,
) -> None:
    """At every edge of the matrix, in place: ``alpha * left_dst . right_src + beta * value`` (finite)."""
    if not beta:
        # 0 times a NaN that an earlier head left would be NaN
        matrix.values().zero_()
    torch.sparse.sampled_addmm(matrix, left, right.t(), beta=beta, alpha=alpha, out=matrix)


def weighted_sums(
    index: Int[Tensor, " edges"],
    ptr: Int[Tensor, " rows_and_one"],
    weights: Float[Tensor, " edges"],
    table: Float[Tensor, "n dim"],
    pieces: Pieces | None = None,
) -> Float[Tensor, "rows dim"]:
    """Row i is the sum of ``weights[e] * table[index[e]]`` over ``e = ptr[i] .. ptr[i + 1] - 1``, or 0."""
    if not table.numel():
        return table.new_zeros(ptr.numel() - 1, table.shape[1])
    bounds, rows = (ptr, None) if pieces is None else pieces
    sums = functional.embedding_bag(
        index, table, bounds, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
    if rows is None:
        return sums
    every = torch.arange(len(sums), device=sums.device)
    return functional.embedding_bag(every, sums, rows, mode="sum", include_last_offset=True)


def pieces_of(ptr: Int[Tensor, " rows_and_one"]) -> Pieces | None:
    """Bounds of pieces of rows of at most ``LONGEST`` edges, and of rows among them; None if all fit."""
    length = ptr.diff()
    if not len(length) or int(length.max()) <= LONGEST:
        return None
    count = (length + LONGEST - 1) // LONGEST
    rows = torch.cat([count.new_zeros(1), count.cumsum(0)])
    owner = torch.repeat_interleave(count)
    place = torch.arange(len(owner), device=ptr.device) - rows[owner]
    return torch.cat([ptr[owner] + LONGEST * place, ptr[-1:]]).to(ptr.dtype), rows


def row_sums(
    ptr: Int[Tensor, " rows_and_one"], values: Float[Tensor, " edges"], pieces: Pieces | None
) -> Float[Tensor, " rows"]:
    """The sum of the values of each row."""
    bounds = ptr if pieces is None else pieces[0]
    sums = torch.segment_reduce(values, "sum", offsets=bounds, initial=0.0, unsafe=True)
    if pieces is None:
        return sums
    total = torch.segment_reduce(sums.double(), "sum", offsets=pieces[1], initial=0.0, unsafe=True)
    return total.to(sums.dtype)


# by the list's own tensor
_cache: MutableMapping[Tensor, dict[Any, Any]] = WeakIdKeyDictionary()


def _once(name: Any, of: Tensor, make: Callable[[Tensor], T]) -> T:
    """``make(of)``, which the host would wait for on a GPU."""
    known = _cache.setdefault(of, {})
    found: T = known.get(name, known)
    if found is known:
        found = make(of)
        # other threads may come and go meanwhile
        if len(known) >= MOST_CACHED:
            known.pop(next(iter(list(known)), None), None)
        known[name] = found
    return found


class Head:
    """Buffers for one head at a time over a list of edges, in one dtype: rows of tokens, numbers of edges."""

    # a fresh page of memory costs more than the arithmetic on it: a head writes where the last one wrote

    def __init__(self, edges: EdgeRows, dtype: torch.dtype) -> None:
        self.edges, self.dtype = edges, dtype
        self._rows: dict[str, Tensor] = {}

    def _matrix(self) -> Tensor:
        accept_sparse_matrices()
        edges, size = self.edges, (self.edges.ptr.numel() - 1, self.edges.out_ptr.numel() - 1)
        values = torch.zeros(edges.src.numel(), dtype=self.dtype, device=edges.src.device)
        return torch.sparse_csr_tensor(edges.ptr, edges.src, values, size, check_invariants=False)

    @functools.cached_property
    def first(self) -> Tensor:
        return self._matrix()

    @functools.cached_property
    def second(self) -> Tensor:
        return self._matrix()

    @functools.cached_property
    def in_pieces(self) -> Pieces | None:
        return _once("pieces", self.edges.ptr, pieces_of)

    @functools.cached_property
    def _out_pieces(self) -> Pieces | None:
        return _once("pieces", self.edges.out_ptr, pieces_of)

    def buffer(self, name: str, like: Rows) -> Rows:
        if name not in self._rows:
            self._rows[name] = torch.empty(like.shape, dtype=self.dtype, device=like.device)
        return self._rows[name]

    def stage(self, name: str, x: Rows) -> Float[Tensor, "rows dim"]:
        """The rows of ``x``, head after head, in the dtype of sums: a view if it can be."""
        if x.dtype == self.dtype and x.is_contiguous():
            return x.flatten(0, -2)
        return self.buffer(name, x).copy_(x).flatten(0, -2)

    def by_edge(self, x: Float[Tensor, " dst"], out: Float[Tensor, " edges"]) -> Float[Tensor, " edges"]:
        return torch.index_select(x, 0, self.edges.dst, out=out)

    def incoming(
        self, weights: Float[Tensor, " edges"], table: Float[Tensor, "src dim"]
    ) -> Float[Tensor, "dst dim"]:
        return weighted_sums(self.edges.src, self.edges.ptr, weights, table, self.in_pieces)

    def outgoing(
        self, weights: Float[Tensor, " edges"], table: Float[Tensor, "dst dim"], spare: Tensor
    ) -> Float[Tensor, "src dim"]:
        # spare is written to
        ordered = torch.index_select(weights, 0, self.edges.out_position, out=spare)
        return weighted_sums(self.edges.out_dst, self.edges.out_ptr, ordered, table, self._out_pieces)


Groups = list[tuple[Index, list[Index]]]


def batches(edges: EdgeRows, shape: Sequence[int], kv_heads: int, dtype: torch.dtype) -> tuple[Head, Groups]:
    """Buffers for one head at a time, and the index of each key/value head with those of its query heads.

    Heads of few edges are taken together, where that is cheaper: the index is ``...`` for all of both.
    ``shape = samples, heads``. Without edges there are none.
    """
    samples, heads = shape
    if not edges.src.numel():
        return Head(edges, dtype), []
    if samples * heads > 1 and samples * heads * edges.src.numel() <= MOST_EDGES:
        return Head(repeat_over_slices(edges, samples * heads, samples * kv_heads), dtype), [(..., [...])]
    group = heads // kv_heads
    return Head(edges, dtype), [
        ((sample, kv_head), [(sample, kv_head * group + member) for member in range(group)])
        for sample in range(samples)
        for kv_head in range(kv_heads)
    ]


def repeat_over_slices(edges: EdgeRows, slices: int, kv_slices: int) -> EdgeRows:
    """The edges repeated for ``slices`` sets of receivers over ``kv_slices`` sets of senders; cached."""

    def fold(ptr: Tensor) -> EdgeRows:
        num_dst, num_src = ptr.numel() - 1, edges.out_ptr.numel() - 1
        slice_ = torch.arange(slices, device=edges.src.device).unsqueeze(1)
        dst = edges.dst + slice_ * num_dst
        src = edges.src + slice_ // (slices // kv_slices) * num_src
        return sorted_edges(src.flatten(), dst.flatten(), kv_slices * num_src, slices * num_dst)

    return replace(_once((slices, kv_slices), edges.ptr, fold), fresh=edges.fresh)
