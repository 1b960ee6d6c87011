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

GIB = 2**30
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


@pytest.mark.parametrize(
    ("graph", "copies"),
    [
        (patterns.causal(T), 0),
        (patterns.full(T), 0),
        (patterns.window(T, 4), 1),
        (differing(heads=H), H),
        (differing(batch=B), B),
        (differing(heads=H, batch=B), B * H),
    ],
    ids=["causal", "full", "window", "by head", "by sample", "by both"],
)
def test_dense_needs_a_mask_in_bytes_and_in_numbers(graph, copies):
    """A bool and up to four bytes of SDPA's mask for each pair of each mask; none where it needs no mask."""
    assert dense.bytes_needed(call_of(graph)) == copies * T * T * 5


@pytest.mark.parametrize("dtype", WIDE)
def test_dense_writes_out_five_numbers_for_each_pair(dtype):
    """Of every head and sample, as wide as sums; positions of a score_mod take 34 bytes for each pair."""
    written = B * H * T * 20 * 5 * WIDE[dtype]
    part = patterns.window(T, 4).rows(0, 20)
    assert dense.bytes_needed(call_of(part, dtype, bias=torch.zeros(1, 1, part.num_edges))) == written
    assert dense.bytes_needed(call_of(part, dtype, score_mod=half_of)) == written + 34 * T * 20
    square = call_of(differing(heads=H, batch=B), dtype, score_mod=half_of)
    assert dense.bytes_needed(square) == B * H * T * T * (5 * WIDE[dtype] + 34)


@pytest.mark.parametrize("dtype", WIDE)
def test_rows_need_a_list_and_two_numbers_for_each_edge(dtype):
    """40 bytes of the list; q and out of receivers, k and v of senders of one head, twice."""
    part = patterns.window(T, 4).rows(0, 20)
    nodes = (20 + T) * (D + V) * WIDE[dtype]
    of_edges = part.num_edges * (40 + 2 * WIDE[dtype] * B * H)
    assert rows.bytes_needed(call_of(part, dtype)) == of_edges + 2 * nodes
    # of many edges, as many heads at once as 2^19 edges are worth, and two
    graph = patterns.full(512)
    nodes = 2 * 512 * (D + V) * 4
    assert rows.bytes_needed(call_of(graph)) == 512 * 512 * (40 + 2 * 4 * (2 + 2)) + 2 * nodes


def test_tiles_and_mixed_take_what_a_call_of_their_kernels_takes():
    plain, graph = call_of(patterns.window(T, 4)), patterns.window(T, 4)
    assert (tiles.bytes_needed(plain), mixed.bytes_needed(plain)) == (64 * 2**20, 128 * 2**20)
    assert tiles.bytes_needed(call_of(graph, score_mod=half_of)) == 256 * 2**20


@pytest.mark.parametrize("dtype", WIDE)
def test_split_needs_two_results_and_their_sum(dtype):
    call = call_of(patterns.window(T, 4).rows(0, 20), dtype)
    assert split.bytes_needed(call) == 3 * B * H * 20 * V * WIDE[dtype] + tiles.bytes_needed(call)


def test_varlen_lays_four_tensors_side_by_side():
    call = call_of(patterns.documents([T]), torch.bfloat16)
    assert varlen.bytes_needed(call) == 4 * B * H * T * V * 2


@pytest.mark.parametrize("dtype", WIDE)
def test_triton_needs_rows_and_gives_each_edge_its_numbers(dtype):
    """Two int32 for each edge and one for each bound of a row, both ways; three numbers for a bias."""
    graph = patterns.window(T, 4).rows(0, 20)
    rows_of = graph.num_edges * 8 + (20 + T + 2) * 4
    assert triton.bytes_needed(call_of(graph, dtype)) == rows_of + 64 * 2**20
    numbers = graph.num_edges * (4 + 2 * WIDE[dtype] * B * H)
    biased = call_of(graph, dtype, bias=torch.zeros(1, 1, graph.num_edges))
    assert triton.bytes_needed(biased) == rows_of + numbers + 64 * 2**20


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


def test_rows_refuse_by_their_limit(monkeypatch):
    call = call_of(patterns.full(2**16), device="meta")
    needed = rows.bytes_needed(call)
    monkeypatch.setattr(rows, "MOST_EDGES", 2**40)
    monkeypatch.setattr(rows, "MEMORY_LIMIT", needed)
    monkeypatch.setattr(memory, "available", lambda: needed)
    assert rows.unsupported_reason(call) is None
    monkeypatch.setattr(rows, "MEMORY_LIMIT", 16 * GIB)
    assert_matches(
        rf"would need about {needed / GIB:.1f} GiB, the limit is 16 GiB", rows.unsupported_reason(call)
    )


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


REFUSED = {
    "score_mod": (
        {"score_mod": half_of},
        "no score_mod; leave score_mod out, or use backend='tiles' or 'rows'",
    ),
    "bias": ({"bias": torch.zeros(1, 1, 122)}, "it has no bias"),
    "dropout": ({"dropout": 0.5}, "it has no dropout"),
    "sinks": ({"sink_logits": torch.zeros(H)}, None),
    "plain": ({}, None),
}


@pytest.mark.parametrize(("option", "reason"), REFUSED.values(), ids=REFUSED)
def test_mixed_supports_plain_calls_and_sinks(option, reason):
    found = mixed.BACKEND.unsupported_reason(call_of(patterns.window(T, 4), **option))
    assert found is None if reason is None else reason in found


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
