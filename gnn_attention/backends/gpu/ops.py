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
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.backends.call import any_needs_gradients, are_eager, token_major
from gnn_attention.backends.dropout import drop_weights
from gnn_attention.backends.gpu.csr import Side, unpack_sides
from gnn_attention.backends.gpu.problem import Problem
from gnn_attention.backends.kernel_function import KernelFunction, kernel_gradients
from gnn_attention.backends.plan.plan import Packed
from gnn_attention.edge_ops import operators
from gnn_attention.edge_ops.edge_lists import sort_by_row, with_own_senders
from gnn_attention.edge_ops.normalisers import apply
from gnn_attention.edge_softmax import accumulation_dtype


def attention(problem: Problem, sides: Packed) -> tuple[Tensor, Tensor, Tensor]:
    """Compute out, the sums ``sum of w a`` of features, and lse, as :func:`kernels.rows.forward` does."""
    inputs = problem.q, problem.k, problem.v, problem.r, problem.a, problem.bias
    offsets = [problem.dst_offset, problem.src_offset, problem.first_sample, problem.first_head]
    scalars = [problem.scale, problem.softcap, problem.dropout]
    options = (problem.seed, problem.edge_type, *sides, offsets, scalars, problem.normaliser)
    if not are_eager((*inputs, problem.seed)):
        out, sums, lse = _ATTENTION(*inputs, *options)
    elif any_needs_gradients(inputs):
        out, sums, lse = KernelFunction.apply(  # type: ignore[no-untyped-call]
            lambda *x: _run(*x, *options),
            lambda grads, x, y: (_run_backward if are_eager(grads) else _GRADIENTS)(*grads, *x, *y, *options),
            partial(_attend_by_operators, options),
            *inputs,
        )
    else:
        out, sums, lse = _run(*inputs, *options)
    return out, sums, lse


def _restore_problem(*arguments: Any) -> tuple[Problem, tuple[Side, Side]]:
    """Build the problem and the sides of its graph from the arguments of an operator."""
    *tokens, bias, seed, edge_type, tensors, chunk_sizes, offsets, scalars, normaliser = arguments
    q, k, v, r, a = map(_make_channels_contiguous, tokens)
    options = *scalars, seed, *offsets, edge_type, normaliser
    return Problem(q, k, v, r, a, bias, *options), unpack_sides(tensors, chunk_sizes)


def _run(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    from gnn_attention.backends.gpu.kernels import rows

    return rows.forward(*_restore_problem(*arguments))


def _run_backward(*arguments: Any) -> tuple[Tensor, ...]:
    from gnn_attention.backends.gpu.kernels import rows

    grad_out, grad_sums, grad_lse, q, k, v, r, a, bias, out, sums, lse, *options = arguments
    problem, sides = _restore_problem(q, k, v, r, a, bias, *options)
    grad_out, grad_sums, out = map(_make_channels_contiguous, (grad_out, grad_sums, out))
    delta = torch.zeros_like(lse)
    if problem.normaliser == "softmax":
        delta = (grad_out.to(lse.dtype) * out).sum(-1) + (grad_sums * sums).sum(-1) - grad_lse
    results = rows.backward(problem, sides, (grad_out, grad_sums), delta, lse.contiguous())
    *grads, dbias, products_grad, weights = results
    da = torch.empty_like(a)
    if r.shape[3]:
        edges = with_own_senders(sides[0].ptr, _feature_rows(problem, sides[0]))
        shape = *q.shape[:2], -1, a.shape[3]
        da = operators.outgoing(weights, grad_sums.reshape(shape), edges, 1)
        if r.numel():
            da += operators.outgoing(products_grad * problem.scale, r.reshape(shape), edges, 1)
    return *grads, da, dbias


def _feature_rows(problem: Problem, receivers: Side) -> Int[Tensor, " edges"]:
    """Return the row of each edge in r, if r has a row for each receiver and type."""
    dst = torch.repeat_interleave(receivers.ptr.diff(), output_size=receivers.neighbours.numel()).long()
    if problem.edge_type is None:
        return dst
    return dst * (problem.r.shape[3] // problem.a.shape[3]) + problem.edge_type


def _make_channels_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _fake(q: Tensor, k: Tensor, v: Tensor, r: Tensor, *options: Any) -> tuple[Tensor, ...]:
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    out = token_major(q, v.shape[3], r.dtype if r.shape[3] else q.dtype)
    return out, r.new_empty(*q.shape[:3], r.shape[3]), lse


def _fake_grads(*arguments: Any) -> tuple[Tensor, ...]:
    tokens, others = arguments[3:6], arguments[6:9]
    return *(token_major(x, x.shape[3]) for x in tokens), *(x.new_empty(x.shape) for x in others)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *saved, tensors = inputs[:9]
    ctx.options = inputs[9:]
    ctx.save_for_backward(*saved, *output, *tensors)


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    *inputs, seed, edge_type, out, sums, lse = saved[:11]
    tensors = list(saved[11:])
    options = seed, edge_type, tensors, *ctx.options
    run = partial(_GRADIENTS, *grads, *inputs, out, sums, lse, *options)
    input_grads = kernel_gradients(run, partial(_attend_by_operators, options), inputs, grads)
    return *input_grads, None, None, [None] * len(tensors), *[None] * 4


def _attend_by_operators(options: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Compute the formula of the kernel by the operators of edges, which have every derivative."""
    problem, (receivers, senders) = _restore_problem(*inputs, *options)
    dst = torch.repeat_interleave(receivers.ptr.diff(), output_size=receivers.neighbours.numel()).int()
    edges = [receivers.ptr, receivers.neighbours, dst, senders.ptr, senders.neighbours, senders.position]
    dtype, r, a = accumulation_dtype(problem.q.dtype), problem.r, problem.a
    q, k, v = (x.to(dtype) for x in (problem.q, problem.k, problem.v))
    logits = operators.products(q, k, edges, problem.scale)
    if r.shape[3]:
        num_rows = q.shape[2] * r.shape[3] // a.shape[3]
        feature_edges, orders = sort_by_row(_feature_rows(problem, receivers), num_rows)
        a = a.index_select(2, orders[0])
    if r.numel():
        rows = r.reshape(*r.shape[:2], -1, a.shape[3])
        products = operators.products(rows, a, feature_edges, problem.scale)
        logits = logits + operators.permute(products, orders[::-1])
    logits = problem.softcap * (logits / problem.softcap).tanh() if problem.softcap else logits
    logits = logits + problem.bias if problem.bias.shape[2] else logits
    if problem.normaliser == "softmax":
        weights, lse = operators.softmax(logits, edges)
    else:
        weights, lse = apply(problem.normaliser, logits), logits.new_zeros(q.shape[:3])
    ends = dst + problem.dst_offset, receivers.neighbours + problem.src_offset
    first = problem.first_sample, problem.first_head
    weights = drop_weights(weights, problem.seed, problem.dropout, *ends, *first)
    out = operators.incoming(weights, v, edges)
    if not r.shape[3]:
        return out.to(problem.q.dtype), r, lse
    sums = operators.incoming(operators.permute(weights, orders), a, feature_edges)
    return out, sums.view(*q.shape[:3], r.shape[3]), lse


OPTIONS = (
    "Tensor? seed, Tensor? edge_type, Tensor[] tensors, int[] chunk_sizes, int[] offsets, "
    "float[] scalars, str normaliser"
)
INPUTS = "Tensor q, Tensor k, Tensor v, Tensor r, Tensor a, Tensor bias"
FORWARD = f"({INPUTS}, {OPTIONS}) -> (Tensor, Tensor, Tensor)"
SAVED = f"{INPUTS}, Tensor out, Tensor sums, Tensor lse, {OPTIONS}"
GRADS = "Tensor grad_out, Tensor grad_sums, Tensor grad_lse"
BACKWARD = f"({GRADS}, {SAVED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
_ATTENTION = operator("triton_attention", FORWARD, _run, _fake, _differentiate, _save)
KERNEL = "the kernel of the backend 'rows'; use backend='message_passing'"
_GRADIENTS = gradient_operator("triton_attention_backward", BACKWARD, _run_backward, _fake_grads, KERNEL)
