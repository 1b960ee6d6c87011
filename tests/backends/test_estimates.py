"""What backends state that a call needs, computed by hand from their words, and the limits of memory."""

import re

import pytest
import torch
from torch._subclasses import FakeTensorMode

from gnn_attention import patterns
from gnn_attention._support import memory
from gnn_attention.backends import BACKENDS, dense, mixed, rows, tiles, varlen
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.gpu import row_attention
from gnn_attention.backends.plan import planner
from gnn_attention.graph import TokenGraph

B, H, KV, T, D, V = 2, 6, 3, 32, 5, 7
WIDE = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 4}  # bytes of what is summed


def call_of(graph, dtype=torch.float32, device="cpu", **options):
    """Sizes that differ from each other, so that none stands for another."""
    q, k, v = (
        torch.zeros(B, heads, tokens, dim, dtype=dtype, device=device)
        for heads, tokens, dim in ((H, graph.num_dst, D), (KV, graph.num_src, D), (KV, graph.num_src, V))
    )
    return AttentionCall(q, k, v, graph, 1.0, **options)


def half_of(call, score, b, h, dst, src):
    return score / 2


def differing(heads=None, batch=None):
    return TokenGraph.from_rule(lambda b, h, dst, src: src <= dst - h - b, T, heads=heads, batch=batch)


PART = patterns.window(T, 4).rows(0, 20)
EDGES, PAIRS, BOTH = PART.num_edges, T * T, differing(heads=H, batch=B)
BIAS, MOD = {"bias": torch.zeros(1, 1, EDGES)}, {"score_mod": half_of}
# bytes by the width of sums
NEEDED = {
    # a bool and up to four bytes of SDPA's mask for each pair of each mask; none where it needs no mask
    "dense, causal": (dense, patterns.causal(T), {}, lambda wide: 0),
    "dense, full": (dense, patterns.full(T), {}, lambda wide: 0),
    "dense, window": (dense, patterns.window(T, 4), {}, lambda wide: 5 * PAIRS),
    "dense, by head": (dense, differing(heads=H), {}, lambda wide: H * 5 * PAIRS),
    "dense, by sample": (dense, differing(batch=B), {}, lambda wide: B * 5 * PAIRS),
    "dense, by both": (dense, BOTH, {}, lambda wide: B * H * 5 * PAIRS),
    # five numbers for each pair of every head and sample; positions of a score_mod take 34 bytes for each
    "dense, bias": (dense, PART, BIAS, lambda wide: B * H * T * 20 * 5 * wide),
    "dense, score_mod": (dense, PART, MOD, lambda wide: B * H * T * 20 * 5 * wide + 34 * T * 20),
    "dense, written out by both": (dense, BOTH, MOD, lambda wide: B * H * PAIRS * (5 * wide + 34)),
    # the list and two numbers for each edge of a head; q, k, v and out of one head, twice
    "rows": (rows, PART, {}, lambda w: EDGES * (40 + 2 * w * B * H) + 2 * (20 + T) * (D + V) * w),
    # of many edges, as many heads at once as 2^19 edges are worth, and two
    "rows, many": (rows, patterns.full(512), {}, lambda w: 2**18 * (40 + 2 * w * 4) + 2048 * (D + V) * w),
    "tiles": (tiles, PART, {}, lambda wide: 2**26),
    "tiles, score_mod": (tiles, PART, MOD, lambda wide: 2**28),
    "mixed": (mixed, PART, {}, lambda wide: 2**27),
    # two int32 for each edge and one for each bound of a row, both ways; with a bias a third, the bias in the
    # dtype of sums, which is the same for all heads and samples, and its gradient for each of them
    "rows in the kernel": (row_attention, PART, {}, lambda wide: EDGES * 8 + (20 + T + 2) * 4 + 2**26),
    "rows in the kernel, bias": (
        *(row_attention, PART, BIAS),
        lambda wide: EDGES * (12 + wide * (1 + B * H)) + (20 + T + 2) * 4 + 2**26,
    ),
    # the rows of every sample and head
    "rows in the kernel, by both": (
        *(row_attention, BOTH, {}),
        lambda wide: BOTH.num_edges * 8 + (B * H * 2 * T + 2) * 4 + 2**26,
    ),
}


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize(("backend", "graph", "options", "needed"), NEEDED.values(), ids=NEEDED)
def test_bytes_needed(backend, graph, options, needed, dtype):
    assert backend.bytes_needed(call_of(graph, dtype, **options)) == needed(WIDE[dtype])


def test_varlen_packs_four_tensors():
    call = call_of(patterns.documents([T]), torch.bfloat16)
    assert varlen.bytes_needed(call) == 4 * B * H * T * V * 2


def assert_matches(pattern, text):
    assert re.search(pattern, text or "None"), text


def test_rows_refuse_more_edges_than_int32_numbers(monkeypatch):
    largest = torch.iinfo(torch.int32).max
    assert largest == rows.MOST_EDGES
    call = call_of(patterns.window(T, 4))
    monkeypatch.setattr(rows, "MOST_EDGES", call.graph.num_edges)
    assert rows.unsupported_reason(call) is None
    monkeypatch.setattr(rows, "MOST_EDGES", call.graph.num_edges - 1)
    assert_matches(r"it has 122 edges, the limit is 121", rows.unsupported_reason(call))


@pytest.mark.parametrize("more", [0, 1])
def test_mixed_and_tiles_refuse_by_their_limits(monkeypatch, more):
    call = call_of(patterns.window(T, 4))
    monkeypatch.setattr(memory, "available", lambda: 2**33)
    monkeypatch.setattr(mixed, "memoized", lambda work, graph: planner.Work(edges=2**28 + more))
    monkeypatch.setattr(tiles, "memoized", lambda bytes_of, graph: 2**32 + more)
    if not more:
        assert mixed.unsupported_reason(call) is tiles.unsupported_reason(call) is None
        return
    message = r"268435457 edges are left outside of well filled tiles, the limit is 268435456"
    assert_matches(message, mixed.unsupported_reason(call))
    message = r"would need 4.0 GiB, the limit is 4 GiB; use backend='rows'"
    assert_matches(message, tiles.unsupported_reason(call))


@pytest.mark.parametrize("name", ["tiles", "rows", "dense"])
def test_what_is_left_counts_on_a_cpu(monkeypatch, name):
    """Of the memory of a GPU the host knows nothing."""
    backend, graph = BACKENDS[name], patterns.window(T, 4)
    assert backend.unsupported_reason(call_of(graph)) is None
    monkeypatch.setattr(memory, "shortage", lambda needed: "too little")
    assert_matches("too little", backend.unsupported_reason(call_of(graph)))
    with FakeTensorMode():
        reason = backend.unsupported_reason(call_of(graph, device="cuda"))
    assert reason is None if name != "tiles" else "it runs on cpu" in reason


def test_rows_need_what_computes_them_needs(monkeypatch):
    """The kernel where it serves the call, else the operators of torch."""
    call = call_of(PART)
    assert rows.bytes_needed(call) > row_attention.bytes_needed(call) - row_attention.WORKSPACE
    monkeypatch.setattr(row_attention, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(row_attention, "INSTALLED", True)
    assert rows.bytes_needed(call) == row_attention.bytes_needed(call)
    by_operators = call_of(PART, score_mod=half_of)
    assert rows.bytes_needed(by_operators) == NEEDED["rows"][3](4)


# SDPA on CUDA writes logits out: five numbers for each pair of every head
LOGITS = 5 * B * H * T * T
FUSED = {
    "halves": ((torch.bfloat16, H, 64, 64), 0),
    "halves, grouped": ((torch.bfloat16, KV, 64, 64), 0),
    "halves of another width": ((torch.float16, KV, 64, 72), 4 * LOGITS),
    "float32": ((torch.float32, H, 64, 64), 0),
    "float32, grouped": ((torch.float32, KV, 64, 64), 4 * LOGITS),
    "float32, not in steps of 16 bytes": ((torch.float32, H, 65, 65), 4 * LOGITS),
    "float64": ((torch.float64, H, 64, 64), 8 * LOGITS),
}


@pytest.mark.parametrize(("about", "needed"), FUSED.values(), ids=FUSED)
def test_which_calls_have_a_fused_kernel_on_cuda(about, needed):
    """A causal call, which needs no mask, on a GPU that is not there."""
    dtype, kv_heads, dim, value_dim = about
    with FakeTensorMode():
        shapes = (H, dim), (kv_heads, dim), (kv_heads, value_dim)
        q, k, v = (torch.empty(B, heads, T, width, dtype=dtype, device="cuda") for heads, width in shapes)
        assert dense.bytes_needed(AttentionCall(q, k, v, patterns.causal(T), 1.0)) == needed
