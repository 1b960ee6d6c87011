"""What the passes of the kernel share: launches, arguments, and in Triton dropout and tanh.

Sums are in ``ACC``: float64 for float64, else float32.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Mapping
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends import dropout
from gnn_attention.backends.gpu.problem import Problem
from gnn_attention.edge_softmax import accumulation_dtype

Given = tuple[Any, ...]  # arguments of a kernel
WIDEST = 16  # the largest divisor of strides worth knowing: 16 numbers are 16 bytes or more
GOLDEN = tl.constexpr(dropout.GOLDEN)
FIRST = tl.constexpr(dropout.FIRST)
SECOND = tl.constexpr(dropout.SECOND)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # as kernels are made: for one mode


def launch(
    kernel: Any, grid: Given, arguments: Given, constants: Mapping[str, Any], warps: int, stages: int
) -> None:
    """Run ``kernel`` on every program of the grid, which may be empty: the only place that starts one."""
    if 0 in grid:
        return
    # what it is compiled for: dtype and alignment of tensors, whether integers have 32 bits
    kinds = [
        -(2**31) <= x < 2**31
        if x.__class__ is int
        else None
        if x is None or x.__class__ is float
        else (x.dtype, x.data_ptr() % 16)
        for x in arguments
    ]
    device = arguments[0].device
    # Triton launches on the current device, which need not be that of the tensors
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    with nullcontext() if here else torch.cuda.device(device):
        key = kernel, device, warps, stages, *constants.values(), *kinds
        compiled = _COMPILED.get(key)
        if compiled is None:
            options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
            compiled = kernel[grid](*arguments, **constants, **options)
            # None where it is interpreted, and no module where it is not run
            if getattr(compiled, "module", None) is not None:
                _COMPILED[key] = compiled
            return
        rest = [constants[name] for name in kernel.arg_names[len(arguments) :]]
        compiled[*grid, 1](*arguments, *rest)


# Triton's own look at 70 arguments takes as much host time as the rest of a call
_COMPILED: dict[Given, Any] = {}


def jit(function: Any) -> Any:
    """``triton.jit``, which does not compile again for other numbers: arguments in lower case."""
    parameters = inspect.signature(function).parameters
    return triton.jit(do_not_specialize=[name for name in parameters if name.islower()])(function)


def strides(*tensors: Tensor | None) -> tuple[int, ...]:
    """Those of the first three axes of each; 0 for None."""
    return tuple(y for x in tensors for y in ((0, 0, 0) if x is None else x.stride()[:3]))


def alignment(*tensors: Tensor) -> int:
    """The largest power of two, up to 16, that divides all strides of samples, heads and tokens."""
    return min(_alignment(x.shape, x.stride()) for x in tensors)


@lru_cache
def _alignment(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    divisor = WIDEST
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        while size > 1 and stride % divisor:
            divisor //= 2
    return divisor


def channels(width: int) -> int:
    """The power of two, at least 16, that a kernel lays ``width`` channels out on."""
    return max(16, 1 << (width - 1).bit_length())


def constants(problem: Problem, *results: Tensor) -> dict[str, Any]:
    """Which options a problem has, its channels, the alignment of its tensors and the dtype of sums."""
    dim, value_dim = problem.q.shape[3], problem.v.shape[3]
    return {
        "HAS_CAP": problem.softcap > 0,
        "HAS_BIAS": problem.bias is not None,
        "HAS_DROPOUT": problem.dropout > 0,
        "D": dim,
        "DP": channels(dim),
        "DV": value_dim,
        "DVP": channels(value_dim),
        "ALIGN": alignment(problem.q, problem.k, problem.v, *results),
        "ACC": tl.float64 if accumulation_dtype(problem.q.dtype) == torch.float64 else tl.float32,
    }


def scalars(problem: Problem) -> tuple[float, ...]:
    """Scale, softcap, the threshold and factor of dropout, and offsets: numbers that all kernels take."""
    offsets = problem.dst_offset, problem.src_offset, problem.first_sample, problem.first_head
    return *_factors(problem.scale, problem.softcap, problem.dropout), *offsets


@lru_cache
def _factors(scale: float, softcap: float, probability: float) -> tuple[float, ...]:
    factor = 1.0 / (1.0 - probability) if probability < 1 else 0.0
    rest = dropout.threshold(probability), *_two_floats(factor)
    return *_two_floats(scale), *_two_floats(softcap), *rest


def _two_floats(number: float) -> tuple[float, float]:
    """A float64 as the sum of two float32, which is what a kernel takes: exact to 48 bits."""
    (high,) = struct.unpack("f", struct.pack("f", number))
    return high, number - high


def heads_last(like: Float[Tensor, "batch heads tokens _"], width: int) -> Float[Tensor, "..."]:
    """An empty result ``[B, H, T, width]`` whose memory is ``[B, T, H, width]``, as projections take it.

    The interpreter truncates to bfloat16 where GPUs round: there it is float32, to be rounded later.
    """
    batch, heads, tokens, _ = like.shape
    dtype = torch.float32 if like.dtype == torch.bfloat16 and INTERPRETED.value else like.dtype
    # no view: autograd forbids writing into a view that a Function of several results returned
    strides = max(1, tokens) * max(1, heads) * width, width, max(1, heads) * width, 1
    return like.new_empty_strided((batch, heads, tokens, width), strides, dtype=dtype)


@triton.jit
def options(scale, scale_low, cap, cap_low, factor, factor_low, ACC: tl.constexpr):
    """Scale, softcap and the factor of dropout, each the sum of two float32."""
    scale = tl.full((), scale, ACC) + tl.full((), scale_low, ACC)
    cap = tl.full((), cap, ACC) + tl.full((), cap_low, ACC)
    return scale, cap, tl.full((), factor, ACC) + tl.full((), factor_low, ACC)


@triton.jit
def tanh(x):
    """Exact to rounding near 0 too: a continued fraction there, elsewhere exponentials."""
    size = tl.abs(x)
    decay = tl.exp(-2.0 * size)
    far = (1.0 - decay) / (1.0 + decay)
    y = tl.minimum(size, 0.5)
    z = y * y
    above = y * (135135.0 + z * (17325.0 + z * (378.0 + z)))
    near = above / (135135.0 + z * (62370.0 + z * (3150.0 + 28.0 * z)))
    bent = tl.where(size < 0.5, near, far)
    return tl.where(x < 0.0, -bent, bent)


@triton.jit
def is_finite(x):
    """Neither infinite nor NaN."""
    return tl.abs(x) < float("inf")


@triton.jit
def _mix_bits(z):
    """SplitMix64's finalizer on uint64."""
    z = (z ^ (z >> 30)) * FIRST
    z = (z ^ (z >> 27)) * SECOND
    return z ^ (z >> 31)


@triton.jit
def stream_of(SEED, sample, head):
    """The generator of a sample and a head, both absolute and int64 (``backends.dropout``)."""
    seed = tl.load(SEED).to(tl.uint64)
    return _mix_bits(seed + GOLDEN * ((sample.to(tl.uint64) << 32) + head.to(tl.uint64) + 1))


@triton.jit
def stays(stream, dst, src, threshold):
    """Whether dropout leaves an edge its weight; dst and src absolute, int64, of shapes that broadcast."""
    bits = _mix_bits(stream + GOLDEN * ((dst.to(tl.uint64) << 32) + src.to(tl.uint64) + 1))
    return (bits >> 40).to(tl.int32) >= threshold
