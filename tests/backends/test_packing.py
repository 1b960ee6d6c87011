"""Which graphs are packed documents with one window for all of them."""

import pytest
import torch

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends.plan.packing import packing

PACKED = {
    "causal": (patterns.causal(14), [0, 14], (-1, 0)),
    "full": (patterns.full(14), [0, 14], (-1, -1)),
    "window": (patterns.window(14, 4), [0, 14], (3, 0)),
    "documents": (patterns.documents([5, 1, 8]), [0, 5, 6, 14], (-1, 0)),
    "windows in documents": (patterns.documents([6, 8]) & patterns.window(14, 3), [0, 6, 14], (2, 0)),
}


@pytest.mark.parametrize(("graph", "bounds", "window"), PACKED.values(), ids=PACKED)
def test_bounds_and_window(graph, bounds, window):
    packed = packing(graph)
    assert (packed.cu_seqlens.tolist(), packed.window) == (bounds, window)
    assert packed.max_seqlen == int(torch.tensor(bounds).diff().max())
    assert packing(graph) is packed


NOT_PACKED = {
    "window and sinks": patterns.window(14, 4) | patterns.sinks(14, 1),
    "empty rows": patterns.strict_causal(14),
    "not square": patterns.cross(7, 14),
    "no tokens": patterns.causal(0),
    "a list": ga.TokenGraph.from_edges(patterns.causal(14).edge_index, 14),
    "by head": ga.TokenGraph.from_rule(lambda b, h, dst, src: dst - src <= h, 14, heads=4),
}


@pytest.mark.parametrize("graph", NOT_PACKED.values(), ids=NOT_PACKED)
def test_other_graphs_have_none(graph):
    assert packing(graph) is None
