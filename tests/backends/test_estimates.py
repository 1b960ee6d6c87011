"""What backends state that a call needs, worked out by hand from their words, and the limits at which they
refuse it.
"""

import re

import pytest
import torch

from gnn_attention import patterns
from gnn_attention._support import memory
from gnn_attention.backends import BACKENDS, dense, mixed, rows, split, tiles, triton, varlen
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
def test_dense_keeps_a_mask_in_bytes_and_in_numbers(graph, copies):
    """A bool and up to four bytes of SDPA's mask for each pair of each mask; none where SDPA needs no
    mask.
    """
    assert dense.bytes_needed(call_of(graph)) == copies * T * T * 5


@pytest.mark.parametrize("dtype", WIDE)
def test_dense_writes_out_five_numbers_for_each_pair(dtype):
    """Of every head and sample, as wide as they are summed; a score_mod's positions take 34 bytes for each
    pair of each mask.
    """
    written = B * H * T * 20 * 5 * WIDE[dtype]
    part = patterns.window(T, 4).rows(0, 20)
    assert dense.bytes_needed(call_of(part, dtype, bias=torch.zeros(1, 1, part.num_edges))) == written
    assert dense.bytes_needed(call_of(part, dtype, score_mod=half_of)) == written + 34 * T * 20
    square = call_of(differing(heads=H, batch=B), dtype, score_mod=half_of)
    assert dense.bytes_needed(square) == B * H * T * T * (5 * WIDE[dtype] + 34)


@pytest.mark.parametrize("dtype", WIDE)
def test_rows_keep_a_list_and_two_numbers_for_each_edge(dtype):
    """40 bytes of the list; q and out of receivers, k and v of senders of one head, twice: as given, and as
    summed.
    """
    part = patterns.window(T, 4).rows(0, 20)
    nodes = (20 + T) * (D + V) * WIDE[dtype]
    assert (
        rows.bytes_needed(call_of(part, dtype)) == part.num_edges * (40 + 2 * WIDE[dtype] * B * H) + 2 * nodes
    )


def test_rows_of_many_edges_take_few_heads_at_once():
    """As many as 2^19 edges are worth, and two."""
    graph = patterns.full(512)
    nodes = 2 * 512 * (D + V) * 4
    assert rows.bytes_needed(call_of(graph)) == 512 * 512 * (40 + 2 * 4 * (2 + 2)) + 2 * nodes


def test_tiles_and_mixed_take_what_a_call_of_their_kernels_takes():
    plain, graph = call_of(patterns.window(T, 4)), patterns.window(T, 4)
    assert (tiles.bytes_needed(plain), mixed.bytes_needed(plain)) == (64 * 2**20, 128 * 2**20)
    assert tiles.bytes_needed(call_of(graph, score_mod=half_of)) == 256 * 2**20


@pytest.mark.parametrize("dtype", WIDE)
def test_split_keeps_two_results_and_their_sum(dtype):
    call = call_of(patterns.window(T, 4).rows(0, 20), dtype)
    assert split.bytes_needed(call) == 3 * B * H * 20 * V * WIDE[dtype] + tiles.bytes_needed(call)


def test_varlen_lays_four_tensors_side_by_side():
    """As wide as the wider of keys and values, in the dtype they have."""
    call = call_of(patterns.documents([T]), torch.bfloat16)
    assert varlen.bytes_needed(call) == 4 * B * H * T * V * 2


@pytest.mark.parametrize("dtype", WIDE)
def test_triton_keeps_rows_and_gives_each_edge_its_numbers(dtype):
    """Two int32 for each edge and one for each bound of a row, both ways; with a bias its place and two
    numbers; 64 MiB.
    """
    graph = patterns.window(T, 4).rows(0, 20)
    rows_of = graph.num_edges * 8 + (20 + T + 2) * 4
    assert triton.bytes_needed(call_of(graph, dtype)) == rows_of + 64 * 2**20
    numbers = graph.num_edges * (4 + 2 * WIDE[dtype] * B * H)
    biased = call_of(graph, dtype, bias=torch.zeros(1, 1, graph.num_edges))
    assert triton.bytes_needed(biased) == rows_of + numbers + 64 * 2**20


@pytest.mark.parametrize(
    "name", [name for name, backend in BACKENDS.items() if backend.bytes_needed is not None]
)
def test_every_estimate_is_a_whole_number(name):
    for graph in (patterns.causal(T), patterns.window(0, 4), patterns.window(T, 4).rows(3, 3)):
        needed = BACKENDS[name].bytes_needed(call_of(graph))
        assert type(needed) is int
        assert needed >= 0


def told(pattern, text):
    assert text is not None
    assert re.search(pattern, text), text


def test_rows_refuse_more_edges_than_int32_numbers(monkeypatch):
    """2^31 - 1 of them are held."""
    largest = torch.iinfo(torch.int32).max
    assert largest == rows.MOST_EDGES
    call = call_of(patterns.window(T, 4))
    monkeypatch.setattr(rows, "MOST_EDGES", call.graph.num_edges)
    assert rows.unsupported_reason(call) is None
    monkeypatch.setattr(rows, "MOST_EDGES", call.graph.num_edges - 1)
    told(r"it has 122 edges, the limit is 121", rows.unsupported_reason(call))


def test_rows_refuse_by_their_limit(monkeypatch):
    call = call_of(patterns.full(2**16), device="meta")
    needed = rows.bytes_needed(call)
    monkeypatch.setattr(rows, "MOST_EDGES", 2**40)
    monkeypatch.setattr(rows, "MEMORY_LIMIT", needed)
    monkeypatch.setattr(memory, "available", lambda: needed)
    assert rows.unsupported_reason(call) is None
    monkeypatch.setattr(rows, "MEMORY_LIMIT", 16 * GIB)
    told(rf"would need about {needed / GIB:.1f} GiB, the limit is 16 GiB", rows.unsupported_reason(call))


@pytest.mark.parametrize("edges_left", [0, 100, 2**28, 2**28 + 1])
def test_mixed_refuses_more_edges_than_a_list_holds(monkeypatch, edges_left):
    monkeypatch.setattr(mixed, "memoized", lambda work, graph: planner.Work(edges=edges_left))
    found = mixed.unsupported_reason(call_of(patterns.window(T, 4)))
    if edges_left <= 2**28:
        assert found is None
    else:
        told(r"268435457 edges are left outside of well filled tiles, the limit is 268435456", found)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"score_mod": half_of}, "it has no score_mod"),
        ({"bias": torch.zeros(1, 1, 122)}, "it has no bias"),
        ({"dropout": 0.5}, "it has no dropout"),
        ({"sink_logits": torch.zeros(H)}, None),
        ({}, None),
    ],
    ids=["score_mod", "bias", "dropout", "sinks", "plain"],
)
def test_mixed_holds_plain_calls_and_sinks(option, said):
    found = mixed.BACKEND.unsupported_reason(call_of(patterns.window(T, 4), **option))
    assert found is None if said is None else said in found


@pytest.mark.parametrize("needed", [2**28, 2**32, 2**32 + 1, 3 * 2**32])
def test_tiles_refuse_by_their_limit(monkeypatch, needed):
    """4 GiB of masks are held, where there are so many."""
    monkeypatch.setattr(tiles, "memoized", lambda bytes_of, graph: needed)
    monkeypatch.setattr(memory, "available", lambda: 2**33)
    found = tiles.unsupported_reason(call_of(patterns.window(T, 4)))
    if needed <= 2**32:
        assert found is None
    else:
        told(rf"would need {needed / GIB:.1f} GiB, the limit is 4 GiB; use backend='rows'", found)


@pytest.mark.parametrize(
    "backend", [tiles, rows, dense], ids=lambda module: module.__name__.rpartition(".")[2]
)
def test_what_is_left_is_asked_for_on_a_cpu(monkeypatch, backend):
    """A GPU's memory is not the system's: there nobody is asked."""
    call = call_of(patterns.window(T, 4))
    assert backend.unsupported_reason(call) is None
    monkeypatch.setattr(memory, "shortage", lambda needed: "too little")
    told("too little", backend.unsupported_reason(call))
    there = type(
        "Tensor", (), {"device": torch.device("cuda"), "shape": call.q.shape, "dtype": call.q.dtype}
    )()
    object.__setattr__(call, "q", there)
    assert backend.unsupported_reason(call) is None


def test_triton_holds_as_many_rows_as_a_grid(monkeypatch):
    """Receivers times the query heads of a group, or senders: int32."""
    assert torch.iinfo(torch.int32).max == triton.MOST_PROGRAMS
    for most, graph in (
        (2 * T, patterns.causal(T)),
        (T, patterns.causal(T).rows(0, T // 4)),
    ):  # of two query heads in a group
        monkeypatch.setattr(triton, "MOST_PROGRAMS", most)
        assert triton._too_much(call_of(graph), "rows") is None
        monkeypatch.setattr(triton, "MOST_PROGRAMS", most - 1)
        told(
            rf"at most {most - 1} receivers times query heads of a group",
            triton._too_much(call_of(graph), "rows"),
        )
