"""What was chosen, counted by hand from masks."""

from __future__ import annotations

import pytest
import torch

from gnn_attention import TokenGraph, analyse, patterns


def graphs(count=3):
    """Random causal graphs of two samples and three heads, sender 0 in most."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        scores = torch.rand(2, 3, 30, 30, generator=generator) + (torch.arange(30) == 0) * 0.5
        scores = scores.masked_fill(~patterns.causal(30).mask(), -1.0)
        found = scores.topk(4)
        yield TokenGraph.from_indices(torch.where(found.values < 0, -1, found.indices), 30, name="four")


def test_choices_are_counted():
    graph, causal = next(graphs()), patterns.causal(30)
    found, mask = analyse.choice(graph, causal), graph.mask()
    assert torch.equal(found.chosen, mask.sum((0, 1, 2)))
    assert torch.equal(found.possible, 6 * causal.mask().sum(0))
    far = [int(mask.diagonal(-d, -2, -1).sum()) for d in range(30)]
    assert found.distance.tolist() == far[: len(found.distance)]
    assert not any(far[len(found.distance) :])
    half = next(d for d in range(30) if sum(far[: d + 1]) >= 0.5 * sum(far))
    assert found.within(0.5) == half
    share = mask.sum((0, 1, 2)) / (6 * causal.mask().sum(0))
    assert found.sinks(0.4).tolist() == [s for s in range(16) if share[s] >= 0.4]
    assert "four: 684 of 2790 edges (0.245)" in str(found)
    by_head = TokenGraph.from_rule(causal.rule, 30, heads=3, batch=2)
    assert torch.equal(analyse.choice(graph, by_head).possible, found.possible)
    with pytest.raises(ValueError, match="graph must have edges, and the tokens of"):
        analyse.choice(graph, patterns.causal(31))


def test_overlap_is_the_share_of_common_edges():
    steps = list(graphs())
    found = analyse.overlap(steps)
    for i, first in enumerate(steps):
        for j, second in enumerate(steps):
            a, b = first.mask().flatten(2), second.mask().flatten(2)
            due = ((a & b).sum(-1) / (a | b).sum(-1).double()).mean()
            assert abs(found[i, j] - due) < 1e-12
    heads = analyse.overlap(steps[0])
    masks = steps[0].mask().flatten(2)
    due = ((masks[:, 0] & masks[:, 2]).sum(-1) / (masks[:, 0] | masks[:, 2]).sum(-1).double()).mean()
    assert abs(heads[0, 2] - due) < 1e-12
    assert heads.shape == (3, 3)
    nothing = TokenGraph.from_indices(torch.full((3, 1), -1), 3)
    assert analyse.overlap([nothing, nothing]).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    with pytest.raises(ValueError, match="graphs must have the same tokens, heads and samples"):
        analyse.overlap([patterns.causal(3), patterns.causal(4)])
