"""What all kernels share: launches, arguments, and Triton functions for normalisers, dropout and tanh.

``ACC`` is the dtype of sums: float64 if q is float64, else float32.
"""

from __future__ import annotations

import inspect
import struct
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import dropout
from gnn_attention.backends.call import token_major
from gnn_attention.backends.gpu.problem import Problem
from gnn_attention.edge_softmax import accumulation_dtype

Arguments = tuple[Any, ...]
MAX_ALIGNMENT = 16  # Larger divisors of strides do not help: 16 elements fill the widest load, of 16 bytes.
GOLDEN = tl.constexpr(dropout.GOLDEN)
FIRST = tl.constexpr(dropout.FIRST_FACTOR)
SECOND = tl.constexpr(dropout.SECOND_FACTOR)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # The value is fixed on import.


def launch(
    kernel: Any, grid: Arguments, args: Arguments, constants: dict[str, Any], num_warps: int, num_stages: int
) -> None:
    """Launch ``kernel`` on a grid, which may be empty. Every launch goes through this function."""
    if 0 in grid:
        return
    # Triton compiles a kernel for dtypes and alignments of tensors, and for 32 or 64-bit integers.
    argument_kinds = [
        -(2**31) <= x < 2**31
        if x.__class__ is int
        else None
        if x is None or x.__class__ is float
        else (x.dtype, x.data_ptr() % 16)
        for x in args
    ]
    device = args[0].device
    # Triton launches on the current device, which may differ from that of the tensors.
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    with nullcontext() if is_current else torch.cuda.device(device):
        key = kernel, device, num_warps, num_stages, *constants.values(), *argument_kinds
        compiled = _COMPILED.get(key)
        if compiled is None:
            options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
            compiled = kernel[grid](*args, **constants, **options)
            # The interpreter returns None, and a kernel that was compiled but not loaded has no module.
            if getattr(compiled, "module", None) is not None:
                _COMPILED[key] = compiled
            return
        constant_values = [constants[name] for name in kernel.arg_names[len(args) :]]
        compiled[*grid, 1](*args, *constant_values)


# This cache avoids Triton's check of 70 arguments, which takes as much host time as the rest of a call.
_COMPILED: dict[Arguments, Any] = {}


def jit(function: Any) -> Any:
    """Apply ``triton.jit``, but do not specialize on scalars, whose names are in lower case."""
    parameters = inspect.signature(function).parameters
    return triton.jit(do_not_specialize=[name for name in parameters if name.islower()])(function)


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of the first three axes of each tensor."""
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def alignment(*tensors: Tensor) -> int:
    """Return the largest power of two, up to 16, that divides all strides but those of channels."""
    return min(_alignment(x.shape, x.stride()) for x in tensors)


@lru_cache
def _alignment(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    divisor = MAX_ALIGNMENT
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        while size > 1 and stride % divisor:
            divisor //= 2
    return divisor


def padded_channels(width: int) -> int:
    """Return the power of two, at least 16, to which a kernel pads ``width`` channels."""
    return max(16, 1 << (width - 1).bit_length())


def constants(problem: Problem, *other_tensors: Tensor) -> dict[str, Any]:
    """Return the compile-time constants of a kernel: options, channels, alignment and ACC."""
    dim, value_dim = problem.q.shape[3], problem.v.shape[3]
    return {
        "HAS_CAP": problem.softcap > 0,
        "HAS_BIAS": problem.bias.shape[2] > 0,
        "HAS_DROPOUT": problem.dropout > 0,
        "D": dim,
        "DP": padded_channels(dim),
        "DV": value_dim,
        "DVP": padded_channels(value_dim),
        "ALIGN": alignment(problem.q, problem.k, problem.v, *other_tensors),
        "NORMALISER": problem.normaliser,
        "F": problem.a.shape[3],
        "NF": problem.r.shape[3],
        "HAS_R": problem.r.numel() > 0,
        "FP": padded_channels(problem.r.shape[3]),
        "ACC": tl.float64 if accumulation_dtype(problem.q.dtype) == torch.float64 else tl.float32,
    }


def scalars(problem: Problem) -> tuple[float, ...]:
    """Return the scalar arguments of all kernels: scale, softcap, dropout and offsets."""
    offsets = problem.dst_offset, problem.src_offset, problem.first_sample, problem.first_head
    return *_factors(problem.scale, problem.softcap, problem.dropout), *offsets


@lru_cache
def _factors(scale: float, softcap: float, probability: float) -> tuple[float, ...]:
    threshold = dropout.threshold(probability)
    factor = 1.0 / (1.0 - probability) if probability < 1 else 0.0
    return *_split_float(scale), *_split_float(softcap), threshold, *_split_float(factor)


def _split_float(value: float) -> tuple[float, float]:
    """Split a float64 into two float32 arguments of a kernel, whose sum is exact to 48 bits."""
    (high,) = struct.unpack("f", struct.pack("f", value))
    return high, value - high


def empty_token_major(like: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Allocate a result. The interpreter, which truncates to bfloat16, writes float32, which is rounded."""
    is_truncated = dtype == torch.bfloat16 and INTERPRETED.value
    return token_major(like, width, torch.float32 if is_truncated else dtype)


@triton.jit
def to_acc(scale, scale_low, cap, cap_low, factor, factor_low, ACC: tl.constexpr):
    """Return scale, softcap and the factor of kept weights, each the sum of two float32."""
    scale = tl.full((), scale, ACC) + tl.full((), scale_low, ACC)
    cap = tl.full((), cap, ACC) + tl.full((), cap_low, ACC)
    return scale, cap, tl.full((), factor, ACC) + tl.full((), factor_low, ACC)


@triton.jit
def tanh(x):
    """Compute tanh to rounding error: by a continued fraction near 0, by exponentials elsewhere."""
    magnitude = tl.abs(x)
    decay = tl.exp(-2.0 * magnitude)
    by_exponential = (1.0 - decay) / (1.0 + decay)
    y = tl.minimum(magnitude, 0.5)
    z = y * y
    numerator = y * (135135.0 + z * (17325.0 + z * (378.0 + z)))
    by_fraction = numerator / (135135.0 + z * (62370.0 + z * (3150.0 + 28.0 * z)))
    result = tl.where(magnitude < 0.5, by_fraction, by_exponential)
    return tl.where(x < 0.0, -result, result)


@triton.jit
def weigh(logit, lse, NORMALISER: tl.constexpr):
    """Return weights and their derivatives by the logits, without that of the lse of a softmax."""
    if NORMALISER == "softmax":
        weight = tl.exp(logit - lse)
        slope = weight
    elif NORMALISER == "sigmoid":
        weight = tl.sigmoid(logit)
        slope = weight * (1.0 - weight)
    elif NORMALISER == "silu":
        share = tl.sigmoid(logit)
        weight = logit * share
        slope = share + weight * (1.0 - share)
    elif NORMALISER == "gelu":
        root_half = tl.full(logit.shape, 0.7071067811865476, logit.dtype)
        density = tl.full(logit.shape, 0.3989422804014327, logit.dtype) * tl.exp(-0.5 * logit * logit)
        share = 0.5 + 0.5 * tl.erf(logit * root_half)
        weight = logit * share
        slope = share + logit * density
    elif NORMALISER == "identity":
        weight = logit
        slope = tl.full(logit.shape, 1.0, logit.dtype)
    else:
        # The comparison keeps NaN.
        weight = tl.where(logit <= 0.0, 0.0, logit)
        slope = tl.where(logit <= 0.0, 0.0, 1.0).to(logit.dtype)
        if NORMALISER == "relu2":
            slope = 2.0 * weight
            weight = weight * weight
    return weight, slope


@triton.jit
def is_finite(x):
    """Return True for values that are neither infinite nor NaN."""
    return tl.abs(x) < float("inf")


@triton.jit
def _mix_bits(z):
    """Apply the finalizer of SplitMix64 to uint64 values."""
    z = (z ^ (z >> 30)) * FIRST
    z = (z ^ (z >> 27)) * SECOND
    return z ^ (z >> 31)


@triton.jit
def random_stream(SEED, sample, head):
    """Return the random stream (``backends.dropout``) of a sample and head, absolute int64 indices."""
    seed = tl.load(SEED).to(tl.uint64)
    return _mix_bits(seed + GOLDEN * ((sample.to(tl.uint64) << 32) + head.to(tl.uint64) + 1))


@triton.jit
def keeps_edge(stream, dst, src, threshold):
    """Return whether dropout keeps an edge; dst and src are absolute int64 indices and broadcast."""
    bits = _mix_bits(stream + GOLDEN * ((dst.to(tl.uint64) << 32) + src.to(tl.uint64) + 1))
    return (bits >> 40).to(tl.int32) >= threshold
