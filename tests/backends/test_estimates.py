"""The limits of memory and of numbers beyond which backends refuse a call."""

import re

import pytest
import torch
from torch._subclasses import FakeTensorMode

from gnn_attention import patterns
from gnn_attention._support import memory
from gnn_attention.backends import BACKENDS, mixed, rows, tiles
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.cost_model import Work

WINDOW = patterns.window(32, 4)


def call_on(device="cpu"):
    q, k = (torch.zeros(2, heads, 32, 8, device=device) for heads in (6, 3))
    return AttentionCall(q, k, k, WINDOW, 1.0)


def assert_refuses(backend, message):
    assert re.search(message, backend.unsupported_reason(call_on()) or "None")


def test_rows_refuse_more_edges_than_int32_numbers(monkeypatch):
    assert torch.iinfo(torch.int32).max == rows.MOST_EDGES
    monkeypatch.setattr(rows, "MOST_EDGES", WINDOW.num_edges)
    assert rows.unsupported_reason(call_on()) is None
    monkeypatch.setattr(rows, "MOST_EDGES", WINDOW.num_edges - 1)
    assert_refuses(rows, r"it has 122 edges, the limit is 121")


@pytest.mark.parametrize("more", [0, 1])
def test_mixed_and_tiles_refuse_by_their_limits(monkeypatch, more):
    monkeypatch.setattr(memory, "available", lambda: 2**33)
    monkeypatch.setattr(mixed, "memoized", lambda work, graph: Work(edges=2**28 + more))
    monkeypatch.setattr(tiles, "memoized", lambda bytes_of, graph: 2**32 + more)
    if not more:
        assert mixed.unsupported_reason(call_on()) is tiles.unsupported_reason(call_on()) is None
        return
    assert_refuses(mixed, r"268435457 edges are left outside of well filled tiles, the limit is 268435456")
    assert_refuses(tiles, r"would need 4.0 GiB, the limit is 4 GiB; use backend='rows'")


@pytest.mark.parametrize("name", ["tiles", "rows", "dense"])
def test_what_is_left_counts_on_a_cpu(monkeypatch, name):
    """Of the memory of a GPU the host knows nothing."""
    backend = BACKENDS[name]
    assert backend.unsupported_reason(call_on()) is None
    monkeypatch.setattr(memory, "shortage", lambda needed: "too little")
    assert_refuses(backend, "too little")
    with FakeTensorMode():
        reason = backend.unsupported_reason(call_on("cuda"))
    assert reason is None if name != "tiles" else "it runs on cpu" in reason
