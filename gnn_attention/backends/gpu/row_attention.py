"""Attention in the Triton kernel over rows of edges, with all options of this library in the kernel.

It serves CUDA tensors. Where Python was started with ``TRITON_INTERPRET=1`` it serves CPU tensors too,
slowly, for tests and rehearsals.
"""

import importlib.util
import os

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import failures
from gnn_attention.backends.call import AttentionCall, any_needs_gradients, joined
from gnn_attention.backends.gpu import ops, score_terms
from gnn_attention.backends.gpu.csr import MOST_EDGES, bytes_of, hands_over, rows_of
from gnn_attention.backends.gpu.problem import Packed, Problem, pack
from gnn_attention.edge_softmax import accumulation_dtype
from gnn_attention.graph import TokenGraph, memoized

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WIDEST = 512  # channels of a head
MOST_PROGRAMS = 2**31 - 1  # along the first axis of a grid
WORKSPACE = 2**26  # bytes of partial results of long rows
DEVICES = ("cuda", "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",)
INSTALLED = importlib.util.find_spec("triton") is not None


def run(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """``out [B, Hq, dst, Dv]`` in the dtype of q and ``lse [B, Hq, dst]`` in float32 or float64.

    A graph that differs by sample or head is computed in one launch, unless a number is added to its logits
    or weights are dropped: then each of its slices is a launch of its own.
    """
    graph = call.graph
    if graph.batch is None and graph.heads is None:
        return call.with_sinks(*_run_plain(call))
    if call.is_plain:
        return call.with_sinks(*_run_folded(call))
    out, lse = joined([[run(part) for part in row] for row in call.parts()])
    assert lse is not None
    return out, lse


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why the kernel does not serve the call, or None; torch operators do what it does not."""
    if call.q.device.type not in DEVICES:
        return f"the kernel runs on {DEVICES[0]}, q is on {call.q.device}"
    if not INSTALLED:
        return "the kernel needs Triton, which comes with torch for CUDA: pip install triton"
    if call.q.dtype not in DTYPES:
        return f"the kernel has no {call.q.dtype}"
    width = max(call.q.shape[3], call.v.shape[3])
    if width > WIDEST:
        return f"the kernel takes heads of at most {WIDEST} channels, got {width}"
    folds = call.graph.batch is not None or call.graph.heads is not None
    slices = call.q.shape[0] * call.q.shape[1] if folds else call.q.shape[1] // call.k.shape[1]
    if max(call.q.shape[2], call.k.shape[2]) * slices > MOST_PROGRAMS:
        return f"the kernel takes at most {MOST_PROGRAMS} receivers of all heads that share their senders"
    if call.graph.num_edges > MOST_EDGES:
        return f"the kernel takes at most {MOST_EDGES} edges, got {call.graph.num_edges}"
    return score_terms.unsupported_reason(call) or failures.reason("rows", call)


def bytes_needed(call: AttentionCall) -> int:
    """The extra memory: the rows of the graph, a workspace, numbers for each edge."""
    slices = call.q.shape[0] * call.q.shape[1] // ((call.graph.batch or 1) * (call.graph.heads or 1))
    numbers = 2 * accumulation_dtype(call.q.dtype).itemsize * slices * call.graph.num_edges
    handed = numbers if _hands_over(call) else 0
    rows = bytes_of(call.graph, score_terms.has_edge_numbers(call) or _hands_over(call))
    return rows + handed + score_terms.edge_number_bytes(call) + WORKSPACE


def _hands_over(call: AttentionCall) -> bool:
    """Whether edges are numbered for both sides, so that a backward pass hands their p and ds over."""
    trained = any_needs_gradients((call.q, call.k, call.v))
    # the number of samples may change in a compiled program: it does not decide
    heads = call.q.shape[1] if call.graph.heads is None else 1
    wide = accumulation_dtype(call.q.dtype).itemsize
    return trained and hands_over(call.graph.num_edges, heads, wide)


def _run_plain(call: AttentionCall) -> tuple[Tensor, Tensor]:
    graph = call.graph
    slopes, softcap, before, bias = score_terms.added_to_edges(call)
    numbered = before is not None or bias is not None or _hands_over(call)
    problem = Problem(
        q=call.q,
        k=call.k,
        v=call.v,
        scale=call.scale,
        softcap=softcap,
        slopes=slopes,
        before=before,
        bias=bias,
        dropout=call.dropout,
        seed=call.seed,
        dst_offset=graph.dst_offset,
        src_offset=graph.src_offset,
        first_sample=call.first_sample,
        first_head=call.first_head,
    )
    return ops.attention(problem, memoized(_packed_rows, graph, call.q.device, numbered, 1))


def _run_folded(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """A plain call on a graph that varies: the axes by which it does are folded into that of the tokens."""
    graph, group = call.graph, call.q.shape[1] // call.k.shape[1]
    numbered = _hands_over(call)
    q, k, v = (_fold(x, graph) for x in (call.q, call.k, call.v))
    rows = memoized(_packed_rows, graph, call.q.device, numbered, group)
    out, lse = ops.attention(Problem(q, k, v, call.scale), rows)
    return _unfold(out, call), _unfold(lse.unsqueeze(-1), call).squeeze(-1)


def _fold(x: Tensor, graph: TokenGraph) -> Tensor:
    """``[B, H, T, D]`` with samples, heads or both in the axis of the tokens, in this order."""
    batch, heads, tokens, width = x.shape
    if graph.heads is None:
        return x.transpose(0, 1).reshape(1, heads, batch * tokens, width)
    if graph.batch is None:
        return x.reshape(batch, 1, heads * tokens, width)
    return x.reshape(1, 1, batch * heads * tokens, width)


def _unfold(x: Tensor, call: AttentionCall) -> Tensor:
    """The reverse of :func:`_fold` for a result ``[..., tokens, width]`` of the receivers."""
    batch, heads, tokens, _ = call.q.shape
    if call.graph.heads is None:
        return x.reshape(heads, batch, tokens, -1).transpose(0, 1)
    return x.reshape(batch, heads, tokens, -1)


def _packed_rows(graph: TokenGraph, device: torch.device, numbered: bool, group: int) -> Packed:
    return pack(rows_of(graph, device, numbered, group))
