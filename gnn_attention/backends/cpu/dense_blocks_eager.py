"""Attention over rectangles written out in differentiable torch: score_mods (which may learn), bias, dropout.

Some rectangles of all samples and heads are taken at a time, and are recomputed for their gradients, so that
no more than a small part of the logits is ever in memory.
"""

import torch

from gnn_attention import edge_softmax
from gnn_attention._support.autograd import recompute
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.plan.plan import Groups, Plan, Rectangles, Strided
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.derived import receiver_order

LOGITS_AT_ONCE = 2**22  # bytes
MOST_PARTS = 32  # the gradient of each part is as long as its input, so that there must not be many


def formula(call: AttentionCall, plan: Plan) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` over a plan of rectangles in which every receiver has one; lse in float32 or float64."""
    wide = edge_softmax.accumulation_dtype(call.q.dtype)
    pieces = [piece for piece in plan.pieces if isinstance(piece, Rectangles)]
    cell = call.q.shape[0] * call.q.shape[1] * wide.itemsize
    most = max(LOGITS_AT_ONCE // max(cell, 1), sum(piece.cells for piece in pieces) // MOST_PARTS)
    bands = [band for piece in pieces for band in piece.bands(max(1, most // piece.src.size))]
    parts = [part for band in bands for part in band.parts(max(1, most // (band.dst.size * band.src.size)))]
    results = [recompute(_attend, call, part) if len(parts) > 1 else _attend(call, part) for part in parts]
    # where each receiver's result stands among those of the parts; after them all if it is in none
    found = [_tokens(part.dst, call.q.device).flatten() for part in parts]
    dst = torch.cat([*found, torch.zeros(0, dtype=torch.int64, device=call.q.device)])
    order = torch.full((call.q.shape[2],), len(dst), dtype=torch.int64, device=call.q.device)
    order = order.index_copy(0, dst, torch.arange(len(dst), device=call.q.device))
    each = zip(*results, isolated_rows(call, 1), strict=True)
    out, lse = (torch.cat(some, 2).index_select(2, order) for some in each)
    return out.to(call.q.dtype), lse


def isolated_rows(call: AttentionCall, num_dst: int) -> tuple[Tensor, Tensor]:
    """The result of receivers without in-edges, in float32 or better, with gradients that are 0."""
    wide, shape = edge_softmax.accumulation_dtype(call.q.dtype), (*call.q.shape[:2], num_dst)
    zero = sum(x[..., :0].sum() for x in (call.q, call.k, call.v))
    out = call.q.new_zeros(*shape, call.v.shape[3], dtype=wide)
    return out + zero, call.q.new_full(shape, -torch.inf, dtype=wide) + zero


def _attend(call: AttentionCall, part: Rectangles) -> tuple[Tensor, Tensor]:
    """``out [B, Hq, groups * size, Dv]`` and lse of the receivers of the part, in float32 or better."""
    dst, src = _tokens(part.dst, call.q.device), _tokens(part.src, call.q.device)
    bias = None
    if part.masks is not None:
        mask = part.masks.table.to(dst.device).index_select(0, part.masks.which.to(dst.device))
    else:
        every = torch.ones(part.dst.size, part.src.size, dtype=torch.bool, device=dst.device)
        mask = (every.tril() if part.causal else every).expand(part.dst.count, -1, -1)
    if call.bias is not None:
        # where each edge stands in graph.edge_index: a rectangle has all in-edges of its receivers
        first, order = memoized(_by_receiver, call.graph, dst.device)
        position = (first[dst].unsqueeze(2) + mask.cumsum(2) - 1).masked_fill(~mask, 0)
        position = position if order is None else torch.take(order, position)
        bias = call.bias.to(edge_softmax.accumulation_dtype(call.q.dtype))[..., position]
    ends = _rows(call.q, dst), _rows(call.k, src), _rows(call.v, src)
    out, lse = written_out(call, ends, mask, dst, src, bias)
    return out.flatten(2, 3), lse.flatten(2, 3)


def written_out(
    call: AttentionCall,
    ends: tuple[Tensor, Tensor, Tensor],
    mask: Bool[Tensor, "... receivers senders"],
    dst: Int[Tensor, "... receivers"],
    src: Int[Tensor, "... senders"],
    bias: Float[Tensor, "... receivers senders"] | None,
) -> tuple[Tensor, Tensor]:
    """``softmax(score_mod(q k^T scale) + bias) v`` over the edges in ``mask``, in float32 or better, and lse.

    ``ends``: q, k and v of the receivers ``dst`` and the senders ``src``, ``[B, H, ..., tokens, D]``.
    """
    wide, heads = edge_softmax.accumulation_dtype(call.q.dtype), call.q.shape[1]
    q, k, v = (edge_softmax.per_query_head(x.to(wide), heads) for x in ends)
    logits = call.apply_score_mod(q @ k.mT * call.scale, *_ends(call, dst, src, mask))
    logits = (logits if bias is None else logits + bias).masked_fill(~mask, -torch.inf)
    sinks = None
    if call.sink_logits is not None:
        sinks = call.sink_logits.to(wide).view(-1, *[1] * (q.dim() - 2))
        sinks = torch.where(mask.any(-1, keepdim=True), sinks, -torch.inf)
    weights, lse = edge_softmax.row_softmax(logits, sinks)
    # a row that is NaN gives non-edges no gradient
    weights = call.apply_dropout(weights.masked_fill(~mask, 0.0), dst.unsqueeze(-1), src.unsqueeze(-2))
    return weights @ v, lse


def _rows(x: Tensor, tokens: Int[Tensor, "groups size"]) -> Tensor:
    """``x[B, H, T, D]`` at the groups' tokens: ``[B, H, groups, size, D]``."""
    return x.index_select(2, tokens.flatten()).view(*x.shape[:2], *tokens.shape, x.shape[3])


def _tokens(groups: Groups, device: torch.device) -> Int[Tensor, "groups size"]:
    if not isinstance(groups, Strided):
        return groups.index
    first = groups.start + groups.stride * torch.arange(groups.count, device=device)
    return first.unsqueeze(1) + torch.arange(groups.size, device=device)


def _ends(call: AttentionCall, dst: Tensor, src: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The ends of every pair for a score_mod; a non-edge gets those of an edge.

    That edge is of its own rectangle, or of another if that has none. The result is thrown away, but its
    derivative is multiplied by 0: a score_mod that divides by 0 where there is no edge would make NaN of the
    gradients of all others.
    """
    if call.score_mod is None or not mask.numel() or call.graph.is_full():
        return dst.unsqueeze(-1), src.unsqueeze(-2)
    pairs = mask.flatten(-2)
    has_edge, cell = pairs.any(-1, keepdim=True), pairs.to(torch.uint8).argmax(-1, keepdim=True)
    lender = has_edge.flatten().to(torch.uint8).argmax(0, keepdim=True)
    ends = []
    for tokens, place in ((dst, cell // mask.shape[-1]), (src, cell % mask.shape[-1])):
        of_edge = tokens.expand(*mask.shape[:-2], -1).gather(-1, place)
        # an index without axes, as of torch.take, would be a number that compilers do not know
        lent = of_edge.flatten().index_select(0, lender)
        ends.append(torch.where(has_edge, of_edge, lent).unsqueeze(-1))
    return torch.where(mask, dst.unsqueeze(-1), ends[0]), torch.where(mask, src.unsqueeze(-2), ends[1])


def _by_receiver(graph: TokenGraph, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Where each receiver's in-edges begin, by receiver, then sender; and their order if listed otherwise."""
    degree, order = graph.in_degree(), None if graph.edges.stored_list() is None else receiver_order(graph)[0]
    first = (degree.cumsum(0) - degree).to(device)
    return first, None if order is None else order.to(device)
