"""Products and weighted sums over a list of edges, for one head, in plain torch functions.

``torch.sparse.sampled_addmm`` multiplies the rows at both ends of each edge; ``embedding_bag`` sums
weighted rows for each token. Both read only the tokens of edges. A bag adds its terms one by one,
and rounding errors add up, so sums over long rows are split into chunks.

Many heads with few edges are faster together, as one head of a larger graph, which has a copy of
the receivers for each query head, and a copy of the senders for each key/value head.
"""

import functools
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from gnn_attention._support import devices
from gnn_attention._support.locks import silence_sparse_csr_warning
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.edge_ops.edge_lists import EdgeRows, sort_edges
from gnn_attention.edge_softmax import SAFE_LOGIT, needs_no_shift

CHUNK_SIZE = 64  # At most this many terms are added one by one.
MAX_EDGES = 10**5  # Heads with up to this many edges in all are faster together.
MAX_CACHED_RESULTS = 4  # At most this many results are cached for each list of edges.

T = TypeVar("T")
Rows = Float[Tensor, "*heads tokens dim"]
Index = tuple[int, int] | slice
Chunks = tuple[Int[Tensor, " chunks_plus_one"], Int[Tensor, " rows_plus_one"]]


def sampled_products(
    matrix: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0, beta: float = 0.0
) -> None:
    """Set the value of each edge to ``alpha * left_dst . right_src + beta * value``."""
    if not beta:
        # A NaN that an earlier head left in the values would survive a product with 0.
        matrix.values().zero_()
    torch.sparse.sampled_addmm(matrix, left, right.t(), beta=beta, alpha=alpha, out=matrix)


def _weighted_sums(
    index: Tensor, ptr: Tensor, weights: Tensor, rows: Tensor, chunks: Chunks | None
) -> Float[Tensor, "rows dim"]:
    """Sum ``weights[e] * rows[index[e]]`` over ``e = ptr[i] .. ptr[i + 1] - 1`` for each row i."""
    if not rows.numel():
        return rows.new_zeros(ptr.numel() - 1, rows.shape[1])
    bounds = ptr if chunks is None else chunks[0]
    sums = functional.embedding_bag(
        index, rows, bounds, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
    if chunks is None:
        return sums
    chunk = torch.arange(len(sums), device=sums.device)
    return functional.embedding_bag(chunk, sums, chunks[1], mode="sum", include_last_offset=True)


def _split_long_rows(ptr: Int[Tensor, " rows_plus_one"]) -> Chunks | None:
    """Return where chunks begin, and with which chunk each row begins; None if no row is long."""
    row_lengths = ptr.diff()
    if not len(row_lengths) or int(row_lengths.max()) <= CHUNK_SIZE:
        return None
    num_chunks = (row_lengths + CHUNK_SIZE - 1) // CHUNK_SIZE
    row_bounds = torch.cat([num_chunks.new_zeros(1), num_chunks.cumsum(0)])
    row = torch.repeat_interleave(num_chunks)
    chunk_in_row = torch.arange(len(row), device=ptr.device) - row_bounds[row]
    return torch.cat([ptr[row] + CHUNK_SIZE * chunk_in_row, ptr[-1:]]).to(ptr.dtype), row_bounds


# The results for a list of edges are cached under its ``ptr`` or ``out_ptr``.
_cache: MutableMapping[Tensor, dict[Any, Any]] = WeakIdKeyDictionary()


def _compute_once(key: Any, ptr: Tensor, compute: Callable[[Tensor], T]) -> T:
    """Return ``compute(ptr)``, cached by ``ptr`` and ``key``, because on a GPU the host waits for it."""
    results = _cache.setdefault(ptr, {})
    result: T = results.get(key, results)
    if result is results:
        result = compute(ptr)
        # Other threads may change ``results`` at the same time.
        if len(results) >= MAX_CACHED_RESULTS:
            results.pop(next(iter(list(results)), None), None)
        results[key] = result
    return result


class Buffers:
    """Buffers in one dtype for one head at a time: values of edges and rows of tokens."""

    # Each head overwrites the values of the last head: new memory pages cost more than arithmetic.

    def __init__(self, edges: EdgeRows, dtype: torch.dtype) -> None:
        self.edges, self.dtype = edges, dtype
        self._rows: dict[str, Tensor] = {}

    def _new_matrix(self) -> Tensor:
        silence_sparse_csr_warning()
        edges = self.edges
        shape = edges.ptr.numel() - 1, edges.out_ptr.numel() - 1
        values = torch.zeros(edges.src.numel(), dtype=self.dtype, device=edges.src.device)
        return torch.sparse_csr_tensor(edges.ptr, edges.src, values, shape, check_invariants=False)

    @functools.cached_property
    def matrix(self) -> Tensor:
        return self._new_matrix()

    @functools.cached_property
    def second_matrix(self) -> Tensor:
        return self._new_matrix()

    @functools.cached_property
    def _in_chunks(self) -> Chunks | None:
        return _compute_once("chunks", self.edges.ptr, _split_long_rows)

    @functools.cached_property
    def _out_chunks(self) -> Chunks | None:
        return _compute_once("chunks", self.edges.out_ptr, _split_long_rows)

    def allocate(self, name: str, like: Rows) -> Rows:
        if name not in self._rows:
            self._rows[name] = torch.empty(like.shape, dtype=self.dtype, device=like.device)
        return self._rows[name]

    def stage(self, name: str, x: Rows) -> Float[Tensor, "rows dim"]:
        """Return the rows of ``x``, head by head, in the dtype of the buffers, as a view if possible."""
        if x.dtype == self.dtype and x.is_contiguous():
            return x.flatten(0, -2)
        return self.allocate(name, x).copy_(x).flatten(0, -2)

    def gather_by_dst(self, x: Float[Tensor, " dst"], out: Float[Tensor, " edges"]) -> Tensor:
        return torch.index_select(x, 0, self.edges.dst, out=out)

    def max_rows(self, values: Float[Tensor, " edges"]) -> Float[Tensor, " dst"]:
        """Return the largest value of the in-edges of each receiver, -inf without in-edges."""
        return torch.segment_reduce(values, "max", offsets=self.edges.ptr, initial=-torch.inf, unsafe=True)

    def sum_rows(self, values: Float[Tensor, " edges"]) -> Float[Tensor, " dst"]:
        """Sum the values of the in-edges of each receiver."""
        chunks = self._in_chunks
        bounds = self.edges.ptr if chunks is None else chunks[0]
        sums = torch.segment_reduce(values, "sum", offsets=bounds, initial=0.0, unsafe=True)
        if chunks is None:
            return sums
        total = torch.segment_reduce(sums.double(), "sum", offsets=chunks[1], initial=0.0, unsafe=True)
        return total.to(sums.dtype)

    def sum_incoming(self, weights: Tensor, rows: Tensor) -> Float[Tensor, "dst dim"]:
        """Sum the weighted rows of senders over the in-edges of each receiver."""
        return _weighted_sums(self.edges.src, self.edges.ptr, weights, rows, self._in_chunks)

    def sum_outgoing(self, weights: Tensor, rows: Tensor, temp: Tensor) -> Float[Tensor, "src dim"]:
        """Sum the weighted rows of receivers over the out-edges of each sender; ``temp`` is overwritten."""
        weights = torch.index_select(weights, 0, self.edges.out_position, out=temp)
        return _weighted_sums(self.edges.out_dst, self.edges.out_ptr, weights, rows, self._out_chunks)


def exponentiate(buffers: Buffers, logits: Float[Tensor, " edges"]) -> tuple[Tensor, Tensor, Tensor | float]:
    """Replace logits by ``mass = exp(logit - shift[dst])``; return mass, its sum by receiver, and shift."""
    shift: Tensor | float = 0.0
    # A receiver's largest logit is subtracted unless it is small. Its own logits decide, so that
    # no result depends on other receivers, not even by rounding. If all logits are small,
    # nothing is subtracted, but an asynchronous device does not wait to find out.
    if logits.device.type in devices.ASYNCHRONOUS or not needs_no_shift(logits):
        shift = buffers.max_rows(logits)
        shift.masked_fill_((shift.abs() <= SAFE_LOGIT) | (shift == -torch.inf), 0.0)
        logits.sub_(buffers.gather_by_dst(shift, buffers.second_matrix.values()))
    mass = logits.exp_()
    return mass, buffers.sum_rows(mass), shift


HeadGroups = list[tuple[Index, list[Index]]]


def group_heads(
    edges: EdgeRows, shape: Sequence[int], kv_heads: int, dtype: torch.dtype
) -> tuple[Buffers, HeadGroups]:
    """Return buffers, and the index of each key/value head with the indices of its query heads.

    ``shape`` is ``(samples, heads)``. If heads are faster together, an index is a slice of samples,
    for all of their heads; without edges there are no heads.
    """
    samples, heads = shape
    if not edges.src.numel():
        return Buffers(edges, dtype), []
    num_together = min(samples, MAX_EDGES // (heads * edges.src.numel()))
    while num_together and samples % num_together:
        num_together -= 1
    if num_together and samples * heads > 1:
        slices = [slice(i, i + num_together) for i in range(0, samples, num_together)]
        repeated = _repeat_edges(edges, num_together * heads, num_together * kv_heads)
        return Buffers(repeated, dtype), [(samples, [samples]) for samples in slices]
    group_size = heads // kv_heads
    return Buffers(edges, dtype), [
        ((sample, kv_head), [(sample, kv_head * group_size + i) for i in range(group_size)])
        for sample in range(samples)
        for kv_head in range(kv_heads)
    ]


def _repeat_edges(edges: EdgeRows, num_slices: int, num_kv: int) -> EdgeRows:
    """Repeat edges for copies of the receivers (``num_slices``) and of the senders (``num_kv``)."""

    def repeat(ptr: Tensor) -> EdgeRows:
        num_dst, num_src = ptr.numel() - 1, edges.out_ptr.numel() - 1
        index = torch.arange(num_slices, device=edges.src.device).unsqueeze(1)
        dst = edges.dst + index * num_dst
        src = edges.src + index // (num_slices // num_kv) * num_src
        return sort_edges(src.flatten(), dst.flatten(), num_kv * num_src, num_slices * num_dst)

    return replace(_compute_once((num_slices, num_kv), edges.ptr, repeat), is_first=edges.is_first)
