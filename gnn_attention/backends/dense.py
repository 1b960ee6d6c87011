"""Attention over all pairs with a mask: torch's ``scaled_dot_product_attention`` wherever it can.

What SDPA cannot (a score_mod, a per-edge bias, dropout keyed by the edge, sinks, lse) is the plain formula on
``[dst, src]`` logits in float32 or better; on CUDA, lse of full and causal graphs comes from SDPA's own
kernel (``gpu.flash_varlen``). Three things dense kernels do not give are added here: a receiver without
in-edges gets exactly 0 (its mask row is opened and its result replaced, so that no kernel ever sees an empty
row), a non-finite token reaches only those that attend to it (kernels multiply a hidden value by weight 0,
and 0 * NaN is NaN), and a score_mod without a finite value or derivative on some non-edge spoils nothing (it
gets the ends of an edge instead).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from gnn_attention import edges
from gnn_attention._support import memory
from gnn_attention._support.autograd import twice_differentiable
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import nonfinite
from gnn_attention.backends.backend import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.capabilities import Capabilities
from gnn_attention.backends.gpu import flash_varlen
from gnn_attention.graph import TokenGraph, memoized

SMALL_MASK = 2**18  # pairs up to which the mask is cached in the dtype of q
DEVICES_OF_FLASH = ("cuda",)
COMFORTABLE = 4 * 2**30  # bytes of mask and logits up to which "auto" takes this backend


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """``out [B, Hq, dst, Dv]`` in the dtype of q; ``lse [B, Hq, dst]`` where due or computed, else None."""
    if _has_flash_lse(call):
        return _with_lse(call)
    if _plain(call) and nonfinite.may_ask(call.q):
        form: _Form = memoized(_form_of, call.graph)
        out = _run_plain(call, form)
        if _shows_all(call, form, out):
            return _zero_empty_rows(call, form, out), None
    elif nonfinite.surely_finite(call.q, call.k, call.v):
        return _run_finite(call)
    q, k, v = nonfinite.cleaned(call.q, call.k, call.v)
    bad = nonfinite.poisoned(call.q, call.k, call.v, partial(_reached, call), call.has_in_edges)
    out, lse = _run_finite(replace(call, q=q, k=k, v=v))
    out = out.masked_fill(bad.unsqueeze(-1), torch.nan)
    return out, None if lse is None else lse.masked_fill(bad, torch.nan)


def unsupported_reason(call: AttentionCall) -> str | None:
    short = None if call.q.device.type == "cuda" else memory.shortage(bytes_needed(call))
    return None if short is None else f"{short}, for a mask and logits of all pairs; use backend='auto'"


def bytes_needed(call: AttentionCall) -> int:
    """The extra memory, estimated: none for SDPA without a mask, else the mask, or the formula's logits."""
    cells = call.graph.num_dst * call.graph.num_src
    masks = cells * (call.graph.batch or 1) * (call.graph.heads or 1)
    if _plain(call) or _has_flash_lse(call):
        return 0 if _needs_no_mask(call.graph) else 5 * masks
    number = edges.accumulation_dtype(call.q.dtype).itemsize
    logits = 5 * call.q.shape[0] * call.q.shape[1] * cells * number
    return logits + (0 if call.score_mod is None else 34 * masks)


def _plain(call: AttentionCall) -> bool:
    return call.is_plain and call.sink_logits is None and not call.with_lse


class _Form(NamedTuple):
    """What a graph needs of SDPA: ``full`` and ``causal`` ones no mask, others care for empty rows."""

    full: bool
    causal: bool
    has_empty_rows: bool


def _form_of(graph: TokenGraph) -> _Form:
    full = graph.is_full()
    causal = not full and graph.is_causal()
    return _Form(full, causal, not full and not causal and graph.has_empty_rows)


def _needs_no_mask(graph: TokenGraph) -> bool:
    form = memoized(_form_of, graph)
    return bool(form.full or form.causal)


def _run_finite(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    if _plain(call):
        form: _Form = memoized(_form_of, call.graph)
        return _zero_empty_rows(call, form, _run_plain(call, form)), None
    return _formula(call, call.graph.mask(call.q.device))


def _run_plain(call: AttentionCall, form: _Form) -> Tensor:
    if form.full or form.causal:
        return _sdpa(call, None, is_causal=form.causal)
    return _sdpa(call, _opened_mask(call.graph, call.q.dtype, call.q.device), is_causal=False)


def _shows_all(call: AttentionCall, form: _Form, out: Tensor) -> bool:
    """True if no non-finite token leaked along a non-edge, nor will its gradient, and none was lost.

    A receiver of a v that is not finite shows it: in a full or causal graph the last receiver does. A row of
    logits that are all NaN becomes 0 in the kernel for CPUs (not in those for GPUs), so that there q and k
    are looked at, too; and for gradients, where they are multiplied by weights 0.
    """
    on_cuda = out.is_cuda
    if on_cuda and form.full:
        return True
    shown = out[:, :, -1:] if form.full or form.causal else out
    if on_cuda and not out.requires_grad:
        return nonfinite.surely_finite(shown)
    return nonfinite.surely_finite(shown, call.q, call.k)


def _zero_empty_rows(call: AttentionCall, form: _Form, out: Tensor) -> Tensor:
    if not form.has_empty_rows:
        return out
    return out.masked_fill(~call.graph.mask(out.device).any(-1, keepdim=True), 0.0)


def _opened_mask(graph: TokenGraph, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The mask for SDPA, all True in an isolated row, which it would make NaN; small ones in q's dtype."""
    small = graph.num_dst * graph.num_src <= SMALL_MASK
    mask: Tensor = memoized(_opened, graph, dtype if small else torch.bool, device)
    return mask


def _opened(graph: TokenGraph, dtype: torch.dtype, device: torch.device) -> Tensor:
    mask = graph.mask(device)
    if graph.has_empty_rows:
        mask = mask | ~mask.any(-1, keepdim=True)
    # one of three axes keeps SDPA from its fused kernel
    mask = mask.unsqueeze(0) if mask.dim() == 3 else mask
    if dtype == torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, -torch.inf)


def _sdpa(call: AttentionCall, mask: Tensor | None, is_causal: bool) -> Tensor:
    q, k, v = _adjacent_channels(call.q), _adjacent_channels(call.k), _adjacent_channels(call.v)
    options: dict[str, Any] = {
        "attn_mask": mask,
        "is_causal": is_causal,
        "scale": call.scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if not torch.is_grad_enabled() or not (q.requires_grad or k.requires_grad or v.requires_grad):
        return functional.scaled_dot_product_attention(q, k, v, **options)
    kernel = partial(functional.scaled_dot_product_attention, **options)
    return twice_differentiable(kernel, partial(_unfused, kernel), q, k, v)


def _adjacent_channels(x: Tensor) -> Tensor:
    # of others SDPA has no fused kernel, and would make all weights
    return x if x.stride(-1) == 1 else x.contiguous()


def _unfused(kernel: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """SDPA made of operators that have second derivatives."""
    with sdpa_kernel(SDPBackend.MATH):
        return kernel(*inputs)


def _has_flash_lse(call: AttentionCall) -> bool:
    """True where lse comes from SDPA's own kernel for CUDA: nothing of the size dst x src is made."""
    on_device = call.q.device.type in DEVICES_OF_FLASH and call.q.dtype in flash_varlen.DTYPES
    if not on_device or not flash_varlen.available():
        return False
    wanted = call.is_plain and (call.with_lse or call.sink_logits is not None) and _needs_no_mask(call.graph)
    sizes = (*call.q.shape, *call.v.shape)
    return wanted and 0 not in sizes and max(call.q.shape[3], call.v.shape[3] + 1) <= flash_varlen.WIDEST


def _with_lse(call: AttentionCall) -> tuple[Tensor, Tensor]:
    dst, src = memoized(_bounds, call.graph, call.q.device)
    window = (-1, -1) if call.graph.is_full() else (-1, 0)
    sequences = flash_varlen.Sequences(dst, src, (call.graph.num_dst, call.graph.num_src), window)
    out, lse = flash_varlen.attention(call.q, call.k, call.v, sequences, call.scale)
    if call.sink_logits is None:
        return out, lse
    return edges.add_sinks(out, lse, call.sink_logits, call.has_in_edges)


def _bounds(graph: TokenGraph, device: torch.device) -> tuple[Tensor, Tensor]:
    bounds = torch.tensor([[0, graph.num_dst], [0, graph.num_src]], dtype=torch.int32, device=device)
    return bounds[0], bounds[1]


def _formula(call: AttentionCall, mask: Tensor) -> tuple[Tensor, Tensor]:
    """``softmax(score_mod(q k^T scale) + bias) v`` over the edges, written out."""
    # without an edge there are no ends for a score_mod
    call = call if call.graph.num_edges else replace(call, score_mod=None)
    wide, heads = edges.accumulation_dtype(call.q.dtype), call.q.shape[1]
    q, k, v = (edges.per_query_head(x.to(wide), heads) for x in (call.q, call.k, call.v))
    sinks = None
    if call.sink_logits is not None:
        sinks = torch.where(mask.any(-1, keepdim=True), call.sink_logits.to(wide).view(-1, 1, 1), -torch.inf)
    weights, lse = edges.row_softmax(_logits(call, q, k, mask), sinks)
    dst, src = (torch.arange(size, device=mask.device) for size in mask.shape[-2:])
    weights = call.dropped(weights.masked_fill(~mask, 0.0), dst.unsqueeze(-1), src)
    return (weights @ v).to(call.q.dtype), lse


def _logits(call: AttentionCall, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """``score_mod(q k^T scale) + bias``, -inf where there is no edge."""
    logits = call.modified(q @ k.mT * call.scale, *_ends(call, mask))
    if call.bias is not None:
        logits = logits + _spread(call.bias.to(q.dtype), call.graph)
    return logits.masked_fill(~mask, -torch.inf)


def _ends(call: AttentionCall, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The receiver and the sender of every pair for a score_mod; a non-edge gets those of an edge.

    That is an edge of its head, if it has one. The result is thrown away, but its derivative is multiplied by
    0: a score_mod that divides by 0 where there is no edge would make NaN of the gradients of all others.
    """
    graph = call.graph
    dst, src = (torch.arange(size, device=mask.device) for size in (graph.num_dst, graph.num_src))
    dst = dst.unsqueeze(-1)
    if call.score_mod is None or not mask.numel() or graph.is_full():
        return dst, src
    pairs = mask.flatten(-2)
    anywhere = pairs.reshape(-1, pairs.shape[-1]).any(0).to(torch.uint8).argmax()
    some_edge = torch.where(pairs.any(-1), pairs.to(torch.uint8).argmax(-1), anywhere)[..., None, None]
    some_dst, some_src = some_edge // graph.num_src, some_edge % graph.num_src
    return torch.where(mask, dst, some_dst), torch.where(mask, src, some_src)


def _spread(bias: Tensor, graph: TokenGraph) -> Tensor:
    src, dst = graph.edges_on(bias.device)
    table = bias.new_zeros(*bias.shape[:2], graph.num_dst * graph.num_src)
    filled = table.index_copy(2, dst * graph.num_src + src, bias)
    return filled.view(*bias.shape[:2], graph.num_dst, graph.num_src)


def _reached(call: AttentionCall, marked: Tensor) -> Tensor:
    """Which receivers ``[B, Hq, dst]`` have an edge from a marked sender ``[B, Hkv, src]``."""
    graph, marked = call.graph, edges.per_query_head(marked, call.q.shape[1])
    if graph.is_full():
        return marked.any(-1, keepdim=True).expand(*marked.shape[:2], graph.num_dst)
    if graph.is_causal():
        return marked.cumsum(-1) > 0
    mask = graph.mask(marked.device).to(torch.float32)
    return (mask @ marked.to(torch.float32).unsqueeze(-1)).squeeze(-1) > 0


BACKEND = Backend(
    "dense",
    run,
    "SDPA on full and causal graphs without a mask, else time and memory of dst x src",
    unsupported_reason,
    bytes_needed,
    capabilities=Capabilities(cached=True, instead="backend='auto'"),
)
