"""One operator for a whole plan: attention over rectangles and edges, merged by log-sum-exp.

It is registered with torch, so that compilers, ``torch.export`` and ``torch.vmap`` take it as it is. Its
backward pass recomputes the weights from q, k and the log-sum-exp of all pieces: nothing of the size of the
edges is saved. Gradients of lse are served, and so are sinks: the output is rounded once, with them. Second
derivatives are refused by name.
"""

from typing import Any

import torch
from torch.nn import functional

from gnn_attention import edge_softmax
from gnn_attention._support.custom_op import gradient_operator, operator
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends import devices
from gnn_attention.backends.call import AttentionCall, any_needs_gradients, are_eager, token_major
from gnn_attention.backends.cpu import csr, dense_blocks
from gnn_attention.backends.plan.csr import fold, unfold
from gnn_attention.backends.plan.plan import EdgeRows, Packed, Plan, unpack_plan
from gnn_attention.backends.plan.planner import packed_plan, plan_on
from gnn_attention.graph import memoized

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def along_plan(call: AttentionCall, kind: str) -> tuple[Tensor, Tensor | None]:
    """A plain call on a plain graph, along the plan of this kind: ``out`` in the dtype of q, and ``lse``."""
    graph, device, q, k, v, sinks = call.graph, call.q.device, call.q, call.k, call.v, call.sink_logits
    learns = any_needs_gradients((q, k, v, sinks))
    if not learns and are_eager((q, k, v)):
        # the operator would have nothing to add
        out, lse = _forward(q, k, v, _sinks(q, sinks), memoized(plan_on, graph, kind, device), call.scale)
    else:
        out, lse = attention(q, k, v, memoized(packed_plan, graph, kind, device), call.scale, sinks)
    if sinks is None:
        return out, lse
    # A receiver whose in-edges all have logit -inf has the sink alone.
    has_sink_alone = (lse == -torch.inf) & call.has_in_edges
    return out, torch.where(has_sink_alone, sinks.to(lse.dtype).unsqueeze(-1), lse)


def along_all_tokens(call: AttentionCall, plan: Packed, has_in_edges: Tensor | None = None) -> Pair:
    """A plain call along a graph that differs by sample or head, by a plan over all its tokens in one row.

    ``has_in_edges``: which receivers have some, if the graph cannot be asked.
    """
    graph, sinks = call.graph, call.sink_logits
    # With sinks the output is rounded once.
    wide = call.q.dtype if sinks is None else edge_softmax.accumulation_dtype(call.q.dtype)
    q, k, v = (fold(x.to(wide), graph) for x in (call.q, call.k, call.v))
    out, lse = attention(q, k, v, plan, call.scale)
    out, lse = unfold(out, call), unfold(lse.unsqueeze(-1), call).squeeze(-1)
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
    """``(out, lse)`` over the pieces of a plan; a receiver in none has out 0 and lse -inf, despite sinks."""
    out, lse = _ATTENTION(q, k, v, _sinks(q, sink_logits), *plan, scale)
    return out, lse


def _sinks(q: Tensor, sink_logits: Tensor | None) -> Float[Tensor, "batch heads_or_none"]:
    return q.new_zeros(q.shape[0], 0) if sink_logits is None else sink_logits.expand(q.shape[0], -1)


def _run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, tensors: Any, numbers: Any, scale: float) -> Pair:
    return _forward(q, k, v, sinks, unpack_plan(tensors, numbers), scale)


def _run_backward(grad_out: Tensor, grad_lse: Tensor, *saved: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, token-major in memory, and of the sinks.

    That of a sink is ``- sum over receivers of e^(sink - lse) (sum(grad_out * out) - grad_lse)``.
    """
    q, k, v, sinks, out, lse, tensors, numbers, scale = saved
    # without in-edges exp(logit - lse) = 0, and 0 times a NaN of an unused gradient must not be
    excluded = lse == -torch.inf
    if q.device.type in devices.ASYNCHRONOUS or bool(excluded.any()):
        # these receivers, whose out is 0, contribute nothing
        grad_out = grad_out.masked_fill(excluded.unsqueeze(-1), 0.0)
        grad_lse, lse = grad_lse.masked_fill(excluded, 0.0), lse.masked_fill(excluded, torch.inf)
    grad_sinks = torch.empty_like(sinks)
    if sinks.shape[1]:
        delta = (grad_out.to(lse.dtype) * out).sum(-1) - grad_lse
        weights = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp()  # 0 without in-edges: lse is inf there
        grad_sinks = -(weights * delta).sum(-1).to(sinks.dtype)
    plan = unpack_plan(tensors, numbers)
    return *_backward(grad_out, grad_lse, (q, k, v), out, lse, plan, scale), grad_sinks


def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, plan: Plan, scale: float) -> Pair:
    wide = torch.promote_types(q.dtype, torch.float32)
    # the dtype of sums until all pieces are merged and sinks are added
    unfinished = bool(sinks.shape[1]) or not plan.all_fresh
    out = token_major(q, v.shape[3], wide if unfinished else q.dtype)
    lse = token_major(q, 1, wide).squeeze(-1)
    if not plan.complete:
        out.zero_()
        lse.fill_(-torch.inf)
    ends = [q, k, v]
    if plan.rectangles:
        # a CPU has no arithmetic for float16
        if unfinished or (q.dtype == torch.float16 and q.device.type == "cpu"):
            ends = [q.to(wide), k.to(wide), v.to(wide)]
        ends = _same_width(max(q.shape[3], v.shape[3]), *ends)
    for piece in plan.pieces:
        if isinstance(piece, EdgeRows):
            csr.forward(q, k, v, piece, scale, out, lse)
        else:
            dense_blocks.forward(ends[0], ends[1], ends[2], piece, scale, out, lse)
    if sinks.shape[1]:
        every = sinks.to(wide).unsqueeze(-1).expand(lse.shape)
        (share, _), total = edge_softmax.shares(lse, every.masked_fill(lse == -torch.inf, -torch.inf))
        out.mul_(share.unsqueeze(-1))
        lse.copy_(total)
    return out.to(q.dtype), lse


def _backward(
    grad_out: Tensor, grad_lse: Tensor, ends: Triple, out: Tensor, lse: Tensor, plan: Plan, scale: float
) -> Triple:
    q, k, v = ends
    wide = edge_softmax.accumulation_dtype(q.dtype)
    grads = [token_major(x, x.shape[3], wide) for x in ends]
    for total in grads if plan.rectangles or not plan.pieces else ():
        total.zero_()
    padded: list[Tensor] = []
    if plan.rectangles:
        # there is no arithmetic for float16, whose kernel rounds more and takes some times longer
        padded = [x.float() if x.dtype == torch.float16 else x for x in (grad_out, q, k, v, out)]
        # The kernel's delta is sum(out * grad_out). ``- grad_lse`` belongs there too: it is one more channel,
        # in which out is -grad_lse, grad_out 1 and v 0.
        extra = bool(grad_lse.any())
        if extra:
            minus = -grad_lse.to(padded[4].dtype).unsqueeze(-1)
            padded[0] = torch.cat([padded[0], torch.ones_like(minus)], -1)
            padded[4] = torch.cat([padded[4], minus], -1)
        padded = _same_width(max(q.shape[3], v.shape[3] + extra), *padded)
    for piece in plan.pieces:
        if isinstance(piece, EdgeRows):
            delta = (grad_out.to(wide) * out).sum(-1) - grad_lse
            csr.backward(grad_out, delta, ends, lse, piece, scale, grads, add=bool(plan.rectangles))
        else:
            dense_blocks.backward(padded, lse, piece, scale, grads)
    return grads[0].to(q.dtype), grads[1].to(q.dtype), grads[2].to(q.dtype)


def _same_width(width: int, *tensors: Tensor) -> list[Tensor]:
    """As dense kernels read them: channels adjacent, with 0 up to ``width``, the same for q, k and v."""
    ends = []
    for x in tensors:
        x = x if x.shape[3] == width else functional.pad(x, (0, width - x.shape[3]))
        ends.append(x if x.stride(3) == 1 and x.stride(2) >= width else x.contiguous())
    return ends


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Pair:
    lse = token_major(q, 1, edge_softmax.accumulation_dtype(q.dtype)).squeeze(-1)
    return token_major(q, v.shape[3], q.dtype), lse


def _fake_backward(
    grad_out: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (token_major(x, x.shape[3], x.dtype) for x in (q, k, v))
    return dq, dk, dv, torch.empty_like(sinks, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    q, k, v, sinks, tensors, ctx.numbers, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, *tensors)


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    q, k, v, sinks, out, lse, *tensors = ctx.saved_tensors
    found = _GRADIENTS(*grads, q, k, v, sinks, out, lse, tensors, ctx.numbers, ctx.scale)
    return *found, [None] * len(tensors), None, None


PLAN = "Tensor[] tensors, int[] numbers, float scale"
FORWARD = f"(Tensor q, Tensor k, Tensor v, Tensor sinks, {PLAN}) -> (Tensor, Tensor)"
BACKWARD = (
    "(Tensor grad_out, Tensor grad_lse, Tensor q, Tensor k, Tensor v, Tensor sinks, Tensor out, Tensor lse, "
    f"{PLAN}) -> (Tensor, Tensor, Tensor, Tensor)"
)
_ATTENTION = operator("attention_pieces", FORWARD, _run, _fake, _differentiate, _save)
OF_OURS = "the backends tiles, rows and mixed; use backend='message_passing'"
_GRADIENTS = gradient_operator("attention_pieces_backward", BACKWARD, _run_backward, _fake_backward, OF_OURS)
