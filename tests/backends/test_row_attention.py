"""The kernel of ``rows`` says without a GPU which calls it supports, and how it reads a graph.

A CPU takes the place of a GPU, and no kernel starts; ``interpreted/`` runs it.
"""

import re

import pytest
import torch
from support.bounds import assert_exact
from support.inputs import random_graph

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends import rows
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.gpu import csr, row_attention
from gnn_attention.backends.gpu.csr import pack_sides, unpack_sides
from gnn_attention.graph.edges import ChosenEdges
from gnn_attention.score_mods import alibi, alibi_slopes, chain, softcap

GRAPH, CPU = patterns.window(6, 3), torch.device("cpu")


def make_call(graph=GRAPH, heads=4, width=8, dtype=torch.float32, **options):
    """Build a call with this number of heads."""
    q, k = (torch.ones(2, heads, tokens, width, dtype=dtype) for tokens in (graph.num_dst, graph.num_src))
    return AttentionCall.from_arguments(q, k, k, graph, **options)


@pytest.fixture
def use_cpu(monkeypatch):
    """Pretend that the kernel runs on a CPU."""
    monkeypatch.setattr(row_attention, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(row_attention, "HAS_TRITON", True)


def double_score(score, b, h, dst, src):
    return 2 * score


UNSUPPORTED = {
    "a function": ({"score_mod": double_score}, "does not support the score_mod <function.*per-edge bias"),
    "two softcaps": (
        {"score_mod": chain(softcap(1.0), softcap(2.0))},
        "support.*softcap.* must come first",
    ),
    "a subclass": ({"score_mod": type("Subclass", (alibi,), {})((1.0,) * 4)}, "not support the score_mod"),
    "too few slopes": ({"score_mod": alibi(alibi_slopes(2))}, "alibi has 2 slopes for 4 heads"),
    "a dtype": ({"dtype": torch.float8_e4m3fn}, "the kernel does not support torch.float8_e4m3fn"),
    "a width": ({"width": 513}, "heads of at most 512 channels, got 513"),
}


@pytest.mark.usefixtures("use_cpu")
@pytest.mark.parametrize(("options", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_calls_that_the_kernel_does_not_support(options, message):
    assert re.search(message, row_attention.unsupported_reason(make_call(**options)) or "no reason")
    assert row_attention.unsupported_reason(make_call(width=512)) is None


def test_devices_and_triton(monkeypatch):
    monkeypatch.setattr(row_attention, "DEVICES", ("cuda",))
    assert row_attention.unsupported_reason(make_call()) == "the kernel runs on cuda, q is on cpu"
    monkeypatch.setattr(row_attention, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(row_attention, "HAS_TRITON", False)
    assert "pip install triton" in row_attention.unsupported_reason(make_call())


@pytest.mark.usefixtures("use_cpu")
@pytest.mark.parametrize("heads", [None, 4])
def test_torch_operators_compute_what_the_kernel_does_not_support(heads, monkeypatch):
    """The kernel computes what it supports: with a score_mod, one head of a varying graph at a time."""
    kernel_calls = []

    def run(call):
        kernel_calls.append(call)
        return call.v, call.v[..., 0]

    monkeypatch.setattr(row_attention, "run", run)
    graph = ga.TokenGraph.from_rule(lambda b, h, dst, src: (dst - src - h) % 3 == 0, 6, heads=heads)
    double_call = make_call(graph, score_mod=double_score, dtype=torch.float64)
    inputs = double_call.q, double_call.k, double_call.v
    expected = ga.attend(*inputs, graph, score_mod=double_score, backend="dense")
    assert_exact(rows.run(double_call)[0], expected)
    assert not kernel_calls
    rows.run(make_call(graph, score_mod=softcap(2.0)))
    assert len(kernel_calls) == (heads or 1)


def list_pairs(side):
    """Return the pair ``(row, other)`` of every entry, row by row."""
    rows = torch.arange(len(side.ptr) - 1).repeat_interleave(side.ptr.diff())
    return list(zip(rows.tolist(), side.neighbours.tolist(), strict=True))


def make_sides(graph):
    return unpack_sides(*pack_sides(graph, CPU))


@pytest.mark.parametrize("sizes", [(), (4,), (2, 4)], ids=str)
def test_no_list_of_a_chosen_graph_is_made_on_the_host(sizes, monkeypatch):
    """Rows are sorted on the device of the index."""
    monkeypatch.setattr(ChosenEdges, "_edge_list", None)
    monkeypatch.setattr(ChosenEdges, "select", None)
    monkeypatch.setattr(ga.TokenGraph, "edge_index", None)
    graph = ga.TokenGraph.from_indices(torch.tensor([[1, 0], [2, -1]]).expand(*sizes, 2, 2), 3)
    assert list_pairs(make_sides(graph)[0])[:3] == [(0, 0), (0, 1), (1, 2)]


def test_chunks_stay_few(monkeypatch):
    """If all rows are long, the chunks grow until the workspace is small."""
    monkeypatch.setattr(csr, "MIN_CHUNK_SIZE", 2)
    monkeypatch.setattr(csr, "MAX_CHUNKS", 12)
    receivers, _ = make_sides(random_graph(20, 30, 500))
    assert (receivers.chunk_size, receivers.chunk_row.numel()) == (32, 0)
    _, senders = make_sides(patterns.global_tokens(40, 1))
    assert (senders.chunk_size, senders.chunk_row.tolist()) == (4, [0] * 10)
