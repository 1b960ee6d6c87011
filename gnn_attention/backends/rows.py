"""Attention on a list of edges, for irregular graphs: its cost grows with the number of edges.

On CUDA a call runs in our Triton kernel (``gpu.row_attention``) if that supports its score_mod, width and
dtype. Other calls run on the same edges with torch operators. A plain call is one fused operator, which
saves no weights of edges. A call with a score_mod, bias or dropout computes the logits of all
edges (for all heads at once if edges are few, else head by head) and recomputes them in the backward pass.
Only edges are read, so non-edges have no influence.
"""

from collections.abc import Sequence

import torch

from gnn_attention import edge_softmax
from gnn_attention._support import memory
from gnn_attention._support.autograd import recompute
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.backend import Backend, Capabilities
from gnn_attention.backends.call import AttentionCall, any_needs_gradients, join_slices
from gnn_attention.backends.cpu import attention_op, csr_ops
from gnn_attention.backends.gpu import row_attention
from gnn_attention.backends.plan import work
from gnn_attention.backends.plan.csr import edge_order, edge_rows
from gnn_attention.backends.plan.plan import Plan, pack_plan

MAX_LOGITS_AT_ONCE = 2**19  # Up to this many logits (edges x samples x heads) are computed together.
MAX_BYTES = 2**34  # Lists and values of edges take at most 16 GiB; int32 would allow more.


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    graph = call.graph
    if graph.num_dst == 1 and is_decoding_step(call):
        return _run_decoding_step(call)
    # On a CPU the device alone rules out the kernel, so the slower has_kernel is not called.
    uses_kernel = call.q.device.type in row_attention.DEVICES and has_kernel(call)
    varies = graph.batch is not None or graph.heads is not None
    if varies and not call.is_plain:
        return join_slices([[run(part) for part in row] for row in call.slices()])
    if uses_kernel:
        return row_attention.run(call)
    if call.is_plain:
        if not varies:
            return attention_op.run_plan(call, "rows")
        group_size = call.q.shape[1] // call.k.shape[1] if graph.heads else 1
        edges = edge_rows(graph, call.q.device, group_size)
        return attention_op.run_folded(call, pack_plan(Plan((edges,), is_complete=True)))
    edges = edge_rows(graph, call.q.device)
    order = edge_order(graph, call.q.device)
    batch, heads = call.q.shape[:2]
    if batch * heads * edges.src.numel() <= MAX_LOGITS_AT_ONCE:
        return _attend(call, edges.tensors, order)
    calls = [[call.select(b, h) for h in range(heads)] for b in range(batch)]
    return join_slices([[recompute(_attend, part, edges.tensors, order) for part in row] for row in calls])


def has_kernel(call: AttentionCall) -> bool:
    """True if the Triton kernel runs the call, False if torch operators do."""
    return row_attention.unsupported_reason(call) is None


def is_decoding_step(call: AttentionCall) -> bool:
    """True for a plain call of one receiver without gradients, which needs no list of rows."""
    graph = call.graph
    if graph.num_dst != 1 or graph.batch is not None or graph.heads is not None or not call.is_plain:
        return False
    return graph.num_edges > 0 and not any_needs_gradients((call.q, call.k, call.v, call.sink_logits))


def unsupported_reason(call: AttentionCall) -> str | None:
    num_bytes = bytes_needed(call)
    gib, limit = num_bytes / 2**30, MAX_BYTES / 2**30
    if num_bytes > MAX_BYTES and not has_kernel(call):
        return f"its list of edges would need about {gib:.1f} GiB, the limit is {limit:.0f} GiB"
    return None if call.q.device.type == "cuda" else memory.shortage(num_bytes)


def bytes_needed(call: AttentionCall) -> int:
    """Estimate the extra memory: the edge list, two values for each edge, and rows of one head."""
    if has_kernel(call):
        return row_attention.bytes_needed(call)
    itemsize = edge_softmax.accumulation_dtype(call.q.dtype).itemsize
    num_edges = work.num_edges(call.graph)
    num_heads = min(call.q.shape[0] * call.q.shape[1], 2 + MAX_LOGITS_AT_ONCE // max(num_edges, 1))
    token_bytes = (call.graph.num_dst + call.graph.num_src) * (call.q.shape[3] + call.v.shape[3]) * itemsize
    return num_edges * (40 + 2 * itemsize * num_heads) + 2 * token_bytes


def _run_decoding_step(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Run a decoding step without lists of edges; query heads of a group are rows of a matrix."""
    pointers = None if torch.compiler.is_compiling() else call.graph.edges.pointers()
    src = call.graph.edges_on(call.q.device)[0] if pointers is None else pointers[1].to(call.q.device)
    dtype = edge_softmax.accumulation_dtype(call.q.dtype)
    batch, kv_heads = call.k.shape[:2]
    shape = call.q.shape[:3]
    q = (call.q.to(dtype) * call.scale).reshape(batch, kv_heads, -1, call.k.shape[3])
    logits = q @ call.k.index_select(2, src).to(dtype).mT
    lse = None
    if call.with_lse or call.sink_logits is not None:
        sinks = None if call.sink_logits is None else call.sink_logits.to(dtype).view(kv_heads, -1, 1)
        weights, lse = edge_softmax.row_softmax(logits, sinks)
    else:  # torch.softmax takes half the time.
        weights = logits.softmax(-1).masked_fill_(logits.amax(-1, keepdim=True) == -torch.inf, 0.0)
    out = weights @ call.v.index_select(2, src).to(dtype)
    return out.reshape(*shape, -1).to(call.q.dtype), None if lse is None else lse.reshape(shape)


def _attend(call: AttentionCall, edges: Sequence[Tensor], order: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``sum dropout(softmax(score_mod(scale q . k) + bias)) v`` over in-edges, and lse."""
    dtype = edge_softmax.accumulation_dtype(call.q.dtype)
    q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
    src, dst = edges[1].long(), edges[2].long()
    logits = call.apply_score_mod(csr_ops.products(q, k, edges) * call.scale, dst, src)
    if call.bias is not None:
        logits = logits + call.bias.to(dtype).index_select(2, order)
    sinks = None if call.sink_logits is None else call.sink_logits.to(dtype)
    weights, lse = edge_softmax.softmax(logits, dst, call.graph.num_dst, sinks, check=False)
    out = csr_ops.incoming(call.apply_dropout(weights, dst, src), v, edges)
    return out.to(call.q.dtype), lse


BACKEND = Backend(
    "rows",
    run,
    "edge by edge, so time and memory grow with the edges: for irregular graphs",
    unsupported_reason,
    bytes_needed,
    recomputes=True,
    capabilities=Capabilities(double_backward=False, cached=True, parallel_edges="kept"),
)
