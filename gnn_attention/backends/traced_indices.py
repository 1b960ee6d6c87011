"""Chosen senders inside a traced program: the numbers of an index become edges each time that it runs.

Under ``torch.compile`` and ``torch.export`` ``TokenGraph.from_indices`` makes a :class:`TracedIndices`, whose
index is an input of the program or computed in it. One operator sorts it into rows and their transpose, of
the size of the index whatever its numbers are, so that no other numbers compile anew. On a GPU the host waits
for it, as for ``rows`` in general.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gnn_attention import edges
from gnn_attention._support import checks
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.cpu import attention_op
from gnn_attention.backends.plan.csr import edges_of
from gnn_attention.backends.plan.plan import PADDED
from gnn_attention.graph import TokenGraph, rules

Lists = tuple[Tensor, ...]


@dataclass(eq=False, repr=False)
class TracedIndices(TokenGraph):
    """The graph of an index whose numbers are not known yet; it ends with the trace."""

    # those of plan.Edges
    lists: Lists = ()

    def __post_init__(self) -> None:
        """Nothing that a compiler would have to trace."""

    __setattr__ = object.__setattr__  # type: ignore[assignment]

    @classmethod
    def of(
        cls, index: Tensor, num_src: int, count: Tensor | None, coalesce: bool | str, causal: bool, name: str
    ) -> TracedIndices:
        if not isinstance(coalesce, bool):
            got = f"coalesce={coalesce!r}, which makes a score_mod of numbers that are not known yet"
            raise NotImplementedError(f"from_indices in a traced program takes no {got}: use True or False")
        if not isinstance(index, Tensor) or not 2 <= index.dim() <= 4:
            raise ValueError(
                f"index must be a tensor [..., dst, K] of 2 to 4 axes, got {checks.quoted(index)}"
            )
        if count is not None:
            place = torch.arange(index.shape[-1], device=index.device)
            index = index.masked_fill(place >= count.unsqueeze(-1), -1)
        lists = torch.ops.gnn_attention.chosen_edges(index, num_src, coalesce, causal)
        heads = index.shape[-3] if index.dim() > 2 else 1
        return cls(
            rules.everyone,
            index.shape[-2],
            num_src,
            heads=heads if index.dim() == 3 or heads > 1 else None,
            batch=index.shape[0] if index.dim() == 4 else None,
            name=name,
            lists=tuple(lists),
        )

    def runner(self, backend: Any) -> Callable[[Any], Any]:
        return partial(_run, backend)

    def edges_on(self, device: torch.device) -> Int[Tensor, "2 edges"]:
        """NotImplementedError: how many there are is not known yet."""
        raise NotImplementedError("the edges of an index in a traced program are not known: make it outside")


def _run(backend: Any, call: AttentionCall) -> tuple[Tensor, Tensor]:
    if backend not in ("auto", "rows") or not call.is_plain:
        got = f"backend={backend!r}" if call.is_plain else "a score_mod, bias or dropout"
        reason = f"from_indices in a traced program does not run with {got}"
        raise NotImplementedError(f"{reason}: use 'auto' or 'rows' without them, or make the graph outside")
    graph: Any = call.graph
    numbers = [1, PADDED, 1, graph.batch or 1, graph.heads or 1]
    plan = list(graph.lists), numbers
    out, lse = attention_op.attention(call.q, call.k, call.v, plan, call.scale, call.sink_logits)
    if call.sink_logits is None:
        return out, lse
    has_in_edges = graph.lists[0].diff().view(*graph.shape4[:3]) > 0
    return out, edges.sinks_alone(lse, call.sink_logits, has_in_edges)


def _chosen_edges(index: Tensor, num_src: int, coalesce: bool, causal: bool) -> Lists:
    graph = TokenGraph.from_indices(index, num_src, coalesce=coalesce, causal=causal)
    assert isinstance(graph, TokenGraph)
    found = edges_of(graph, index.device).tensors
    sizes = [x.shape[0] for x in _like_chosen_edges(index, num_src, coalesce, causal)]
    return tuple(torch.cat([x, x.new_zeros(size - len(x))]) for x, size in zip(found, sizes, strict=True))


def _like_chosen_edges(index: Tensor, num_src: int, coalesce: bool, causal: bool) -> Lists:
    most, rows = index.numel(), math.prod(index.shape[:-1])
    sizes = rows + 1, most, most, math.prod(index.shape[:-2]) * num_src + 1, most, most
    return tuple(index.new_empty(size, dtype=torch.int32) for size in sizes)


NAME = "gnn_attention::chosen_edges"
SIX = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
torch.library.define(NAME, f"(Tensor index, SymInt num_src, bool coalesce, bool causal) -> {SIX}")
torch.library.impl(NAME, "default", _chosen_edges)
torch.library.register_fake(NAME, _like_chosen_edges)
TokenGraph.while_traced = TracedIndices.of
