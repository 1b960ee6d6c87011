"""The operators of the GPU kernels: one for the forward pass, one for the backward pass, whatever the form of
the graph.

They are registered with torch, so that compilers, ``torch.export`` and ``torch.vmap`` take them as they are.
The backward pass computes the weights again from lse: nothing of the size of the edges is kept. A gradient
that comes in for lse is served too. Second derivatives are refused by name. Triton itself is loaded by the
first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gnn_attention._support.custom_op import operator
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.gpu.csr import Rows
from gnn_attention.backends.gpu.formats import ROWS, TILES, WINDOWS, Kernels, Packed, Problem, unpacked
from gnn_attention.backends.gpu.row_windows import Windows
from gnn_attention.backends.gpu.tiles import Tiles
from gnn_attention.edges import accumulation_dtype

FORM_TYPES: dict[int, Any] = {ROWS: Rows, WINDOWS: Windows, TILES: Tiles}


def attention(
    problem: Problem, form: Packed
) -> tuple[Float[Tensor, "batch heads dst value_dim"], Float[Tensor, "batch heads dst"]]:
    """``(out, lse)`` of a problem on a graph in some form; a receiver without in-edges has out 0 and lse
    -inf.

    out is in the dtype of q, lse in float32, or float64 for float64.
    """
    out, lse = _ATTENTION(
        *_flattened(problem), *form, _places(problem), [problem.scale, problem.softcap, problem.dropout]
    )
    return out, lse


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: Tensor,
    bias: Tensor,
    slopes: Tensor | None,
    seed: Tensor | None,
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    places: Sequence[int],
    constants: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """The operator of the forward pass."""
    problem = _restored((q, k, v, before, bias), slopes, seed, places, constants)
    return _kernels(numbers).forward(problem, unpacked(FORM_TYPES[numbers[0]], tensors, numbers))


def _run_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: Tensor,
    bias: Tensor,
    out: Tensor,
    lse: Tensor,
    slopes: Tensor | None,
    seed: Tensor | None,
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    places: Sequence[int],
    constants: Sequence[float],
) -> tuple[Tensor, ...]:
    """The operator of the backward pass: the gradients of q, k, v, before and bias."""
    from gnn_attention.backends.gpu.kernels import _common

    problem = _restored((q, k, v, before, bias), slopes, seed, places, constants)
    grad_out, out = (_with_plain_channels(x) for x in (grad_out, out))
    delta = _common.delta(grad_out, out, grad_lse)
    form = unpacked(FORM_TYPES[numbers[0]], tensors, numbers)
    *grads, dbefore, dbias = _kernels(numbers).backward(problem, form, grad_out, delta, lse.contiguous())
    return *grads, _or_nothing(dbefore, q, lse.dtype), _or_nothing(dbias, q, lse.dtype)


def _kernels(numbers: Sequence[int]) -> Kernels:
    """The module for the kind of a form."""
    from gnn_attention.backends.gpu.kernels import rows, tiles, windows

    modules: tuple[Kernels, ...] = (rows, windows, tiles)
    return modules[numbers[0]]


def _flattened(problem: Problem) -> tuple[Tensor | None, ...]:
    """Its tensors. One that must be there for the operator, but is not, is empty: it has a sample axis all
    the same.
    """
    per_edge = (
        _or_nothing(x, problem.q, accumulation_dtype(problem.q.dtype)) for x in (problem.before, problem.bias)
    )
    return problem.q, problem.k, problem.v, *per_edge, problem.slopes, problem.seed


def _places(problem: Problem) -> list[int]:
    """Its integers, and which tensors are there."""
    has = [int(x is not None) for x in (problem.before, problem.bias)]
    return [*has, problem.dst_offset, problem.src_offset, problem.first_sample, problem.first_head]


def _restored(
    x: tuple[Tensor, ...],
    slopes: Tensor | None,
    seed: Tensor | None,
    places: Sequence[int],
    constants: Sequence[float],
) -> Problem:
    q, k, v = (_with_plain_channels(part) for part in x[:3])
    before, bias = (part if there else None for part, there in zip(x[3:], places, strict=False))
    scale, softcap, dropout = constants
    return Problem(q, k, v, scale, softcap, slopes, before, bias, dropout, seed, *places[2:])


def _or_nothing(x: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    return like.new_empty(like.shape[0], 0, 0, dtype=dtype) if x is None else x


def _with_plain_channels(x: Tensor) -> Tensor:
    """A copy unless the channels of a token lie side by side."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of the results."""
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    return _token_major(q, v.shape[3]), lse


def _fake_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: Tensor,
    bias: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """Shapes and dtypes of the gradients."""
    grads = (_token_major(x, x.shape[3]) for x in (q, k, v))
    return *grads, before.new_empty(before.shape), bias.new_empty(bias.shape)


def _token_major(like: Tensor, width: int) -> Tensor:
    """As the kernels write: an empty ``[B, H, T, width]`` whose memory is ``[B, T, H, width]``."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty(batch, tokens, heads, width).transpose(1, 2)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *given, tensors, ctx.numbers, ctx.places, ctx.constants = inputs
    ctx.save_for_backward(*given, *output, *tensors)


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    q, k, v, before, bias, slopes, seed, out, lse, *tensors = ctx.saved_tensors
    given = (
        *grads,
        q,
        k,
        v,
        before,
        bias,
        out,
        lse,
        slopes,
        seed,
        tensors,
        ctx.numbers,
        ctx.places,
        ctx.constants,
    )
    return *_GRADIENTS(*given), None, None, [None] * len(tensors), None, None, None


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """There is no derivative that would need it."""


def _no_second_derivative(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(
        "second derivatives do not pass through the backend triton; use backend='reference' or 'dense'"
    )


GIVEN = "Tensor? slopes, Tensor? seed, Tensor[] tensors, int[] numbers, int[] places, float[] constants"
_ATTENTION = operator(
    "triton_attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor before, Tensor bias, {GIVEN}) -> (Tensor, Tensor)",
    _run,
    _fake,
    _differentiate,
    _keep,
)
_GRADIENTS = operator(
    "triton_attention_backward",
    "(Tensor grad_out, Tensor grad_lse, Tensor q, Tensor k, Tensor v, Tensor before, Tensor bias, Tensor out, Tensor lse, "
    f"{GIVEN}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
    _no_second_derivative,
    _keep_nothing,
)
