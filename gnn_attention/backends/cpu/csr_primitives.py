"""The two operations over a list of edges that everything else is made of, in plain torch functions, for one
head.

Products (one number for each edge, of its two ends) are ``torch.sparse.sampled_addmm``; weighted sums (one
row for each token, of the rows it gathers) are ``embedding_bag``. Both read the rows of edges only. A bag
adds its rows one after the other, so that its error grows with their number: the rows of a hub are summed in
pieces, and then the pieces.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from gnn_attention._support.locks import accept_sparse_matrices
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.backends.plan.plan import Edges

LONGEST = 64  # rows that are added one after the other

Pieces = tuple[Int[Tensor, " pieces_and_one"], Int[Tensor, " rows_and_one"]]


def matrix_of(edges: Edges, values: Float[Tensor, " edges"]) -> Tensor:
    """The sparse matrix ``[dst, src]`` with these numbers at the edges; writing to ``values`` changes it."""
    accept_sparse_matrices()
    size = (edges.ptr.numel() - 1, edges.out_ptr.numel() - 1)
    return torch.sparse_csr_tensor(edges.ptr, edges.src, values, size, check_invariants=False)


def sampled_products(
    matrix: Tensor,
    left: Float[Tensor, "dst dim"],
    right: Float[Tensor, "src dim"],
    alpha: float = 1.0,
    beta: float = 0.0,
) -> None:
    """At every edge of the matrix, in place: ``alpha * left_dst . right_src + beta * what was there`` (which
    must be finite).
    """
    torch.sparse.sampled_addmm(matrix, left, right.t(), beta=beta, alpha=alpha, out=matrix)


def weighted_sums(
    index: Int[Tensor, " edges"],
    ptr: Int[Tensor, " rows_and_one"],
    weights: Float[Tensor, " edges"],
    table: Float[Tensor, "n dim"],
    pieces: Pieces | None = None,
) -> Float[Tensor, "rows dim"]:
    """Row i is the sum of ``weights[e] * table[index[e]]`` over ``e = ptr[i] .. ptr[i + 1] - 1``; 0 over
    none.

    ``pieces`` are those of :func:`pieces_of` ``(ptr)``.
    """
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
    """Rows cut into pieces of at most ``LONGEST`` edges: the bounds of the pieces, and of each row among
    them.

    None where no row is longer.

    >>> pieces_of(torch.tensor([0, 2, 2, 5])), pieces_of(torch.tensor([0, 3, 203]))
    (None, (tensor([  0,   3,  67, 131, 195, 203]), tensor([0, 1, 5])))
    """
    length = ptr.diff()
    if not len(length) or int(length.max()) <= LONGEST:
        return None
    count = (length + LONGEST - 1) // LONGEST
    rows = torch.cat([count.new_zeros(1), count.cumsum(0)])
    owner = torch.repeat_interleave(count)
    place = torch.arange(len(owner), device=ptr.device) - rows[owner]
    return torch.cat([ptr[owner] + LONGEST * place, ptr[-1:]]), rows


def row_sums(matrix: Tensor) -> Float[Tensor, " dst"]:
    """The sum of each row of a sparse matrix."""
    values = matrix.values()
    if values.device.type == "cpu" and not torch._C.has_mkl:
        return torch.segment_reduce(values, "sum", offsets=matrix.crow_indices(), initial=0.0, unsafe=True)
    total: Tensor = torch.mv(matrix, values.new_ones(matrix.shape[1]))
    return total


def row_maxima(ptr: Int[Tensor, " rows_and_one"], values: Float[Tensor, " edges"]) -> Float[Tensor, " rows"]:
    """The largest value of each row, -inf for a row without any."""
    return torch.segment_reduce(values, "max", offsets=ptr, initial=-torch.inf, unsafe=True)


class Head:
    """Buffers for one head at a time over a list of edges, in one dtype: rows of tokens by name, and numbers
    of edges.

    A fresh page of memory costs more than the arithmetic on it, so every head writes where the one before
    wrote.
    """

    def __init__(self, edges: Edges, dtype: torch.dtype) -> None:
        self.edges, self.dtype = edges, dtype
        self._rows: dict[str, Tensor] = {}

    @functools.cached_property
    def first(self) -> Tensor:
        """A sparse matrix over the edges."""
        return self._matrix()

    @functools.cached_property
    def second(self) -> Tensor:
        """Another."""
        return self._matrix()

    @functools.cached_property
    def heard(self) -> Tensor:
        """Which receivers have in-edges."""
        return self.edges.ptr[1:] > self.edges.ptr[:-1]

    @functools.cached_property
    def _in_pieces(self) -> Pieces | None:
        return pieces_of(self.edges.ptr)

    @functools.cached_property
    def _out_pieces(self) -> Pieces | None:
        return pieces_of(self.edges.out_ptr)

    def buffer(
        self, name: str, like: Float[Tensor, "*heads tokens dim"]
    ) -> Float[Tensor, "*heads tokens dim"]:
        """The rows of this name, of the shape of ``like``, as the last head left them."""
        if name not in self._rows:
            self._rows[name] = torch.empty(like.shape, dtype=self.dtype, device=like.device)
        return self._rows[name]

    def staged(self, name: str, x: Float[Tensor, "*heads tokens dim"]) -> Float[Tensor, "rows dim"]:
        """The rows of ``x``, head after head, in the dtype of sums: ``x`` itself if it is that already, else
        a copy.
        """
        if x.dtype == self.dtype and x.is_contiguous():
            return x.flatten(0, -2)
        return self.buffer(name, x).copy_(x).flatten(0, -2)

    def by_edge(self, x: Float[Tensor, " dst"], out: Float[Tensor, " edges"]) -> Float[Tensor, " edges"]:
        """``x[dst]`` for every edge."""
        return torch.index_select(x, 0, self.edges.dst, out=out)

    def incoming(
        self, weights: Float[Tensor, " edges"], table: Float[Tensor, "src dim"]
    ) -> Float[Tensor, "dst dim"]:
        """What each receiver hears: the weighted sum over its in-edges of the senders' rows."""
        return weighted_sums(self.edges.src, self.edges.ptr, weights, table, self._in_pieces)

    def outgoing(
        self, weights: Float[Tensor, " edges"], table: Float[Tensor, "dst dim"], spare: Tensor
    ) -> Float[Tensor, "src dim"]:
        """The reverse: the weighted sum over each sender's out-edges of the receivers' rows. ``spare`` is
        written to.
        """
        ordered = torch.index_select(weights, 0, self.edges.out_position, out=spare)
        return weighted_sums(self.edges.out_dst, self.edges.out_ptr, ordered, table, self._out_pieces)

    def _matrix(self) -> Tensor:
        values = torch.zeros(self.edges.src.numel(), dtype=self.dtype, device=self.edges.src.device)
        return matrix_of(self.edges, values)
