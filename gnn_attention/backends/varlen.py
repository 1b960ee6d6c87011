"""Packed documents, each causal, full or under one window, through torch's flash attention on CUDA.

The kernel visits nothing outside of a document or window, saves nothing of the size of the edges and returns
lse, which has a gradient (``gpu/flash_varlen``). On a CPU ``tiles`` does the same work.
"""

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.backend import Backend, Capabilities
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.gpu import flash_varlen
from gnn_attention.backends.plan.planner import packing
from gnn_attention.graph import TokenGraph, memoized


def run(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """``out [B, Hq, dst, Dv]`` in the dtype of q and ``lse [B, Hq, dst]`` in float32."""
    bounds, longest, left, right = memoized(_on_device, call.graph, call.q.device)
    return flash_varlen.attention(call, (bounds, bounds), (longest, longest), (left, right))


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why the sizes or the graph are unsupported; or None."""
    if memoized(packing, call.graph) is None:
        wanted = "packing of documents with one window (see convert.to_varlen)"
        return f"the graph is no {wanted}; use backend='flex'"
    if 0 in (*call.q.shape, *call.v.shape):
        sizes = f"q {list(call.q.shape)} and v {list(call.v.shape)}"
        return f"it needs samples, heads, tokens and channels, got {sizes}"
    needs_lse = torch.is_grad_enabled() and (call.with_lse or call.sink_logits is not None)
    width, widest = max(call.q.shape[3], call.v.shape[3] + needs_lse), flash_varlen.WIDEST
    if width <= widest:
        return None
    sizes = f"it has {widest} channels, one for the gradient of lse, and needs {width}"
    return f"{sizes}; use backend='flex' or 'rows'"


def bytes_needed(call: AttentionCall) -> int:
    """The extra memory: q, k, v and the output, packed as the kernel reads and writes them."""
    batch, heads, tokens, dim = call.q.shape
    return 4 * batch * heads * tokens * max(dim, call.v.shape[3]) * call.q.element_size()


def _on_device(graph: TokenGraph, device: torch.device) -> tuple[Tensor, int, int, int]:
    found = memoized(packing, graph)
    assert found is not None
    return found.cu_seqlens.to(device), found.max_seqlen, *found.window


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
        double_backward=False,
        visits_non_edges=True,
        instead="backend='tiles' or 'rows'",
    ),
)
