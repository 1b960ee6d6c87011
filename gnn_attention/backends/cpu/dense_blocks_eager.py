"""Attention over rectangles by differentiable operators, for a score_mod, a bias and dropout.

A few rectangles are computed at a time, for all samples and heads. The backward pass computes them
again, so that only a small part of the logits is ever in memory.
"""

from functools import reduce

import torch

from gnn_attention import edge_softmax
from gnn_attention._support.autograd import recompute
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.plan.plan import Groups, Packed, Piece, Plan, Rectangles, Strided, unpack_plan
from gnn_attention.edge_ops import operators
from gnn_attention.edge_ops.edge_lists import EdgeRows
from gnn_attention.edge_ops.normalisers import apply
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.derived import receiver_order

LOGIT_CHUNK_BYTES = 2**22  # The size of the logits of a few rectangles, which are a chunk.
NO_EDGES = TokenGraph.from_edges(torch.zeros(2, 0, dtype=torch.int64), 0, 0)  # A plain call reads no edges.
MAX_CHUNKS = 32  # Each chunk has gradients as large as q, k and v, so chunks must be few.


def rectangle_attention(call: AttentionCall, plan: Plan) -> tuple[Tensor, Tensor]:
    """Compute ``(out, lse)`` over a plan in which each receiver is in at most one rectangle."""
    pieces = [piece for piece in plan.pieces if isinstance(piece, Rectangles)]
    batch, heads = call.q.shape[:2]
    pair_bytes = batch * heads * edge_softmax.accumulation_dtype(call.q.dtype).itemsize
    max_pairs = max(LOGIT_CHUNK_BYTES // max(pair_bytes, 1), sum(x.num_cells for x in pieces) // MAX_CHUNKS)
    pieces = [y for x in pieces for y in x.split_receivers(max(1, max_pairs // x.src.size))]
    chunks = [y for x in pieces for y in x.split_groups(max(1, max_pairs // (x.dst.size * x.src.size)))]
    results = [recompute(_attend, call, x) if len(chunks) > 1 else _attend(call, x) for x in chunks]
    # Each receiver gets its row of the results, or, if it is in no chunk, the isolated row at the end.
    empty = torch.zeros(0, dtype=torch.int64, device=call.q.device)
    dst = torch.cat([*(_list_tokens(x.dst, call.q.device).flatten() for x in chunks), empty])
    row_index = torch.full((call.q.shape[2],), len(dst), dtype=torch.int64, device=call.q.device)
    row_index = row_index.index_copy(0, dst, torch.arange(len(dst), device=call.q.device))
    outs_and_lses = zip(*results, isolated_rows(call, 1), strict=True)
    out, lse = (torch.cat(tensors, 2).index_select(2, row_index) for tensors in outs_and_lses)
    return out.to(call.q.dtype), lse


def attend_pieces(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, plan: Packed, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute what the fused operator of a plan computes, by operators with derivatives of every order."""
    dtype = edge_softmax.accumulation_dtype(q.dtype)
    call = AttentionCall(q.to(dtype), k.to(dtype), v.to(dtype), NO_EDGES, scale)
    first_rectangles: list[Piece] = []
    results = []
    for piece in unpack_plan(*plan).pieces:
        if isinstance(piece, EdgeRows):
            logits = operators.products(call.q, call.k, piece.tensors, scale)
            weights, lse = operators.softmax(logits, piece.tensors)
            results.append((operators.incoming(weights, call.v, piece.tensors), lse))
        elif piece.is_first:
            first_rectangles.append(piece)
        else:
            results.append(rectangle_attention(call, Plan((piece,), False)))
    if first_rectangles or not results:
        results.append(rectangle_attention(call, Plan(tuple(first_rectangles), False)))
    out, lse = reduce(lambda first, second: edge_softmax.merge(*first, *second), results)
    if sinks.shape[1]:
        sinks = sinks.to(dtype).unsqueeze(-1).expand(lse.shape)
        (share, _), lse = edge_softmax.merge_weights(lse, torch.where(lse == -torch.inf, lse, sinks))
        out = out * share.unsqueeze(-1)
    return out.to(q.dtype), lse


def isolated_rows(call: AttentionCall, num_dst: int) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)`` of isolated receivers, in float32 or better, with gradients that are 0."""
    zero = sum(x[..., :0].sum() for x in (call.q, call.k, call.v))
    dtype = edge_softmax.accumulation_dtype(call.q.dtype)
    lse = call.q.new_full((*call.q.shape[:2], num_dst), -torch.inf, dtype=dtype)
    return lse.new_zeros(*lse.shape, call.v.shape[3]) + zero, lse + zero


def _attend(call: AttentionCall, chunk: Rectangles) -> tuple[Tensor, Tensor]:
    """Compute ``out [B, Hq, groups * size, Dv]`` and lse of the receivers in ``chunk``."""
    dst, src = _list_tokens(chunk.dst, call.q.device), _list_tokens(chunk.src, call.q.device)
    bias = None
    if chunk.masks is not None:
        mask = chunk.masks.table.to(dst.device).index_select(0, chunk.masks.index.to(dst.device))
    else:
        mask = torch.ones(chunk.dst.size, chunk.src.size, dtype=torch.bool, device=dst.device)
        mask = (mask.tril() if chunk.causal else mask).expand(chunk.dst.count, -1, -1)
    if call.bias is not None:
        # A rectangle has all in-edges of its receivers: the n-th edge in a row is the n-th in-edge.
        row_start, order = memoized(_in_edge_order, call.graph, dst.device)
        index = (row_start[dst].unsqueeze(2) + mask.cumsum(2) - 1).masked_fill(~mask, 0)
        index = index if order is None else torch.take(order, index)
        bias = call.bias.to(edge_softmax.accumulation_dtype(call.q.dtype))[..., index]
    inputs = _gather_rows(call.q, dst), _gather_rows(call.k, src), _gather_rows(call.v, src)
    out, lse = masked_attention(call, inputs, mask, dst, src, bias)
    return out.flatten(2, 3), lse.flatten(2, 3)


def masked_attention(
    call: AttentionCall,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Bool[Tensor, "... receivers senders"],
    dst: Int[Tensor, "... receivers"],
    src: Int[Tensor, "... senders"],
    bias: Float[Tensor, "... receivers senders"] | None,
) -> tuple[Tensor, Tensor]:
    """Compute ``normalise(score_mod(q k^T scale) + bias) v`` over the edges in ``mask``, and lse.

    ``inputs`` are q, k and v of these receivers and senders, ``[B, H, ..., tokens, D]``. The
    normaliser is elementwise or a softmax; without a softmax lse has no meaning.
    """
    dtype = edge_softmax.accumulation_dtype(call.q.dtype)
    q, k, v = (edge_softmax.per_query_head(x.to(dtype), call.q.shape[1]) for x in inputs)
    logits = call.apply_score_mod(q @ k.mT * call.scale, *_score_mod_tokens(call, dst, src, mask))
    logits = logits if bias is None else logits + bias
    if call.normaliser != "softmax":
        weights = apply(call.normaliser, logits).masked_fill(~mask, 0.0)
        weights = call.apply_dropout(weights, dst.unsqueeze(-1), src.unsqueeze(-2))
        return weights @ v, logits.new_zeros(logits.shape[:-1])
    logits = logits.masked_fill(~mask, -torch.inf)
    sinks = None
    if call.sink_logits is not None:
        sinks = call.sink_logits.to(dtype).view(-1, *[1] * (q.dim() - 2))
        sinks = torch.where(mask.any(-1, keepdim=True), sinks, -torch.inf)
    weights, lse = edge_softmax.row_softmax(logits, sinks)
    # In a row of NaN, non-edges would have gradients if their weight were not 0.
    weights = call.apply_dropout(weights.masked_fill(~mask, 0.0), dst.unsqueeze(-1), src.unsqueeze(-2))
    return weights @ v, lse


def _gather_rows(x: Tensor, tokens: Int[Tensor, "groups size"]) -> Tensor:
    """Gather rows of ``x [B, H, T, D]`` as ``[B, H, groups, size, D]``."""
    return x.index_select(2, tokens.flatten()).view(*x.shape[:2], *tokens.shape, x.shape[3])


def _list_tokens(groups: Groups, device: torch.device) -> Int[Tensor, "groups size"]:
    if not isinstance(groups, Strided):
        return groups.index
    group_start = groups.start + groups.stride * torch.arange(groups.count, device=device)
    return group_start.unsqueeze(1) + torch.arange(groups.size, device=device)


def _score_mod_tokens(call: AttentionCall, dst: Tensor, src: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the receiver and sender of each pair for a score_mod; non-edges are replaced by an edge.

    The score of a non-edge is discarded, but its derivative is multiplied by 0: a score_mod that divides
    by 0 there would turn all other gradients into NaN. The edge is from the same rectangle if possible.
    """
    if call.score_mod is None or not mask.numel() or call.graph.is_full():
        return dst.unsqueeze(-1), src.unsqueeze(-2)
    pairs = mask.flatten(-2)
    has_edge = pairs.any(-1, keepdim=True)
    pair_index = pairs.to(torch.uint8).argmax(-1, keepdim=True)
    rectangle_with_edge = has_edge.flatten().to(torch.uint8).argmax(0, keepdim=True)
    substitutes = []
    for tokens, index in ((dst, pair_index // mask.shape[-1]), (src, pair_index % mask.shape[-1])):
        token = tokens.expand(*mask.shape[:-2], -1).gather(-1, index)
        # For a 0-dimensional index, torch.take would return a scalar, which compilers do not support.
        other_token = token.flatten().index_select(0, rectangle_with_edge)
        substitutes.append(torch.where(has_edge, token, other_token).unsqueeze(-1))
    pair_dst = torch.where(mask, dst.unsqueeze(-1), substitutes[0])
    return pair_dst, torch.where(mask, src.unsqueeze(-2), substitutes[1])


def _in_edge_order(graph: TokenGraph, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return where the sorted in-edges of each receiver begin, and an order that sorts listed edges."""
    degree = graph.in_degree()
    order = None if graph.edges.listed() is None else receiver_order(graph)[0]
    return (degree.cumsum(0) - degree).to(device), None if order is None else order.to(device)
