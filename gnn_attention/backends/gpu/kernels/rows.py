"""Launches of the Triton kernels over rows of edges, which use online softmax and no atomics.

The forward pass and the gradients of q and bias have a program for each receiver and some heads.
The gradients of k and v have one for each sender, which sums over the query heads of a group in
order. Every result is written by one program and summed in a fixed order, so results repeat bit for
bit. Pairs without an edge contribute nothing, not even a NaN. In the backward pass, neither do
receivers whose lse is not finite. The programs of one key/value head are launched together, so that
its senders stay in the cache. Long rows have chunks (:class:`gnn_attention.backends.gpu.csr.Side`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.gpu.csr import MAX_WORKSPACE_BYTES, Side
from gnn_attention.backends.gpu.kernels import _common, _row_passes
from gnn_attention.backends.gpu.kernels._common import Arguments, empty_token_major, strides
from gnn_attention.backends.gpu.problem import Problem
from gnn_attention.edge_softmax import accumulation_dtype

MIN_PROGRAMS = 2**12  # Fewer programs do not keep a GPU busy.
MAX_CHANNELS = 512  # A program has at most this many: then sm_90 spills no registers (Triton 3.6.0, 3.7.1).
MAX_SLICES = 65535  # A grid has at most this many programs along its second axis.
CHUNKS_PER_STEP = 16  # A program reads the results of this many chunks at once.


class Config(NamedTuple):
    """The edges that a program reads in one step, its warps, and its pipeline stages."""

    num_edges: int
    num_warps: int
    num_stages: int


# A key is the bytes of an element and the padded channels of all heads of a program. Each warp
# loads a few KiB of k and of v at once. With all options and 128 features it spills up to 48 bytes.
CONFIGS = {key: Config(*config) for key, config in {
    (2, 16): (32, 1, 2), (2, 32): (32, 1, 2), (2, 64): (32, 1, 2), (2, 128): (16, 2, 2), (2, 256): (16, 2, 2),
    (2, 512): (16, 4, 2), (4, 16): (32, 1, 2), (4, 32): (32, 1, 2), (4, 64): (16, 2, 2), (4, 128): (16, 4, 2),
    (4, 256): (16, 4, 2), (4, 512): (8, 4, 2), (8, 16): (8, 1, 2), (8, 32): (8, 2, 2), (8, 64): (8, 4, 2),
    (8, 128): (8, 8, 2), (8, 256): (4, 8, 2), (8, 512): (4, 8, 2),
}.items()}  # fmt: skip


@lru_cache
def choose_num_members(num_rows: int, num_kv_heads: int, group_size: int, num_channels: int) -> int:
    """Return how many query heads of a group one program computes, a divisor of ``group_size``.

    ``num_rows`` counts tokens; ``num_channels`` is the larger padded width of k and v. The heads
    of a program share the keys and values that it gathers. So it computes as many as fit into
    registers, unless too few programs would remain to keep a GPU busy (``MIN_PROGRAMS``).
    """
    divisors = [n for n in range(1, group_size + 1) if group_size % n == 0]
    fitting = [n for n in divisors if (1 << (n - 1).bit_length()) * num_channels <= MAX_CHANNELS]
    num_groups = num_rows * num_kv_heads
    return max([n for n in fitting if num_groups * (group_size // n) >= MIN_PROGRAMS], default=1)


def forward(
    problem: Problem, sides: tuple[Side, Side]
) -> tuple[Float[Tensor, "batch heads dst value_dim"], Tensor, Float[Tensor, "batch heads dst"]]:
    """Compute out, the sums of features, and lse, which is 0 without a softmax. Rows are token-major.

    An isolated receiver has 0, and lse -inf. With features, out has the dtype of sums, like r.
    """
    q, r = problem.q, problem.r
    out = empty_token_major(q, problem.v.shape[3], r.dtype if r.shape[3] else q.dtype)
    sums = r.new_empty(*q.shape[:3], r.shape[3])
    lse = torch.empty(q.shape[:3], dtype=accumulation_dtype(q.dtype), device=q.device)
    receiver_pass = _Pass(problem, sides[0], False, out)
    receiver_pass.run(_row_passes.forward, (), (out, sums), lse)
    return out if r.shape[3] else out.to(q.dtype), sums, lse


def backward(
    problem: Problem, sides: tuple[Side, Side], grads: tuple[Tensor, Tensor], delta: Tensor, lse: Tensor
) -> tuple[Tensor, ...]:
    """Compute the gradients of q, k, v, r and bias from ``ds = exp(logit - lse) (grad_out . v - delta)``.

    ``grads`` are those of out and of the sums of features. For the gradient of features, also return that
    of the products and the weights after dropout ``[batch, heads, edges]``, empty without features.
    """
    q, k, v, r, bias = problem.q, problem.k, problem.v, problem.r, problem.bias
    receivers, senders = sides
    grad_out, num_edges = grads[0], receivers.neighbours.numel()
    dbias = lse.new_empty(bias.shape)
    shape = *q.shape[:2], num_edges if r.shape[3] else 0
    ddot, weight = lse.new_empty(shape), lse.new_empty(shape)
    dq, dk, dv = (empty_token_major(x, x.shape[3], x.dtype) for x in (q, k, v))
    dr = torch.empty_like(r, memory_format=torch.contiguous_format)
    receiver_pass = _Pass(problem, receivers, False, grad_out, dq)
    arguments = (*grads, lse, delta, dbias, ddot, weight, *strides(*grads), num_edges)
    receiver_pass.run(_row_passes.backward_dst, arguments, (dq, dr))
    sender_pass = _Pass(problem, senders, True, grad_out, dk, dv)
    arguments = (grad_out, lse, delta, senders.position, ddot, weight, *strides(grad_out), num_edges)
    sender_pass.run(_row_passes.backward_src, arguments, (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dr, dbias, ddot, weight


class _Pass:
    """The launches of one pass over one side, with the arguments that its kernels have in common."""

    def __init__(self, problem: Problem, side: Side, by_sender: bool, *other_tensors: Tensor) -> None:
        q, k, v = problem.q, problem.k, problem.v
        self.side, self.q = side, q
        self.num_kv_heads, self.num_slices = k.shape[1], k.shape[0] * k.shape[1]
        self.num_rows = (k if by_sender else q).shape[2]
        group_size = q.shape[1] // k.shape[1]
        constants = _common.constants(problem, *other_tensors)
        num_channels = max(constants["DP"], constants["DVP"])
        if constants["NF"]:
            num_channels = min(MAX_CHANNELS, _common.padded_channels(num_channels + constants["FP"]))
        num_members = choose_num_members(self.num_rows, self.num_kv_heads, group_size, num_channels)
        # One program sums both gradients of a sender over all heads of the group.
        self.results_per_chunk = 1 if by_sender else group_size
        self.split = 1 if by_sender else group_size // num_members
        num_padded = 1 << (num_members - 1).bit_length()
        config = CONFIGS[q.dtype.itemsize, num_channels * num_padded]
        num_edges = max(2, config.num_edges // max(1, min(4, num_padded * (1 + by_sender) // 4)))
        self.config = config._replace(num_edges=num_edges)
        constants |= {"GROUP": group_size, "MEMBERS": num_members, "MP": num_padded, "EDGES": num_edges}
        self.constants = constants
        self.arguments = (
            *(q, k, v, side.ptr, side.neighbours, side.chunk_row, side.chunk_start, problem.bias),
            # q replaces a missing tensor, which kernels do not read.
            *(q if x is None else x for x in (problem.seed, problem.edge_type)),
            *(problem.r, problem.a),
            *strides(q, k, v, problem.bias, problem.r, problem.a),
            *_common.scalars(problem),
            *(side.chunk_size, q.shape[2], self.num_kv_heads),
        )

    def run(
        self, kernel: Any, arguments: Arguments, results: tuple[Tensor, ...], lse: Tensor | None = None
    ) -> None:
        """Write ``results`` for all rows. Chunks are merged by lse if there is one, else summed."""
        launch_args = (*arguments, *results, *(() if lse is None else (lse,)), *strides(*results))
        for first_slice in range(0, self.num_slices, MAX_SLICES):
            grid = self.num_rows * self.split, min(MAX_SLICES, self.num_slices - first_slice)
            self._launch(kernel, grid, launch_args, first_slice, chunked=False)
        widths = [x.shape[3] for x in results] + ([] if lse is None else [1])
        for first_slice, *workspaces in self._allocate_workspaces(widths):
            grid = self.side.chunk_row.numel() * self.split, len(workspaces[0])
            # The kernels do not use the strides of a workspace.
            launch_args = (*arguments, *workspaces, *[0] * (3 * len(results)))
            self._launch(kernel, grid, launch_args, first_slice, chunked=True)
            for workspace, result in zip(workspaces, results, strict=False):
                # The first result has the lse of its rows, even if it has no channels.
                if result.numel() or result is results[0]:
                    self._combine(first_slice, workspace, workspaces[-1], result, lse)

    def _combine(
        self, first_slice: int, workspace: Tensor, part_lse: Tensor, result: Tensor, lse: Tensor | None
    ) -> None:
        """Combine the chunks of each long row into ``result``."""
        num_slices, num_rows, width = workspace.shape
        sizes = first_slice, self.num_kv_heads, self.q.shape[2], num_rows
        constants = {"GROUP": self.results_per_chunk, "D": width, "DP": _common.padded_channels(width)}
        constants |= {"STEP": CHUNKS_PER_STEP, "ACC": self.constants["ACC"]}
        constants["HAS_LSE"] = lse is not None and self.constants["NORMALISER"] == "softmax"
        grid = (self.side.long_row.numel() * self.results_per_chunk, num_slices)
        tensors = workspace, part_lse, result, result if lse is None else lse
        arguments = (*tensors, *strides(result), self.side.long_row, self.side.first_chunk, *sizes)
        _common.launch(_row_passes.combine_chunks, grid, arguments, constants, num_warps=4, num_stages=1)

    def _allocate_workspaces(self, widths: list[int]) -> Iterator[Arguments]:
        """Yield each launch's first slice and workspaces ``[slices, num_rows, width]``."""
        num_rows = self.side.chunk_row.numel() * self.results_per_chunk
        dtype = accumulation_dtype(self.q.dtype)
        if not num_rows or not self.num_slices:
            return
        fitting_slices = max(1, MAX_WORKSPACE_BYTES // (num_rows * sum(widths) * dtype.itemsize))
        max_slices = min(self.num_slices, MAX_SLICES, fitting_slices)
        workspaces = [torch.empty(max_slices, num_rows, w, dtype=dtype, device=self.q.device) for w in widths]
        for first_slice in range(0, self.num_slices, max_slices):
            yield first_slice, *(x[: self.num_slices - first_slice] for x in workspaces)

    def _launch(self, kernel: Any, grid: Arguments, args: Arguments, first_slice: int, chunked: bool) -> None:
        constants = {**self.constants, "CHUNKED": chunked}
        arguments = (*self.arguments, first_slice, *args)
        _common.launch(kernel, grid, arguments, constants, self.config.num_warps, self.config.num_stages)
