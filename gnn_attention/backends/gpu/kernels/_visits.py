"""How the kernels of blocks are launched, forward and backward, for every form that has blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton

from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.backends.gpu.formats import Problem
from gnn_attention.backends.gpu.kernels import _common, _tiled_backward, _tiled_forward
from gnn_attention.backends.gpu.tiles import SIDE
from gnn_attention.edges import accumulation_dtype

__all__ = ["WIDEST", "Config", "Configs", "Visits", "backward", "forward", "holds"]

WIDEST = {2: 256, 4: 128, 8: 128}  # channels that a block may have, by bytes of a number


class Config(NamedTuple):
    """Own tokens of a program, others that it visits in one step, its warps, stages of its pipeline.

    Smaller blocks take as many warps fewer, and visit no more others than they have own tokens.
    """

    own: int
    others: int
    warps: int
    stages: int

    def fitted(self, size: int, most: int) -> Config:
        """For blocks of ``size`` own tokens, visiting no more than ``most`` others in a step."""
        if size >= self.own:
            return self._replace(others=min(self.others, most))
        warps = max(2, self.warps * size // self.own)
        return Config(size, min(self.others, size, most), warps, self.stages)


class Configs(NamedTuple):
    """For the forward pass, the backward pass over receivers and that over senders, of plain calls; two for
    all others.

    ``laden`` serves receivers in both passes, ``laden_senders`` senders.
    """

    forward: Config
    receivers: Config
    senders: Config
    laden: Config
    laden_senders: Config

    def chosen(self, step: str, plain: bool) -> Config:
        """The one for ``step``: "forward", "receivers" or "senders"."""
        other = self.laden_senders if step == "senders" else self.laden
        found: Config = getattr(self, step) if plain else other
        return found


class Visits(NamedTuple):
    """Blocks of ``size`` own tokens: block b visits the entries ``ptr[b] .. ptr[b + 1] - 1`` of ``other``;
    ``order`` is by work.

    In windows an entry is a token, and its entry of ``words`` tells by bits which own tokens it goes with. In
    tiles (``slots`` is there) it is a tile of other tokens; ``words[slots[entry]]`` tells for each own token
    which of them it goes with, slot 0 all. ``first`` and ``position`` number the edges, where that is asked
    for.
    """

    ptr: Int[Tensor, " blocks_and_one"]
    other: Int[Tensor, " entries"]
    words: Int[Tensor, "..."]
    order: Int[Tensor, " blocks"]
    first: Int[Tensor, "..."]
    position: Int[Tensor, "..."]
    slots: Int[Tensor, " entries"] | None
    size: int

    def programs(self, config: Config) -> int:
        """How many own parts of blocks there are."""
        return len(self.order) * (self.size // config.own)

    def given(self) -> tuple[Tensor, ...]:
        """As the kernels take them."""
        return (
            self.ptr,
            self.other,
            self.order if self.slots is None else self.slots,
            self.words,
            self.order,
            self.first,
        )


def holds(problem: Problem) -> str | None:
    """Why blocks cannot hold heads so wide, or None."""
    width, most = max(problem.q.shape[3], problem.v.shape[3]), WIDEST[problem.q.element_size()]
    return (
        None
        if width <= most
        else f"blocks hold at most {most} channels of {problem.q.dtype}, got {width}; use the form rows"
    )


def forward(
    problem: Problem, visits: Visits, configs: Mapping[tuple[int, int], Configs]
) -> tuple[Tensor, Tensor]:
    """``(out, lse)``, out token-major in memory; a receiver without in-edges has 0 and -inf."""
    q, k, v = problem.q, problem.k, problem.v
    out = _common.heads_last(q, v.shape[3], _common.written_dtype(q.dtype))
    lse = torch.empty(q.shape[:3], dtype=accumulation_dtype(q.dtype), device=q.device)
    config = _config(problem, configs, "forward", visits.size)
    constants = _constants(problem, visits, config, _common.alignment(q, k, v, out))
    for first, count in _common.slices_of(q.shape[0] * q.shape[1]):
        _common.launch(
            _tiled_forward.receivers,
            (visits.programs(config), count),
            [
                *(q, k, v, out, lse, *_added(problem), *visits.given()),
                *_strides(q, k, v, out, problem.before, problem.bias),
                *(*_sizes(problem, first, ahead=True), *_scalars(problem)),
            ],
            constants,
            config.warps,
            config.stages,
        )
    return out.to(q.dtype), lse


def backward(
    problem: Problem,
    ahead: Visits,
    back: Visits,
    configs: Mapping[tuple[int, int], Configs],
    grad_out: Float[Tensor, "batch heads dst value_dim"],
    delta: Float[Tensor, "batch heads dst"],
    lse: Float[Tensor, "batch heads dst"],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of q, k, v, before and bias: ``ds = exp(logit - lse) (grad_out . v - delta)`` for each
    edge.

    ``ahead`` are blocks of receivers, ``back`` blocks of senders.
    """
    grad_out = grad_out if grad_out.stride(3) == 1 else grad_out.contiguous()
    delta, lse = delta.contiguous(), lse.contiguous()
    grad_q, grad_before, grad_bias = _receivers_backward(problem, ahead, configs, grad_out, delta, lse)
    grad_k, grad_v = _senders_backward(problem, back, configs, grad_out, delta, lse)
    return grad_q, grad_k, grad_v, grad_before, grad_bias


def _receivers_backward(
    problem: Problem,
    visits: Visits,
    configs: Mapping[tuple[int, int], Configs],
    grad_out: Tensor,
    delta: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    q, k, v = problem.q, problem.k, problem.v
    grad_q = _common.heads_last(q, q.shape[3], _common.written_dtype(q.dtype))
    edgewise = [
        None if x is None else x.new_empty(x.shape, dtype=lse.dtype) for x in (problem.before, problem.bias)
    ]
    config = _config(problem, configs, "receivers", visits.size)
    constants = _constants(problem, visits, config, _common.alignment(q, k, v, grad_out, grad_q))
    for first, count in _common.slices_of(q.shape[0] * q.shape[1]):
        sizes = _sizes(problem, first, ahead=True)
        num_edges = next((x.shape[2] for x in edgewise if x is not None), 0)
        _common.launch(
            _tiled_backward.receivers_backward,
            (visits.programs(config), count),
            [
                *(
                    q,
                    k,
                    v,
                    grad_out,
                    lse,
                    delta,
                    grad_q,
                    *(lse if x is None else x for x in edgewise),
                    *_added(problem),
                ),
                *(*visits.given(), *_strides(q, k, v, grad_out, grad_q, problem.before, problem.bias)),
                *(*sizes[:5], num_edges, *sizes[5:], *_scalars(problem)),
            ],
            constants,
            config.warps,
            config.stages,
        )
    return grad_q.to(q.dtype), edgewise[0], edgewise[1]


def _senders_backward(
    problem: Problem,
    visits: Visits,
    configs: Mapping[tuple[int, int], Configs],
    grad_out: Tensor,
    delta: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor]:
    q, k, v = problem.q, problem.k, problem.v
    grad_k, grad_v = (_common.heads_last(x, x.shape[3], _common.written_dtype(x.dtype)) for x in (k, v))
    config = _config(problem, configs, "senders", visits.size)
    constants = _constants(problem, visits, config, _common.alignment(q, k, v, grad_out, grad_k, grad_v))
    for first, count in _common.slices_of(k.shape[0] * k.shape[1]):
        _common.launch(
            _tiled_backward.senders_backward,
            (visits.programs(config), count),
            [
                *(
                    q,
                    k,
                    v,
                    grad_out,
                    lse,
                    delta,
                    grad_k,
                    grad_v,
                    *_added(problem),
                    *visits.given(),
                    visits.position,
                ),
                *_strides(q, k, v, grad_out, grad_k, grad_v, problem.before, problem.bias),
                *(*_sizes(problem, first, ahead=False), *_scalars(problem)),
            ],
            constants,
            config.warps,
            config.stages,
        )
    return grad_k.to(k.dtype), grad_v.to(v.dtype)


def _config(problem: Problem, configs: Mapping[tuple[int, int], Configs], step: str, size: int) -> Config:
    refused = holds(problem)
    if refused:
        raise NotImplementedError(refused)
    found = configs[problem.q.element_size(), _common.channels(max(problem.q.shape[3], problem.v.shape[3]))]
    plain = not any(_common.features(problem).values())
    config = found.chosen(step, plain)
    if not _has_few_registers():
        return config.fitted(size, most=SIDE)
    return config.fitted(size if plain else min(size, 32), most=16 if step == "senders" else 32)


def _has_few_registers() -> bool:
    """GPUs before Hopper, whose products take their operands from registers; and all that are not
    NVIDIA's.
    """
    try:
        target = triton.runtime.driver.active.get_current_target()
    except RuntimeError:  # there is no GPU: the interpreter
        return False
    return not (target.backend == "cuda" and target.arch >= 90)


def _constants(problem: Problem, visits: Visits, config: Config, align: int) -> dict[str, Any]:
    width, value = problem.q.shape[3], problem.v.shape[3]
    has = _common.features(problem)
    return {
        "PARTS": 0 if visits.slots is None else SIDE // config.others,
        "PLAIN": not any(has[name] for name in ("SLOPES", "SOFTCAP", "BEFORE", "BIAS")),
        "HAS_SLOPES": has["SLOPES"],
        "HAS_CAP": has["SOFTCAP"],
        "HAS_BEFORE": has["BEFORE"],
        "HAS_BIAS": has["BIAS"],
        "HAS_DROPOUT": has["DROPOUT"],
        "WIDTH": width,
        "PADDED": _common.channels(width),
        "VALUE": value,
        "VALUE_PADDED": _common.channels(value),
        "ALIGN": align,
        "SIZE": visits.size,
        "BM": config.own,
        "BN": config.others,
        "ACC": _common.sum_dtype(problem.q.dtype),
        "PRECISION": _precision(problem.q.dtype),
    }


def _precision(dtype: torch.dtype) -> str:
    """Products of float32 are exact to rounding unless the user allows TF32 for matrix products."""
    return (
        "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
    )


def _added(problem: Problem) -> tuple[Tensor, ...]:
    """Slopes, before, bias and seed; where there is none, something that is not read."""
    given = (problem.slopes, problem.before, problem.bias, problem.seed)
    return tuple(problem.q if x is None else x for x in given)


def _strides(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in _common.strides(x))


def _sizes(problem: Problem, first: int, ahead: bool) -> tuple[int, ...]:
    heads, group = problem.q.shape[1], problem.q.shape[1] // problem.k.shape[1]
    own, other = (problem.q, problem.k) if ahead else (problem.k, problem.q)
    offsets = (problem.dst_offset, problem.src_offset, problem.first_sample, problem.first_head)
    return first, heads, group, own.shape[2], other.shape[2], *offsets


def _scalars(problem: Problem) -> tuple[float, ...]:
    return (
        *_common.parted(problem.scale),
        *_common.parted(problem.softcap),
        *_common.dropout_arguments(problem),
    )
