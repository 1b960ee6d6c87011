"""Attention along rows of edges, forward and backward: one program for each receiver and some heads, online
softmax, no atomics.

The forward pass and the gradients of q and ``bias`` go over receivers; those of k and v over
senders, the query heads of a group in order. Every number is written by one program and summed in one order:
results repeat bit for bit. Only edges are read, so that a NaN outside of them has no effect; in the backward
pass a receiver whose lse is not finite contributes nothing. Long rows are done in chunks
(:class:`gnn_attention.backends.gpu.csr.Side`) whose results are added in order.

All programs of one key/value head come first, so that its senders stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.gpu.csr import Side
from gnn_attention.backends.gpu.kernels import _common, _row_passes
from gnn_attention.backends.gpu.kernels._common import Given, heads_last, strides
from gnn_attention.backends.gpu.problem import Problem
from gnn_attention.edge_softmax import accumulation_dtype

WORKSPACE = 2**26  # bytes of partial results at a time
FEWEST = 2**12  # programs of a warp or more that keep a GPU busy
MOST = 512  # channels of all heads of a program: no spills for sm_90 by Triton 3.6.0 and 3.7.1
MOST_SLICES = 65535  # programs along the second axis of a grid
TOGETHER = 16  # partial results that are read at once


class Config(NamedTuple):
    """Edges that a program takes in one step, warps of a program, stages of its pipeline."""

    edges: int
    warps: int
    stages: int


# By bytes of a number and channels (a power of two), those of all heads of a program: some KiB of keys in
# flight for each warp, and as many of values; as many edges as the registers of a GPU hold without spilling,
# with all options at once.
CONFIGS = {key: Config(*numbers) for key, numbers in {
    (2, 16): (32, 1, 2), (2, 32): (32, 1, 2), (2, 64): (32, 1, 2), (2, 128): (16, 2, 2), (2, 256): (16, 2, 2),
    (2, 512): (16, 4, 2), (4, 16): (32, 1, 2), (4, 32): (32, 1, 2), (4, 64): (16, 2, 2), (4, 128): (16, 4, 2),
    (4, 256): (16, 4, 2), (4, 512): (8, 4, 2), (8, 16): (8, 1, 2), (8, 32): (8, 2, 2), (8, 64): (8, 4, 2),
    (8, 128): (8, 8, 2), (8, 256): (4, 8, 2), (8, 512): (4, 8, 2),
}.items()}  # fmt: skip


@lru_cache
def members_of(rows: int, kv_heads: int, group: int, row: int) -> int:
    """How many query heads of a group one program takes of ``rows`` tokens, a divisor of the group.

    ``row``: channels of q, k or v, padded to a power of two. Query heads of a group share their keys and
    values, which are then gathered once: as many of them as registers hold (:data:`MOST`), unless so few
    programs are left that multiprocessors stand idle (:data:`FEWEST`).
    """
    fit = [n for n in range(1, group + 1) if group % n == 0 and _power(n) * row <= MOST]
    return max([n for n in fit if rows * kv_heads * (group // n) >= FEWEST], default=1)


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def forward(
    problem: Problem, form: tuple[Side, Side]
) -> tuple[Float[Tensor, "batch heads dst value_dim"], Float[Tensor, "batch heads dst"]]:
    """``(out, lse)``, out token-major in memory; a receiver without in-edges has 0 and -inf."""
    q = problem.q
    out = heads_last(q, problem.v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=accumulation_dtype(q.dtype), device=q.device)
    work = _Pass(problem, form[0], q.shape[2], False, out)
    work.run(_row_passes.forward, (), (out,), lse)
    return out.to(q.dtype), lse


def backward(
    problem: Problem,
    form: tuple[Side, Side],
    grad_out: Float[Tensor, "batch heads dst value_dim"],
    delta: Float[Tensor, "batch heads dst"],
    lse: Float[Tensor, "batch heads dst"],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and bias: ``ds = exp(logit - lse) (grad_out . v - delta)``."""
    q, k, v, (receivers, senders) = problem.q, problem.k, problem.v, form
    dbias = None if problem.bias is None else problem.bias.new_empty(problem.bias.shape, dtype=lse.dtype)
    dq, dk, dv = (heads_last(x, x.shape[3]) for x in (q, k, v))
    work = _Pass(problem, receivers, q.shape[2], False, grad_out, dq)
    given = (grad_out, lse, delta, dbias, *strides(grad_out), receivers.others.numel())
    work.run(_row_passes.backward_dst, given, (dq,))
    work = _Pass(problem, senders, k.shape[2], True, grad_out, dk, dv)
    work.run(_row_passes.backward_src, (grad_out, lse, delta, senders.position, *strides(grad_out)), (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbias


class _Pass:
    """The launches of one pass: what all its kernels are given, for one side of the rows."""

    def __init__(self, problem: Problem, side: Side, rows: int, of_senders: bool, *aligned: Tensor) -> None:
        q, k, v = problem.q, problem.k, problem.v
        self.side, self.q, self.rows, self.kv_heads = side, q, rows, k.shape[1]
        self.slices, group = k.shape[0] * k.shape[1], q.shape[1] // k.shape[1]
        options = _common.constants(problem, *aligned)
        row = max(options["DP"], options["DVP"])
        members = members_of(rows, self.kv_heads, group, row)
        # a sender has one result, to which all heads of its group add, and a program has more sums then
        self.group = 1 if of_senders else group
        self.split = 1 if of_senders else group // members
        found, padded = CONFIGS[q.dtype.itemsize, row * _power(members)], _power(members)
        fewer = max(1, min(4, padded * (1 + of_senders) // 4))
        self.config = found._replace(edges=max(2, found.edges // fewer))
        options |= {"GROUP": group, "MEMBERS": members, "MP": padded, "EDGES": self.config.edges}
        self.constants = options
        self.arguments = (
            *(q, k, v, side.ptr, side.others, side.chunk_row, side.chunk_start),
            # where there is none, q, which is then not read
            *(q if x is None else x for x in (problem.bias, problem.seed)),
            *strides(q, k, v, problem.bias),
            *_common.scalars(problem),
            *(side.limit, q.shape[2], self.kv_heads),
        )

    def run(
        self, kernel: object, given: Given, results: tuple[Tensor, ...], lse: Tensor | None = None
    ) -> None:
        """Write the ``results`` of all rows: the long ones from their chunks, which are merged by ``lse``."""
        rest = (*given, *results, *(() if lse is None else (lse,)), *strides(*results))
        for first in range(0, self.slices, MOST_SLICES):
            grid = self.rows * self.split, min(MOST_SLICES, self.slices - first)
            self._launch(kernel, grid, rest, first, chunked=False)
        widths = [x.shape[3] for x in results] + ([] if lse is None else [1])
        for first, *parts in self._workspaces(widths):
            grid = self.side.chunk_row.numel() * self.split, len(parts[0])
            self._launch(kernel, grid, (*given, *parts, *[0] * (3 * len(results))), first, chunked=True)
            if lse is not None:
                self._finish(_row_passes.merge, first, (parts[0], parts[1], results[0], lse), results[0])
                continue
            for part, result in zip(parts, results, strict=True):
                self._finish(_row_passes.add_up, first, (part, result), result)

    def _finish(self, kernel: object, first: int, tensors: Given, result: Tensor) -> None:
        """Write the long rows from the results of their chunks."""
        slices, chunks, width = tensors[0].shape
        numbers = (self.side.long, self.side.first, first, self.kv_heads, self.q.shape[2], chunks)
        constants = {"GROUP": self.group, "D": width, "DP": _common.channels(width), "TOGETHER": TOGETHER}
        constants["ACC"] = self.constants["ACC"]
        grid, arguments = (
            (self.side.long.numel() * self.group, slices),
            (*tensors, *strides(result), *numbers),
        )
        _common.launch(kernel, grid, arguments, constants, warps=4, stages=1)

    def _workspaces(self, widths: list[int]) -> Iterator[Given]:
        """(first, workspaces ``[slices, chunks * group, width]`` ...), as many slices as fit at a time."""
        chunks, dtype = self.side.chunk_row.numel() * self.group, accumulation_dtype(self.q.dtype)
        if not chunks or not self.slices:
            return
        fit = max(1, WORKSPACE // (chunks * sum(widths) * dtype.itemsize))
        most = min(self.slices, MOST_SLICES, fit)
        made = [torch.empty(most, chunks, width, dtype=dtype, device=self.q.device) for width in widths]
        for first in range(0, self.slices, most):
            yield first, *(x[: self.slices - first] for x in made)

    def _launch(self, kernel: object, grid: Given, rest: Given, first: int, chunked: bool) -> None:
        constants, config = {**self.constants, "CHUNKED": chunked}, self.config
        _common.launch(kernel, grid, (*self.arguments, first, *rest), constants, config.warps, config.stages)
