"""Attention by message passing: gather both ends of all edges, score, softmax over in-edges, sum.

It computes ``out_dst = sum over src -> dst of w_e v_src`` as a graph layer does, with torch operators, which
have derivatives of every order. It needs neither a plan nor sorted edges, so it is fastest for few edges,
above all if the graph changes in every step. Its messages have ``edges x heads x channels`` elements.
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

NUM_MESSAGE_COPIES = 8  # Training makes up to 8 tensors as large as all messages.
MAX_TERMS = 64  # Sums of more terms are computed in float64.


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    src, dst = call.graph.edges_on(call.q.device)
    # Messages to a receiver and gradients to a sender are added one by one; long sums need float64.
    has_hubs = call.graph.num_edges > MAX_TERMS and memoized(_has_hubs, call.graph)
    accumulation_dtype = edge_softmax.accumulation_dtype(call.q.dtype)
    out, lse = attend_along_edges(call, torch.float64 if has_hubs else accumulation_dtype, src, dst)
    return out.to(call.q.dtype), None if lse is None else lse.to(accumulation_dtype)


def attend_along_edges(
    call: AttentionCall,
    dtype: torch.dtype,
    src: Int[Tensor, " edges"],
    dst: Int[Tensor, " edges"],
    first_receiver: int = 0,
    edge_index: Int[Tensor, " edges"] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute ``out_dst = sum of w_e v_src``, and lse if needed, in ``dtype``.

    The edges must include every in-edge of each of their receivers; ``edge_index`` are their
    indices in ``graph.edge_index``, by default all. The queries of the call begin at receiver
    ``first_receiver``, and its bias, if any, is for these edges only.
    """
    batch, heads, num_dst = call.q.shape[:3]
    receiver = dst - first_receiver if first_receiver else dst
    q, k, v = (_flatten_tokens(x, heads).to(dtype) for x in (call.q, call.k, call.v))
    dst_row = _row_index(receiver, batch, num_dst)
    src_row = _row_index(src, batch, call.graph.num_src)
    k, v = k.index_select(0, src_row), v.index_select(0, src_row)
    if call.features is not None:
        key, value = call.features.edge_rows(heads, dtype, edge_index)
        k = (k.view(batch, len(src), *k.shape[1:]) + key).flatten(0, 1)
        v = (v.view(batch, len(src), *v.shape[1:]) + value).flatten(0, 1)
    logits = (q.index_select(0, dst_row) * k).sum(-1) * call.scale
    if call.is_plain and not call.with_lse and call.sink_logits is None:
        weights = edge_softmax.softmax(logits.mT, dst_row, len(q), check=False)[0].mT
        lse = None
    else:
        logits = call.apply_score_mod(logits.view(batch, len(dst), heads).mT, dst, src)
        logits = logits if call.bias is None else logits + call.bias.to(dtype)
        weights, lse = call.normalise(logits, receiver, num_dst)
        weights = call.apply_dropout(weights, dst, src) if call.dropout else weights
        weights = weights.mT.reshape(batch * len(dst), heads)
    messages = weights.unsqueeze(-1) * v
    out = messages.new_zeros(len(q), *messages.shape[1:]).index_add_(0, dst_row, messages)
    return out.view(batch, num_dst, *messages.shape[1:]).transpose(1, 2), lse


def _flatten_tokens(x: Float[Tensor, "batch any_heads tokens dim"], heads: int) -> Rows:
    """Return ``[batch * tokens, heads, dim]``, one row for all heads of a token."""
    # torch gathers and sums along the first axis three times as fast as along any other.
    x = x if x.shape[1] == heads else edge_softmax.per_query_head(x, heads)
    return x.transpose(1, 2).flatten(0, 1)


def _row_index(tokens: Int[Tensor, " edges"], batch: int, num_rows: int) -> Index:
    """Return the row of each token in each sample; a sample has ``num_rows`` rows."""
    if batch == 1:
        return tokens
    return (num_rows * torch.arange(batch, device=tokens.device).unsqueeze(1) + tokens).flatten()


def _has_hubs(graph: TokenGraph) -> bool:
    return any(int(torch.bincount(ends).max()) > MAX_TERMS for ends in graph.edge_index)


def unsupported_reason(call: AttentionCall) -> str | None:
    return memory.shortage(bytes_needed(call)) if call.q.device.type == "cpu" else None


def bytes_needed(call: AttentionCall) -> int:
    """Return an upper bound of the extra memory: tensors as large as the messages, in float64."""
    elements_per_edge = call.q.shape[0] * call.q.shape[1] * max(call.q.shape[3], call.v.shape[3])
    return NUM_MESSAGE_COPIES * call.graph.num_edges * elements_per_edge * torch.float64.itemsize


BACKEND = Backend(
    "message_passing",
    run,
    "all edges at once, differentiable to any order: for few edges, or a graph that is used once",
    unsupported_reason,
    bytes_needed,
    capabilities=Capabilities(
        normalisers="all",
        edge_attr=True,
        varying_graphs=False,
        cached=True,
        parallel_edges="kept",
        instead="backend='auto'",
    ),
)
