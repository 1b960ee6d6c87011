"""What would exhaust memory is refused by name before any is taken, with the estimate or the limit."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gnn_attention import convert, draw, patterns
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends.dispatch import explain
from gnn_attention.explorer import page
from gnn_attention.graph import TokenGraph
from tests.guarantees.allocations import Allocated, allocated

MILLION, TRILLION = 10**6, 10**12
MOST = 2**28  # bytes that a refusal, or an answer, may take: some numbers for each of a million tokens
ESTIMATE = re.compile(r"[\d,.]+ GiB|at most \d+|limit is \d+|holds at most \d+")


def _attend(graph: TokenGraph, backend: str, **options: Any) -> Callable[[], Any]:
    def ask() -> Any:
        q, k = (torch.zeros(1, 1, n, 1) for n in (graph.num_dst, graph.num_src))
        return attend(q, k, k, graph, backend=backend, **options)

    return ask


def _everyone_through_a_hub() -> TokenGraph:
    """Two hops that join every pair of a million: all attend to the hub, which attends to all."""
    star = torch.stack([torch.zeros(MILLION, dtype=torch.int64), torch.arange(MILLION)])
    return TokenGraph.from_edges(star, MILLION) @ TokenGraph.from_edges(star.flip(0), MILLION)


def _unstructured(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (dst * 7 + src * src) % 11 == 0


REFUSED: Mapping[str, Callable[[], Any]] = {
    "the mask of a million tokens": lambda: patterns.causal(MILLION).mask(),
    "the mask of a rule of a million tokens": lambda: TokenGraph.from_rule(_unstructured, MILLION).mask(),
    "the mask of two heads of a million tokens": lambda: TokenGraph.from_rule(
        _unstructured, MILLION, heads=2
    ).mask(),
    "the list of half a trillion edges": lambda: patterns.causal(MILLION).edge_index,
    "the in-degrees of a trillion tokens": lambda: patterns.causal(TRILLION).in_degree(),
    "two hops between all of a million tokens": _everyone_through_a_hub,
    "SDPA's mask of a million tokens": lambda: convert.to_sdpa_mask(patterns.window(MILLION, 4)),
    "a networkx graph of half a trillion edges": lambda: convert.to_networkx(patterns.causal(MILLION)),
    "dense attention over a window of a million tokens": _attend(patterns.window(MILLION, 4), "dense"),
    "rows of half a trillion edges": _attend(patterns.causal(MILLION), "rows"),
    "the reference on a million tokens": _attend(patterns.causal(MILLION), "reference"),
    "a drawing of a million tokens": lambda: draw.mask(patterns.causal(MILLION)),
    "nodes and links of a million tokens": lambda: draw.graph(patterns.causal(MILLION)),
    "a page of a million tokens": lambda: page([5] * MILLION),
}
ANSWERED: Mapping[str, Callable[[], Any]] = {
    "explain for a hundred thousand tokens": lambda: explain(patterns.causal(MILLION // 10), 8, 64),
    "edges of a causal graph of a million tokens": lambda: patterns.causal(MILLION).num_edges,
    "decoding rows of a million tokens": lambda: patterns.causal(MILLION).rows(MILLION - 2, MILLION).mask(),
    "a page with a graph of a million tokens": lambda: page("ab", graph=f"full({MILLION})", room=2),
}


def refused(name: str) -> str | None:
    """None where it is refused by name; else what is wrong."""
    return _fault(allocated(REFUSED[name]))


def _fault(found: Allocated) -> str | None:
    error = found.error
    if error is None:
        return "not refused"
    if not isinstance(error, (ValueError, NotImplementedError)):
        return f"{type(error).__name__}: {error}"[:200]
    if not ESTIMATE.search(str(error)):
        return f"without an estimate or a limit: {error}"[:200]
    return f"{found.peak / 2**20:.0f} MiB were taken first" if found.peak > MOST else None


def answered(name: str) -> str | None:
    """None where it is answered within little memory; else what is wrong."""
    found = allocated(ANSWERED[name])
    if found.error is not None:
        return f"{type(found.error).__name__}: {found.error}"[:200]
    return f"{found.peak / 2**20:.0f} MiB were taken" if found.peak > MOST else None
