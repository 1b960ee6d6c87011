"""The limits of memory and of numbers beyond which backends refuse a call."""

import re

import pytest
import torch

from gnn_attention import patterns
from gnn_attention._support import memory
from gnn_attention.backends import BACKENDS, rows, tiles
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.cost_model import Work

Q, K = torch.zeros(2, 6, 32, 8), torch.zeros(2, 3, 32, 8)
CALL = AttentionCall(Q, K, K, patterns.window(32, 4), 1.0)


@pytest.mark.parametrize("more", [0, 1])
def test_a_backend_refuses_what_is_beyond_its_limit(monkeypatch, more):
    """By one edge, or one byte."""
    monkeypatch.setattr(memory, "available", lambda: 2**33)
    monkeypatch.setattr(rows, "MEMORY_LIMIT", rows.bytes_needed(CALL) - more)
    counts = {tiles.mixed_work: Work(edges=2**28 + more), tiles.mask_bytes: 2**32 + more}
    monkeypatch.setattr(tiles, "memoized", lambda count, graph: counts[count])
    messages = {
        "rows": "its list of edges would need about 0.0 GiB, the limit is 0 GiB",
        "mixed": "268435457 edges are left outside of well filled tiles, the limit is 268435456",
        "tiles": "would need 4.0 GiB, the limit is 4 GiB; use backend='rows'",
    }
    for name, message in messages.items():
        reason = BACKENDS[name].unsupported_reason(CALL)
        assert re.search(message, reason) if more else reason is None


@pytest.mark.parametrize("name", ["tiles", "rows", "dense"])
def test_what_is_left_counts_on_a_cpu(monkeypatch, name):
    assert BACKENDS[name].unsupported_reason(CALL) is None
    monkeypatch.setattr(memory, "shortage", lambda needed: "too little")
    assert "too little" in BACKENDS[name].unsupported_reason(CALL)
