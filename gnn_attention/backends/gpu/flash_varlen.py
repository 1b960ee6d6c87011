"""Packed sequences through torch's flash attention for CUDA, with lse and the gradient that comes in for lse.

It is the kernel behind ``torch.nn.attention.varlen``, whose own lse has no gradient: here it is one operator
with a derivative, for grouped heads, windows and any head width up to 256, in float16 and bfloat16. FA3 or
FA4 takes its place where the user activates one of them
(``torch.nn.attention.activate_flash_attention_impl``). In tests the formula stands for the two calls of the
kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from gnn_attention._support.custom_op import gradient_operator, operator
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.call import AttentionCall, token_major

DTYPES = (torch.float16, torch.bfloat16)
WIDEST = 256  # channels of the kernel, which takes them eight at a time
EIGHT = 8
FLASH: Any = torch.ops.aten._flash_attention_forward
FLASH_BACKWARD: Any = torch.ops.aten._flash_attention_backward
Given = Sequence[Any]  # the bounds, numbers and scale of a call, as the operator takes them


def attention(
    call: AttentionCall, bounds: tuple[Tensor, Tensor], longest: tuple[int, int], window: tuple[int, int]
) -> tuple[Float[Tensor, "batch heads dst value_dim"], Float[Tensor, "batch heads dst"]]:
    """``(out, lse)`` of a plain call, in the dtype of q and float32; every sample is packed alike.

    ``bounds``: where the sequences of receivers and senders begin; ``longest``: of each. A token attends to
    ``window[0]`` tokens before and ``window[1]`` after itself, -1 = all. Causal is ``(-1, 0)``; sequences
    with more receivers than senders, or fewer, must be full.
    """
    out, lse = _ATTENTION(call.q, call.k, call.v, list(bounds), [*longest, *window], call.scale)
    return call.with_sinks(out, lse)


def _run(
    q: Tensor, k: Tensor, v: Tensor, bounds: Given, numbers: Given, scale: float
) -> tuple[Tensor, Tensor]:
    width, ends = max(q.shape[3], v.shape[3]), _of_samples(bounds, q, k)
    out, lse = _forward_kernel(
        _pack_samples(q, width), _pack_samples(k, width), _pack_samples(v, width), ends, numbers, scale
    )
    lse = lse.view(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1)
    return _unpack_samples(out, (*q.shape[:3], v.shape[3])), lse


def _run_backward(grad_out: Tensor, grad_lse: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The operator of the backward pass; the last of ``numbers`` says whether there is a gradient for lse."""
    q, k, v, out, lse, bounds, numbers, scale = given
    if numbers[-1]:
        # the kernel's delta is sum(out * grad_out): ``- grad_lse`` is one channel more, where v is 0
        ones = torch.ones_like(grad_lse, dtype=out.dtype).unsqueeze(-1)
        grad_out = torch.cat([grad_out, ones], -1)
        out = torch.cat([out, -grad_lse.to(out.dtype).unsqueeze(-1)], -1)
    width = max(q.shape[3], out.shape[3])
    ends, rows = _of_samples(bounds, q, k), lse.transpose(0, 1).flatten(1)
    tensors = [_pack_samples(x, width) for x in (grad_out, q, k, v, out)]
    dq, dk, dv = _backward_kernel(tensors, rows, ends, numbers, scale)
    return _unpack_samples(dq, q.shape), _unpack_samples(dk, k.shape), _unpack_samples(dv, v.shape)


def _pack_samples(
    x: Float[Tensor, "batch heads tokens dim"], width: int
) -> Float[Tensor, "batch_tokens heads width"]:
    """All samples one after the other, the channels padded to a multiple of eight; a view where possible."""
    width = -(-width // EIGHT) * EIGHT
    x = x if x.shape[3] == width else functional.pad(x, (0, width - x.shape[3]))
    x = x if x.stride(3) == 1 else x.contiguous()
    return x.transpose(1, 2).flatten(0, 1)


def _unpack_samples(x: Tensor, sizes: Given) -> Float[Tensor, "batch heads tokens dim"]:
    batch, heads, tokens, dim = sizes
    return x[..., :dim].contiguous().view(batch, tokens, heads, dim).transpose(1, 2)


def _of_samples(bounds: Given, q: Tensor, k: Tensor) -> list[Tensor]:
    """The bounds of all samples, one after the other, without waiting for the device."""
    if q.shape[0] == 1:
        return list(bounds)
    found = []
    for ends, tokens in zip(bounds, (q.shape[2], k.shape[2]), strict=True):
        first = torch.arange(q.shape[0], dtype=ends.dtype, device=ends.device).unsqueeze(1) * tokens
        found.append(torch.cat([(ends[:-1] + first).flatten(), ends[-1:] + (q.shape[0] - 1) * tokens]))
    return found


def _forward_kernel(
    q: Tensor, k: Tensor, v: Tensor, bounds: Given, numbers: Given, scale: float
) -> tuple[Float[Tensor, "tokens heads dim"], Float[Tensor, "heads tokens"]]:
    """torch's own kernel over packed tokens."""
    sizes, window = _sizes_and_window(numbers)
    out, lse, *_ = FLASH(q, k, v, *bounds, *sizes, False, scale=scale, **window)
    return out, lse


def _backward_kernel(
    tensors: Given, lse: Tensor, bounds: Given, numbers: Given, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from grad_out, q, k, v and out."""
    sizes, window = _sizes_and_window(numbers)
    # of a dropout of 0
    state = torch.zeros(2, dtype=torch.uint64, device=lse.device), torch.empty(0, device=lse.device)
    dq, dk, dv = FLASH_BACKWARD(*tensors, lse, *bounds, *sizes, *state, scale=scale, **window)
    return dq, dk, dv


def _sizes_and_window(numbers: Given) -> tuple[tuple[Any, ...], dict[str, int]]:
    """The longest sequences, dropout and whether it is causal; and the window, by torch's names."""
    *longest, left, right = numbers[:4]
    # FA4 has a backward pass only for calls without the names
    window = {"window_size_left": left, "window_size_right": right} if left >= 0 or right > 0 else {}
    return (*longest, 0.0, (left, right) == (-1, 0)), window


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _ = q.shape
    return token_major(q, v.shape[3]), q.new_empty(heads, batch, tokens, dtype=torch.float32).transpose(0, 1)


def _fake_backward(grad_out: Tensor, grad_lse: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return tuple(token_major(x, x.shape[3]) for x in given[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds, ctx.numbers, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, *bounds)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *bounds = ctx.saved_tensors
    if grad_lse is not None and max(q.shape[3], v.shape[3] + 1) > WIDEST:
        raise NotImplementedError(
            f"the gradient of lse needs a channel more than the {WIDEST} of torch's flash attention, "
            f"v has {v.shape[3]}; use backend='flex' or 'rows'"
        )
    numbers = [*ctx.numbers, int(grad_lse is not None)]
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    grads = _GRADIENTS(grad_out, grad_lse, q, k, v, out, lse, bounds, numbers, ctx.scale)
    return *grads, [None, None], None, None


REST = "Tensor[] bounds, int[] numbers, float scale"
INPUTS = "Tensor q, Tensor k, Tensor v"
SCHEMA = f"({INPUTS}, {REST}) -> (Tensor, Tensor)"
_ATTENTION = operator("flash_sequences", SCHEMA, _run, _fake, _differentiate, _save)
_GRADIENTS = gradient_operator(
    "flash_sequences_backward",
    f"(Tensor grad_out, Tensor grad_lse, {INPUTS}, Tensor out, Tensor lse, {REST})"
    " -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
    "torch's flash attention; use backend='reference'",
)
