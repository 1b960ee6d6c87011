"""Chosen pairs of tokens in a call of attention: which are edges, and their logits.

A pair is a column ``(src, dst)`` of an int64 ``[2, K]``; numbers of pairs are ``[B, H, K]``.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gnn_attention import edge_softmax
from gnn_attention._support.autograd import recomputed
from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.backends.call import AttentionCall, one_of
from gnn_attention.graph import TokenGraph, edge_list, memoized
from gnn_attention.graph.regions import enumerate_pairs

# numbers of chosen heads; None: all
Heads = tuple[int, ...] | None


def as_pairs(pairs: Any) -> Int[Tensor, "2 pairs"]:
    """``[2, K]`` from a tensor of that shape, a list of ``(src, dst)`` or a single such pair."""
    if not isinstance(pairs, Tensor):
        if not isinstance(pairs, Sequence) or isinstance(pairs, str):
            raise TypeError(f"edges must be a tensor [2, K] or a list of (src, dst), got {quoted(pairs)}")
        try:
            rows = torch.tensor(pairs) if len(pairs) else torch.zeros(0, 2, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError):
            rows = torch.zeros(0)
        columns = (rows.unsqueeze(0) if rows.dim() == 1 else rows).movedim(-1, 0)
    else:
        columns = edge_list.elements("edges", pairs)
    is_table, is_integer = columns.dim() == 2 and len(columns) == 2, columns.dtype in edge_list.SIGNED
    if not is_table or not is_integer or (columns < 0).any():
        error = ValueError if not is_table else IndexError if is_integer else TypeError
        got = quoted(columns[:, (columns < 0).any(0)].mT.tolist() if error is IndexError else pairs)
        raise error(f"edges: a pair is (src, dst), integers from 0 on, or a column of [2, K], got {got}")
    return columns.detach().to("cpu", torch.int64, copy=True)


def union(graph: TokenGraph, device: torch.device, heads: Heads = None) -> Int[Tensor, "2 pairs"]:
    """All pairs that are an edge for some sample and chosen head; by receiver where the graph varies."""
    if not graph.varying_axes:
        return graph.edges_on(device)
    pairs: Tensor = memoized(_union, graph, heads if graph.heads else None)
    return pairs.to(device)


def _union(graph: TokenGraph, heads: Heads) -> Tensor:
    numbers = range(graph.heads or 1) if heads is None else heads
    parts = [one_of(graph, b, h).edge_index for b in range(graph.batch or 1) for h in numbers]
    src, dst = torch.cat(parts, dim=1)
    width = max(graph.num_src, 1)
    keys: Tensor = torch.unique(dst * width + src)
    return torch.stack([keys % width, keys // width])


def is_edge(
    graph: TokenGraph, pairs: Int[Tensor, "2 pairs"], batch: int, heads: int | Sequence[int]
) -> Bool[Tensor, "batch heads pairs"]:
    """For so many heads, or those of these numbers."""
    src, dst = pairs
    b = torch.arange(batch, device=pairs.device).view(-1, 1, 1)
    numbers = list(range(heads) if isinstance(heads, int) else heads)
    h = torch.tensor(numbers, dtype=torch.int64, device=pairs.device).view(1, -1, 1)
    found = enumerate_pairs.evaluate(graph.rule, repr(graph), b, h, dst, src)
    return found.expand(batch, len(numbers), len(src))


def check_edges(graph: TokenGraph, pairs: Tensor, heads: int, chosen: Sequence[int] | None, why: str) -> None:
    """ValueError or IndexError for a pair that is no edge for any sample and any of the ``chosen`` heads."""
    edge_list.checked(pairs, graph.num_dst, graph.num_src)
    missing = ~is_edge(graph, pairs, graph.batch or 1, heads if chosen is None else chosen).any(0).any(0)
    if missing.any():
        src, dst = pairs[:, missing][:, 0].tolist()
        raise ValueError(f"{src} -> {dst} is no edge of {graph!r}: {why}")


def part_of(call: AttentionCall, graph: TokenGraph, heads: Heads, rows: Any) -> AttentionCall:
    """The chosen heads along a part of the graph, with the ``rows`` (senders, receivers) that are needed."""
    count, (senders, receivers) = call.q.shape[1], rows or (None, None)
    bias, score_mod = call.bias, call.score_mod
    if bias is not None:
        bias = bias.expand(-1, count, -1)[:, list(range(count) if heads is None else heads)]
        bias = bias[..., call.graph.positions_of(graph.edge_index).to(bias.device)]
    if score_mod is not None and heads is not None:
        score_mod = partial(_of_heads, score_mod, heads)
    q, k, v = chosen_rows(call.q, count, heads, receivers), call.k, call.v
    k, v = (chosen_rows(x, count, heads, senders) for x in (k, v))
    return replace(call, q=q, k=k, v=v, graph=graph, score_mod=score_mod, bias=bias, sink_logits=None)


def chosen_rows(x: Tensor, count: int, heads: Heads, rows: Tensor | None) -> Tensor:
    """Of ``x [B, heads or key/value heads, tokens, ...]``, those of query heads and tokens."""
    x = x if heads is None else edge_softmax.per_query_head(x, count)[:, list(heads)]
    return x if rows is None else x.index_select(2, rows)


def _of_heads(
    inner: Any, heads: tuple[int, ...], score: Tensor, b: Any, h: Tensor, dst: Any, src: Any
) -> Any:
    return inner(score, b, torch.tensor(heads, device=h.device)[h], dst, src)


def overlaps(
    call: AttentionCall, pairs: Int[Tensor, "2 pairs"], rows: Int[Tensor, "2 pairs"] | None = None
) -> Float[Tensor, "batch heads pairs"]:
    """``score_mod(scale * q_dst . k_src)`` of any pairs, edges or not; in float32 or better.

    ``rows``: where q and k have the ends of the pairs, if not at their own numbers.
    """
    both = pairs, pairs if rows is None else rows
    parts = zip(*(torch.split(x, call.edges_at_once, dim=1) for x in both), strict=True)
    return torch.cat([recomputed(_overlaps, call, *part) for part in parts], dim=-1)


def logits(
    call: AttentionCall, pairs: Int[Tensor, "2 pairs"], rows: Tensor | None = None, heads: Heads = None
) -> Float[Tensor, "batch heads pairs"]:
    """The logit of edges, bias included; -inf for the samples and heads in which a pair is no edge."""
    numbers, bias = overlaps(call, pairs, rows), call.bias
    if bias is not None:
        bias = bias[..., call.graph.positions_of(pairs).to(pairs.device)]
        numbers = numbers + bias.to(numbers.dtype)
    if not call.graph.varying_axes:
        return numbers
    batch, count = numbers.shape[:2]
    there = is_edge(call.graph, pairs, batch, count if heads is None else heads)
    return numbers.masked_fill(~there, -torch.inf)


def _overlaps(call: AttentionCall, pairs: Tensor, rows: Tensor) -> Tensor:
    # widened before the gather, so that gradients are summed in the wide dtype too
    wide, (src, dst) = edge_softmax.accumulation_dtype(call.q.dtype), rows
    q_dst, k_src = call.q.to(wide).index_select(2, dst), call.k.to(wide).index_select(2, src)
    score = edge_softmax.logit(q_dst, edge_softmax.per_query_head(k_src, call.q.shape[1]), call.scale)
    return call.modified(score, pairs[1], pairs[0])
