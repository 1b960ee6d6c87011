"""Attention in packed sequences by torch's flash attention for CUDA, with lse and its gradient.

``torch.nn.attention.varlen`` calls the same kernel, but its lse has no gradient. This operator also
supports grouped heads, windows and heads of up to 256 channels, in float16 and bfloat16. With
``torch.nn.attention.activate_flash_attention_impl``, it runs FA3 or FA4 instead. Tests replace the
two kernel calls with the attention formula.
"""

from typing import Any

import torch
from torch.nn import functional

from gnn_attention._support.custom_op import gradient_operator, operator
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.call import AttentionCall, token_major

DTYPES = (torch.float16, torch.bfloat16)
WIDEST = 256  # A head has at most this many channels.
CHANNEL_MULTIPLE = 8
FLASH: Any = torch.ops.aten._flash_attention_forward
FLASH_BACKWARD: Any = torch.ops.aten._flash_attention_backward
Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def attention(
    call: AttentionCall, bounds: Pair, longest: tuple[int, int], window: tuple[int, int]
) -> tuple[Float[Tensor, "batch heads dst value_dim"], Float[Tensor, "batch heads dst"]]:
    """Compute out in the dtype of q, and lse in float32, for a plain call.

    All samples have the same sequences. ``bounds`` are the cu_seqlens of receivers and of senders;
    ``longest`` are the lengths of the longest sequences. A token attends to itself, ``window[0]``
    tokens before it and ``window[1]`` after it, where -1 means all: causal is ``(-1, 0)``. If a
    sequence has different numbers of receivers and senders, the window must be ``(-1, -1)``.
    """
    out, lse = _ATTENTION(call.q, call.k, call.v, list(bounds), [*longest, *window], call.scale)
    return call.with_sinks(out, lse)


def _run(q: Tensor, k: Tensor, v: Tensor, bounds: Any, numbers: Any, scale: float) -> Pair:
    width = max(q.shape[3], v.shape[3])
    packed_q, packed_k, packed_v = (_pack_samples(x, width) for x in (q, k, v))
    out, lse = _forward_kernel(packed_q, packed_k, packed_v, _repeat_bounds(bounds, q, k), numbers, scale)
    lse = lse.view(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1)
    return _unpack_samples(out, (*q.shape[:3], v.shape[3])), lse


def _run_backward(grad_out: Tensor, grad_lse: Tensor, *saved: Any) -> Triple:
    """Compute the gradients of q, k and v; ``numbers[-1]`` says whether lse has a gradient."""
    q, k, v, out, lse, bounds, numbers, scale = saved
    if numbers[-1]:
        # The kernel's delta is sum(out * grad_out). A channel with out = -grad_lse, grad_out = 1
        # and v = 0 adds the missing ``- grad_lse``.
        ones = torch.ones_like(grad_lse, dtype=out.dtype).unsqueeze(-1)
        grad_out = torch.cat([grad_out, ones], -1)
        out = torch.cat([out, -grad_lse.to(out.dtype).unsqueeze(-1)], -1)
    width = max(q.shape[3], out.shape[3])
    all_bounds = _repeat_bounds(bounds, q, k)
    packed_lse = lse.transpose(0, 1).flatten(1)
    tensors = [_pack_samples(x, width) for x in (grad_out, q, k, v, out)]
    dq, dk, dv = _backward_kernel(tensors, packed_lse, all_bounds, numbers, scale)
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


def _repeat_bounds(bounds: Any, q: Tensor, k: Tensor) -> list[Tensor]:
    """Extend bounds from one sample to the joined tokens of all, without waiting for the device."""
    if q.shape[0] == 1:
        return list(bounds)
    all_bounds = []
    for ends, tokens in zip(bounds, (q.shape[2], k.shape[2]), strict=True):
        first = torch.arange(q.shape[0], dtype=ends.dtype, device=ends.device).unsqueeze(1) * tokens
        last_end = ends[-1:] + (q.shape[0] - 1) * tokens
        all_bounds.append(torch.cat([(ends[:-1] + first).flatten(), last_end]))
    return all_bounds


def _forward_kernel(q: Tensor, k: Tensor, v: Tensor, bounds: Any, numbers: Any, scale: float) -> Pair:
    """Call torch's kernel on packed tokens ``[tokens, heads, dim]``; lse is ``[heads, tokens]``."""
    sizes, window = _sizes_and_window(numbers)
    out, lse, *_ = FLASH(q, k, v, *bounds, *sizes, False, scale=scale, **window)
    return out, lse


def _backward_kernel(tensors: Any, lse: Tensor, bounds: Any, numbers: Any, scale: float) -> Triple:
    """Call torch's backward kernel; ``tensors`` are grad_out, q, k, v and out."""
    sizes, window = _sizes_and_window(numbers)
    seed = torch.zeros(2, dtype=torch.uint64, device=lse.device)
    offset = torch.empty(0, device=lse.device)
    dq, dk, dv = FLASH_BACKWARD(*tensors, lse, *bounds, *sizes, seed, offset, scale=scale, **window)
    return dq, dk, dv


def _sizes_and_window(numbers: Any) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Return the kernels' max_q, max_k, dropout_p and is_causal, and the keywords of the window."""
    *longest, left, right = numbers[:4]
    # FA4 has a backward pass only for calls without these keywords.
    window = {"window_size_left": left, "window_size_right": right} if left >= 0 or right > 0 else {}
    return (*longest, 0.0, (left, right) == (-1, 0)), window


def _fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _ = q.shape
    lse = q.new_empty(heads, batch, tokens, dtype=torch.float32)
    return token_major(q, v.shape[3]), lse.transpose(0, 1)


def _fake_grads(grad_out: Tensor, grad_lse: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    return tuple(token_major(x, x.shape[3]) for x in saved[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds, ctx.numbers, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, *bounds)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *bounds = ctx.saved_tensors
    if grad_lse is not None and max(q.shape[3], v.shape[3] + 1) > WIDEST:
        raise NotImplementedError(
            f"the gradient of lse needs one channel beyond those of v, and torch's flash attention "
            f"supports {WIDEST} in all, got v with {v.shape[3]}; use backend='flex' or 'rows'"
        )
    numbers = [*ctx.numbers, int(grad_lse is not None)]
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    grads = _GRADIENTS(grad_out, grad_lse, q, k, v, out, lse, bounds, numbers, ctx.scale)
    return *grads, [None, None], None, None


OPTIONS = "Tensor[] bounds, int[] numbers, float scale"
INPUTS = "Tensor q, Tensor k, Tensor v"
FORWARD = f"({INPUTS}, {OPTIONS}) -> (Tensor, Tensor)"
SAVED = f"{INPUTS}, Tensor out, Tensor lse, {OPTIONS}"
BACKWARD = f"(Tensor grad_out, Tensor grad_lse, {SAVED}) -> (Tensor, Tensor, Tensor)"
_ATTENTION = operator("flash_sequences", FORWARD, _run, _fake, _differentiate, _save)
ERROR_END = "torch's flash attention; use backend='reference'"
_GRADIENTS = gradient_operator("flash_sequences_backward", BACKWARD, _run_backward, _fake_grads, ERROR_END)
