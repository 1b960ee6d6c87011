"""Attention edge by edge in one piece: gather both ends of all edges, score, softmax over in-edges, sum.

The formula of a layer's message passing, ``out_dst = sum over src -> dst of w_e v_src``, in operators of
torch that have every derivative. It needs no plan and no order of the edges, so that it is the quickest for
few edges, above all where the graph is another one in every step. Its memory is that of the messages,
``edges x heads x channels``.
"""

import torch

from gnn_attention import edge_softmax
from gnn_attention._support import memory
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.backends.backend import Backend, Capabilities
from gnn_attention.backends.call import AttentionCall
from gnn_attention.graph import TokenGraph, memoized

Rows = Float[Tensor, "_ heads _"]
Index = Int[Tensor, "_"]

# tensors of the size of the messages in a training step: the gathered q, k and v, products and gradients
COPIES = 8
LONGEST_SUM = 64  # messages that are added one after the other in float32


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    src, dst = call.graph.edges_on(call.q.device)
    # messages are added one after the other, and so are gradients of senders
    has_hubs = call.graph.num_edges > LONGEST_SUM and memoized(_has_hubs, call.graph)
    wide = torch.float64 if has_hubs else edge_softmax.accumulation_dtype(call.q.dtype)
    out, lse = attend_along(call, wide, src, dst)
    lse = None if lse is None else lse.to(edge_softmax.accumulation_dtype(call.q.dtype))
    return out.to(call.q.dtype), lse


def attend_along(
    call: AttentionCall,
    dtype: torch.dtype,
    src: Int[Tensor, " edges"],
    dst: Int[Tensor, " edges"],
    first: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """``out_dst = sum of w_e v_src`` and lse, if due, over edges that are all in-edges of their receivers.

    Computes in ``dtype``. The call has the queries of receivers from ``first`` on, and a bias of these edges.
    """
    (batch, heads, num_dst), receiver = call.q.shape[:3], dst - first if first else dst
    q, k, v = (_rows(x, heads).to(dtype) for x in (call.q, call.k, call.v))
    row, of_src = _index(receiver, batch, num_dst), _index(src, batch, call.graph.num_src)
    logits = (q.index_select(0, row) * k.index_select(0, of_src)).sum(-1) * call.scale
    if call.is_plain and not call.with_lse and call.sink_logits is None:
        weights, lse = edge_softmax.softmax(logits.mT, row, len(q), check=False)[0].mT, None
    else:
        logits = call.apply_score_mod(logits.view(batch, len(dst), heads).mT, dst, src)
        logits = logits if call.bias is None else logits + call.bias.to(dtype)
        of_edge, lse = edge_softmax.softmax(logits, receiver, num_dst, call.sink_logits, check=False)
        of_edge = call.apply_dropout(of_edge, dst, src) if call.dropout else of_edge
        weights = of_edge.mT.reshape(batch * len(dst), heads)
    messages = weights.unsqueeze(-1) * v.index_select(0, of_src)
    out = messages.new_zeros(len(q), *messages.shape[1:]).index_add_(0, row, messages)
    return out.view(batch, num_dst, *messages.shape[1:]).transpose(1, 2), lse


def _rows(x: Float[Tensor, "batch heads_of_x tokens dim"], heads: int) -> Rows:
    """The rows of all heads of every token, one sample after the other."""
    # along its first axis torch gathers and sums rows in a third of the time of any other
    x = x if x.shape[1] == heads else edge_softmax.per_query_head(x, heads)
    return x.transpose(1, 2).flatten(0, 1)


def _index(tokens: Int[Tensor, " edges"], batch: int, count: int) -> Index:
    """Where these of ``count`` tokens of every sample stand among the rows."""
    if batch == 1:
        return tokens
    return (count * torch.arange(batch, device=tokens.device).unsqueeze(1) + tokens).flatten()


def _has_hubs(graph: TokenGraph) -> bool:
    return any(int(torch.bincount(side).max()) > LONGEST_SUM for side in graph.edge_index)


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
    capabilities=Capabilities(
        varying_graphs=False, cached=True, parallel_edges="kept", instead="backend='auto'"
    ),
)
