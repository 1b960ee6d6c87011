"""Attention over all pairs with a mask, using torch's ``scaled_dot_product_attention`` if possible.

For options that SDPA lacks (score_mod, a bias for each edge, dropout keyed by the edge, sinks, lse)
``[dst, src]`` logits are computed explicitly, in float32 or better. On CUDA, lse of full and
causal graphs comes from SDPA's own kernel (``gpu.flash_varlen``). An isolated receiver gets exactly
0: in SDPA it attends to all senders, which avoids NaN, and then its output is set to 0.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from gnn_attention import edge_softmax
from gnn_attention._support import memory
from gnn_attention._support.autograd import derivative_order, has_forward_derivative
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.backend import Backend, Capabilities
from gnn_attention.backends.call import AttentionCall, any_needs_gradients, are_eager
from gnn_attention.backends.cpu.dense_blocks import FLASH, FLASH_BACKWARD, additive_mask
from gnn_attention.backends.cpu.dense_blocks_eager import masked_attention
from gnn_attention.backends.gpu import flash_varlen
from gnn_attention.backends.kernel_function import KernelFunction
from gnn_attention.graph import TokenGraph, memoized

MAX_CONVERTED_PAIRS = 2**18  # Masks of more pairs are cached as bool, others in q's dtype.
FLASH_DEVICES = ("cuda",)
AUTO_MAX_BYTES = 4 * 2**30  # "auto" avoids this backend if mask and logits need more bytes.


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Return ``out [B, Hq, dst, Dv]`` in the dtype of q, and ``lse [B, Hq, dst]`` or None."""
    graph = call.graph
    # The backward pass of torch's SDPA for dual numbers raises an error, but not inside torch.func.
    is_dual = forward_ad._current_level >= 0 and not torch._C._are_functorch_transforms_active()
    if _fits_sdpa(call) and not is_dual:
        return _run_sdpa(call), None
    if _has_flash_lse(call):
        bounds = memoized(_make_bounds, graph, call.q.device)
        window = (-1, -1) if graph.is_full() else (-1, 0)
        return flash_varlen.attention(call, bounds, (graph.num_dst, graph.num_src), window)
    # A graph without edges has no pair to call a score_mod with.
    call = call if graph.num_edges else replace(call, score_mod=None)
    mask = graph.mask(call.q.device)
    dtype = edge_softmax.accumulation_dtype(call.q.dtype)
    bias = None if call.bias is None else scatter_bias(call.bias.to(dtype), graph)
    dst, src = (torch.arange(size, device=mask.device) for size in mask.shape[-2:])
    out, lse = masked_attention(call, (call.q, call.k, call.v), mask, dst, src, bias)
    return out.to(call.q.dtype), lse


def unsupported_reason(call: AttentionCall) -> str | None:
    shortage = None if call.q.device.type == "cuda" else memory.shortage(bytes_needed(call))
    return shortage and f"for a mask and logits of all pairs {shortage}; use backend='auto'"


def bytes_needed(call: AttentionCall) -> int:
    """Estimate the extra memory: SDPA without a mask needs none; other calls need a mask or all logits.

    On a CPU, SDPA never stores logits. On CUDA its flash kernel supports half precision if q and v have the
    same width, at most 256. Its memory-efficient kernel also supports float32, but no grouped heads. Both
    need rows whose length is a multiple of 16 bytes; SDPA pads rows only for the flash kernel.
    """
    q, k, v = call.q, call.k, call.v
    num_pairs = call.graph.num_dst * call.graph.num_src
    num_mask_entries = num_pairs * (call.graph.batch or 1) * (call.graph.heads or 1)
    fits_flash = q.dtype in flash_varlen.DTYPES and q.shape[3] == v.shape[3] <= flash_varlen.MAX_CHANNELS
    is_aligned = q.shape[3] * q.dtype.itemsize % 16 == 0 == v.shape[3] * v.dtype.itemsize % 16
    fits_efficient = q.dtype != torch.float64 and q.shape[1] == k.shape[1] and is_aligned
    has_fused_kernel = q.device.type != "cuda" or fits_flash or fits_efficient
    if (_fits_sdpa(call) and has_fused_kernel) or _has_flash_lse(call):
        return 0 if _needs_no_mask(call.graph) else 5 * num_mask_entries
    itemsize = edge_softmax.accumulation_dtype(q.dtype).itemsize
    logit_bytes = 5 * q.shape[0] * q.shape[1] * num_pairs * itemsize
    return logit_bytes + (0 if call.score_mod is None else 34 * num_mask_entries)


def _fits_sdpa(call: AttentionCall) -> bool:
    return call.is_plain and call.sink_logits is None and not call.with_lse


def _needs_no_mask(graph: TokenGraph) -> bool:
    return graph.is_full() or graph.is_causal()


def scatter_bias(bias: Tensor, graph: TokenGraph) -> Tensor:
    """Scatter a bias ``[batch, heads, edges]`` to a table ``[batch, heads, dst, src]``, 0 elsewhere.

    Parallel edges share the entry ``log(sum of e^bias)``. If there are any, non-edges get -inf.
    """
    src, dst = graph.edges_on(bias.device)
    pair, num_pairs = dst * graph.num_src + src, graph.num_dst * graph.num_src
    if graph.has_parallel_edges:
        table = edge_softmax.softmax(bias, pair, num_pairs, check=False)[1]
    else:
        table = bias.new_zeros(*bias.shape[:2], num_pairs).index_copy(2, pair, bias)
    return table.view(*bias.shape[:2], graph.num_dst, graph.num_src)


def _run_sdpa(call: AttentionCall) -> Tensor:
    if _needs_no_mask(call.graph):
        return _call_sdpa(call, None, is_causal=not call.graph.is_full())
    is_small = call.graph.num_dst * call.graph.num_src <= MAX_CONVERTED_PAIRS
    mask = memoized(_make_mask, call.graph, call.q.dtype if is_small else torch.bool, call.q.device)
    out = _call_sdpa(call, mask, is_causal=False)
    return out.masked_fill(~call.has_in_edges.unsqueeze(-1), 0.0) if call.graph.has_empty_rows else out


def _make_mask(graph: TokenGraph, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the mask, bool or additive; isolated receivers get all edges, since SDPA would return NaN."""
    mask = graph.mask(device)
    if graph.has_empty_rows:
        mask = mask | ~mask.any(-1, keepdim=True)
    # SDPA has no fused kernel for a mask of three axes.
    mask = mask.unsqueeze(0) if mask.dim() == 3 else mask
    return mask if dtype == torch.bool else additive_mask(mask, dtype)


def _call_sdpa(call: AttentionCall, mask: Tensor | None, is_causal: bool) -> Tensor:
    q, k, v = call.q, call.k, call.v
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        # For other strides SDPA has no fused kernel and would store all weights.
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    options: dict[str, Any] = {"scale": call.scale, "enable_gqa": q.size(1) != k.size(1)}
    sdpa: Callable[..., Tensor] = functional.scaled_dot_product_attention
    sdpa = partial(sdpa, attn_mask=mask, is_causal=is_causal, **options)
    is_eager = are_eager((q, k, v))
    if not is_eager and (has_forward_derivative((q, k, v)) or derivative_order((q, k, v)) > 1):
        return _unfused_sdpa(sdpa, q, k, v)
    if not is_eager or not any_needs_gradients((q, k, v)):
        return sdpa(q, k, v)
    choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, is_causal, **options)
    if q.device.type == "cpu" and choice == SDPBackend.FLASH_ATTENTION.value:
        if mask is not None and mask.dtype == torch.bool:
            mask = additive_mask(mask, q.dtype)
        scale = call.scale
        out, _ = KernelFunction.apply(  # type: ignore[no-untyped-call]
            partial(FLASH, is_causal=is_causal, attn_mask=mask, scale=scale),
            lambda grads, x, y: FLASH_BACKWARD(grads[0], *x, *y, 0.0, is_causal, attn_mask=mask, scale=scale),
            lambda *x: [_unfused_sdpa(sdpa, *x)],
            *(q, k, v),
        )
        return out  # type: ignore[no-any-return]
    out = sdpa(q, k, v)
    if choice != SDPBackend.MATH.value:
        out.register_hook(_refuse_second_derivative)  # type: ignore[no-untyped-call]
    return out


def _refuse_second_derivative(grad: Tensor) -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "second derivatives do not pass through SDPA; use backend='message_passing'"
        )


def _unfused_sdpa(sdpa: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(*inputs)


def _has_flash_lse(call: AttentionCall) -> bool:
    """True if lse comes from SDPA's own kernel for CUDA, which stores nothing of size dst x src."""
    if call.q.device.type not in FLASH_DEVICES or call.q.dtype not in flash_varlen.DTYPES:
        return False
    needs_lse = call.with_lse or call.sink_logits is not None
    if not needs_lse or not call.is_plain or 0 in (*call.q.shape, *call.v.shape):
        return False
    width = max(call.q.shape[3], call.v.shape[3] + 1)
    return _needs_no_mask(call.graph) and width <= flash_varlen.MAX_CHANNELS


def _make_bounds(graph: TokenGraph, device: torch.device) -> tuple[Tensor, Tensor]:
    bounds = torch.tensor([[0, graph.num_dst], [0, graph.num_src]], dtype=torch.int32, device=device)
    return bounds[0], bounds[1]


BACKEND = Backend(
    "dense",
    run,
    "SDPA, without a mask on full and causal graphs; on others time and memory grow with dst x src",
    unsupported_reason,
    bytes_needed,
    capabilities=Capabilities(
        normalisers="elementwise", cached=True, visits_non_edges=True, instead="backend='auto'"
    ),
)
