"""The operators of the GPU kernel: forward and backward.

They are registered for ``torch.compile``, ``torch.export`` and ``torch.vmap``. An eager call
skips their dispatch, which takes as much host time as the rest of the call. The backward pass
recomputes the weights from lse, so that nothing is saved per edge. lse is differentiable. Second
derivatives pass through the operators of edges. The first call loads Triton.
"""

from functools import partial
from typing import Any

import torch

from gnn_attention._support.custom_op import gradient_operator, operator
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.call import any_needs_gradients, are_eager, differentiable_gradients, token_major
from gnn_attention.backends.dropout import drop_weights
from gnn_attention.backends.gpu.csr import Side, unpack_sides
from gnn_attention.backends.gpu.problem import Problem
from gnn_attention.backends.plan.plan import Packed
from gnn_attention.edge_ops import operators
from gnn_attention.edge_softmax import accumulation_dtype


def attention(problem: Problem, sides: Packed) -> tuple[Tensor, Tensor]:
    """Compute out in q's dtype (0 for isolated receivers) and lse in float32 or float64 (-inf for them)."""
    q, bias = problem.q, problem.bias
    if bias is None:
        # The operator requires a tensor, so an empty one replaces a missing bias.
        bias = q.new_empty(q.shape[0], 0, 0, dtype=accumulation_dtype(q.dtype))
    inputs = q, problem.k, problem.v, bias, problem.seed
    offsets = [problem.dst_offset, problem.src_offset, problem.first_sample, problem.first_head]
    scalars = [problem.scale, problem.softcap, problem.dropout]
    options = (*sides, problem.bias is not None, offsets, scalars)
    if not are_eager(inputs):
        out, lse = _ATTENTION(*inputs, *options)
    elif any_needs_gradients(inputs):
        out, lse = _Eager.apply(*inputs, options)  # type: ignore[no-untyped-call]
    else:
        out, lse = _run(*inputs, *options)
    return out, lse


def _restore_problem(*arguments: Any) -> tuple[Problem, tuple[Side, Side]]:
    """Build the problem and the sides of its graph from the arguments of an operator."""
    q, k, v, bias, seed, tensors, chunk_sizes, has_bias, offsets, (scale, softcap, dropout) = arguments
    q, k, v = (_make_channels_contiguous(x) for x in (q, k, v))
    problem = Problem(q, k, v, scale, softcap, bias if has_bias else None, dropout, seed, *offsets)
    return problem, unpack_sides(tensors, chunk_sizes)


def _run(*arguments: Any) -> tuple[Tensor, Tensor]:
    from gnn_attention.backends.gpu.kernels import rows

    return rows.forward(*_restore_problem(*arguments))


def _run_backward(grad_out: Tensor, grad_lse: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    from gnn_attention.backends.gpu.kernels import rows

    q, k, v, bias, out, lse, *options = saved
    problem, sides = _restore_problem(q, k, v, bias, *options)
    grad_out, out = _make_channels_contiguous(grad_out), _make_channels_contiguous(out)
    delta = (grad_out.to(lse.dtype) * out).sum(-1) - grad_lse
    *grads, dbias = rows.backward(problem, sides, grad_out, delta, lse.contiguous())
    return *grads, torch.empty_like(bias) if dbias is None else dbias


def _make_channels_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    return token_major(q, v.shape[3]), lse


def _fake_grads(grad_out: Tensor, grad_lse: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    q, k, v, bias, *_ = saved
    return *(token_major(x, x.shape[3]) for x in (q, k, v)), bias.new_empty(bias.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, seed, tensors, ctx.chunk_sizes, ctx.has_bias, ctx.offsets, ctx.scalars = inputs
    ctx.save_for_backward(q, k, v, bias, seed, *output, *tensors)


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    q, k, v, bias, seed, out, lse, *tensors = ctx.saved_tensors
    options = seed, tensors, ctx.chunk_sizes, ctx.has_bias, ctx.offsets, ctx.scalars
    compute = partial(_attend_by_operators, q, k, v, bias, *options)
    input_grads: Any = differentiable_gradients(compute, (q, k, v, bias), grads)
    if input_grads is None:
        input_grads = _GRADIENTS(*grads, q, k, v, bias, out, lse, *options)
    return *input_grads, None, [None] * len(tensors), None, None, None, None


def _attend_by_operators(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute the formula of the kernel by the operators of edges, which have every derivative."""
    problem, (receivers, senders) = _restore_problem(*arguments)
    dst = torch.repeat_interleave(receivers.ptr.diff(), output_size=receivers.neighbours.numel()).int()
    edges = [receivers.ptr, receivers.neighbours, dst, senders.ptr, senders.neighbours, senders.position]
    dtype = accumulation_dtype(problem.q.dtype)
    q, k, v = (x.to(dtype) for x in (problem.q, problem.k, problem.v))
    logits = operators.products(q, k, edges, problem.scale)
    logits = problem.softcap * (logits / problem.softcap).tanh() if problem.softcap else logits
    weights, lse = operators.softmax(logits if problem.bias is None else logits + problem.bias, edges)
    ends = dst + problem.dst_offset, receivers.neighbours + problem.src_offset
    first = problem.first_sample, problem.first_head
    weights = drop_weights(weights, problem.seed, problem.dropout, *ends, *first)
    return operators.incoming(weights, v, edges).to(problem.q.dtype), lse


class _Eager(torch.autograd.Function):
    """Run both passes without the dispatcher; ``ctx.options`` keeps the tensors of the graph."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *inputs, ctx.options = arguments
        out, lse = _run(*inputs, *ctx.options)
        ctx.save_for_backward(*inputs, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, bias, seed, out, lse = ctx.saved_tensors
        compute = partial(_attend_by_operators, q, k, v, bias, seed, *ctx.options)
        input_grads: Any = differentiable_gradients(compute, (q, k, v, bias), grads)
        if input_grads is None:
            arguments = *grads, q, k, v, bias, out, lse, seed
            input_grads = (_run_backward if are_eager(arguments) else _GRADIENTS)(*arguments, *ctx.options)
        return *input_grads, None, None


OPTIONS = "Tensor? seed, Tensor[] tensors, int[] chunk_sizes, bool has_bias, int[] offsets, float[] scalars"
INPUTS = "Tensor q, Tensor k, Tensor v, Tensor bias"
FORWARD = f"({INPUTS}, {OPTIONS}) -> (Tensor, Tensor)"
SAVED = f"{INPUTS}, Tensor out, Tensor lse, {OPTIONS}"
BACKWARD = f"(Tensor grad_out, Tensor grad_lse, {SAVED}) -> (Tensor, Tensor, Tensor, Tensor)"
_ATTENTION = operator("triton_attention", FORWARD, _run, _fake, _differentiate, _save)
KERNEL = "the kernel of the backend 'rows'; use backend='message_passing'"
_GRADIENTS = gradient_operator("triton_attention_backward", BACKWARD, _run_backward, _fake_grads, KERNEL)
