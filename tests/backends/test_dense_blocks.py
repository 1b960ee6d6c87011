"""Rectangles, some at a time."""

import pytest
import torch
from support.bounds import assert_exact
from support.inputs import qkv
from support.plans import STRUCTURED

import gnn_attention as ga
from gnn_attention.backends.cpu import dense_blocks as kernels

PARTS = (
    "window and sinks",
    "documents",
    "steps down",
    "global tokens",
    "rows of a window",
    "causal",
    "no ranges",
)


@pytest.mark.parametrize("room", [1, 3000, 100_000])
@pytest.mark.parametrize("name", PARTS)
def test_a_few_rectangles_at_a_time(name, room, monkeypatch):
    """The same however many go into one call, of strided and gathered tokens."""
    graph = STRUCTURED[name]
    given = qkv(graph.num_dst, graph.num_src, heads=2, kv_heads=1, batch=3)
    wanted = ga.attend(*given, graph, backend="rows")
    wanted = [wanted, *torch.autograd.grad(wanted.square().sum(), given)]
    monkeypatch.setattr(kernels, "BYTES_AT_ONCE", room)
    out = ga.attend(*given, graph, backend="tiles")
    assert_exact([out, *torch.autograd.grad(out.square().sum(), given)], wanted)
