"""Attention along rows of edges, forward and backward: one program for each receiver and head, online
softmax, no atomics.

The forward pass and the gradients of q, ``before`` and ``bias`` go over receivers; those of k and v over
senders, the query heads of a group in order. Every number is written by one program and summed in one order:
results repeat bit for bit. Only edges are read, so that what a non-edge holds, NaN too, reaches nobody; in
the backward pass a receiver whose lse is not finite contributes nothing. Long rows are done in chunks
(:class:`gnn_attention.backends.gpu.csr.Side`) whose results are added in order.

All programs of one key/value head come first, so that its senders stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.gpu.csr import Rows, Side, receivers, senders
from gnn_attention.backends.gpu.formats import Problem
from gnn_attention.backends.gpu.kernels import _common, _row_passes
from gnn_attention.edges import accumulation_dtype

__all__ = ["CONFIGS", "Config", "backward", "forward"]

WORKSPACE = 2**26  # bytes of partial results at a time
TOGETHER = 16  # partial results that are read at once


class Config(NamedTuple):
    """Edges that a program takes in one step, warps of a program, stages of its pipeline."""

    edges: int
    warps: int
    stages: int


# By bytes of a number and channels (a power of two): some KiB of keys in flight for each warp, and as many of
# values; as many edges as the registers of a GPU hold without spilling, with all options at once.
CONFIGS = {
    (2, 16): Config(32, 1, 2), (2, 32): Config(32, 1, 2), (2, 64): Config(32, 1, 2), (2, 128): Config(16, 2, 2),
    (2, 256): Config(16, 2, 2), (2, 512): Config(16, 4, 2),
    (4, 16): Config(32, 1, 2), (4, 32): Config(32, 1, 2), (4, 64): Config(16, 2, 2), (4, 128): Config(16, 2, 2),
    (4, 256): Config(16, 4, 2), (4, 512): Config(8, 4, 2),
    (8, 16): Config(8, 1, 2), (8, 32): Config(8, 2, 2), (8, 64): Config(8, 4, 2), (8, 128): Config(8, 8, 2),
    (8, 256): Config(4, 8, 2), (8, 512): Config(4, 8, 2),
}  # fmt: skip


def forward(
    problem: Problem, form: Rows
) -> tuple[Float[Tensor, "batch heads dst value_dim"], Float[Tensor, "batch heads dst"]]:
    """``(out, lse)``, out token-major in memory; a receiver without in-edges has 0 and -inf."""
    q, width = problem.q, problem.v.shape[3]
    out = _common.heads_last(q, width, _common.written_dtype(q.dtype))
    lse = torch.empty(q.shape[:3], dtype=accumulation_dtype(q.dtype), device=q.device)
    work = _Work(problem, receivers(form), (out,))
    work.run(_row_passes.forward, q.shape[2] * work.group, (out, lse, *_common.strides(out)))
    for first, part, part_lse in work.parts(work.group, width, 1):
        work.run_chunks(_row_passes.forward, first, part, (part, part_lse, 0, 0, 0))
        work.finish(
            _row_passes.merge,
            first,
            part,
            (part, part_lse, out, lse, *_common.strides(out)),
            work.group,
            width,
        )
    return out.to(q.dtype), lse


def backward(
    problem: Problem,
    form: Rows,
    grad_out: Float[Tensor, "batch heads dst value_dim"],
    delta: Float[Tensor, "batch heads dst"],
    lse: Float[Tensor, "batch heads dst"],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of q, k, v, before and bias: ``ds = exp(logit - lse) (grad_out . v - delta)`` for each
    edge.
    """
    dq, dbefore, dbias = _over_receivers(problem, form, grad_out, delta, lse)
    dk, dv = _over_senders(problem, form, grad_out, delta, lse)
    return dq, dk, dv, dbefore, dbias


def _over_receivers(
    problem: Problem, form: Rows, grad_out: Tensor, delta: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    q = problem.q
    dq = _common.heads_last(q, q.shape[3], _common.written_dtype(q.dtype))
    edge_grads = [_for_edges(x, lse.dtype) for x in (problem.before, problem.bias)]
    work = _Work(problem, receivers(form), (grad_out, dq))
    given = (grad_out, lse, delta, *edge_grads, *_common.strides(grad_out), form.src.numel())
    work.run(_row_passes.backward_dst, q.shape[2] * work.group, (*given, dq, *_common.strides(dq)))
    for first, part in work.parts(work.group, q.shape[3]):
        work.run_chunks(_row_passes.backward_dst, first, part, (*given, part, 0, 0, 0))
        work.finish(_row_passes.add_up, first, part, (part, dq, *_common.strides(dq)), work.group, q.shape[3])
    return dq.to(q.dtype), edge_grads[0], edge_grads[1]


def _over_senders(
    problem: Problem, form: Rows, grad_out: Tensor, delta: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    k, v = problem.k, problem.v
    dk, dv = (_common.heads_last(x, x.shape[3], _common.written_dtype(x.dtype)) for x in (k, v))
    work = _Work(problem, senders(form), (grad_out, dk, dv))
    given = (grad_out, lse, delta, form.out_edge, *_common.strides(grad_out))
    work.run(
        _row_passes.backward_src, k.shape[2], (*given, dk, dv, *_common.strides(dk), *_common.strides(dv))
    )
    for first, part_k, part_v in work.parts(1, k.shape[3], v.shape[3]):
        work.run_chunks(_row_passes.backward_src, first, part_k, (*given, part_k, part_v, 0, 0, 0, 0, 0, 0))
        for part, result in ((part_k, dk), (part_v, dv)):
            work.finish(
                _row_passes.add_up, first, part, (part, result, *_common.strides(result)), 1, result.shape[3]
            )
    return dk.to(k.dtype), dv.to(v.dtype)


def _for_edges(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Where the gradient of a number for each edge is written."""
    return None if x is None else torch.empty(x.shape, dtype=dtype, device=x.device)


class _Work:
    """The launches of one pass: what all its kernels are given, for one side of the rows."""

    def __init__(self, problem: Problem, side: Side, others: tuple[Tensor, ...]) -> None:
        q, k, v = problem.q, problem.k, problem.v
        self.side, self.q, self.kv_heads, self.slices = side, q, k.shape[1], k.shape[0] * k.shape[1]
        self.group = q.shape[1] // k.shape[1]
        self.config = CONFIGS[q.dtype.itemsize, max(_common.channels(x.shape[3]) for x in (q, v))]
        self.arguments = _arguments(problem, side)
        self.constants = {
            **_common.features(problem),
            "D": q.shape[3],
            "DP": _common.channels(q.shape[3]),
            "DV": v.shape[3],
            "DVP": _common.channels(v.shape[3]),
            "GROUP": self.group,
            "EDGES": self.config.edges,
            "ALIGN": _common.alignment(q, k, v, *others),
            "ACC": _common.sum_dtype(q.dtype),
        }

    def run(self, kernel: object, programs: int, rest: tuple[object, ...]) -> None:
        """All rows but the long ones, which are left at 0."""
        for first, count in _common.slices_of(self.slices):
            self._launch(kernel, (programs, count), rest, first, False)

    def run_chunks(self, kernel: object, first: int, part: Tensor, rest: tuple[object, ...]) -> None:
        """The chunks of the long rows, for as many samples and heads as ``part`` holds."""
        self._launch(kernel, (part.shape[1], part.shape[0]), rest, first, True)

    def finish(
        self, kernel: object, first: int, part: Tensor, given: tuple[object, ...], group: int, width: int
    ) -> None:
        """Write the long rows from the results of their chunks."""
        numbers = (self.side.long, self.side.first, first, self.kv_heads, self.q.shape[2], part.shape[1])
        constants = {"GROUP": group, "WIDTH": width, "PADDED": _common.channels(width), "TOGETHER": TOGETHER}
        grid = (self.side.long.numel() * group, part.shape[0])
        _common.launch(
            kernel, grid, (*given, *numbers), {**constants, "ACC": self.constants["ACC"]}, warps=4, stages=1
        )

    def parts(self, group: int, *widths: int) -> Iterator[tuple[Any, ...]]:
        """(first, workspaces ``[slices, chunks * group, width]`` ...) for as many slices at a time as a
        workspace may hold.
        """
        chunks, dtype = self.side.chunk_row.numel() * group, accumulation_dtype(self.q.dtype)
        if chunks and self.slices:
            most = min(
                self.slices, _common.MOST_SLICES, max(1, WORKSPACE // (chunks * sum(widths) * dtype.itemsize))
            )
            made = [torch.empty(most, chunks, width, dtype=dtype, device=self.q.device) for width in widths]
            for first in range(0, self.slices, most):
                yield first, *(x[: self.slices - first] for x in made)

    def _launch(
        self, kernel: object, grid: tuple[int, int], rest: tuple[object, ...], first: int, chunked: bool
    ) -> None:
        constants = {**self.constants, "CHUNKED": chunked}
        _common.launch(
            kernel, grid, (*self.arguments, first, *rest), constants, self.config.warps, self.config.stages
        )


def _arguments(problem: Problem, side: Side) -> tuple[object, ...]:
    """In the order in which every kernel takes them."""
    return (
        *(problem.q, problem.k, problem.v, side.ptr, side.others, side.chunk_row, side.chunk_start),
        *(problem.slopes, problem.before, problem.bias, problem.seed),
        *(
            number
            for x in (problem.q, problem.k, problem.v, problem.before, problem.bias)
            for number in _common.strides(x)
        ),
        *(
            *_common.parted(problem.scale),
            *_common.parted(problem.softcap),
            *_common.dropout_arguments(problem),
        ),
        *(side.limit, problem.q.shape[2], problem.k.shape[1]),
        *(problem.dst_offset, problem.src_offset, problem.first_sample, problem.first_head),
    )
