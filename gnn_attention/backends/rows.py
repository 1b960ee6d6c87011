"""Attention along a list of edges: for irregular graphs, whose cost is that of their edges.

On CUDA a call whose score_mod, width and dtype our Triton kernel has runs in that kernel
(``gpu.row_attention``). Every other call runs along the same edges by operators of torch: a plain one in one
fused operator, which saves nothing of the size of the edges; one with a score_mod, a bias or dropout written
out on the logits of the edges, all heads of a small graph at once, else head by head, each recomputed for its
gradient. Only edges are ever read, so that a non-edge carries nothing.
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

AT_ONCE = 2**19  # edges, of all samples and heads together, up to which everything is written out at once
# bytes of edge lists and numbers of edges, of which int32 numbers more
MEMORY_LIMIT = 2**34


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    graph = call.graph
    if graph.num_dst == 1 and is_decoding_step(call):
        return _run_decoding_step(call)
    # most calls on a CPU are told from others by their device alone
    kernel = call.q.device.type in row_attention.DEVICES and has_kernel(call)
    varies = graph.batch is not None or graph.heads is not None
    if varies and not call.is_plain:
        return join_slices([[run(part) for part in row] for row in call.parts()])
    if kernel:
        return row_attention.run(call)
    if call.is_plain:
        if not varies:
            return attention_op.run_plan(call, "rows")
        group = call.q.shape[1] // call.k.shape[1] if graph.heads else 1
        edges = edge_rows(graph, call.q.device, group)
        return attention_op.run_folded(call, pack_plan(Plan((edges,), is_complete=True)))
    listed = edge_rows(graph, call.q.device)
    arguments, (batch, heads) = (listed.tensors, edge_order(graph, call.q.device)), call.q.shape[:2]
    if batch * heads * listed.src.numel() <= AT_ONCE:
        return _formula(call, *arguments)
    return join_slices(
        [[recompute(_formula, call.part(b, h), *arguments) for h in range(heads)] for b in range(batch)]
    )


def has_kernel(call: AttentionCall) -> bool:
    """Whether the Triton kernel serves the call; else operators of torch do."""
    return row_attention.unsupported_reason(call) is None


def is_decoding_step(call: AttentionCall) -> bool:
    """True for a plain call of one receiver, without gradients: it needs no list of rows."""
    graph = call.graph
    if graph.num_dst != 1 or graph.batch is not None or graph.heads is not None or not call.is_plain:
        return False
    return graph.num_edges > 0 and not any_needs_gradients((call.q, call.k, call.v, call.sink_logits))


def unsupported_reason(call: AttentionCall) -> str | None:
    needed = bytes_needed(call)
    if needed > MEMORY_LIMIT and not has_kernel(call):
        limit = f"the limit is {MEMORY_LIMIT / 2**30:.0f} GiB"
        return f"its list of edges would need about {needed / 2**30:.1f} GiB, {limit}"
    return None if call.q.device.type == "cuda" else memory.shortage(needed)


def bytes_needed(call: AttentionCall) -> int:
    """The extra memory, estimated: the list, two numbers for each edge, and rows of one head."""
    if has_kernel(call):
        return row_attention.bytes_needed(call)
    wide = edge_softmax.accumulation_dtype(call.q.dtype).itemsize
    count, heads = work.num_edges(call.graph), call.q.shape[0] * call.q.shape[1]
    at_once = min(heads, 2 + AT_ONCE // max(count, 1))
    rows = (call.graph.num_dst + call.graph.num_src) * (call.q.shape[3] + call.v.shape[3]) * wide
    return count * (40 + 2 * wide * at_once) + 2 * rows


def _run_decoding_step(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """A step of decoding, which takes less than lists for it would: the heads of a group are rows."""
    chosen = None if torch.compiler.is_compiling() else call.graph.edges.pointers()
    src = call.graph.edges_on(call.q.device)[0] if chosen is None else chosen[1].to(call.q.device)
    wide = edge_softmax.accumulation_dtype(call.q.dtype)
    (batch, kv_heads), shape = call.k.shape[:2], call.q.shape[:3]
    q = (call.q.to(wide) * call.scale).reshape(batch, kv_heads, -1, call.k.shape[3])
    logits, lse = q @ call.k.index_select(2, src).to(wide).mT, None
    if call.with_lse or call.sink_logits is not None:
        sinks = None if call.sink_logits is None else call.sink_logits.to(wide).view(kv_heads, -1, 1)
        weights, lse = edge_softmax.row_softmax(logits, sinks)
    else:  # in half the time
        weights = logits.softmax(-1).masked_fill_(logits.amax(-1, keepdim=True) == -torch.inf, 0.0)
    out = weights @ call.v.index_select(2, src).to(wide)
    return out.reshape(*shape, -1).to(call.q.dtype), None if lse is None else lse.reshape(shape)


def _formula(call: AttentionCall, listed: Sequence[Tensor], order: Tensor) -> tuple[Tensor, Tensor]:
    """``sum over in-edges of dropout(softmax(score_mod(scale q . k) + bias)) v``, and lse."""
    wide = edge_softmax.accumulation_dtype(call.q.dtype)
    q, k, v = (x.to(wide) for x in (call.q, call.k, call.v))
    src, dst = listed[1].long(), listed[2].long()
    logits = call.apply_score_mod(csr_ops.products(q, k, listed) * call.scale, dst, src)
    if call.bias is not None:
        logits = logits + call.bias.to(wide).index_select(2, order)
    sinks = None if call.sink_logits is None else call.sink_logits.to(wide)
    weights, lse = edge_softmax.softmax(logits, dst, call.graph.num_dst, sinks, check=False)
    return csr_ops.incoming(call.apply_dropout(weights, dst, src), v, listed).to(call.q.dtype), lse


BACKEND = Backend(
    "rows",
    run,
    "edge by edge in time and memory of the edges: for irregular graphs",
    unsupported_reason,
    bytes_needed,
    recomputes=True,
    capabilities=Capabilities(double_backward=False, cached=True, parallel_edges="kept"),
)
