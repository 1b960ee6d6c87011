"""Launches of the Triton kernels over rows of edges, which use online softmax and no atomics.

The forward pass and the gradients of q and bias have a program for each receiver and some heads.
The gradients of k and v have one for each sender, which sums over the query heads of a group in order.
Every result is written by one program and summed in a fixed order, so results repeat bit for bit.
Pairs without an edge contribute nothing, not even a NaN. In the backward pass, neither do receivers
whose lse is not finite. The programs of one key/value head are launched together, so that its
senders stay in the cache. Long rows have chunks (:class:`gnn_attention.backends.gpu.csr.Side`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.gpu.csr import WORKSPACE, Side
from gnn_attention.backends.gpu.kernels import _common, _row_passes
from gnn_attention.backends.gpu.kernels._common import Arguments, heads_last, strides
from gnn_attention.backends.gpu.problem import Problem
from gnn_attention.edge_softmax import accumulation_dtype

MIN_PROGRAMS = 2**12  # Fewer programs do not keep a GPU busy.
MAX_CHANNELS = 512  # A program has at most this many: then sm_90 spills no registers (Triton 3.6.0, 3.7.1).
MAX_SLICES = 65535  # A grid has at most this many programs along its second axis.
STEP = 16  # A program reads this many partial results at once.


class Config(NamedTuple):
    """The edges that a program reads in one step, its warps, and its pipeline stages."""

    edges: int
    warps: int
    stages: int


# A key is the bytes of a number and the padded channels of all heads of a program. Each warp loads
# a few KiB of k and of v at once. No register is spilled, even with all options.
CONFIGS = {key: Config(*config) for key, config in {
    (2, 16): (32, 1, 2), (2, 32): (32, 1, 2), (2, 64): (32, 1, 2), (2, 128): (16, 2, 2), (2, 256): (16, 2, 2),
    (2, 512): (16, 4, 2), (4, 16): (32, 1, 2), (4, 32): (32, 1, 2), (4, 64): (16, 2, 2), (4, 128): (16, 4, 2),
    (4, 256): (16, 4, 2), (4, 512): (8, 4, 2), (8, 16): (8, 1, 2), (8, 32): (8, 2, 2), (8, 64): (8, 4, 2),
    (8, 128): (8, 8, 2), (8, 256): (4, 8, 2), (8, 512): (4, 8, 2),
}.items()}  # fmt: skip


@lru_cache
def members_of_program(rows: int, kv_heads: int, group: int, channels: int) -> int:
    """Return how many query heads of a group one program computes; this number divides ``group``.

    ``rows`` is the number of tokens; ``channels`` is the larger padded width of k and v. The heads
    of a program share the keys and values that it gathers. So it computes as many as fit into registers
    (``MAX_CHANNELS``), unless too few programs would remain to keep a GPU busy (``MIN_PROGRAMS``).
    """
    divisors = [n for n in range(1, group + 1) if group % n == 0]
    fitting_counts = [n for n in divisors if (1 << (n - 1).bit_length()) * channels <= MAX_CHANNELS]
    return max([n for n in fitting_counts if rows * kv_heads * (group // n) >= MIN_PROGRAMS], default=1)


def forward(
    problem: Problem, sides: tuple[Side, Side]
) -> tuple[Float[Tensor, "batch heads dst value_dim"], Float[Tensor, "batch heads dst"]]:
    """Compute out, token-major in memory, and lse. An isolated receiver has 0 and -inf."""
    q = problem.q
    out = heads_last(q, problem.v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=accumulation_dtype(q.dtype), device=q.device)
    receiver_pass = _Pass(problem, sides[0], False, out)
    receiver_pass.run(_row_passes.forward, (), (out,), lse)
    return out.to(q.dtype), lse


def backward(
    problem: Problem, sides: tuple[Side, Side], grad_out: Tensor, delta: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the gradients of q, k, v and bias from ``ds = exp(logit - lse) (grad_out . v - delta)``."""
    q, k, v, bias = problem.q, problem.k, problem.v, problem.bias
    receivers, senders = sides
    dbias = None if bias is None else bias.new_empty(bias.shape, dtype=lse.dtype)
    dq, dk, dv = (heads_last(x, x.shape[3]) for x in (q, k, v))
    receiver_pass = _Pass(problem, receivers, False, grad_out, dq)
    arguments = (grad_out, lse, delta, dbias, *strides(grad_out), receivers.neighbours.numel())
    receiver_pass.run(_row_passes.backward_dst, arguments, (dq,))
    sender_pass = _Pass(problem, senders, True, grad_out, dk, dv)
    arguments = (grad_out, lse, delta, senders.position, *strides(grad_out))
    sender_pass.run(_row_passes.backward_src, arguments, (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbias


class _Pass:
    """The launches of one pass over one side, with the arguments that its kernels have in common."""

    def __init__(self, problem: Problem, side: Side, by_sender: bool, *other_tensors: Tensor) -> None:
        q, k, v = problem.q, problem.k, problem.v
        self.side, self.q = side, q
        self.kv_heads, self.slices = k.shape[1], k.shape[0] * k.shape[1]
        self.rows = (k if by_sender else q).shape[2]
        group = q.shape[1] // k.shape[1]
        constants = _common.constants(problem, *other_tensors)
        channels = max(constants["DP"], constants["DVP"])
        members = members_of_program(self.rows, self.kv_heads, group, channels)
        # One program sums both gradients of a sender over all heads of the group.
        self.group = 1 if by_sender else group
        self.split = 1 if by_sender else group // members
        padded_members = 1 << (members - 1).bit_length()
        config = CONFIGS[q.dtype.itemsize, channels * padded_members]
        edges = max(2, config.edges // max(1, min(4, padded_members * (1 + by_sender) // 4)))
        self.config = config._replace(edges=edges)
        self.constants = constants | {
            "GROUP": group,
            "MEMBERS": members,
            "MP": padded_members,
            "EDGES": edges,
        }
        self.arguments = (
            *(q, k, v, side.ptr, side.neighbours, side.chunk_row, side.chunk_start),
            # q replaces a missing tensor, which kernels do not read.
            *(q if x is None else x for x in (problem.bias, problem.seed)),
            *strides(q, k, v, problem.bias),
            *_common.scalars(problem),
            *(side.limit, q.shape[2], self.kv_heads),
        )

    def run(
        self, kernel: object, arguments: Arguments, results: tuple[Tensor, ...], lse: Tensor | None = None
    ) -> None:
        """Write ``results`` for all rows. Chunks are merged by lse if there is one, else summed."""
        outputs = (*arguments, *results, *(() if lse is None else (lse,)), *strides(*results))
        for first in range(0, self.slices, MAX_SLICES):
            grid = self.rows * self.split, min(MAX_SLICES, self.slices - first)
            self._launch(kernel, grid, outputs, first, chunked=False)
        widths = [x.shape[3] for x in results] + ([] if lse is None else [1])
        for first, *workspaces in self._allocate_workspaces(widths):
            grid = self.side.chunk_row.numel() * self.split, len(workspaces[0])
            # The kernels do not use the strides of a workspace.
            outputs = (*arguments, *workspaces, *[0] * (3 * len(results)))
            self._launch(kernel, grid, outputs, first, chunked=True)
            if lse is not None:
                tensors = *workspaces, results[0], lse
                self._combine(_row_passes.merge_chunks, first, tensors, results[0])
                continue
            for workspace, result in zip(workspaces, results, strict=True):
                self._combine(_row_passes.sum_chunks, first, (workspace, result), result)

    def _combine(self, kernel: object, first: int, tensors: Arguments, result: Tensor) -> None:
        """Combine the chunks of each long row into ``result``."""
        slices, chunks, width = tensors[0].shape
        chunking = (self.side.long_row, self.side.first_chunk, first, self.kv_heads, self.q.shape[2], chunks)
        padded_width = _common.padded_channels(width)
        constants = {"GROUP": self.group, "D": width, "DP": padded_width, "STEP": STEP}
        constants["ACC"] = self.constants["ACC"]
        grid = (self.side.long_row.numel() * self.group, slices)
        arguments = (*tensors, *strides(result), *chunking)
        _common.launch(kernel, grid, arguments, constants, warps=4, stages=1)

    def _allocate_workspaces(self, widths: list[int]) -> Iterator[Arguments]:
        """Yield each launch's first slice and workspaces ``[slices, chunks * group, width]``."""
        chunks = self.side.chunk_row.numel() * self.group
        dtype = accumulation_dtype(self.q.dtype)
        if not chunks or not self.slices:
            return
        fitting_slices = max(1, WORKSPACE // (chunks * sum(widths) * dtype.itemsize))
        max_slices = min(self.slices, MAX_SLICES, fitting_slices)
        workspaces = [torch.empty(max_slices, chunks, w, dtype=dtype, device=self.q.device) for w in widths]
        for first in range(0, self.slices, max_slices):
            yield first, *(x[: self.slices - first] for x in workspaces)

    def _launch(self, kernel: object, grid: Arguments, outputs: Arguments, first: int, chunked: bool) -> None:
        constants = {**self.constants, "CHUNKED": chunked}
        arguments = (*self.arguments, first, *outputs)
        _common.launch(kernel, grid, arguments, constants, self.config.warps, self.config.stages)
