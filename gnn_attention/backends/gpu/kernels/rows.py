"""Attention along rows of edges, forward and backward: one program for each receiver and head, online
softmax, no atomics.

The forward pass and the gradients of q, ``before`` and ``bias`` go over receivers; those of k and v over
senders, the query heads of a group in order. Every number is written by one program and summed in one order:
results repeat bit for bit. Only edges are read, so that a NaN outside of them has no effect; in the backward
pass a receiver whose lse is not finite contributes nothing. Long rows are done in chunks
(:class:`gnn_attention.backends.gpu.csr.Side`) whose results are added in order.

All programs of one key/value head come first, so that its senders stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.gpu.csr import Side
from gnn_attention.backends.gpu.formats import Problem
from gnn_attention.backends.gpu.kernels import _common, _row_passes
from gnn_attention.backends.gpu.kernels._common import Given, heads_last, strides
from gnn_attention.edges import accumulation_dtype

WORKSPACE = 2**26  # bytes of partial results at a time
TOGETHER = 16  # partial results that are read at once


class Config(NamedTuple):
    """Edges that a program takes in one step, warps of a program, stages of its pipeline."""

    edges: int
    warps: int
    stages: int


# By bytes of a number and channels (a power of two): some KiB of keys in flight for each warp, and as many of
# values; as many edges as the registers of a GPU hold without spilling, with all options at once.
CONFIGS = {key: Config(*numbers) for key, numbers in {
    (2, 16): (32, 1, 2), (2, 32): (32, 1, 2), (2, 64): (32, 1, 2), (2, 128): (16, 2, 2), (2, 256): (16, 2, 2),
    (2, 512): (16, 4, 2), (4, 16): (32, 1, 2), (4, 32): (32, 1, 2), (4, 64): (16, 2, 2), (4, 128): (16, 2, 2),
    (4, 256): (16, 4, 2), (4, 512): (8, 4, 2), (8, 16): (8, 1, 2), (8, 32): (8, 2, 2), (8, 64): (8, 4, 2),
    (8, 128): (8, 8, 2), (8, 256): (4, 8, 2), (8, 512): (4, 8, 2),
}.items()}  # fmt: skip


def forward(
    problem: Problem, form: tuple[Side, Side]
) -> tuple[Float[Tensor, "batch heads dst value_dim"], Float[Tensor, "batch heads dst"]]:
    """``(out, lse)``, out token-major in memory; a receiver without in-edges has 0 and -inf."""
    q, width = problem.q, problem.v.shape[3]
    out = heads_last(q, width)
    lse = torch.empty(q.shape[:3], dtype=accumulation_dtype(q.dtype), device=q.device)
    work = _Work(problem, form[0], out)
    work.run(_row_passes.forward, q.shape[2] * work.group, (out, lse, *strides(out)))
    for first, part, part_lse in work.parts(work.group, width, 1):
        work.run_chunks(_row_passes.forward, first, part, (part, part_lse, 0, 0, 0))
        work.finish(_row_passes.merge, first, (part, part_lse), (out, lse), work.group)
    return out.to(q.dtype), lse


def backward(
    problem: Problem,
    form: tuple[Side, Side],
    grad_out: Float[Tensor, "batch heads dst value_dim"],
    delta: Float[Tensor, "batch heads dst"],
    lse: Float[Tensor, "batch heads dst"],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of q, k, v, before and bias: ``ds = exp(logit - lse) (grad_out . v - delta)``."""
    dq, dbefore, dbias = _over_receivers(problem, form[0], grad_out, delta, lse)
    dk, dv = _over_senders(problem, form[1], grad_out, delta, lse)
    return dq, dk, dv, dbefore, dbias


def _over_receivers(
    problem: Problem, side: Side, grad_out: Tensor, delta: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    q = problem.q
    dq = heads_last(q, q.shape[3])
    dbefore, dbias = _common.like_edges(problem)
    work = _Work(problem, side, grad_out, dq)
    given = (grad_out, lse, delta, dbefore, dbias, *strides(grad_out), side.others.numel())
    work.run(_row_passes.backward_dst, q.shape[2] * work.group, (*given, dq, *strides(dq)))
    for first, part in work.parts(work.group, q.shape[3]):
        work.run_chunks(_row_passes.backward_dst, first, part, (*given, part, 0, 0, 0))
        work.finish(_row_passes.add_up, first, (part,), (dq,), work.group)
    return dq.to(q.dtype), dbefore, dbias


def _over_senders(
    problem: Problem, side: Side, grad_out: Tensor, delta: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    k, v = problem.k, problem.v
    dk, dv = (heads_last(x, x.shape[3]) for x in (k, v))
    work = _Work(problem, side, grad_out, dk, dv)
    given = (grad_out, lse, delta, side.position, *strides(grad_out))
    work.run(_row_passes.backward_src, k.shape[2], (*given, dk, dv, *strides(dk, dv)))
    for first, *parts in work.parts(1, k.shape[3], v.shape[3]):
        work.run_chunks(_row_passes.backward_src, first, parts[0], (*given, *parts, *[0] * 6))
        for part, result in zip(parts, (dk, dv), strict=True):
            work.finish(_row_passes.add_up, first, (part,), (result,), 1)
    return dk.to(k.dtype), dv.to(v.dtype)


class _Work:
    """The launches of one pass: what all its kernels are given, for one side of the rows."""

    def __init__(self, problem: Problem, side: Side, *results: Tensor) -> None:
        q, k, v = problem.q, problem.k, problem.v
        self.side, self.q, self.kv_heads, self.slices = side, q, k.shape[1], k.shape[0] * k.shape[1]
        self.group = q.shape[1] // k.shape[1]
        self.config = CONFIGS[q.dtype.itemsize, max(_common.channels(x.shape[3]) for x in (q, v))]
        options = _common.constants(problem, *results)
        self.constants = {**options, "GROUP": self.group, "EDGES": self.config.edges}
        self.arguments = (
            *(q, k, v, side.ptr, side.others, side.chunk_row, side.chunk_start),
            *_common.added(problem),
            *strides(q, k, v, problem.before, problem.bias),
            *_common.scalars(problem),
            *(side.limit, q.shape[2], self.kv_heads),
        )

    def run(self, kernel: object, programs: int, rest: Given) -> None:
        """All rows but the long ones, which are left at 0."""
        for first, count in _common.slices_of(self.slices):
            self._launch(kernel, (programs, count), rest, first, False)

    def run_chunks(self, kernel: object, first: int, part: Tensor, rest: Given) -> None:
        """The chunks of the long rows, for as many samples and heads as ``part`` has room for."""
        self._launch(kernel, (part.shape[1], part.shape[0]), rest, first, True)

    def finish(self, kernel: object, first: int, parts: Given, results: Given, group: int) -> None:
        """Write the long rows from the results of their chunks."""
        slices, chunks, width = parts[0].shape
        numbers = (self.side.long, self.side.first, first, self.kv_heads, self.q.shape[2], chunks)
        grid, given = (self.side.long.numel() * group, slices), (*parts, *results, *strides(results[0]))
        constants = {"GROUP": group, "D": width, "DP": _common.channels(width), "TOGETHER": TOGETHER}
        constants["ACC"] = self.constants["ACC"]
        _common.launch(kernel, grid, (*given, *numbers), constants, warps=4, stages=1)

    def parts(self, group: int, *widths: int) -> Iterator[Given]:
        """(first, workspaces ``[slices, chunks * group, width]`` ...), as many slices as fit at a time."""
        chunks, dtype = self.side.chunk_row.numel() * group, accumulation_dtype(self.q.dtype)
        if chunks and self.slices:
            fit = max(1, WORKSPACE // (chunks * sum(widths) * dtype.itemsize))
            most = min(self.slices, _common.MOST_SLICES, fit)
            made = [torch.empty(most, chunks, width, dtype=dtype, device=self.q.device) for width in widths]
            for first in range(0, self.slices, most):
                yield first, *(x[: self.slices - first] for x in made)

    def _launch(self, kernel: object, grid: Given, rest: Given, first: int, chunked: bool) -> None:
        constants, config = {**self.constants, "CHUNKED": chunked}, self.config
        _common.launch(kernel, grid, (*self.arguments, first, *rest), constants, config.warps, config.stages)
