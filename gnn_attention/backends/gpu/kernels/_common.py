"""What the kernels of all forms share: how they are launched, and in Triton the arithmetic of softcap,
dropout and delta.

Everything here is written for pointers and tensors of any shape: sums are in ``ACC``, float32 or for float64
float64.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends import dropout
from gnn_attention.backends.gpu.formats import Problem
from gnn_attention.edges import accumulation_dtype

__all__ = [
    "Parted",
    "alignment",
    "channels",
    "delta",
    "dropout_arguments",
    "features",
    "gathered",
    "heads_last",
]
__all__ += [
    "is_finite",
    "joined",
    "launch",
    "narrowed",
    "parted",
    "slices_of",
    "stays",
    "stream_of",
    "strides",
    "sum_dtype",
    "tanh",
    "written_dtype",
]

MOST_SLICES = 65535  # programs along the second axis of a grid
WIDEST = 16  # numbers whose common divisor with all strides is worth knowing: 16 bytes of the narrowest dtype and more
GOLDEN = tl.constexpr(dropout.GOLDEN)
FIRST = tl.constexpr(dropout.FIRST)
SECOND = tl.constexpr(dropout.SECOND)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # as kernels are made: for one mode


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    constants: Mapping[str, Any],
    warps: int,
    stages: int,
) -> None:
    """Run ``kernel`` on every program of the grid: the only place that starts one. An empty grid is no
    work.
    """
    if 0 not in grid:
        with _device_of(arguments):
            kernel[grid](*arguments, **constants, num_warps=warps, num_stages=stages, enable_fp_fusion=True)


def slices_of(count: int) -> Iterator[tuple[int, int]]:
    """(first, how many) of successive runs of samples and heads, each no more than a grid holds."""
    for first in range(0, count, MOST_SLICES):
        yield first, min(MOST_SLICES, count - first)


def strides(x: Tensor | None) -> tuple[int, int, int]:
    """Those of the first three axes; 0 for None."""
    return (0, 0, 0) if x is None else (x.stride(0), x.stride(1), x.stride(2))


def alignment(*tensors: Tensor) -> int:
    """The largest power of two, up to 16, that divides all strides of samples, heads and tokens: rows begin
    at multiples.
    """
    divisor = WIDEST
    for x in tensors:
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
            while size > 1 and stride % divisor:
                divisor //= 2
    return divisor


def channels(width: int) -> int:
    """The power of two, at least 16, that a kernel lays ``width`` channels out on."""
    return max(16, int(triton.next_power_of_2(width)))


def sum_dtype(dtype: torch.dtype) -> Any:
    """Triton's name for the dtype of sums."""
    return tl.float64 if accumulation_dtype(dtype) == torch.float64 else tl.float32


class Parted(NamedTuple):
    """A float64 as the sum of two float32, which is what a kernel takes."""

    high: float
    low: float


def parted(number: float) -> Parted:
    """``number`` in two parts, exact to 48 bits."""
    (high,) = struct.unpack("f", struct.pack("f", number))
    return Parted(high, number - high)


def features(problem: Problem) -> dict[str, bool]:
    """What a problem has, as constants of a kernel."""
    return {
        "SLOPES": problem.slopes is not None,
        "SOFTCAP": problem.softcap > 0,
        "BEFORE": problem.before is not None,
        "BIAS": problem.bias is not None,
        "DROPOUT": problem.dropout > 0,
    }


def dropout_arguments(problem: Problem) -> tuple[int, float, float]:
    """The least number that is kept, and what a kept weight is multiplied by, in two parts."""
    return dropout.threshold(problem.dropout), *parted(
        1.0 / (1.0 - problem.dropout) if problem.dropout < 1 else 0.0
    )


def written_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what a kernel writes results of this dtype: as they are, but the interpreter truncates to bfloat16
    where GPUs round.
    """
    return torch.float32 if dtype == torch.bfloat16 and INTERPRETED.value else dtype


def heads_last(
    like: Float[Tensor, "batch heads tokens _"], width: int, dtype: torch.dtype
) -> Float[Tensor, "..."]:
    """An empty ``[B, H, T, width]`` whose memory is ``[B, T, H, width]``, as projections make and take it."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty(batch, tokens, heads, width, dtype=dtype).transpose(1, 2)


def delta(
    grad_out: Float[Tensor, "batch heads dst value_dim"],
    out: Float[Tensor, "batch heads dst value_dim"],
    grad_lse: Float[Tensor, "batch heads dst"],
) -> Float[Tensor, "batch heads dst"]:
    """``sum(grad_out * out, -1) - grad_lse`` in the dtype of sums; reads each once and makes nothing else."""
    batch, heads, tokens, width = out.shape
    result = torch.empty(batch, heads, tokens, dtype=accumulation_dtype(out.dtype), device=out.device)
    block = max(1, 2048 // channels(width))
    for first, count in slices_of(batch * heads):
        launch(
            _delta,
            (triton.cdiv(tokens, block), count),
            (
                grad_out,
                out,
                grad_lse,
                result,
                *strides(grad_out),
                *strides(out),
                *strides(grad_lse),
                first,
                heads,
                tokens,
            ),
            {
                "BLOCK": block,
                "WIDTH": width,
                "PADDED": channels(width),
                "ALIGN": alignment(grad_out, out),
                "ACC": sum_dtype(out.dtype),
            },
            warps=4,
            stages=1,
        )
    return result


def _device_of(arguments: Sequence[Any]) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    device = next(x.device for x in arguments if isinstance(x, Tensor))
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@triton.jit
def gathered(base, rows, stride, ok, WIDTH: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr):
    """Rows ``[n, PADDED]`` of ``base``, whose number is ``rows`` (int64): 0 where not ``ok`` and beyond
    ``WIDTH``.

    In the interpreter, which holds bfloat16 as integers and would compare and multiply these, they are
    float32.
    """
    channel = tl.arange(0, PADDED)
    start = tl.multiple_of(rows * stride, ALIGN)
    mask = ok[:, None]
    if PADDED != WIDTH:
        mask = mask & (channel < WIDTH)[None, :]
    found = tl.load(base + start[:, None] + channel[None, :], mask=mask, other=0.0)
    if INTERPRETED and base.dtype.element_ty == tl.bfloat16:
        found = found.to(tl.float32)
    return found


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """Rounded to the dtype in which products are taken: to nearest, ties to even, as :func:`gathered` holds
    it.
    """
    if INTERPRETED and dtype == tl.bfloat16:  # where a conversion would truncate
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        rounded = x.to(dtype)
    return rounded


@triton.jit
def joined(high, low, ACC: tl.constexpr):
    """The number of two parts (:class:`Parted`)."""
    return tl.full((), high, ACC) + tl.full((), low, ACC)


@triton.jit
def tanh(x):
    """Exact to rounding near 0 too: a continued fraction there, elsewhere exponentials."""
    size = tl.abs(x)
    decay = tl.exp(-2.0 * size)
    far = (1.0 - decay) / (1.0 + decay)
    y = tl.minimum(size, 0.5)
    z = y * y
    near = (
        y
        * (135135.0 + z * (17325.0 + z * (378.0 + z)))
        / (135135.0 + z * (62370.0 + z * (3150.0 + 28.0 * z)))
    )
    grown = tl.where(size < 0.5, near, far)
    return tl.where(x < 0.0, -grown, grown)


@triton.jit
def is_finite(x):
    """Neither infinite nor NaN."""
    return tl.abs(x) < float("inf")


@triton.jit
def _mixed(z):
    """SplitMix64's finalizer on uint64."""
    z = (z ^ (z >> 30)) * FIRST
    z = (z ^ (z >> 27)) * SECOND
    return z ^ (z >> 31)


@triton.jit
def stream_of(SEED, sample, head):
    """The generator of a sample and a head, both absolute and int64 (``_edge_dropout``)."""
    seed = tl.load(SEED).to(tl.uint64)
    return _mixed(seed + GOLDEN * ((sample.to(tl.uint64) << 32) + head.to(tl.uint64) + 1))


@triton.jit
def stays(stream, dst, src, threshold):
    """Whether the weight of an edge is kept; dst and src absolute, int64, of shapes that broadcast."""
    bits = _mixed(stream + GOLDEN * ((dst.to(tl.uint64) << 32) + src.to(tl.uint64) + 1))
    return (bits >> 40).to(tl.int32) >= threshold


@triton.jit(
    do_not_specialize=[
        "g_b",
        "g_h",
        "g_t",
        "o_b",
        "o_h",
        "o_t",
        "l_b",
        "l_h",
        "l_t",
        "first",
        "heads",
        "tokens",
    ]
)
def _delta(
    GRAD, OUT, GRAD_LSE, RESULT, g_b, g_h, g_t, o_b, o_h, o_t, l_b, l_h, l_t, first, heads, tokens,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """``sum(grad_out * out, -1) - grad_lse`` for ``BLOCK`` receivers of one sample and head."""
    slice_ = tl.program_id(1).to(tl.int64) + first
    sample, head = slice_ // heads, slice_ % heads
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = row < tokens
    grads, outs = (
        tl.multiple_of(sample * g_b + head * g_h, ALIGN),
        tl.multiple_of(sample * o_b + head * o_h, ALIGN),
    )
    grad = gathered(GRAD + grads, row, g_t, ok, WIDTH, PADDED, ALIGN).to(ACC)
    out = gathered(OUT + outs, row, o_t, ok, WIDTH, PADDED, ALIGN).to(ACC)
    grad_lse = tl.load(GRAD_LSE + sample * l_b + head * l_h + row * l_t, mask=ok, other=0.0).to(ACC)
    tl.store(RESULT + slice_ * tokens + row, tl.sum(grad * out, 1) - grad_lse, mask=ok)
