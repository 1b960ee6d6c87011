"""Attention edge by edge in one piece: gather both ends of all edges, score, softmax over in-edges, sum.

The formula of a layer's message passing, ``out_dst = sum over src -> dst of w_e v_src``, in operators of
torch that have every derivative. It needs no plan and no order of the edges, so that it is the quickest for
few edges, above all where the graph is another one in every step. Its memory is that of the messages,
``edges x heads x channels``.
"""

import torch

from gnn_attention import edges
from gnn_attention._support import memory
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.backends.backend import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.capabilities import Capabilities
from gnn_attention.graph import TokenGraph, memoized

# tensors of the size of the messages in a training step: the gathered q, k and v, products and gradients
COPIES = 8
LONGEST_SUM = 64  # messages that are added one after the other in float32


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    src, dst = call.graph.edges_on(call.q.device)
    wide = _dtype_of_sums(call)
    bias = None if call.bias is None else call.bias.to(wide)
    out, lse = attend_along(call, wide, src, dst, 0, call.graph.num_dst, bias)
    lse = None if lse is None else lse.to(edges.accumulation_dtype(call.q.dtype))
    return out.to(call.q.dtype), lse


def attend_along(
    call: AttentionCall,
    dtype: torch.dtype,
    src: Int[Tensor, " edges"],
    dst: Int[Tensor, " edges"],
    start: int,
    stop: int,
    bias: Float[Tensor, "..."] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``(out, lse)`` of the receivers ``start .. stop - 1``, all of whose in-edges are ``src -> dst``.

    Computes in ``dtype``, in which ``bias`` of these edges comes. lse is None where neither the call nor its
    sinks ask for it.
    """
    batch, heads, row = call.q.shape[0], call.q.shape[1], dst if start == 0 else dst - start
    q, k, v = (
        (x if x.shape[1] == heads else edges.per_query_head(x, heads)).to(dtype)
        for x in (call.q, call.k, call.v)
    )
    # heads last, as the rows of tokens have them
    logits = (_gather(q, dst) * _gather(k, src)).sum(-1).view(batch, len(dst), heads).mT * call.scale
    logits = call.modified(logits, dst, src)
    logits = logits if bias is None else logits + bias
    if call.with_lse or call.sink_logits is not None:
        weights, lse = edges.softmax(logits, row, stop - start, call.sink_logits)
    else:
        weights, lse = edges.weights_of(logits, row, stop - start), None
    weights = call.dropped(weights, dst, src) if call.dropout else weights
    messages = weights.mT.reshape(batch * len(dst), heads, 1) * _gather(v, src)
    out = messages.new_zeros(batch * (stop - start), *messages.shape[1:])
    out = out.index_add_(0, _rows_of(row, batch, stop - start), messages)
    return out.view(batch, stop - start, *messages.shape[1:]).transpose(1, 2), lse


def _gather(
    x: Float[Tensor, "batch heads tokens dim"], index: Int[Tensor, " edges"]
) -> Float[Tensor, "batch_edges heads dim"]:
    """The rows of all heads at the end of every edge, one sample after the other."""
    # along its first axis torch gathers and sums rows in a third of the time of any other
    tokens = x.transpose(1, 2).flatten(0, 1)
    return tokens.index_select(0, _rows_of(index, x.shape[0], x.shape[2]))


def _rows_of(index: Int[Tensor, " edges"], batch: int, tokens: int) -> Int[Tensor, " batch_edges"]:
    """The rows of these tokens of every sample where ``batch`` samples stand one after the other."""
    if batch == 1:
        return index
    first = tokens * torch.arange(batch, device=index.device)
    return (first.unsqueeze(1) + index).flatten()


def _dtype_of_sums(call: AttentionCall) -> torch.dtype:
    """float64 for hubs: messages are added one after the other, and so are gradients of senders."""
    has_hubs = call.graph.num_edges > LONGEST_SUM and memoized(_has_hubs, call.graph)
    return torch.float64 if has_hubs else edges.accumulation_dtype(call.q.dtype)


def _has_hubs(graph: TokenGraph) -> bool:
    return any(int(ends.bincount().max()) > LONGEST_SUM for ends in graph.edge_index)


def unsupported_reason(call: AttentionCall) -> str | None:
    return memory.shortage(bytes_needed(call)) if call.q.device.type == "cpu" else None


def bytes_needed(call: AttentionCall) -> int:
    """The extra memory, estimated at most: the messages and what is like them, in float64."""
    numbers = call.q.shape[0] * call.q.shape[1] * max(call.q.shape[3], call.v.shape[3])
    return COPIES * call.graph.num_edges * numbers * torch.float64.itemsize


BACKEND = Backend(
    "message_passing",
    run,
    "edge by edge at once, with every derivative: for few edges, or a graph that is used once",
    unsupported_reason,
    bytes_needed,
    capabilities=Capabilities(varying_graphs=False, cached=True, instead="backend='auto'"),
)
