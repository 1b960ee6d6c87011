"""Attention block by block, forward and backward, over windows and tiles: shared tokens are read once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton

from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.gpu.formats import SIDE, Blocks, Problem
from gnn_attention.backends.gpu.kernels import _common, _row_passes, _tiled_backward, _tiled_forward, rows
from gnn_attention.backends.gpu.kernels._common import Given, heads_last
from gnn_attention.edges import accumulation_dtype


class Config(NamedTuple):
    """Own tokens of a program, others that it visits in one step, its warps, stages of its pipeline."""

    own: int
    others: int
    warps: int
    stages: int

    def fitted(self, size: int, most: int) -> Config:
        """For blocks of ``size`` own tokens, visiting no more than ``most`` others in a step.

        Smaller blocks take as many warps fewer, and visit no more others than they have own tokens.
        """
        if size >= self.own:
            return self._replace(others=min(self.others, most))
        warps = max(2, self.warps * size // self.own)
        return Config(size, min(self.others, size, most), warps, self.stages)


class Configs(NamedTuple):
    """Of plain calls the forward pass and both backward passes; of all others by side."""

    forward: Config
    receivers: Config
    senders: Config
    other_receivers: Config
    other_senders: Config

    def of(self, step: str, plain: bool) -> Config:
        """The one for ``step``: "forward", "receivers" or "senders"."""
        other = self.other_senders if step == "senders" else self.other_receivers
        found: Config = getattr(self, step) if plain else other
        return found


Table = dict[tuple[int, int], Configs]  # by bytes of a number and channels
WINDOWS: Table = {key: Configs(*(Config(*numbers) for numbers in row)) for key, row in {
    (2, 64): [(64, 64, 4, 3), (64, 64, 4, 3), (64, 32, 8, 2), *[(64, 16, 8, 2)] * 2],
    (2, 128): [(64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2), (64, 16, 8, 1), (32, 32, 8, 1)],
    (2, 256): [(64, 32, 8, 2), (64, 16, 8, 2), *[(32, 16, 8, 1)] * 3],
    (4, 64): [(32, 32, 8, 2), (32, 32, 8, 2), (16, 16, 8, 3), (32, 16, 8, 1), (16, 16, 8, 1)],
    (4, 128): [(32, 16, 8, 2), (32, 32, 8, 2), *[(32, 16, 8, 2)] * 3],
    (8, 64): [*[(16, 16, 4, 1)] * 2, (16, 16, 8, 1), *[(16, 16, 4, 1)] * 2],
    (8, 128): [(16, 16, 4, 1), *[(16, 16, 8, 1)] * 4],
}.items()}  # fmt: skip
TILES: Table = {key: Configs(*(Config(*numbers) for numbers in row)) for key, row in {
    (2, 64): [(128, 64, 8, 2), (128, 64, 8, 3), (64, 32, 8, 2), (64, 32, 8, 2), (64, 16, 8, 2)],
    (2, 128): [(128, 64, 8, 3), (128, 64, 8, 3), (64, 32, 8, 2), (64, 16, 8, 1), (32, 32, 8, 1)],
    (2, 256): [*[(64, 32, 8, 2)] * 2, *[(32, 16, 8, 1)] * 3],
    (4, 64): [*[(32, 32, 8, 2)] * 3, *[(32, 16, 8, 1)] * 2],
    (4, 128): [(32, 16, 8, 2)] * 5,
    (8, 64): [*[(16, 16, 4, 1)] * 2, (16, 16, 8, 1), *[(16, 16, 4, 1)] * 2],
    (8, 128): [(16, 16, 4, 1), *[(16, 16, 8, 1)] * 4],
}.items()}  # fmt: skip


def forward(
    problem: Problem, form: tuple[Blocks, Blocks]
) -> tuple[Float[Tensor, "batch heads dst value_dim"], Float[Tensor, "batch heads dst"]]:
    """``(out, lse)``, out token-major in memory; a receiver without in-edges has 0 and -inf."""
    q = problem.q
    lse = torch.empty(q.shape[:3], dtype=accumulation_dtype(q.dtype), device=q.device)
    out = heads_last(q, problem.v.shape[3])
    work = _Work(problem, form[0], "forward", (out, lse), (out,), (out.shape[3], 1))
    for launch in work.launches(_tiled_forward.receivers, careful=True):
        work.finish(_row_passes.merge, launch, (0, 1), (out, lse))
    return out.to(q.dtype), lse


def backward(
    problem: Problem,
    form: tuple[Blocks, Blocks],
    grad_out: Float[Tensor, "batch heads dst value_dim"],
    delta: Float[Tensor, "batch heads dst"],
    lse: Float[Tensor, "batch heads dst"],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of q, k, v, before and bias: ``ds = exp(logit - lse) (grad_out . v - delta)``."""
    grad_out = grad_out if grad_out.stride(3) == 1 else grad_out.contiguous()
    given = grad_out, lse.contiguous(), delta.contiguous()
    dq, dk, dv = (heads_last(x, x.shape[3]) for x in problem[:3])
    dbefore, dbias = edgewise = _common.like_edges(problem)
    num_edges = next((x.shape[2] for x in edgewise if x is not None), 0)
    results = *given, dq, *(lse if x is None else x for x in edgewise), num_edges
    work = _Work(problem, form[0], "receivers", results, (grad_out, dq), (dq.shape[3],))
    for launch in work.launches(_tiled_backward.receivers_backward, careful=True):
        work.finish(_row_passes.add_up, launch, (0,), (dq,))
    results = *given, dk, dv, form[1].position
    work = _Work(problem, form[1], "senders", results, (grad_out, dk, dv), (dk.shape[3], dv.shape[3]))
    for launch in work.launches(_tiled_backward.senders_backward, careful=False):
        work.finish(_row_passes.add_up, launch, (0,), (dk,))
        work.finish(_row_passes.add_up, launch, (1,), (dv,))
    return dq.to(problem.q.dtype), dk.to(problem.k.dtype), dv.to(problem.v.dtype), dbefore, dbias


class _Work:
    """The launches of a pass over the blocks of one side, and of what adds the chunks of long ones.

    Kernels take the strides of ``strided``, a part of ``given``; ``widths`` are those of their results.
    """

    def __init__(
        self, problem: Problem, blocks: Blocks, step: str, given: Given, strided: Given, widths: Given
    ) -> None:
        q, k, v = problem[:3]
        own, other = (k, q) if step == "senders" else (q, k)
        self.blocks, self.own, self.rows = blocks, own, blocks.chunks * blocks.size
        self.slices = own.shape[0] * own.shape[1]
        self.parts = self._workspaces(widths, accumulation_dtype(q.dtype))
        wide = [part for part in self.parts if part.shape[2] > 1]  # lse is not read in rows
        self.constants = _common.constants(problem, *strided, *wide)
        self.config = _config(problem, step, blocks, self.constants)
        self.constants |= _of_blocks(self.constants, blocks, self.config, q.dtype)
        added, tensors = _common.added(problem), (blocks.items, blocks.other, blocks.slots)
        self.ahead = q, k, v, *given
        self.behind = (
            *(*added, *tensors, _words(blocks, q.dtype), blocks.first),
            *_common.strides(q, k, v, *strided, problem.before, problem.bias),
            *_common.scalars(problem),
            *(q.shape[1], q.shape[1] // k.shape[1], own.shape[2], other.shape[2], self.rows),
        )

    def _workspaces(self, widths: Given, dtype: torch.dtype) -> list[Tensor]:
        """One for each result ``[slices, rows, width]``, for as many slices as fit at a time."""
        fit = max(1, rows.WORKSPACE // max(1, self.rows * sum(widths) * dtype.itemsize))
        most = min(self.slices, _common.MOST_SLICES, fit)
        return [torch.empty(most, self.rows, width, dtype=dtype, device=self.own.device) for width in widths]

    def launches(self, kernel: object, careful: bool) -> Iterator[tuple[int, int]]:
        """Run a pass on successive (first slice, how many).

        Where ``careful``, programs flag what is not finite, and a second launch does that again.
        """
        programs = len(self.blocks.items) * (self.blocks.size // self.config.own)
        most = len(self.parts[0])
        flags = torch.empty(most * programs if careful else 0, dtype=torch.int8, device=self.own.device)
        for first in range(0, self.slices, max(1, most)):
            count = min(most, self.slices - first)
            given = *self.ahead, *self.parts, *([flags] if careful else []), *self.behind, first
            for again in ({"CAREFUL": False}, {"CAREFUL": True}) if careful else ({},):
                constants, numbers = self.constants | again, self.config[2:]
                _common.launch(kernel, (programs, count), given, constants, *numbers)
            yield first, count

    def finish(self, kernel: object, launch: tuple[int, int], which: Given, results: Given) -> None:
        """Write the own tokens of long blocks from the results of their chunks."""
        width, heads = self.parts[which[0]].shape[2], self.own.shape[1]
        given = (*(self.parts[part] for part in which), *results, *_common.strides(results[0]))
        chunks = self.blocks.long, self.blocks.long_first, launch[0], heads, self.own.shape[2], self.rows
        constants = {"GROUP": 1, "D": width, "DP": _common.channels(width), "TOGETHER": rows.TOGETHER}
        constants["ACC"] = self.constants["ACC"]
        grid = self.blocks.long.numel(), launch[1]
        _common.launch(kernel, grid, (*given, *chunks), constants, warps=4, stages=1)


def _of_blocks(
    constants: dict[str, Any], blocks: Blocks, config: Config, dtype: torch.dtype
) -> dict[str, Any]:
    """What kernels of blocks are compiled for, besides what all kernels are."""
    return {
        "PARTS": 0 if blocks.across == 1 else blocks.across // config.others,
        "PLAIN": not any(constants[name] for name in ("HAS_SLOPES", "HAS_CAP", "HAS_BEFORE", "HAS_BIAS")),
        "SIZE": blocks.size,
        "BM": config.own,
        "BN": config.others,
        "PRECISION": _precision(dtype),
    }


def _words(blocks: Blocks, dtype: torch.dtype) -> Tensor:
    """Of 32 bits for float64, with whose products Triton 3.6 does not compile those of 16."""
    narrow = dtype == torch.float64 and blocks.words.dtype == torch.int16
    return blocks.words.int() if narrow else blocks.words


def _config(problem: Problem, step: str, blocks: Blocks, constants: dict[str, Any]) -> Config:
    table = WINDOWS if blocks.across == 1 else TILES
    plain = not any(value for name, value in constants.items() if name.startswith("HAS_"))
    size, dim = problem.q.dtype.itemsize, max(64, constants["DP"], constants["DVP"])
    config, capability = table[size, dim].of(step, plain), _capability()
    few = not 90 <= capability < 120
    if step == "senders" and _precision(problem.q.dtype) == "tf32":
        config = Config(32, 16, 8, 1)
    elif step == "senders" and size == 4 and few:
        config = config._replace(own=16, others=16, stages=1)
    elif step == "senders" and (size, dim) == (2, 256) and few and plain:
        # with one stage it spills by Triton 3.9
        config = config._replace(stages=2)
    if not few:
        # a smaller block has fewer warps for as many channels
        most = 32 if blocks.size < config.own and size * dim >= 256 else SIDE
        return config.fitted(blocks.size, most)
    if size == 8 and capability > 80:
        # threads hold whole rows of both operands: as many as there are
        return config._replace(warps=8)
    return _of_few_registers(config, blocks.size, size * dim, step, plain)


def _of_few_registers(config: Config, size: int, row: int, step: str, plain: bool) -> Config:
    """Fewer tokens the more bytes a row of channels has: no spills, and at most 99 KB of shared memory."""
    most = 16 if step == "senders" or row >= 512 else 32
    if not plain or (step == "senders" and row >= 512):
        return config.fitted(min(size, 32), most)
    return config.fitted(min(size, 128 if row < 256 else 64), most)


def _capability() -> int:
    """Of NVIDIA's GPU, such as 90; 0 for another; 90 where there is none: the interpreter.

    From 90 until before 120, Hopper and data center Blackwell, products take operands from shared memory;
    elsewhere, on consumer Blackwell too, from registers, and after 80 without tensor cores for float64.
    """
    try:
        target = triton.runtime.driver.active.get_current_target()
    except RuntimeError:
        return 90
    return int(target.arch) if target.backend == "cuda" else 0


def _precision(dtype: torch.dtype) -> str:
    """Products of float32 are exact to rounding unless the user allows TF32 for matrix products."""
    allowed = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed else "ieee"
