"""Attention over all pieces of a plan as one operator, which merges their results by log-sum-exp.

The operator is registered with torch for compilers, ``torch.export`` and ``torch.vmap``. The
backward pass recomputes the weights from q, k and the lse of all pieces, so that nothing is saved
for each edge. lse is differentiable. First derivatives, backward and forward, are fused; higher
ones pass through :func:`attend_pieces`. Sinks are added before out is rounded.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from gnn_attention import edge_softmax
from gnn_attention._support import devices
from gnn_attention._support.autograd import derivative_order
from gnn_attention._support.custom_op import gradient_operator, operator
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.call import (
    AttentionCall,
    any_needs_gradients,
    are_eager,
    token_major,
)
from gnn_attention.backends.cpu import csr, dense_blocks
from gnn_attention.backends.cpu.dense_blocks_eager import attend_pieces
from gnn_attention.backends.kernel_function import kernel_gradients
from gnn_attention.backends.plan.plan import Packed, Plan, unpack_plan
from gnn_attention.backends.plan.planner import packed_plan
from gnn_attention.edge_ops.edge_lists import EdgeRows, merge_slices, split_slices
from gnn_attention.graph import TokenGraph, memoized

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def run_plan(call: AttentionCall, kind: str) -> tuple[Tensor, Tensor | None]:
    """Run a plain call on a graph without batch or heads, by its plan of the given ``kind``."""
    q, k, v = call.q, call.k, call.v
    sinks = call.sink_logits
    if not any_needs_gradients((q, k, v, sinks)) and are_eager((q, k, v)):
        # The operator would only add the cost of its dispatch.
        plan = memoized(_plan_on_device, call.graph, kind, q.device)
        out, lse = _forward(q, k, v, _expand_sinks(q, sinks), plan, call.scale)
    else:
        packed = memoized(packed_plan, call.graph, kind, q.device)
        out, lse = attention(q, k, v, packed, call.scale, sinks)
    if sinks is None:
        return out, lse
    # If all in-edges of a receiver have logit -inf, only the sink is left in its softmax.
    has_only_sink = (lse == -torch.inf) & call.has_in_edges
    return out, torch.where(has_only_sink, sinks.to(lse.dtype).unsqueeze(-1), lse)


def _plan_on_device(graph: TokenGraph, kind: str, device: torch.device) -> Plan:
    return unpack_plan(*memoized(packed_plan, graph, kind, device))


def run_folded(call: AttentionCall, plan: Packed, has_in_edges: Tensor | None = None) -> Pair:
    """Run a plain call on a graph that varies by sample or head; ``plan`` is for the folded tokens.

    ``has_in_edges`` replaces ``call.has_in_edges`` if the edges of the graph are not known yet.
    """
    sinks = call.sink_logits
    dtype = call.q.dtype if sinks is None else edge_softmax.accumulation_dtype(call.q.dtype)
    q, k, v = (merge_slices(x.to(dtype), call.graph) for x in (call.q, call.k, call.v))
    out, lse = attention(q, k, v, plan, call.scale)
    shape = call.q.shape[:2]
    out = split_slices(out, call.graph, *shape)
    lse = split_slices(lse.unsqueeze(-1), call.graph, *shape).squeeze(-1)
    if sinks is not None:
        has_in_edges = call.has_in_edges if has_in_edges is None else has_in_edges
        out, lse = edge_softmax.add_sinks(out, lse, sinks, has_in_edges)
    return out.to(call.q.dtype), lse


def attention(
    q: Float[Tensor, "batch heads dst dim"],
    k: Float[Tensor, "batch kv_heads src dim"],
    v: Float[Tensor, "batch kv_heads src value_dim"],
    plan: Packed,
    scale: float,
    sink_logits: Float[Tensor, " heads"] | None = None,
) -> tuple[Float[Tensor, "batch heads dst value_dim"], Float[Tensor, "batch heads dst"]]:
    """Compute ``(out, lse)``; a receiver in no piece has out 0 and lse -inf, even with sinks."""
    sinks = _expand_sinks(q, sink_logits)
    if derivative_order((q, k, v, sink_logits)) > 1:
        return attend_pieces(q, k, v, sinks, plan, scale)
    out, lse = _ATTENTION(q, k, v, sinks, *plan, scale)
    return out, lse


def _expand_sinks(q: Tensor, sink_logits: Tensor | None) -> Float[Tensor, "batch heads_or_none"]:
    return q.new_zeros(q.shape[0], 0) if sink_logits is None else sink_logits.expand(q.shape[0], -1)


def _run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, tensors: Any, metadata: Any, scale: float) -> Pair:
    return _forward(q, k, v, sinks, unpack_plan(tensors, metadata), scale)


def _run_backward(grad_out: Tensor, grad_lse: Tensor, *saved: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v, token-major in memory, and of the sinks.

    The gradient of a sink is ``- sum over receivers of e^(sink - lse) (sum(grad_out * out) - grad_lse)``.
    """
    q, k, v, sinks, out, lse, tensors, metadata, scale = saved
    # Without finite logits, weights are 0, but 0 times a NaN in an unused gradient would be NaN.
    is_empty = lse == -torch.inf
    if q.device.type in devices.ASYNCHRONOUS or bool(is_empty.any()):
        grad_out = grad_out.masked_fill(is_empty.unsqueeze(-1), 0.0)
        grad_lse = grad_lse.masked_fill(is_empty, 0.0)
        lse = lse.masked_fill(is_empty, torch.inf)
    grad_sinks = torch.empty_like(sinks)
    if sinks.shape[1]:
        delta = (grad_out.to(lse.dtype) * out).sum(-1) - grad_lse
        # Where lse was -inf, the sink's weight is 0, because lse was set to inf above.
        weights = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp()
        grad_sinks = -(weights * delta).sum(-1).to(sinks.dtype)
    plan = unpack_plan(tensors, metadata)
    return *_backward(grad_out, grad_lse, (q, k, v), out, lse, plan, scale), grad_sinks


def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, plan: Plan, scale: float) -> Pair:
    sum_dtype = torch.promote_types(q.dtype, torch.float32)
    # Results stay in the dtype of sums until all pieces are merged and sinks are added.
    is_unfinished = bool(sinks.shape[1]) or plan.needs_merge
    out = token_major(q, v.shape[3], sum_dtype if is_unfinished else q.dtype)
    lse = token_major(q, 1, sum_dtype).squeeze(-1)
    if not plan.is_complete:
        out.zero_()
        lse.fill_(-torch.inf)
    inputs = [q, k, v]
    if plan.rectangles:
        # Most CPUs emulate float16, which is slow.
        if is_unfinished or (q.dtype == torch.float16 and q.device.type == "cpu"):
            inputs = [x.to(sum_dtype) for x in inputs]
        inputs = _pad_channels(max(q.shape[3], v.shape[3]), inputs)
    for piece in plan.pieces:
        if isinstance(piece, EdgeRows):
            csr.forward(q, k, v, piece, scale, out, lse)
        else:
            dense_blocks.forward(inputs[0], inputs[1], inputs[2], piece, scale, out, lse)
    if sinks.shape[1]:
        sinks = sinks.to(sum_dtype).unsqueeze(-1).expand(lse.shape)
        (weight, _), total_lse = edge_softmax.merge_weights(lse, torch.where(lse == -torch.inf, lse, sinks))
        out.mul_(weight.unsqueeze(-1))
        lse.copy_(total_lse)
    return out.to(q.dtype), lse


def _backward(
    grad_out: Tensor, grad_lse: Tensor, inputs: Triple, out: Tensor, lse: Tensor, plan: Plan, scale: float
) -> Triple:
    q, k, v = inputs
    sum_dtype = edge_softmax.accumulation_dtype(q.dtype)
    grads = [token_major(x, x.shape[3], sum_dtype) for x in inputs]
    # Edge rows overwrite the gradients if they are the only piece.
    for grad in grads if plan.rectangles or not plan.pieces else ():
        grad.zero_()
    tensors: list[Tensor] = []
    if plan.rectangles:
        # Most CPUs emulate float16: the kernel would round more, and be several times slower.
        tensors = [x.float() if x.dtype == torch.float16 else x for x in (grad_out, q, k, v, out)]
        # The kernel's delta is sum(out * grad_out). A channel with out = -grad_lse, grad_out = 1
        # and v = 0 adds the missing ``- grad_lse``.
        has_grad_lse = bool(grad_lse.any())
        if has_grad_lse:
            channel = -grad_lse.to(tensors[4].dtype).unsqueeze(-1)
            tensors[0] = torch.cat([tensors[0], torch.ones_like(channel)], -1)
            tensors[4] = torch.cat([tensors[4], channel], -1)
        tensors = _pad_channels(max(q.shape[3], v.shape[3] + has_grad_lse), tensors)
    for piece in plan.pieces:
        if isinstance(piece, EdgeRows):
            delta = (grad_out.to(sum_dtype) * out).sum(-1) - grad_lse
            csr.backward(grad_out, delta, inputs, lse, piece, scale, grads, add=bool(plan.rectangles))
        else:
            dense_blocks.backward(tensors, lse, piece, scale, grads)
    return grads[0].to(q.dtype), grads[1].to(q.dtype), grads[2].to(q.dtype)


def _pad_channels(width: int, tensors: list[Tensor]) -> list[Tensor]:
    """Convert tensors to the layout of dense kernels: contiguous channels, zero-padded to ``width``."""
    tensors = [functional.pad(x, (0, width - x.shape[3])) if x.shape[3] != width else x for x in tensors]
    return [x if x.stride(3) == 1 and x.stride(2) >= width else x.contiguous() for x in tensors]


def _fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Pair:
    lse = token_major(q, 1, edge_softmax.accumulation_dtype(q.dtype)).squeeze(-1)
    return token_major(q, v.shape[3], q.dtype), lse


def _fake_backward(grad_out: Tensor, grad_lse: Tensor, *saved: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (token_major(x, x.shape[3], x.dtype) for x in saved[:3])
    return dq, dk, dv, torch.empty_like(saved[3], memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    q, k, v, sinks, tensors, ctx.plan_metadata, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, *tensors)


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    q, k, v, sinks, out, lse, *tensors = ctx.saved_tensors
    plan = tensors, ctx.plan_metadata
    run = partial(_GRADIENTS, *grads, q, k, v, sinks, out, lse, *plan, ctx.scale)
    formula = partial(attend_pieces, plan=plan, scale=ctx.scale)
    input_grads = kernel_gradients(run, formula, (q, k, v, sinks), grads)
    return *input_grads, [None] * len(tensors), None, None


def _jvp(arguments: Sequence[Any], outputs: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> Pair:
    inputs, (tensors, metadata, scale) = arguments[:4], arguments[4:]
    changes = [torch.zeros_like(x) if t is None else t for x, t in zip(inputs, tangents, strict=False)]
    out, lse = _TANGENTS(*changes, *inputs, *outputs, tensors, metadata, scale)
    return out, lse


def _run_jvp(dq: Tensor, dk: Tensor, dv: Tensor, d_sinks: Tensor, *saved: Any) -> Pair:
    """Compute the tangents of out and lse from the sums over all pieces of the changes of the weights."""
    q, k, v, sinks, out, lse, tensors, metadata, scale = saved
    dtype = lse.dtype
    tensors_by_role = [_pad_channels(x.shape[3], [x.to(dtype)])[0] for x in (q, k, v, dq, dk, dv)]
    inputs, tangents = tensors_by_role[:3], tensors_by_role[3:]
    # Where no logit is finite, all weights are 0.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    out_sums = token_major(q, v.shape[3], dtype).zero_()
    lse_sums = token_major(q, 1, dtype).zero_().squeeze(-1)
    for piece in unpack_plan(tensors, metadata).pieces:
        kernel = csr if isinstance(piece, EdgeRows) else dense_blocks
        kernel.jvp(tangents, inputs, lse, piece, scale, out_sums, lse_sums)
    if sinks.shape[1]:
        lse_sums += (sinks.to(dtype).unsqueeze(-1) - lse).exp() * d_sinks.to(dtype).unsqueeze(-1)
    return out_sums.addcmul_(lse_sums.unsqueeze(-1), out.to(dtype), value=-1.0).to(q.dtype), lse_sums


def _fake_jvp(dq: Tensor, dk: Tensor, dv: Tensor, d_sinks: Tensor, *saved: Any) -> Pair:
    return _fake(*saved[:3])


SAVED = "Tensor q, Tensor k, Tensor v, Tensor sinks, Tensor out, Tensor lse"
PLAN = "Tensor[] tensors, int[] numbers, float scale"
FORWARD = f"(Tensor q, Tensor k, Tensor v, Tensor sinks, {PLAN}) -> (Tensor, Tensor)"
BACKWARD = f"(Tensor grad_out, Tensor grad_lse, {SAVED}, {PLAN}) -> (Tensor, Tensor, Tensor, Tensor)"
JVP = f"(Tensor dq, Tensor dk, Tensor dv, Tensor d_sinks, {SAVED}, {PLAN}) -> (Tensor, Tensor)"
_ATTENTION = operator("attention_pieces", FORWARD, _run, _fake, _differentiate, _save, _jvp)
KERNEL = "a fused derivative of the backends tiles, rows and mixed; use backend='message_passing'"
_GRADIENTS = gradient_operator("attention_pieces_backward", BACKWARD, _run_backward, _fake_backward, KERNEL)
_TANGENTS = gradient_operator("attention_pieces_jvp", JVP, _run_jvp, _fake_jvp, KERNEL)
