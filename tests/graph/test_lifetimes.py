"""Last receivers and last senders: read off the mask, pair by pair, and found again from boxes and lists."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnn_attention import TokenGraph, algebra, patterns
from gnn_attention.graph.liveness import last_receivers, last_senders


def expected(mask: Tensor) -> list[int]:
    """The largest dst with ``mask[dst, src]`` for each src, -1 for none: every head and sample counts."""
    while mask.dim() > 2:
        mask = mask.any(0)
    return [max((dst for dst, edge in enumerate(column) if edge), default=-1) for column in mask.T.tolist()]


def odd(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """A rule that cannot be evaluated on ranges."""
    return torch.sin((7 * dst + 3 * src + h + b).double()) > 0.9


def stripes_of_rows(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """Open in dst alone."""
    return (dst % 7 == 3) & (dst < 90)


def stripes_of_columns(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """Open in src alone."""
    return src % 5 == 2


GRAPHS = {
    "causal": patterns.causal(130),
    "window | sinks": patterns.window(130, 17) | patterns.sinks(130, 5),
    "dilated": patterns.dilated(130, 4, 9),
    "rows": TokenGraph.from_rule(stripes_of_rows, 130, 77),
    "columns": TokenGraph.from_rule(stripes_of_columns, 77, 130),
    "odd": TokenGraph.from_rule(odd, 61, 130),
    "by head": algebra.per_head(
        patterns.window(130, 3), patterns.strict_causal(130) & patterns.documents([50, 80])
    ),
    "by sample": algebra.per_sample(patterns.window(130, 3), patterns.documents([50, 80])),
    "no tokens": patterns.causal(0),
    "documents": patterns.documents([1, 60, 0, 9, 60]) - patterns.self_loops(130),
    "tree": patterns.tree([-1] + [(7 * i) % i for i in range(1, 130)]),
    "a list": TokenGraph.from_edges(torch.tensor([[4, 0, 6, 2, 6], [1, 1, 0, 3, 3]]), 5, 7),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_last_receivers_and_senders(name: str) -> None:
    graph = GRAPHS[name]
    mask = graph.mask()
    assert last_receivers(graph).tolist() == expected(mask)
    assert last_senders(graph).tolist() == expected(mask.mT)


def test_a_million_tokens_without_their_pairs() -> None:
    n, w, s = 1_000_000, 4096, 4
    last = last_receivers(patterns.window(n, w) | patterns.sinks(n, s))
    src = torch.arange(n)
    assert torch.equal(last, torch.where(src < s, n - 1, (src + w - 1).clamp(max=n - 1)))
    assert torch.equal(last_senders(patterns.prefix(n, 1000)), src.clamp(min=999))
