"""The kernel of the backend ``rows`` where there is no GPU: which calls it serves, and what it makes of one.

A CPU stands in the place of a GPU, and no kernel starts; ``interpreted/`` runs it.
"""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from support.bounds import assert_exact
from support.extras import needs
from support.kernel_cases import record_launches

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends import call as calls
from gnn_attention.backends import failures, rows
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.gpu import csr, ops, row_attention, score_terms
from gnn_attention.backends.gpu.score_terms import added_to_edges
from gnn_attention.score_mods import alibi, alibi_slopes, chain, relative_bias, softcap

GRAPH, CPU = patterns.window(6, 3), torch.device("cpu")


def call(graph=GRAPH, heads=4, width=8, dtype=torch.float32, **options):
    """A call with so many heads."""
    q, k = (torch.ones(2, heads, tokens, width, dtype=dtype) for tokens in (graph.num_dst, graph.num_src))
    return AttentionCall.checked(q, k, k, graph, **options)


@pytest.fixture
def on_a_cpu(monkeypatch):
    """As if the kernel ran there."""
    monkeypatch.setattr(row_attention, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(row_attention, "INSTALLED", True)


def own_mod(score, b, h, dst, src):
    return 2 * score


UNSERVED = {
    "a function": ({"score_mod": own_mod}, "do not support the score_mod <function own_mod.*per-edge bias"),
    "two softcaps": ({"score_mod": chain(softcap(1.0), softcap(2.0))}, "do not support a second softcap"),
    "a subclass": ({"score_mod": type("Own", (alibi,), {})((1.0,) * 4)}, "do not support the score_mod"),
    "too few slopes": ({"score_mod": alibi(alibi_slopes(2))}, "alibi has 2 slopes for 4 heads"),
    "a dtype": ({"dtype": torch.float8_e4m3fn}, "the kernel has no torch.float8_e4m3fn"),
    "a width": ({"width": 513}, "heads of at most 512 channels, got 513"),
}


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize(("options", "message"), UNSERVED.values(), ids=UNSERVED)
def test_calls_that_the_kernel_does_not_serve(options, message):
    assert re.search(message, row_attention.unsupported_reason(call(**options)) or "it serves the call")
    assert row_attention.unsupported_reason(call(width=512)) is None


def test_devices_and_triton(monkeypatch):
    monkeypatch.setattr(row_attention, "DEVICES", ("cuda",))
    assert row_attention.unsupported_reason(call()) == "the kernel runs on cuda, q is on cpu"
    monkeypatch.setattr(row_attention, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(row_attention, "INSTALLED", False)
    assert "pip install triton" in row_attention.unsupported_reason(call())


@pytest.mark.usefixtures("on_a_cpu")
def test_programs_and_edges_are_counted(monkeypatch):
    """A grid has at most 2^31 - 1 programs: of a group of two there are twice as many as receivers."""
    assert torch.iinfo(torch.int32).max == row_attention.MOST_PROGRAMS
    grouped = replace(call(), k=torch.ones(2, 2, 6, 8), v=torch.ones(2, 2, 6, 8))
    varying = call(ga.TokenGraph.from_rule(lambda b, h, dst, src: src <= dst, 6, batch=2, heads=4))
    for given, programs in ((call(), 6), (grouped, 12), (varying, 48)):
        monkeypatch.setattr(row_attention, "MOST_PROGRAMS", programs)
        assert row_attention.unsupported_reason(given) is None
        monkeypatch.setattr(row_attention, "MOST_PROGRAMS", programs - 1)
        assert f"at most {programs - 1} receivers" in row_attention.unsupported_reason(given)
    monkeypatch.setattr(row_attention, "MOST_PROGRAMS", 2**31 - 1)
    monkeypatch.setattr(row_attention, "MOST_EDGES", GRAPH.num_edges - 1)
    assert row_attention.unsupported_reason(call()) == "the kernel takes at most 14 edges, got 15"


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("heads", [None, 4])
def test_torch_operators_compute_what_the_kernel_does_not_serve(heads, monkeypatch):
    """The kernel computes what it serves, also of a graph that differs by head."""
    calls_of_kernel = []
    monkeypatch.setattr(row_attention, "run", lambda call: calls_of_kernel.append(call))
    graph = ga.TokenGraph.from_rule(lambda b, h, dst, src: (dst - src - h) % 3 == 0, 6, heads=heads)
    own = call(graph, score_mod=own_mod, dtype=torch.float64)
    assert_exact(rows.run(own)[0], ga.attend(own.q, own.k, own.v, graph, score_mod=own_mod, backend="dense"))
    assert not calls_of_kernel
    rows.run(call(graph, score_mod=softcap(2.0)))
    assert len(calls_of_kernel) == 1


TABLE = relative_bias(torch.zeros(4, 3))


def test_what_is_added_to_each_edge():
    """Numbers by receiver, then sender, as the score_mod itself gives them; the bias in that order."""
    order = torch.randperm(15, generator=torch.Generator().manual_seed(0))
    graph = ga.TokenGraph.from_edges(GRAPH.edge_index[:, order], 6)
    graph = replace(graph, dst_offset=2, src_offset=1)
    first, *rest = relative_bias(torch.arange(20.0).view(4, 5)), alibi((1.0,) * 4)
    rest.append(ga.score_mods.log_multiplicity(torch.arange(1.0, 9.0)))
    bias = torch.arange(60.0).view(4, 15)
    given = call(graph, score_mod=chain(first, softcap(2.0), *rest), bias=bias)
    slopes, cap, before, after = added_to_edges(given)
    assert (slopes, cap) == (None, 2.0)
    assert before.shape == after.shape == (2, 4, 15)
    place = {(dst, src): e for e, (src, dst) in enumerate(graph.edge_index.T.tolist())}
    zero = torch.tensor(0)
    for e, (dst, src) in enumerate(sorted(place)):
        for h in range(4):
            at = torch.tensor(0.0), zero, torch.tensor(h), torch.tensor(dst + 2), torch.tensor(src + 1)
            assert before[1, h, e] == first(*at)
            changed = sum(mod(*at) for mod in rest)
            torch.testing.assert_close(after[0, h, e], bias[h, place[dst, src]] + changed)


@pytest.mark.usefixtures("on_a_cpu")
def test_slopes_are_those_of_the_heads_of_the_call():
    part = replace(call(heads=2), score_mod=alibi((1.0, 2.0, 3.0, 4.0)), first_head=1)
    assert added_to_edges(part)[0].tolist() == [2.0, 3.0]
    assert row_attention.unsupported_reason(part) is None
    message = "alibi has 4 slopes for 5 heads"
    assert row_attention.unsupported_reason(replace(part, first_head=3)) == message


# a graph is on the host, and so is what is computed about it without a device
ON_THE_HOST = {("gnn_attention.graph.tiling", "_runs"), ("gnn_attention.graph.derived", "in_degree")}


def has_tensors(x):
    """Whether there is a tensor in what is memoized, however deep."""
    return isinstance(x, torch.Tensor) or (isinstance(x, (tuple, list)) and any(map(has_tensors, x)))


def test_what_is_planned_on_one_stream_is_there_for_every_other(monkeypatch):
    """All tensors kept on a device are made by functions given the device, which ``memoized`` waits for."""
    monkeypatch.setattr(ops, "attention", lambda problem, rows: (problem.q, problem.q[..., 0]))
    graph = patterns.window(6, 3)
    mod = chain(relative_bias(torch.zeros(4, 7)), alibi(alibi_slopes(4)), softcap(2.0))
    more = {"bias": torch.zeros(15), "score_mod": mod, "sink_logits": torch.zeros(4), "dropout": 0.5}
    row_attention.run(call(graph, **more))
    made = [key for key, value in graph._memo.data.items() if has_tensors(value)]
    assert {csr._rows, score_terms._on_device, calls._has_in_edges} <= {key[0] for key in made if CPU in key}
    assert {(key[0].__module__, key[0].__name__) for key in made if CPU not in key} <= ON_THE_HOST


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("options", [{}, {"score_mod": chain(TABLE, softcap(2.0)), "bias": True}], ids=str)
@pytest.mark.parametrize("trained", [True, False])
def test_no_more_memory_is_taken_than_is_said(trained, options, monkeypatch):
    """Both passes, and the rows of the graph, which are made in the first one."""
    needs("triton")
    record_launches(monkeypatch, run=False)
    graph, q = patterns.causal(300), torch.zeros(2, 4, 300, 16, requires_grad=trained)
    options = {**options, "bias": torch.zeros(2, 4, graph.num_edges) if options else None}
    said = row_attention.bytes_needed(AttentionCall.checked(q, q, q, graph, **options))
    with torch.profiler.profile(profile_memory=True) as profile:
        out = ga.attend(q, q, q, graph, **options, backend="rows")
        _ = torch.autograd.grad(out.sum(), q) if trained else None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    ordered = sorted(events, key=lambda event: event.start_ns())
    assert max(itertools.accumulate(event.nbytes() for event in ordered)) <= said + 8 * q.numel() * 4


@pytest.mark.usefixtures("on_a_cpu")
def test_a_kernel_that_failed_is_not_asked_again(monkeypatch):
    """A call of another dtype is."""
    monkeypatch.setattr(failures, "_FAILURES", {})
    failures.record("rows", call(), RuntimeError("out of resources"))
    assert row_attention.unsupported_reason(call()) == "RuntimeError: out of resources"
    assert row_attention.unsupported_reason(call(dtype=torch.float64)) is None
    assert rows.unsupported_reason(call()) is None
