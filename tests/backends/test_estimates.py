"""What backends state that a call needs, computed by hand from their words, and the limits of memory."""

import re
from types import SimpleNamespace

import pytest
import torch

from gnn_attention import patterns
from gnn_attention._support import memory
from gnn_attention.backends import dense, mixed, rows, split, tiles, triton, varlen
from gnn_attention.backends.call import AttentionCall
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
    # results of two parts, their sum, and a call of tiles
    "split": (split, PART, {}, lambda wide: 3 * B * H * 20 * V * wide + 2**26),
    # two int32 for each edge and one for each bound of a row, both ways; with a bias a third, the bias in the
    # dtype of sums, which is the same for all heads and samples, and its gradient for each of them
    "triton": (triton, PART, {}, lambda wide: EDGES * 8 + (20 + T + 2) * 4 + 2**26),
    "triton, bias": (
        *(triton, PART, BIAS),
        lambda wide: EDGES * (12 + wide * (1 + B * H)) + (20 + T + 2) * 4 + 2**26,
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


@pytest.mark.parametrize(
    "backend", [tiles, rows, dense], ids=lambda module: module.__name__.rpartition(".")[2]
)
def test_what_is_left_counts_on_a_cpu(monkeypatch, backend):
    call = call_of(patterns.window(T, 4))
    assert backend.unsupported_reason(call) is None
    monkeypatch.setattr(memory, "shortage", lambda needed: "too little")
    assert_matches("too little", backend.unsupported_reason(call))
    q = SimpleNamespace(device=torch.device("cuda"), shape=call.q.shape, dtype=call.q.dtype)
    object.__setattr__(call, "q", q)
    assert backend.unsupported_reason(call) is None


def test_triton_supports_as_many_rows_as_a_grid(monkeypatch):
    assert torch.iinfo(torch.int32).max == triton.MOST_PROGRAMS
    for most, graph in ((2 * T, patterns.causal(T)), (T, patterns.causal(T).rows(0, T // 4))):
        monkeypatch.setattr(triton, "MOST_PROGRAMS", most)
        assert triton._too_large(call_of(graph), "rows") is None
        monkeypatch.setattr(triton, "MOST_PROGRAMS", most - 1)
        message = rf"at most {most - 1} receivers times query heads of a group"
        assert_matches(message, triton._too_large(call_of(graph), "rows"))
