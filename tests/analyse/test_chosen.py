"""The counts of a selection equal those of its mask."""

from __future__ import annotations

import pytest
import torch

from gnn_attention import TokenGraph, analyse, patterns


def graphs(count=3):
    """Yield random causal graphs of two samples and three heads; most receivers attend to sender 0."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        scores = torch.rand(2, 3, 30, 30, generator=generator) + (torch.arange(30) == 0) * 0.5
        scores = scores.masked_fill(~patterns.causal(30).mask(), -1.0)
        top = scores.topk(4)
        yield TokenGraph.from_indices(torch.where(top.values < 0, -1, top.indices), 30, name="four")


def test_choices_are_counted():
    graph, causal = next(graphs()), patterns.causal(30)
    choice, mask = analyse.choice(graph, causal), graph.mask()
    assert torch.equal(choice.chosen, mask.sum((0, 1, 2)))
    assert torch.equal(choice.possible, 6 * causal.mask().sum(0))
    distances = [int(mask.diagonal(-d, -2, -1).sum()) for d in range(30)]
    assert choice.distance.tolist() == distances[: len(choice.distance)]
    assert not any(distances[len(choice.distance) :])
    half = next(d for d in range(30) if sum(distances[: d + 1]) >= 0.5 * sum(distances))
    assert choice.within(0.5) == half
    share = mask.sum((0, 1, 2)) / (6 * causal.mask().sum(0))
    assert choice.sinks(0.4).tolist() == [s for s in range(16) if share[s] >= 0.4]
    assert "four: 684 of 2790 edges (0.245)" in str(choice)
    by_head = TokenGraph.from_rule(causal.rule, 30, heads=3, batch=2)
    assert torch.equal(analyse.choice(graph, by_head).possible, choice.possible)
    with pytest.raises(ValueError, match="graph must have edges, and the same tokens as"):
        analyse.choice(graph, patterns.causal(31))


def test_overlap_is_the_share_of_common_edges():
    steps = list(graphs())
    table = analyse.overlap(steps)
    for i, first in enumerate(steps):
        for j, second in enumerate(steps):
            a, b = first.mask().flatten(2), second.mask().flatten(2)
            expected = ((a & b).sum(-1) / (a | b).sum(-1).double()).mean()
            assert abs(table[i, j] - expected) < 1e-12
    heads = analyse.overlap(steps[0])
    masks = steps[0].mask().flatten(2)
    expected = ((masks[:, 0] & masks[:, 2]).sum(-1) / (masks[:, 0] | masks[:, 2]).sum(-1).double()).mean()
    assert abs(heads[0, 2] - expected) < 1e-12
    assert heads.shape == (3, 3)
    empty = TokenGraph.from_indices(torch.full((3, 1), -1), 3)
    assert analyse.overlap([empty, empty]).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    with pytest.raises(ValueError, match="graphs must have the same tokens, heads and samples"):
        analyse.overlap([patterns.causal(3), patterns.causal(4)])
