"""Attention in packed sequences using torch's flash attention for CUDA, with lse and its gradient.

``torch.nn.attention.varlen`` calls the same kernel, but its lse has no gradient. This operator also
supports grouped heads, windows and heads of up to 256 channels, in float16 and bfloat16. With
``torch.nn.attention.activate_flash_attention_impl``, it runs FA3 or FA4 instead. Tests replace the
two kernel calls with the attention formula.
"""

from functools import partial
from typing import Any

import torch
from torch.nn import functional

from gnn_attention._support.custom_op import gradient_operator, operator
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.call import AttentionCall, token_major
from gnn_attention.backends.cpu.dense_blocks_eager import attend_pieces
from gnn_attention.backends.kernel_function import kernel_gradients
from gnn_attention.backends.plan.plan import Plan, pack_plan
from gnn_attention.edge_ops.edge_lists import sort_edges

DTYPES = (torch.float16, torch.bfloat16)
MAX_CHANNELS = 256  # A head has at most this many channels.
CHANNEL_MULTIPLE = 8
FLASH_FORWARD: Any = torch.ops.aten._flash_attention_forward
FLASH_BACKWARD: Any = torch.ops.aten._flash_attention_backward
OutAndLse = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


def attention(
    call: AttentionCall, cu_seqlens: Any, max_seqlens: tuple[int, int], window: tuple[int, int]
) -> tuple[Float[Tensor, "batch heads dst value_dim"], Float[Tensor, "batch heads dst"]]:
    """Compute out in the dtype of q, and lse in float32, for a plain call.

    All samples have the same sequences. ``cu_seqlens`` and ``max_seqlens`` have those of receivers
    first, then those of senders. A token attends to itself, ``window[0]`` tokens before it and
    ``window[1]`` after it, where -1 means all: causal is ``(-1, 0)``. If a sequence has different
    numbers of receivers and senders, the window must be ``(-1, -1)``.
    """
    out, lse = _ATTENTION(call.q, call.k, call.v, list(cu_seqlens), [*max_seqlens, *window], call.scale)
    return call.with_sinks(out, lse)


def _run(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Any, limits: Any, scale: float) -> OutAndLse:
    width = max(q.shape[3], v.shape[3])
    packed_q, packed_k, packed_v = (_pack_samples(x, width) for x in (q, k, v))
    all_cu_seqlens = _repeat_cu_seqlens(cu_seqlens, q, k)
    out, lse = _forward_kernel(packed_q, packed_k, packed_v, all_cu_seqlens, limits, scale)
    lse = lse.view(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1)
    return _unpack_samples(out, (*q.shape[:3], v.shape[3])), lse


def _run_backward(grad_out: Tensor, grad_lse: Tensor, *saved: Any) -> Gradients:
    """Compute the gradients of q, k and v."""
    q, k, v, out, lse, cu_seqlens, limits, scale, has_lse_grad = saved
    if has_lse_grad:
        # The kernel's delta is sum(out * grad_out). A channel with out = -grad_lse, grad_out = 1
        # and v = 0 adds the missing ``- grad_lse``.
        ones = torch.ones_like(grad_lse, dtype=out.dtype).unsqueeze(-1)
        grad_out = torch.cat([grad_out, ones], -1)
        out = torch.cat([out, -grad_lse.to(out.dtype).unsqueeze(-1)], -1)
    width = max(q.shape[3], out.shape[3])
    all_cu_seqlens = _repeat_cu_seqlens(cu_seqlens, q, k)
    packed_lse = lse.transpose(0, 1).flatten(1)
    tensors = [_pack_samples(x, width) for x in (grad_out, q, k, v, out)]
    dq, dk, dv = _backward_kernel(tensors, packed_lse, all_cu_seqlens, limits, scale)
    return _unpack_samples(dq, q.shape), _unpack_samples(dk, k.shape), _unpack_samples(dv, v.shape)


def _pack_samples(x: Tensor, width: int) -> Float[Tensor, "batch_tokens heads width"]:
    """Join the tokens of all samples. Pad channels to ``width``, rounded up to a multiple of 8."""
    width = -(-width // CHANNEL_MULTIPLE) * CHANNEL_MULTIPLE
    x = x if x.shape[3] == width else functional.pad(x, (0, width - x.shape[3]))
    x = x if x.stride(3) == 1 else x.contiguous()
    return x.transpose(1, 2).flatten(0, 1)


def _unpack_samples(x: Tensor, sizes: Any) -> Float[Tensor, "batch heads tokens dim"]:
    batch, heads, tokens, dim = sizes
    return x[..., :dim].contiguous().view(batch, tokens, heads, dim).transpose(1, 2)


def _repeat_cu_seqlens(cu_seqlens: Any, q: Tensor, k: Tensor) -> list[Tensor]:
    """Extend cu_seqlens from one sample to the tokens of all, without waiting for the device."""
    if q.shape[0] == 1:
        return list(cu_seqlens)
    all_cu_seqlens = []
    for starts, num_tokens in zip(cu_seqlens, (q.shape[2], k.shape[2]), strict=True):
        sample = torch.arange(q.shape[0], dtype=starts.dtype, device=starts.device).unsqueeze(1)
        end = starts[-1:] + (q.shape[0] - 1) * num_tokens
        all_cu_seqlens.append(torch.cat([(starts[:-1] + sample * num_tokens).flatten(), end]))
    return all_cu_seqlens


def _forward_kernel(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Any, limits: Any, scale: float) -> OutAndLse:
    """Call torch's kernel on packed tokens ``[tokens, heads, dim]``; lse is ``[heads, tokens]``."""
    options, window = _make_kernel_arguments(limits)
    out, lse, *_ = FLASH_FORWARD(q, k, v, *cu_seqlens, *options, False, scale=scale, **window)
    return out, lse


def _backward_kernel(tensors: Any, lse: Tensor, cu_seqlens: Any, limits: Any, scale: float) -> Gradients:
    """Call torch's backward kernel; ``tensors`` are grad_out, q, k, v and out."""
    options, window = _make_kernel_arguments(limits)
    seed, offset = torch.zeros(2, dtype=torch.uint64, device=lse.device), lse.new_empty(0)
    dq, dk, dv = FLASH_BACKWARD(*tensors, lse, *cu_seqlens, *options, seed, offset, scale=scale, **window)
    return dq, dk, dv


def _make_kernel_arguments(limits: Any) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Return the kernels' max_q, max_k, dropout_p and is_causal, and the keywords of the window."""
    *max_seqlens, left, right = limits
    # FA4 has a backward pass only for calls without these keywords.
    window = {"window_size_left": left, "window_size_right": right} if left >= 0 or right > 0 else {}
    return (*max_seqlens, 0.0, (left, right) == (-1, 0)), window


def _fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _ = q.shape
    lse = q.new_empty(heads, batch, tokens, dtype=torch.float32)
    return token_major(q, v.shape[3]), lse.transpose(0, 1)


def _fake_grads(grad_out: Tensor, grad_lse: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    return tuple(token_major(x, x.shape[3]) for x in saved[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, ctx.limits, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, *cu_seqlens)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *cu_seqlens = ctx.saved_tensors
    if grad_lse is not None and max(q.shape[3], v.shape[3] + 1) > MAX_CHANNELS:
        raise NotImplementedError(
            f"the gradient of lse needs one channel beyond those of v, and torch's flash attention "
            f"supports {MAX_CHANNELS} in all, got v with {v.shape[3]}; use backend='flex' or 'rows'"
        )
    has_lse_grad = grad_lse is not None
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    options = cu_seqlens, ctx.limits, ctx.scale
    run = partial(_GRADIENTS, grad_out, grad_lse, q, k, v, out, lse, *options, has_lse_grad)
    grads = kernel_gradients(run, partial(_attend_by_operators, *options), (q, k, v), (grad_out, grad_lse))
    return *grads, [None, None], None, None


def _attend_by_operators(
    bounds: Any, limits: Any, scale: float, q: Tensor, k: Tensor, v: Tensor
) -> OutAndLse:
    """Compute the formula of the kernel by the operators of edges, which have every derivative."""
    dst_bounds, src_bounds = (x.long() for x in bounds)
    sequence = torch.repeat_interleave(dst_bounds.diff(), output_size=q.shape[2])
    position = torch.arange(q.shape[2], device=q.device) - dst_bounds[sequence]
    first, stop = src_bounds[sequence], src_bounds[sequence + 1]
    *_, left, right = limits
    stop = torch.minimum(stop, first + position + right + 1) if right >= 0 else stop
    first = first + (position - left).clamp(min=0) if left >= 0 else first
    degree = stop - first
    dst = torch.repeat_interleave(degree)
    # The senders of a receiver are consecutive.
    src = torch.arange(len(dst), device=q.device) + (first - degree.cumsum(0) + degree)[dst]
    edges = sort_edges(src, dst, k.shape[2], q.shape[2])
    return attend_pieces(q, k, v, q.new_zeros(q.shape[0], 0), pack_plan(Plan((edges,), True)), scale)


OPTIONS = "Tensor[] cu_seqlens, int[] limits, float scale"
INPUTS = "Tensor q, Tensor k, Tensor v"
FORWARD = f"({INPUTS}, {OPTIONS}) -> (Tensor, Tensor)"
SAVED = f"{INPUTS}, Tensor out, Tensor lse, {OPTIONS}"
BACKWARD = f"(Tensor grad_out, Tensor grad_lse, {SAVED}, bool has_lse_grad) -> (Tensor, Tensor, Tensor)"
_ATTENTION = operator("flash_sequences", FORWARD, _run, _fake, _differentiate, _save)
KERNEL = "torch's flash attention; use backend='reference'"
_GRADIENTS = gradient_operator("flash_sequences_backward", BACKWARD, _run_backward, _fake_grads, KERNEL)
