"""Packed documents that are all full, all causal or share a window, using torch's flash attention on CUDA.

The kernel visits no pair outside of a document or window, saves no weights of edges, and
returns lse, which has a gradient (``gpu/flash_varlen``). On a CPU ``tiles`` runs such graphs.
"""

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.backend import Backend, Capabilities
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.gpu import flash_varlen
from gnn_attention.backends.plan.planner import packing
from gnn_attention.graph import TokenGraph, memoized


def run(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return ``out [B, Hq, dst, Dv]`` in the dtype of q and ``lse [B, Hq, dst]`` in float32."""
    bounds, max_length, left, right = memoized(_pack_on_device, call.graph, call.q.device)
    return flash_varlen.attention(call, (bounds, bounds), (max_length, max_length), (left, right))


def unsupported_reason(call: AttentionCall) -> str | None:
    if memoized(packing, call.graph) is None:
        return "the graph is not packed documents with one window (convert.to_varlen); use backend='flex'"
    q_shape, v_shape = list(call.q.shape), list(call.v.shape)
    if 0 in (*q_shape, *v_shape):
        return f"it needs samples, heads, tokens and channels, got q {q_shape} and v {v_shape}"
    needs_lse = torch.is_grad_enabled() and (call.with_lse or call.sink_logits is not None)
    width = max(q_shape[3], v_shape[3] + needs_lse)
    max_width = flash_varlen.MAX_CHANNELS
    if width <= max_width:
        return None
    return f"at most {max_width} channels, one for lse's gradient, got {width}; use backend='flex' or 'rows'"


def bytes_needed(call: AttentionCall) -> int:
    """Estimate the extra memory: packed copies of q, k, v and the output."""
    batch, heads, tokens, dim = call.q.shape
    return 4 * batch * heads * tokens * max(dim, call.v.shape[3]) * call.q.element_size()


def _pack_on_device(graph: TokenGraph, device: torch.device) -> tuple[Tensor, int, int, int]:
    documents = memoized(packing, graph)
    assert documents is not None
    return documents.cu_seqlens.to(device), documents.max_seqlen, *documents.window


BACKEND = Backend(
    "varlen",
    run,
    "packed documents with one window for all: torch's variable-length flash attention",
    unsupported_reason,
    bytes_needed,
    recomputes=True,
    capabilities=Capabilities(
        devices=("cuda",),
        dtypes=flash_varlen.DTYPES,
        score_mod=False,
        bias=False,
        dropout=False,
        visits_non_edges=True,
        instead="backend='tiles' or 'rows'",
    ),
)
