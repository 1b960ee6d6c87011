"""Attention along rows of edges, forward and backward: one program for each receiver and some heads
(:class:`Together`), online softmax, no atomics.

The forward pass and the gradients of q, ``before`` and ``bias`` go over receivers; those of k and v over
senders, the query heads of a group in order. Every number is written by one program and summed in one order:
results repeat bit for bit. Only edges are read, so that a NaN outside of them has no effect; in the backward
pass a receiver whose lse is not finite contributes nothing. Long rows are done in chunks
(:class:`gnn_attention.backends.gpu.csr.Side`) whose results are added in order.

Unless they take all heads, all programs of one key/value head come first, so that its senders stay in the
cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.gpu.csr import Side, hands_over
from gnn_attention.backends.gpu.kernels import _common, _row_passes
from gnn_attention.backends.gpu.kernels._common import Given, heads_last, strides
from gnn_attention.backends.gpu.problem import Problem
from gnn_attention.edge_softmax import accumulation_dtype

WORKSPACE = 2**26  # bytes of partial results at a time, of all heads of a sample if they are taken together
FEWEST = 2**12  # programs of a warp or more that keep a GPU busy
CACHE = 2**25  # bytes, of the 40 to 50 MB of an A100 or H100, that are left to what is gathered
MOST = 512  # channels of all heads of a program: no spills for sm_90 by Triton 3.6.0 and 3.7.1
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


class Together(NamedTuple):
    """Key/value heads of a program (one or all), and query heads of the group of each (a divisor)."""

    heads: int
    members: int

    @property
    def padded(self) -> tuple[int, int]:
        """The powers of two on which they lie."""
        return _power(self.heads), _power(self.members)

    def config(self, row: int, itemsize: int, sums: int) -> Config:
        """As for one head of as many channels; fewer edges the more rows of ``sums`` there are for each."""
        count = math.prod(self.padded)
        found = CONFIGS[itemsize, row * count]
        return found._replace(edges=max(2, found.edges // max(1, min(4, count * sums // 4))))


class Pass(NamedTuple):
    """The sizes of one: its rows, the tokens at the far ends of their edges, gradients that a row has."""

    rows: int
    others: int
    sums: int


@lru_cache
def together(rows: int, others: int, kv_heads: int, group: int, row: int, itemsize: int) -> Together:
    """What one program takes of ``rows`` tokens with ``others`` at the far ends, by size alone.

    ``row``: channels of q, k or v, padded to a power of two. Query heads of a group share their keys and
    values, which are then gathered once: as many of them as registers hold (:data:`MOST`), unless so few
    programs are left that multiprocessors stand idle (:data:`FEWEST`). All heads of a token are one place in
    memory of 1 to 2 KB, which DRAM reads faster than as many places of 128 bytes; but a cache then holds no
    head's senders for long. They are taken where it could not hold them anyway (:data:`CACHE`).
    """
    most = MOST // row
    fit = [n for n in range(1, group + 1) if group % n == 0 and _power(n) <= most]
    members = max([n for n in fit if rows * kv_heads * (group // n) >= FEWEST], default=1)
    cached = 2 * others * row * itemsize <= CACHE
    whole = not cached and _power(kv_heads) * _power(members) <= most
    return Together(kv_heads if whole and rows * (group // members) >= FEWEST else 1, members)


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def forward(
    problem: Problem, form: tuple[Side, Side]
) -> tuple[Float[Tensor, "batch heads dst value_dim"], Float[Tensor, "batch heads dst"]]:
    """``(out, lse)``, out token-major in memory; a receiver without in-edges has 0 and -inf."""
    q, width = problem.q, problem.v.shape[3]
    out = heads_last(q, width)
    lse = torch.empty(q.shape[:3], dtype=accumulation_dtype(q.dtype), device=q.device)
    work = _Work(problem, form[0], Pass(q.shape[2], problem.k.shape[2], 1), out)
    work.run(_row_passes.forward, work.split, (out, lse, *strides(out)))
    for first, part, part_lse in work.parts(work.group, width, 1):
        work.run_chunks(_row_passes.forward, work.split, first, part, (part, part_lse, 0, 0, 0))
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
    q, k, v, (receivers, senders) = problem.q, problem.k, problem.v, form
    edgewise = problem.before, problem.bias
    dbefore, dbias = (None if x is None else x.new_empty(x.shape, dtype=lse.dtype) for x in edgewise)
    # where ds (that of ``before``) and p of each edge go, for the senders; None where they compute them
    handed, (batch, heads), count = None, q.shape[:2], senders.position.numel()
    if count and hands_over(count, batch * heads, lse.dtype.itemsize):
        made = lse.new_empty(batch, heads, count)
        handed = torch.empty_like(made) if dbefore is None else dbefore, made
    dq, dk, dv = (heads_last(x, x.shape[3]) for x in (q, k, v))

    work = _Work(problem, receivers, Pass(q.shape[2], k.shape[2], 1), grad_out, dq)
    work.constants["HANDS"] = handed is not None
    ds, passed = handed or (dbefore, lse)
    given = (grad_out, lse, delta, ds, dbias, passed, *strides(grad_out), receivers.others.numel())
    work.run(_row_passes.backward_dst, work.split, (*given, dq, *strides(dq)))
    for first, part in work.parts(work.group, q.shape[3]):
        work.run_chunks(_row_passes.backward_dst, work.split, first, part, (*given, part, 0, 0, 0))
        work.finish(_row_passes.add_up, first, (part,), (dq,), work.group)

    work = _Work(problem, senders, Pass(k.shape[2], q.shape[2], 2), grad_out, dk, dv)
    work.constants["HANDS"] = handed is not None
    given = (grad_out, lse, delta, senders.position, *(handed or (lse, lse)), *strides(grad_out), count)
    work.run(_row_passes.backward_src, 1, (*given, dk, dv, *strides(dk, dv)))
    for first, *parts in work.parts(1, k.shape[3], v.shape[3]):
        work.run_chunks(_row_passes.backward_src, 1, first, parts[0], (*given, *parts, *[0] * 6))
        for part, result in zip(parts, (dk, dv), strict=True):
            work.finish(_row_passes.add_up, first, (part,), (result,), 1)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbefore, dbias


class _Work:
    """The launches of one pass: what all its kernels are given, for one side of the rows."""

    def __init__(self, problem: Problem, side: Side, about: Pass, *results: Tensor) -> None:
        q, k, v = problem.q, problem.k, problem.v
        self.side, self.q, self.kv_heads, self.slices = side, q, k.shape[1], k.shape[0] * k.shape[1]
        self.group = q.shape[1] // k.shape[1]
        options, size = _common.constants(problem, *results), q.dtype.itemsize
        row = max(options["DP"], options["DVP"])
        taken = together(about.rows, about.others, self.kv_heads, self.group, row, size)
        (self.heads, members), (padded, padded_members) = taken, taken.padded
        self.rows, self.split = about.rows, self.group // members
        self.config = taken.config(row, size, about.sums)
        options |= {"HEADS": self.heads, "HP": padded, "MEMBERS": members, "MP": padded_members}
        self.constants = {**options, "GROUP": self.group, "EDGES": self.config.edges}
        self.arguments = (
            *(q, k, v, side.ptr, side.others, side.chunk_row, side.chunk_start),
            *_common.added(problem),
            *strides(q, k, v, problem.before, problem.bias),
            *_common.scalars(problem),
            *(side.limit, q.shape[2], self.kv_heads),
        )

    def run(self, kernel: object, split: int, rest: Given) -> None:
        """All rows but the long ones, which are left at 0; ``split`` programs for the heads of a group."""
        for first, count in _common.slices_of(self.slices // self.heads):
            self._launch(kernel, (self.rows * split, count), rest, first * self.heads, False)

    def run_chunks(self, kernel: object, split: int, first: int, part: Tensor, rest: Given) -> None:
        """The chunks of the long rows, for as many samples and heads as ``part`` has room for."""
        grid = self.side.chunk_row.numel() * split, part.shape[0] // self.heads
        self._launch(kernel, grid, rest, first, True)

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
            most = min(self.slices, _common.MOST_SLICES, fit) // self.heads * self.heads or self.heads
            made = [torch.empty(most, chunks, width, dtype=dtype, device=self.q.device) for width in widths]
            for first in range(0, self.slices, most):
                yield first, *(x[: self.slices - first] for x in made)

    def _launch(self, kernel: object, grid: Given, rest: Given, first: int, chunked: bool) -> None:
        constants, config = {**self.constants, "CHUNKED": chunked}, self.config
        _common.launch(kernel, grid, (*self.arguments, first, *rest), constants, config.warps, config.stages)
