"""Attention on a list of edges, for irregular graphs: its cost grows with the number of edges.

On CUDA a call runs in our Triton kernel (``gpu.row_attention``) if that supports its score_mod, normaliser,
width and dtype. Other calls run on the same edges with torch operators. A plain call is one fused operator,
which saves no weights of edges. Any other call computes the logits of all edges; with a score_mod or dropout
it does so head by head if edges are many, and again in the backward pass. Non-edges have no influence.
"""

from typing import Any

import torch

from gnn_attention import edge_softmax
from gnn_attention._support import memory
from gnn_attention._support.autograd import derivative_order, has_forward_derivative, recompute
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.backend import Backend, Capabilities
from gnn_attention.backends.call import AttentionCall, any_needs_gradients, are_eager, join_slices
from gnn_attention.backends.cpu import attention_op
from gnn_attention.backends.gpu import row_attention
from gnn_attention.backends.plan import work
from gnn_attention.backends.plan.plan import Plan, pack_plan
from gnn_attention.edge_ops import operators
from gnn_attention.edge_ops.edge_lists import edge_rows
from gnn_attention.edge_ops.normalisers import normalise

MAX_LOGITS_AT_ONCE = 2**19  # Up to this many logits (edges x samples x heads) are computed together.
MAX_BYTES = 2**34  # Lists and values of edges take at most 16 GiB; int32 would allow more.


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    graph = call.graph
    if graph.num_dst == 1 and is_decoding_step(call):
        return _run_decoding_step(call)
    # On a CPU the device alone rules out the kernel, so the slower has_kernel is not called.
    uses_kernel = call.q.device.type in row_attention.DEVICES and has_kernel(call)
    if uses_kernel:
        features = call.features and (call.features.attr, call.features.key, call.features.value)
        tensors = call.q, call.k, call.v, call.bias, *(features or ())
        uses_kernel = not has_forward_derivative(tensors) and derivative_order(tensors) < 2
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
    batch, heads = call.q.shape[:2]
    needs_one_head = call.score_mod is not None or call.dropout > 0
    if not needs_one_head or batch * heads * graph.num_edges <= MAX_LOGITS_AT_ONCE:
        return _attend(call)
    calls = [[call.select(b, h) for h in range(heads)] for b in range(batch)]
    return join_slices([[recompute(_attend, part) for part in row] for row in calls])


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


def _attend(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Compute ``sum of dropout(normalise(logits)) v`` over in-edges, and lse for a softmax."""
    logits, edges = _logits(call)
    weights, lse = normalise(call.normaliser, logits, edges, call.graph)
    if call.sink_logits is not None and lse is not None:
        sinks = call.sink_logits.to(lse.dtype).unsqueeze(-1).expand(lse.shape)
        sinks = sinks.masked_fill(~call.has_in_edges, -torch.inf)
        (share, _), lse = edge_softmax.merge_weights(lse, sinks)
        weights = weights * operators.spread(share, edges)
    weights = call.apply_dropout(weights, edges[2], edges[1])
    out = operators.incoming(weights, call.v.to(weights.dtype), edges)
    if call.features is not None:
        out = call.features.add_values(out, weights, call.graph)
    return out.to(call.q.dtype), lse


def _logits(call: AttentionCall) -> tuple[Tensor, list[Tensor]]:
    """Compute ``score_mod(scale * q . k) + bias`` of each edge in the order of EdgeRows; return these too."""
    dtype = edge_softmax.accumulation_dtype(call.q.dtype)
    q = call.q.to(dtype)
    edges = edge_rows(call.graph, q.device).tensors
    query_map = None if call.features is None else call.features.query_map(q)
    if call.features is None or query_map is None:
        logits = operators.products(q, call.k.to(dtype), edges, call.scale)
    else:
        saves_memory = are_eager((q, query_map)) and any_needs_gradients((q, query_map))
        q, r = _Queries.apply(q, query_map) if saves_memory else (q, q @ query_map)  # type: ignore[no-untyped-call]
        logits = operators.products(q, call.k.to(dtype), edges, 1.0)
        # The backward pass begins with the last term, before the gradients of q and k take memory.
        logits = (logits + call.features.logits(r, call.graph)) * call.scale
    if call.score_mod is not None:
        logits = call.apply_score_mod(logits, edges[2].long(), edges[1].long())
    if call.bias is not None:
        logits = logits + operators.sort_values(call.bias.to(dtype), call.graph)
    return logits, edges


class _Queries(torch.autograd.Function):
    """Return q and ``q W``; both gradients of q are summed in place."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, weight)
        return q.view_as(q), q @ weight

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_r: Tensor) -> tuple[Tensor, Tensor]:
        q, weight = ctx.saved_tensors
        grad_weight = (q.mT @ grad_r).sum(0)
        if torch.is_grad_enabled():
            return grad_q + grad_r @ weight.mT, grad_weight
        grad_q = grad_q.contiguous()
        for sums, grad in zip(grad_q, grad_r, strict=True):
            sums.baddbmm_(grad, weight.mT)
        return grad_q, grad_weight


def edge_logits(call: AttentionCall) -> Float[Tensor, "batch heads edges"]:
    """Compute the logit of each edge, in the order of ``graph.edge_index``."""
    return operators.restore_order(_logits(call)[0], call.graph)


def edge_weights(call: AttentionCall, lse: Tensor | None) -> Float[Tensor, "batch heads edges"]:
    """Compute the weight of each edge before dropout, in the order of ``graph.edge_index``."""
    logits, edges = _logits(call)
    if lse is None or call.normaliser != "softmax":
        weights, _ = normalise(call.normaliser, logits, edges, call.graph)
    else:
        # Where lse is -inf, all weights are 0.
        shift = operators.spread(lse.masked_fill(lse == -torch.inf, torch.inf), edges)
        can_overwrite = are_eager((logits, shift)) and not any_needs_gradients((logits, shift))
        weights = logits.sub_(shift).exp_() if can_overwrite else (logits - shift).exp()
    return operators.restore_order(weights, call.graph)


BACKEND = Backend(
    "rows",
    run,
    "edge by edge, so time and memory grow with the edges: for irregular graphs",
    unsupported_reason,
    bytes_needed,
    recomputes=True,
    capabilities=Capabilities(normalisers="all", edge_attr=True, cached=True, parallel_edges="kept"),
)
