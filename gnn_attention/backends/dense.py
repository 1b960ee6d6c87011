"""Attention over all pairs with a mask: torch's ``scaled_dot_product_attention`` wherever it can.

What SDPA cannot (a score_mod, a per-edge bias, dropout keyed by the edge, sinks, lse) is the plain formula on
``[dst, src]`` logits in float32 or better; on CUDA, lse of full and causal graphs comes from SDPA's own
kernel (``gpu.flash_varlen``). One thing that dense kernels do not give is added here: a receiver without
in-edges gets exactly 0, because its mask row is opened and its result replaced.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from gnn_attention import edge_softmax
from gnn_attention._support import memory
from gnn_attention._support.autograd import needs_every_derivative
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.backend import Backend, Capabilities
from gnn_attention.backends.call import AttentionCall, any_needs_gradients, are_plain
from gnn_attention.backends.cpu.dense_blocks import FLASH, FLASH_BACKWARD, additive_mask
from gnn_attention.backends.cpu.dense_blocks_eager import masked_attention
from gnn_attention.backends.gpu import flash_varlen
from gnn_attention.graph import TokenGraph, memoized

SMALL_MASK = 2**18  # pairs up to which the mask is cached in the dtype of q
DEVICES_OF_FLASH = ("cuda",)
COMFORTABLE = 4 * 2**30  # bytes of mask and logits up to which "auto" takes this backend


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """``out [B, Hq, dst, Dv]`` in the dtype of q; ``lse [B, Hq, dst]`` where due or computed, else None."""
    if _plain(call):
        return _run_plain(call), None
    if not _has_flash_lse(call):
        return _run_formula(call)
    graph, bounds = call.graph, memoized(_bounds, call.graph, call.q.device)
    window = (-1, -1) if graph.is_full() else (-1, 0)
    return flash_varlen.attention(call, bounds, (graph.num_dst, graph.num_src), window)


def unsupported_reason(call: AttentionCall) -> str | None:
    short = None if call.q.device.type == "cuda" else memory.shortage(bytes_needed(call))
    return None if short is None else f"{short}, for a mask and logits of all pairs; use backend='auto'"


def bytes_needed(call: AttentionCall) -> int:
    """The extra memory, estimated: none for SDPA without a mask, else the mask, or the formula's logits.

    On a CPU SDPA never writes logits. On CUDA its flash kernel takes halves of one width up to 256; its
    memory-efficient one takes float32 too, but no grouped heads. Both want rows of a multiple of 16 bytes, to
    which SDPA pads halves.
    """
    q, k, v = call.q, call.k, call.v
    cells = call.graph.num_dst * call.graph.num_src
    masks = cells * (call.graph.batch or 1) * (call.graph.heads or 1)
    fits_flash = q.dtype in flash_varlen.DTYPES and q.shape[3] == v.shape[3] <= flash_varlen.WIDEST
    aligned = q.shape[3] * q.dtype.itemsize % 16 == 0 == v.shape[3] * v.dtype.itemsize % 16
    is_efficient = q.dtype != torch.float64 and q.shape[1] == k.shape[1] and aligned
    is_fused = q.device.type != "cuda" or fits_flash or is_efficient
    if (_plain(call) and is_fused) or _has_flash_lse(call):
        return 0 if _needs_no_mask(call.graph) else 5 * masks
    number = edge_softmax.accumulation_dtype(q.dtype).itemsize
    logits = 5 * q.shape[0] * q.shape[1] * cells * number
    return logits + (0 if call.score_mod is None else 34 * masks)


def _plain(call: AttentionCall) -> bool:
    return call.is_plain and call.sink_logits is None and not call.with_lse


def _needs_no_mask(graph: TokenGraph) -> bool:
    return graph.is_full() or graph.is_causal()


def _run_formula(call: AttentionCall) -> tuple[Tensor, Tensor]:
    # without an edge there are no ends for a score_mod
    call = call if call.graph.num_edges else replace(call, score_mod=None)
    mask, wide = call.graph.mask(call.q.device), edge_softmax.accumulation_dtype(call.q.dtype)
    bias = None if call.bias is None else spread(call.bias.to(wide), call.graph)
    dst, src = (torch.arange(size, device=mask.device) for size in mask.shape[-2:])
    out, lse = masked_attention(call, (call.q, call.k, call.v), mask, dst, src, bias)
    return out.to(call.q.dtype), lse


def spread(bias: Tensor, graph: TokenGraph) -> Tensor:
    """A bias ``[batch, heads, edges]`` as a table ``[batch, heads, dst, src]``, 0 elsewhere.

    The bias of parallel edges is the logarithm of the sum of ``e^bias``, -inf at a pair that is no edge.
    """
    src, dst = graph.edges_on(bias.device)
    cell, num_cells = dst * graph.num_src + src, graph.num_dst * graph.num_src
    if graph.has_parallel_edges:
        table = edge_softmax.softmax(bias, cell, num_cells, check=False)[1]
    else:
        table = bias.new_zeros(*bias.shape[:2], num_cells).index_copy(2, cell, bias)
    return table.view(*bias.shape[:2], graph.num_dst, graph.num_src)


def _run_plain(call: AttentionCall) -> Tensor:
    if _needs_no_mask(call.graph):
        return _sdpa(call, None, is_causal=not call.graph.is_full())
    small = call.graph.num_dst * call.graph.num_src <= SMALL_MASK
    mask = memoized(_opened_mask, call.graph, call.q.dtype if small else torch.bool, call.q.device)
    out = _sdpa(call, mask, is_causal=False)
    return out.masked_fill(~call.has_in_edges.unsqueeze(-1), 0.0) if call.graph.has_empty_rows else out


def _opened_mask(graph: TokenGraph, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The mask for SDPA, bool or additive, with all edges in an isolated row, which it would make NaN."""
    mask = graph.mask(device)
    if graph.has_empty_rows:
        mask = mask | ~mask.any(-1, keepdim=True)
    # one of three axes keeps SDPA from its fused kernel
    mask = mask.unsqueeze(0) if mask.dim() == 3 else mask
    return mask if dtype == torch.bool else additive_mask(mask, dtype)


def _sdpa(call: AttentionCall, mask: Tensor | None, is_causal: bool) -> Tensor:
    q, k, v = call.q, call.k, call.v
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        # of others SDPA has no fused kernel, and would make all weights
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    sdpa, scale, grouped = functional.scaled_dot_product_attention, call.scale, q.size(1) != k.size(1)
    kernel = partial(sdpa, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    is_plain = are_plain((q, k, v))
    if not is_plain and needs_every_derivative((q, k, v)):
        return _unfused_sdpa(kernel, q, k, v)
    if not is_plain or not any_needs_gradients((q, k, v)):
        return kernel(q, k, v)
    choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=grouped)
    if q.device.type == "cpu" and choice == SDPBackend.FLASH_ATTENTION.value:
        slow = partial(_unfused_sdpa, kernel)
        return _Flash.apply(slow, mask, is_causal, scale, q, k, v)  # type: ignore[no-any-return, no-untyped-call]
    out = kernel(q, k, v)
    if choice != SDPBackend.MATH.value:
        out.register_hook(_refuse_second_derivative)  # type: ignore[no-untyped-call]
    return out


def _refuse_second_derivative(grad: Tensor) -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "second derivatives do not pass through SDPA; use backend='message_passing'"
        )


class _Flash(torch.autograd.Function):
    """SDPA's kernel for a CPU; a gradient that will be differentiated again is that of the equal ``slow``."""

    @staticmethod
    def forward(ctx: Any, slow: Any, mask: Tensor | None, causal: bool, scale: float, *inputs: Any) -> Tensor:
        if mask is not None and mask.dtype == torch.bool:
            mask = additive_mask(mask, inputs[0].dtype)
        out: Tensor
        out, lse = FLASH(*inputs, is_causal=causal, attn_mask=mask, scale=scale)
        ctx.save_for_backward(*inputs, out, lse, mask)
        ctx.slow, ctx.causal, ctx.scale = slow, causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *inputs, out, lse, mask = ctx.saved_tensors
        if torch.is_grad_enabled():
            leaves = [x for x in inputs if x.requires_grad]
            of_leaves = iter(torch.autograd.grad(ctx.slow(*inputs), leaves, grad, create_graph=True))
            grads = [next(of_leaves) if x.requires_grad else None for x in inputs]
        else:
            grads = FLASH_BACKWARD(grad, *inputs, out, lse, 0.0, ctx.causal, attn_mask=mask, scale=ctx.scale)
        return None, None, None, None, *grads


def _unfused_sdpa(kernel: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """SDPA made of operators that have second derivatives."""
    with sdpa_kernel(SDPBackend.MATH):
        return kernel(*inputs)


def _has_flash_lse(call: AttentionCall) -> bool:
    """True where lse comes from SDPA's own kernel for CUDA: nothing of the size dst x src is made."""
    on_device = call.q.device.type in DEVICES_OF_FLASH and call.q.dtype in flash_varlen.DTYPES
    if not on_device:
        return False
    wanted = call.is_plain and (call.with_lse or call.sink_logits is not None) and _needs_no_mask(call.graph)
    sizes = (*call.q.shape, *call.v.shape)
    return wanted and 0 not in sizes and max(call.q.shape[3], call.v.shape[3] + 1) <= flash_varlen.WIDEST


def _bounds(graph: TokenGraph, device: torch.device) -> tuple[Tensor, Tensor]:
    bounds = torch.tensor([[0, graph.num_dst], [0, graph.num_src]], dtype=torch.int32, device=device)
    return bounds[0], bounds[1]


BACKEND = Backend(
    "dense",
    run,
    "SDPA on full and causal graphs without a mask, else time and memory of dst x src",
    unsupported_reason,
    bytes_needed,
    capabilities=Capabilities(cached=True, visits_non_edges=True, instead="backend='auto'"),
)
