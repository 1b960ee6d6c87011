"""The kernel of the backend ``rows`` where there is no GPU: which calls it serves, and what it makes of one.

A CPU stands in the place of a GPU, and no kernel starts; ``interpreted/`` runs it.
"""

import itertools
import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.bounds import assert_exact, assert_sum
from support.extras import needs
from support.kernel_cases import record_launches

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends import call as calls
from gnn_attention.backends import failures, rows
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.gpu import csr, ops, row_attention, score_terms
from gnn_attention.backends.gpu.csr import rows_of
from gnn_attention.backends.gpu.problem import pack
from gnn_attention.backends.gpu.score_terms import Added, added_to, added_to_edges, has_edge_numbers
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
PARTS = {
    "nothing": (None, Added()),
    "one": (softcap(2.0), Added(softcap=2.0)),
    "in order": (chain(TABLE, softcap(2.0), alibi((1.0,))), Added(None, (TABLE,), 2.0, (alibi((1.0,)),))),
    "without a cap": (chain(TABLE, alibi((1.0,))), Added((1.0,), (), 0.0, (TABLE,))),
    "chains of chains": (chain(chain(alibi((1.0,)), chain()), chain(alibi((0.5,)))), Added((1.5,))),
}


@pytest.mark.parametrize(("mod", "parts"), PARTS.values(), ids=PARTS)
def test_the_parts_of_a_score_mod(mod, parts):
    assert added_to(mod) == parts


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
    assert (slopes, cap, has_edge_numbers(given)) == (None, 2.0, True)
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


@pytest.fixture
def packed_rows(monkeypatch):
    """The rows of each call of the kernel, whose results are ones, and lse 0."""
    plans = []

    def attention(problem, plan):
        plans.append(plan)
        shape = problem.q.shape[:3]
        return problem.q.new_ones(*shape, problem.v.shape[3]), problem.q.new_zeros(shape)

    monkeypatch.setattr(ops, "attention", attention)
    return plans


@pytest.mark.parametrize("options", [{}, {"bias": torch.zeros(15)}, {"score_mod": TABLE}], ids=str)
def test_edges_are_numbered_for_what_has_a_number_for_each(options, packed_rows):
    row_attention.run(call(**options))
    (tensors, limits), (wanted, wanted_limits) = packed_rows[0], pack(rows_of(GRAPH, CPU, bool(options)))
    assert limits == wanted_limits
    assert all(torch.equal(x, y) for x, y in zip(tensors, wanted, strict=True))


@pytest.mark.usefixtures("packed_rows")
def test_a_sink_is_added_where_there_are_in_edges():
    graph = ga.TokenGraph.from_edges(torch.tensor([[0, 2], [1, 1]]), 3, 3)
    out, lse = row_attention.run(call(graph, sink_logits=torch.zeros(4)))
    assert out[0, 0, :, 0].tolist() == [0.0, 0.5, 0.0]
    assert lse[0, 0, [0, 2]].tolist() == [-math.inf, -math.inf]
    assert_sum(lse[0, 0, 1], math.log(2.0), terms=3, magnitude=1.0)


# a graph is on the host, and so is what is computed about it without a device
ON_THE_HOST = {("gnn_attention.graph.tiling", "_runs"), ("gnn_attention.graph.derived", "in_degree")}


def has_tensors(x):
    """Whether there is a tensor in what is memoized, however deep."""
    return isinstance(x, torch.Tensor) or (isinstance(x, (tuple, list)) and any(map(has_tensors, x)))


@pytest.mark.usefixtures("packed_rows")
def test_what_is_planned_on_one_stream_is_there_for_every_other():
    """All tensors kept on a device are made by functions given the device, which ``memoized`` waits for."""
    graph = patterns.window(6, 3)
    mod = chain(relative_bias(torch.zeros(4, 7)), alibi(alibi_slopes(4)), softcap(2.0))
    more = {"bias": torch.zeros(15), "score_mod": mod, "sink_logits": torch.zeros(4), "dropout": 0.5}
    row_attention.run(call(graph, **more))
    made = [key for key, value in graph._memo.data.items() if has_tensors(value)]
    on_device = {key[0] for key in made if CPU in key}
    made_on_it = {row_attention._packed_rows, score_terms._on_device, score_terms._in_edges}
    assert {*made_on_it, calls._has_in_edges} <= on_device
    assert {(key[0].__module__, key[0].__name__) for key in made if CPU not in key} <= ON_THE_HOST


def peak(function):
    """The most bytes that a function has allocated at once."""
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    ordered = sorted(events, key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in ordered))


LEARNED = {"score_mod": relative_bias(torch.zeros(4, 601, requires_grad=True))}
COUNTED = {
    "relative_bias": (2, LEARNED, None),
    "of eight samples": (8, LEARNED, None),
    "a bias": (2, {}, (2, 4)),
    "a bias for all": (2, {}, ()),
    "before and after softcap": (2, {"score_mod": chain(LEARNED["score_mod"], softcap(2.0))}, (2, 4)),
    "both after": (2, LEARNED, (2, 4)),
}


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize(("batch", "options", "bias"), COUNTED.values(), ids=COUNTED)
def test_numbers_of_edges_are_counted(batch, options, bias, monkeypatch):
    """Both passes allocate no more than is said, and at least two fifths of it, beyond a plain call."""
    needs("triton")
    record_launches(monkeypatch, run=False)
    monkeypatch.setattr(csr, "MOST_HANDED", 0)
    graph = patterns.causal(300)
    order = torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(0))
    graph = ga.TokenGraph.from_edges(graph.edge_index[:, order], 300)
    q = torch.zeros(batch, 4, 300, 16, requires_grad=True)
    numbers = None if bias is None else torch.zeros(*bias, graph.num_edges, requires_grad=True)
    options = {**options, "bias": numbers}

    def both_passes(**options):
        ga.attend(q, q, q, graph, **options, backend="rows").sum().backward()

    both_passes(**options)
    both_passes()
    allocated = peak(partial(both_passes, **options)) - peak(both_passes)
    said = row_attention.bytes_needed(AttentionCall.checked(q, q, q, graph, **options))
    said -= row_attention.WORKSPACE + csr.bytes_of(graph, for_edges=True)
    assert 0.4 * said <= allocated <= said


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("heads", [None, 4], ids=["one graph", "a graph for each head"])
def test_p_and_ds_are_counted(trained, heads, monkeypatch):
    """In training two numbers for each edge and head, and 4 bytes for the place of each edge."""
    needs("triton")
    record_launches(monkeypatch, run=False)
    q = torch.zeros(2, 4, 300, 16, requires_grad=trained)
    graph = ga.TokenGraph.from_rule(lambda b, h, dst, src: src <= dst, 300, heads=heads)
    allocated, said = [], []

    def both_passes():
        out = ga.attend(q, q, q, graph, backend="rows")
        return torch.autograd.grad(out.sum(), q) if trained else out

    for most in (0, 2**28):
        monkeypatch.setattr(csr, "MOST_HANDED", most)
        both_passes()
        allocated.append(peak(both_passes))
        said.append(row_attention.bytes_needed(AttentionCall.checked(q, q, q, graph)))
    edges_of_a_sample = graph.num_edges * (1 if heads else 4)
    handed = 2 * 4 * 2 * edges_of_a_sample if trained else 0
    assert said[1] - said[0] == handed + (4 * graph.num_edges if trained else 0)
    assert 0.9 * handed <= allocated[1] - allocated[0] <= handed


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize(("heads", "each"), [(None, 4), (4, 1)], ids=["one graph", "a graph for each head"])
def test_p_and_ds_are_handed_over_up_to_a_limit(heads, each, monkeypatch):
    """Of a graph for each head every edge is that of one head."""
    graph = ga.TokenGraph.from_rule(lambda b, h, dst, src: src <= dst, 30, heads=heads)
    q = torch.zeros(1, 4, 30, 16, requires_grad=True)
    given, bytes_of_both = AttentionCall.checked(q, q, q, graph), 2 * 4 * each * graph.num_edges
    said = []
    for most in (bytes_of_both, bytes_of_both - 1):
        monkeypatch.setattr(csr, "MOST_HANDED", most)
        said.append(row_attention.bytes_needed(given))
    assert said[0] - said[1] == bytes_of_both + 4 * graph.num_edges


@pytest.mark.usefixtures("on_a_cpu")
def test_a_kernel_that_failed_is_not_asked_again():
    """A call of another dtype is."""
    failures.record("rows", call(), RuntimeError("out of resources"))
    try:
        assert row_attention.unsupported_reason(call()) == "RuntimeError: out of resources"
        assert row_attention.unsupported_reason(call(dtype=torch.float64)) is None
        assert rows.unsupported_reason(call()) is None
    finally:
        failures.forget()
