"""Last receivers and last senders: read off the mask, pair by pair, and found again from boxes and lists."""

from __future__ import annotations

import pytest
import torch
from support.plans import PLAIN
from torch import Tensor

from gnn_attention import algebra, patterns
from gnn_attention.graph.liveness import last_receivers, last_senders


def expected(mask: Tensor) -> list[int]:
    """The largest dst with ``mask[dst, src]`` for each src, -1 for none: every head and sample counts."""
    while mask.dim() > 2:
        mask = mask.any(0)
    return [max((dst for dst, edge in enumerate(column) if edge), default=-1) for column in mask.T.tolist()]


GRAPHS = PLAIN | {
    "by head": algebra.per_head(
        patterns.window(130, 3), patterns.strict_causal(130) & patterns.documents([50, 80])
    ),
    "by sample": algebra.per_sample(patterns.window(130, 3), patterns.documents([50, 80])),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_last_receivers_and_senders(name: str) -> None:
    graph = GRAPHS[name]
    mask = graph.mask()
    assert last_receivers(graph).tolist() == expected(mask)
    assert last_senders(graph).tolist() == expected(mask.mT)


@pytest.mark.slow
def test_a_million_tokens_without_their_pairs() -> None:
    n, w, s = 1_000_000, 4096, 4
    last = last_receivers(patterns.window(n, w) | patterns.sinks(n, s))
    src = torch.arange(n)
    assert torch.equal(last, torch.where(src < s, n - 1, (src + w - 1).clamp(max=n - 1)))
    assert torch.equal(last_senders(patterns.prefix(n, 1000)), src.clamp(min=999))
