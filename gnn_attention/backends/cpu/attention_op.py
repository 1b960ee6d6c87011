"""One operator for a whole plan: attention over rectangles and edges, merged by log-sum-exp, with one
backward pass.

It is registered with torch, so that compilers, ``torch.export`` and ``torch.vmap`` take it as it is. Its
backward pass recomputes the weights from q, k and the log-sum-exp of all pieces: nothing of the size of the
edges is kept. A gradient that comes in for lse is served too, and so are sinks: the output is rounded once,
with them. Second derivatives are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from gnn_attention import edges
from gnn_attention._support.custom_op import operator
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends import nonfinite
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.cpu import csr, dense_blocks
from gnn_attention.backends.plan.plan import Edges, Packed, Plan, unpacked
from gnn_attention.backends.plan.planner import packed_plan, plan_on
from gnn_attention.graph import memoized

NARROW = 16  # senders: the numbers of a vector in the kernel for CPUs


def along_plan(call: AttentionCall, kind: str) -> tuple[Tensor, Tensor]:
    """A plain call on a plain graph, along the plan of this kind: ``out`` in the dtype of q, and ``lse``.

    Without a gradient to come, and where nothing traces or transforms the program, the operator has nothing
    to add.
    """
    q, k, v, sinks = call.q, call.k, call.v, call.sink_logits
    if _is_eager(q, k, v) and (sinks is None or not (sinks.requires_grad and torch.is_grad_enabled())):
        plan = memoized(plan_on, call.graph, kind, q.device)
        batch = q.new_zeros(q.shape[0], 0) if sinks is None else sinks.expand(q.shape[0], -1)
        out, lse = _attend(q, k, v, batch, plan, call.scale)
    else:
        out, lse = attention(q, k, v, packed_plan(kind, call.graph, q.device), call.scale, sinks)
    return (out, lse) if sinks is None else (out, edges.sinks_alone(lse, sinks, call.heard))


def _is_eager(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True for plain tensors with numbers whose derivative nothing needs, outside of compilers, transforms
    and modes.
    """
    if torch.compiler.is_compiling() or not type(q) is type(k) is type(v) is Tensor or q.is_meta:
        return False
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    transformed = torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    return not modes and not transformed and torch._C._get_tracing_state() is None


def attention(
    q: Float[Tensor, "batch heads dst dim"],
    k: Float[Tensor, "batch kv_heads src dim"],
    v: Float[Tensor, "batch kv_heads src value_dim"],
    plan: Packed,
    scale: float,
    sink_logits: Float[Tensor, " heads"] | None = None,
) -> tuple[Float[Tensor, "batch heads dst value_dim"], Float[Tensor, "batch heads dst"]]:
    """``(out, lse)`` of attention over the pieces of a plan; a receiver in no piece has out 0 and lse -inf,
    with sinks too.

    out is in the dtype of q, lse in float32, or float64 for float64.
    """
    sinks = q.new_zeros(q.shape[0], 0) if sink_logits is None else sink_logits.expand(q.shape[0], -1)
    out, lse = _ATTENTION(q, k, v, sinks, *plan, scale)
    return out, lse


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The operator of the forward pass; ``sinks`` is ``[B, Hq]``, or ``[B, 0]`` for none."""
    return _attend(q, k, v, sinks, unpacked(tensors, numbers), scale)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, plan: Plan, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = _forward(q, k, v, plan, scale, sinks)
    if _carried_all(q, k, v, lse, plan):
        return out, lse
    clean = nonfinite.cleaned(q, k, v)
    out, lse = _forward(clean[0], clean[1], clean[2], plan, scale, sinks)
    bad = nonfinite.poisoned(q, k, v, lambda marked: _hears(marked, q, plan), lse > -torch.inf)
    return out.masked_fill_(bad.unsqueeze(-1), torch.nan), lse.masked_fill_(bad, torch.nan)


def _run_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operator of the backward pass: the gradients of q, k and v, token-major in memory, and of the
    sinks.
    """
    plan = unpacked(tensors, numbers)
    if plan.visits_non_edges and not nonfinite.surely_finite(q, k, v):
        q, k, v = nonfinite.cleaned(q, k, v)
        spoiled = nonfinite.spoiled(lse)
        grad_out, out = (x.masked_fill(spoiled.unsqueeze(-1), 0.0) for x in (grad_out, out))
        grad_lse, lse = grad_lse.masked_fill(spoiled, 0.0), lse.masked_fill(spoiled, torch.inf)
    deaf = lse == -torch.inf
    if bool(
        deaf.any()
    ):  # whoever hears nobody: exp(logit - lse) = 0, and 0 * NaN of a gradient that nobody wants must not be
        grad_out, grad_lse = grad_out.masked_fill(deaf.unsqueeze(-1), 0.0), grad_lse.masked_fill(deaf, 0.0)
        lse = lse.masked_fill(deaf, torch.inf)
    grad_sinks = (
        _sinks_backward(grad_out, grad_lse, out, lse, sinks) if sinks.shape[1] else torch.empty_like(sinks)
    )
    return *_backward(grad_out, grad_lse, q, k, v, out, lse, plan, scale), grad_sinks


def _forward(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    # the dtype of sums until all pieces are merged and sinks are added
    unfinished = (sinks is not None and bool(sinks.shape[1])) or not plan.all_fresh
    out = _token_major(q, v.shape[3], wide if unfinished else q.dtype)
    lse = _token_major(q, 1, wide).squeeze(-1)
    if not plan.complete:
        out.zero_()
        lse.fill_(-torch.inf)
    ends = [q, k, v]
    if plan.has_blocks:
        if unfinished or (q.dtype == torch.float16 and q.device.type == "cpu"):
            ends = [q.to(wide), k.to(wide), v.to(wide)]  # a CPU has no arithmetic for float16
        ends = _same_width(max(q.shape[3], v.shape[3]), *ends)
    for piece in plan.pieces:
        if isinstance(piece, Edges):
            csr.forward(q, k, v, piece, scale, out, lse)
        else:
            dense_blocks.forward(ends[0], ends[1], ends[2], piece, scale, out, lse)
    if sinks is not None and sinks.shape[1]:
        _add_sinks(out, lse, sinks.to(wide).unsqueeze(-1))
    return out.to(q.dtype), lse


def _add_sinks(out: Tensor, lse: Tensor, sinks: Float[Tensor, "batch heads 1"]) -> None:
    """One more logit in every softmax that has any, without a value, in place:
    ``out / (1 + e^(sink - lse))``.
    """
    share, _, total = edges.shares(lse, sinks.expand(lse.shape), lse == -torch.inf)
    out.mul_(share.unsqueeze(-1))
    lse.copy_(total)


def _sinks_backward(grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """``- sum over receivers of e^(sink - lse) (sum(grad_out * out) - grad_lse)``."""
    delta = (grad_out.to(lse.dtype) * out).sum(-1) - grad_lse
    weights = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp()  # 0 where nobody is heard: lse is inf there
    return -(weights * delta).sum(-1).to(sinks.dtype)


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: Plan,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    wide, several = (
        edges.accumulation_dtype(q.dtype),
        any(not isinstance(piece, Edges) for piece in plan.pieces),
    )
    grads = tuple(_token_major(x, x.shape[3], wide) for x in (q, k, v))
    for total in grads if several or not plan.pieces else ():
        total.zero_()
    delta = (
        (grad_out.to(wide) * out).sum(-1) - grad_lse
        if any(isinstance(p, Edges) for p in plan.pieces)
        else grad_lse
    )
    padded = _for_dense_backward(grad_lse, *map(_taken, (grad_out, q, k, v, out))) if several else []
    for piece in plan.pieces:
        if isinstance(piece, Edges):
            csr.backward(grad_out, delta, q, k, v, lse, piece, scale, grads[0], grads[1], grads[2], several)
        else:
            dense_blocks.backward(padded, lse, piece, scale, grads)
    return grads[0].to(q.dtype), grads[1].to(q.dtype), grads[2].to(q.dtype)


def _token_major(like: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """An empty ``[B, H, T, width]`` whose memory is ``[B, T, H, width]``, as projections make and take it."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty(batch, tokens, heads, width, dtype=dtype).transpose(1, 2)


def _same_width(width: int, *tensors: Tensor) -> list[Tensor]:
    """As dense kernels read them: each token's channels in a row of its own, with 0 up to ``width``, alike
    for q, k and v.
    """
    ends = []
    for x in tensors:
        x = x if x.shape[3] == width else functional.pad(x, (0, width - x.shape[3]))
        ends.append(x if x.stride(3) == 1 and x.stride(2) >= width else x.contiguous())
    return ends


def _taken(x: Tensor) -> Tensor:
    """As dense kernels take it: a CPU has no arithmetic for float16, whose kernel rounds more and takes some
    times longer.
    """
    return x.float() if x.dtype == torch.float16 and x.device.type == "cpu" else x


def _for_dense_backward(
    grad_lse: Tensor, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor
) -> list[Tensor]:
    """What the dense kernel takes: it works out ``delta = sum(out * grad_out)`` itself, where ``- grad_lse``
    belongs too.

    That is one more channel, in which out holds -grad_lse, grad_out 1 and v 0.
    """
    if not bool(grad_lse.any()):
        return _same_width(max(q.shape[3], v.shape[3]), grad_out, q, k, v, out)
    ones = torch.ones_like(grad_lse, dtype=q.dtype).unsqueeze(-1)
    grad_out, out = torch.cat([grad_out, ones], -1), torch.cat([out, -grad_lse.to(q.dtype).unsqueeze(-1)], -1)
    return _same_width(max(q.shape[3], v.shape[3] + 1), grad_out, q, k, v, out)


def _carried_all(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, plan: Plan) -> bool:
    """True if nothing that is not finite leaked, or was lost: the kernel for CPUs takes few logits that are
    all NaN for hidden.

    Elsewhere a q or k that is not finite shows in lse. For a logit of +inf that kernel tells lse +inf, and in
    halves an output that is finite, where all weights are NaN.
    """
    if not plan.has_blocks:
        return True
    if plan.narrowest < NARROW:
        return nonfinite.surely_finite(q, k, v)
    if not plan.visits_non_edges:
        return not bool((lse == torch.inf).any())
    return not bool(nonfinite.spoiled(lse).any()) and nonfinite.surely_finite(v)


def _hears(marked: Tensor, q: Tensor, plan: Plan) -> Tensor:
    """Which receivers ``[B, Hq, dst]`` hear a marked sender ``[B, Hkv, src]``: attention with equal weights
    to the marks.
    """
    marks = marked.to(torch.float32).unsqueeze(-1)
    mean, _ = _forward(marks.new_zeros(*q.shape[:3], 1), torch.zeros_like(marks), marks, plan, 1.0)
    return mean.squeeze(-1) > 0


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of the results."""
    return _token_major(q, v.shape[3], q.dtype), _token_major(
        q, 1, edges.accumulation_dtype(q.dtype)
    ).squeeze(-1)


def _fake_backward(
    grad_out: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shapes and dtypes of the gradients."""
    dq, dk, dv = (_token_major(x, x.shape[3], x.dtype) for x in (q, k, v))
    return dq, dk, dv, torch.empty_like(sinks, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, tensors, ctx.numbers, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, *tensors)


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    q, k, v, sinks, out, lse, *tensors = ctx.saved_tensors
    return (
        *_GRADIENTS(*grads, q, k, v, sinks, out, lse, tensors, ctx.numbers, ctx.scale),
        [None] * len(tensors),
        None,
        None,
    )


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """There is no derivative that would need it."""


def _no_second_derivative(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(
        "second derivatives do not pass through the backends tiles, rows and mixed; use backend='reference' or 'dense'"
    )


PLAN = "Tensor[] tensors, int[] numbers, float scale"
_ATTENTION = operator(
    "attention_pieces",
    f"(Tensor q, Tensor k, Tensor v, Tensor sinks, {PLAN}) -> (Tensor, Tensor)",
    _run,
    _fake,
    _differentiate,
    _keep,
)
_GRADIENTS = operator(
    "attention_pieces_backward",
    "(Tensor grad_out, Tensor grad_lse, Tensor q, Tensor k, Tensor v, Tensor sinks, Tensor out, Tensor lse, "
    f"{PLAN}) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
    _no_second_derivative,
    _keep_nothing,
)
