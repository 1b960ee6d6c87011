"""The operators of the GPU kernel: forward and backward.

They are registered with torch, so that compilers, ``torch.export`` and ``torch.vmap`` take them as they are;
an eager call of plain tensors takes the same functions without the operator, whose dispatch is as much host
time as all the rest. The backward pass computes the weights again from lse: nothing of the size of the edges
is saved. lse has a gradient, too; second derivatives are unsupported. The first call loads Triton.
"""

from __future__ import annotations

from typing import Any

import torch

from gnn_attention._support.custom_op import gradient_operator, operator
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.call import any_needs_gradients, are_eager, token_major
from gnn_attention.backends.gpu.csr import Side, sides_of
from gnn_attention.backends.gpu.problem import Problem
from gnn_attention.backends.plan.plan import Packed
from gnn_attention.edge_softmax import accumulation_dtype


def attention(
    problem: Problem, rows: Packed
) -> tuple[Float[Tensor, "batch heads dst value_dim"], Float[Tensor, "batch heads dst"]]:
    """``(out, lse)`` of a problem on the rows of a graph; an isolated row has out 0 and lse -inf.

    out is in the dtype of q, lse in float32, or float64 for float64.
    """
    # A bias that is not there is a tensor without edges.
    bias = _or_empty(problem.bias, problem.q, accumulation_dtype(problem.q.dtype))
    given = problem.q, problem.k, problem.v, bias, problem.seed
    offsets = [problem.dst_offset, problem.src_offset, problem.first_sample, problem.first_head]
    places = [int(problem.bias is not None), *offsets]
    rest = (*rows, places, [problem.scale, problem.softcap, problem.dropout])
    if not are_eager(given):
        out, lse = _ATTENTION(*given, *rest)
    elif any_needs_gradients(given):
        out, lse = _Eager.apply(*given, rest)  # type: ignore[no-untyped-call]
    else:
        out, lse = _run(*given, *rest)
    return out, lse


def _restore_problem(*given: Any) -> tuple[Problem, tuple[Side, Side]]:
    """The problem, and the rows of its graph, from the operator's arguments."""
    *x, bias, seed, tensors, limits, (has_bias, *offsets), (scale, softcap, dropout) = given
    q, k, v = map(_with_plain_channels, x)
    problem = Problem(q, k, v, scale, softcap, bias if has_bias else None, dropout, seed, *offsets)
    return problem, sides_of(tensors, limits)


def _run(*given: Any) -> tuple[Tensor, Tensor]:
    from gnn_attention.backends.gpu.kernels import rows

    return rows.forward(*_restore_problem(*given))


def _run_backward(grad_out: Tensor, grad_lse: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """The operator of the backward pass: the gradients of q, k, v and bias."""
    from gnn_attention.backends.gpu.kernels import rows

    *x, out, lse, seed, tensors, limits, places, constants = given
    problem, sides = _restore_problem(*x, seed, tensors, limits, places, constants)
    grad_out, out = (_with_plain_channels(x) for x in (grad_out, out))
    delta = (grad_out.to(lse.dtype) * out).sum(-1) - grad_lse
    *grads, dbias = rows.backward(problem, sides, grad_out, delta, lse.contiguous())
    return *grads, _or_empty(dbias, problem.q, lse.dtype)


def _or_empty(x: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    return like.new_empty(like.shape[0], 0, 0, dtype=dtype) if x is None else x


def _with_plain_channels(x: Tensor) -> Tensor:
    """A copy unless the channels of a token are consecutive."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    return token_major(q, v.shape[3]), lse


def _fake_backward(grad_out: Tensor, grad_lse: Tensor, *given: Any) -> tuple[Tensor, ...]:
    q, k, v, bias, *_ = given
    return *(token_major(x, x.shape[3]) for x in (q, k, v)), bias.new_empty(bias.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *given, tensors, ctx.limits, ctx.places, ctx.constants = inputs
    ctx.save_for_backward(*given, *output, *tensors)


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    q, k, v, bias, seed, out, lse, *tensors = ctx.saved_tensors
    given = *grads, q, k, v, bias, out, lse, seed
    found = _GRADIENTS(*given, tensors, ctx.limits, ctx.places, ctx.constants)
    return *found, None, [None] * len(tensors), None, None, None


class _Eager(torch.autograd.Function):
    """The operator's forward and backward pass for plain tensors; the graph's own need no saving."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *given, ctx.rest = inputs
        out, lse = _run(*given, *ctx.rest)
        ctx.save_for_backward(*given, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, bias, seed, out, lse = ctx.saved_tensors
        given = *grads, q, k, v, bias, out, lse, seed
        again = torch.is_grad_enabled() or not are_eager(given)  # second derivatives are refused there
        found = (_GRADIENTS if again else _run_backward)(*given, *ctx.rest)
        return *found, None, None


REST = "Tensor? seed, Tensor[] tensors, int[] limits, int[] places, float[] constants"
INPUTS = "Tensor q, Tensor k, Tensor v, Tensor bias"
SCHEMA = f"({INPUTS}, {REST}) -> (Tensor, Tensor)"
_ATTENTION = operator("triton_attention", SCHEMA, _run, _fake, _differentiate, _save)
_GRADIENTS = gradient_operator(
    "triton_attention_backward",
    f"(Tensor grad_out, Tensor grad_lse, {INPUTS}, Tensor out, Tensor lse, {REST})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
    "the kernel of the backend rows; use backend='message_passing'",
)
