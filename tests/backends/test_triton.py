"""The backend ``triton`` where there is no GPU: what it supports, and what it makes of a call."""

import dataclasses
import itertools
import math
import re
import sys
from functools import partial

import pytest
import torch
from support.bounds import assert_sum
from support.extras import needs

import gnn_attention as ga
from gnn_attention import convert, patterns
from gnn_attention.backends import BACKENDS, triton
from gnn_attention.backends import call as calls
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.gpu import csr, score_terms
from gnn_attention.backends.gpu.csr import rows_of
from gnn_attention.backends.gpu.formats import BLOCKS, ROWS, pack
from gnn_attention.backends.gpu.roofline import Form, Sizes
from gnn_attention.backends.gpu.row_windows import windows_of
from gnn_attention.backends.gpu.score_terms import Added, added_to, added_to_edges, has_edge_numbers
from gnn_attention.backends.gpu.tiles import tiles_of
from gnn_attention.score_mods import alibi, alibi_slopes, chain, relative_bias, softcap

GRAPH, CPU = patterns.window(6, 3), torch.device("cpu")


def call(graph=GRAPH, heads=4, width=8, dtype=torch.float32, **options):
    """A call with so many heads."""
    q, k = (torch.ones(2, heads, tokens, width, dtype=dtype) for tokens in (graph.num_dst, graph.num_src))
    return AttentionCall.checked(q, k, k, graph, **options)


def on_devices(monkeypatch, *devices):
    """As if its kernels ran there."""
    supported = dataclasses.replace(triton.CAPABILITIES, devices=devices)
    for backend in (triton.BACKEND, *triton.FORM_BACKENDS):
        monkeypatch.setitem(BACKENDS, backend.name, dataclasses.replace(backend, capabilities=supported))


@pytest.fixture
def interpreted(monkeypatch):
    """As if Python had been started with TRITON_INTERPRET=1; nothing runs."""
    on_devices(monkeypatch, "cuda", "cpu")
    monkeypatch.setattr(triton, "INSTALLED", True)


def test_without_a_gpu_or_triton(monkeypatch):
    """An error says what to do."""
    on_devices(monkeypatch, "cuda")
    monkeypatch.setattr(triton, "INSTALLED", True)
    q = torch.zeros(1, 1, 6, 4)
    for name in ("triton", "triton-rows", "triton-windows", "triton-tiles"):
        message = f"{name}.*runs on cuda, q is on cpu.*set TRITON_INTERPRET=1 before Python starts"
        with pytest.raises(NotImplementedError, match=message):
            ga.attend(q, q, q, GRAPH, backend=name)
    on_devices(monkeypatch, "cpu")
    monkeypatch.setattr(triton, "INSTALLED", False)
    message = r"needs Triton, which is not installed.*pip install triton"
    with pytest.raises(NotImplementedError, match=message):
        ga.attend(q, q, q, GRAPH, backend="triton")


UNSUPPORTED = {
    "a function": ({"score_mod": lambda s, b, h, i, j: 2 * s}, "score_mod <function.*per-edge bias"),
    "two softcaps": ({"score_mod": chain(softcap(1.0), softcap(2.0))}, "do not support a second softcap"),
    "a subclass": ({"score_mod": type("Own", (alibi,), {})((1.0,) * 4)}, "do not support the score_mod"),
    "too few slopes": ({"score_mod": alibi(alibi_slopes(2))}, "alibi has 2 slopes for 4 heads"),
    "a dtype": ({"dtype": torch.float8_e4m3fn}, "in float16, bfloat16, float32, float64, q is float8"),
    "a width": ({"width": 513}, "rows take heads of at most 512 channels of torch.float32, got 513"),
}


@pytest.mark.parametrize(("options", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_calls(options, message, interpreted):
    assert re.search(message, BACKENDS["triton-rows"].unsupported_reason(call(**options)) or "nothing")


@pytest.mark.parametrize(
    ("dtype", "widest"), [(torch.bfloat16, 256), (torch.float32, 128), (torch.float64, 128)]
)
def test_widths_of_blocks(dtype, widest, interpreted):
    """Windows and tiles take fewer channels than rows, which are then the form of least estimated time."""
    for width in (widest, widest + 1):
        given = call(dtype=dtype, width=width)
        for form in ("windows", "tiles"):
            assert (BACKENDS[f"triton-{form}"].unsupported_reason(given) is None) is (width == widest)
        assert BACKENDS["triton"].unsupported_reason(given) is None
    assert triton.form_name(given) == "rows"
    dense = partial(call, patterns.causal(512), dtype=dtype)
    assert triton.form_name(dense(width=widest)) != "rows"
    assert triton.form_name(dense(width=widest + 1)) == "rows"


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
    graph = dataclasses.replace(graph, dst_offset=2, src_offset=1)
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


def test_slopes_are_those_of_the_heads_of_the_call(interpreted):
    given = dataclasses.replace(call(heads=2), score_mod=alibi((1.0, 2.0, 3.0, 4.0)), first_head=1)
    assert added_to_edges(given)[0].tolist() == [2.0, 3.0]
    assert triton.unsupported_reason(given) is None
    message = "alibi has 4 slopes for 5 heads"
    assert triton.unsupported_reason(dataclasses.replace(given, first_head=3)) == message


LOWERED = {
    "rows": lambda numbers, size: pack(ROWS, rows_of(GRAPH, CPU, numbers)),
    "windows": lambda numbers, size: pack(BLOCKS, windows_of(GRAPH, CPU, size, numbers)),
    "tiles": lambda numbers, size: pack(BLOCKS, tiles_of(GRAPH, CPU, None, numbers)),
}


@pytest.fixture
def given(monkeypatch):
    """The plans of the calls, whose results are ones, and lse 0."""
    plans = []

    def attention(problem, plan):
        plans.append(plan)
        shape = problem.q.shape[:3]
        return problem.q.new_ones(*shape, problem.v.shape[3]), problem.q.new_zeros(shape)

    monkeypatch.setattr(triton.ops, "attention", attention)
    return plans


def same(plan, other):
    """Whether the tensors and numbers of two forms are equal."""
    return plan[1] == other[1] and all(torch.equal(x, y) for x, y in zip(plan[0], other[0], strict=True))


def choose(monkeypatch, name, height=None):
    """As if the estimates were best for this form; the arguments of each estimate."""
    seen = []
    monkeypatch.setattr(triton, "form_of", lambda *about: seen.append(about) or Form(name, height, ""))
    return seen


GIVEN = [{}, {"bias": torch.zeros(15)}, {"score_mod": relative_bias(torch.zeros(4, 7))}]


@pytest.mark.parametrize("options", GIVEN, ids=str)
@pytest.mark.parametrize("form", LOWERED)
def test_a_form_is_lowered_for_what_the_call_has(form, options, given):
    """With the numbers of edges where there is a tensor with an entry for each; windows of 64 receivers."""
    triton.run(call(**options), form)
    assert same(given[0], LOWERED[form](bool(options), 64))
    assert not same(LOWERED[form](True, 64), LOWERED[form](False, 64))


def test_the_best_form_is_lowered_as_it_was_estimated(given, monkeypatch):
    """For the heads of one sample, their channels and dtype."""
    seen = choose(monkeypatch, "windows", 16)
    triton.run(call(patterns.window(6, 3) | GRAPH, heads=4, width=8))
    assert same(given[0], LOWERED["windows"](False, 16))
    assert not same(given[0], LOWERED["windows"](False, 64))
    assert seen[0][1] == Sizes(4, 8, 8, torch.float32)


TAKEN = [("tiles", "too many", "rows"), ("tiles", None, "tiles"), ("windows", "too many", "windows")]


@pytest.mark.parametrize(("best", "reason", "taken"), TAKEN)
def test_too_many_tiles_are_rows(best, reason, taken, interpreted, monkeypatch):
    """Where tiles are named, the reason is returned, but not for a call with numbers for each edge."""
    monkeypatch.setattr(triton.tiles, "unsupported_reason", lambda graph: reason)
    choose(monkeypatch, best)
    assert triton.form_name(call(patterns.causal(6))) == taken
    new = patterns.causal(6)
    assert triton.unsupported_reason(call(new), best) == (reason if best == "tiles" else None)
    assert triton.unsupported_reason(call(new, bias=torch.zeros(21)), best) is None


def test_the_first_of_several_graphs_decides_the_form(interpreted, monkeypatch):
    several = ga.TokenGraph.from_rule(lambda b, h, dst, src: src <= dst - 2 * b - h, 6, batch=2, heads=4)
    checked, seen = [], choose(monkeypatch, "tiles")
    monkeypatch.setattr(triton.tiles, "unsupported_reason", lambda graph: checked.append(graph.num_edges))
    assert triton.form_name(call(several)) == "tiles"
    assert seen[0][0].num_edges == 21
    assert triton.unsupported_reason(call(several), "tiles") is None
    assert checked == [21]


def test_a_sink_is_added_where_there_are_in_edges(given):
    graph = ga.TokenGraph.from_edges(torch.tensor([[0, 2], [1, 1]]), 3, 3)
    out, lse = triton.run(call(graph, sink_logits=torch.zeros(4)), "rows")
    assert out[0, 0, :, 0].tolist() == [0.0, 0.5, 0.0]
    assert lse[0, 0, [0, 2]].tolist() == [-math.inf, -math.inf]
    assert_sum(lse[0, 0, 1], math.log(2.0), terms=3, magnitude=1.0)


def test_what_is_supported_is_asked_once_for_each_graph(interpreted, given, monkeypatch):
    """For a name, shapes and options; each time for a score_mod, of which some are not supported."""
    asked = []
    for backend in triton.FORM_BACKENDS:
        reason = partial(lambda name, call: asked.append(name), backend.name)
        monkeypatch.setitem(
            BACKENDS, backend.name, dataclasses.replace(BACKENDS[backend.name], unsupported_reason=reason)
        )
    q, graph = torch.zeros(1, 1, 6, 4), patterns.window(6, 3)
    for name in ("triton-rows", "triton-rows", "triton-tiles"):
        ga.attend(q, q, q, graph, backend=name)
    assert asked == ["triton-rows", "triton-tiles"]
    for _ in range(2):
        ga.attend(q, q, q, graph, score_mod=softcap(2.0), backend="triton-rows")
    assert asked[2:] == ["triton-rows"] * 2


@pytest.mark.parametrize("form", ["rows", "windows", "tiles"])
def test_a_planned_call_is_little_work_for_the_host(form, interpreted, monkeypatch):
    """A forward call is at most 255 calls of functions, of Python or C, and 65 for its second launch.

    Those of a launch ask tensors for their addresses, which spares Triton's look at every argument.
    """
    needs("triton")
    from support.compile_gate import _NoDriver
    from triton.runtime import JITFunction, driver

    launched, calls = [], []
    monkeypatch.setattr(JITFunction, "run", lambda self, *given, **options: launched.append(self))
    monkeypatch.setattr(driver, "_active", _NoDriver(90))
    q, graph = torch.zeros(1, 4, 70, 64, dtype=torch.bfloat16), patterns.window(70, 16)
    for _ in range(2):
        ga.attend(q, q, q, graph, backend=f"triton-{form}")
    launched.clear()
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event.endswith("call") else None)
    ga.attend(q, q, q, graph, backend=f"triton-{form}")
    sys.setprofile(None)
    # blocks that are not finite are visited again, with care
    launches = 1 if form == "rows" else 2
    assert len(launched) == launches
    assert len(calls) <= 190 + 65 * launches


@pytest.mark.slow
@pytest.mark.parametrize("form", ["rows", "tiles"])
def test_a_second_launch_hands_the_driver_what_the_first_did(form, monkeypatch):
    """Without Triton's look at each argument; where a kernel would be another, Triton looks again."""
    needs("triton")
    from support.compile_gate import launched_for
    from support.host_time import take_cpu_tensors
    from triton.runtime import JITFunction

    looked, started, run = [], [], JITFunction.run
    take_cpu_tensors()
    monkeypatch.setattr(JITFunction, "run", lambda self, *x, **y: looked.append(self) or run(self, *x, **y))
    graph, memory = patterns.window(70, 16), torch.zeros(70 * 2 * 64 + 1, dtype=torch.bfloat16)
    with launched_for("sm_90", lambda *given: started.append(given)):
        # as at first, as before, and not aligned
        for first, wanted in ((0, True), (0, False), (1, True)):
            looked.clear()
            q = memory[first : first + 70 * 2 * 64].view(1, 70, 2, 64).transpose(1, 2)
            ga.attend(q, q, q, graph, backend=f"triton-{form}")
            assert bool(looked) is wanted
    half = len(started) // 3
    for one, other in zip(started[:half], started[half : 2 * half], strict=True):
        # of the outputs, which are new tensors, and what hooks are told, only the kind
        assert [known(x) for x in one] == [known(x) for x in other]


def known(x):
    """What two launches have in common."""
    return (
        (x.dtype, x.shape, x.stride())
        if isinstance(x, torch.Tensor)
        else x
        if type(x) in (int, float)
        else type(x)
    )


# a graph is on the host, and so is what is computed about it without a device
ON_THE_HOST = {("gnn_attention.graph.tiling", "_runs"), ("gnn_attention.graph.derived", "in_degree")}


def has_tensors(x):
    """Whether there is a tensor in what is memoized, however deep."""
    return isinstance(x, torch.Tensor) or (isinstance(x, (tuple, list)) and any(map(has_tensors, x)))


@pytest.mark.parametrize("form", [None, "rows", "windows", "tiles"])
def test_what_is_planned_on_one_stream_is_there_for_every_other(form, given):
    """All tensors kept on a device are made by functions given the device, which ``memoized`` waits for."""
    graph = patterns.window(6, 3)
    mod = chain(relative_bias(torch.zeros(4, 7)), alibi(alibi_slopes(4)), softcap(2.0))
    more = {"bias": torch.zeros(15), "score_mod": mod, "sink_logits": torch.zeros(4), "dropout": 0.5}
    triton.run(call(graph, **more), form)
    made = [key for key, value in graph._memo.data.items() if has_tensors(value)]
    named = {key[0] for key in made if CPU in key}
    assert {triton._plan, calls._has_in_edges, score_terms._on_device, score_terms._in_edges} <= named
    assert {(key[0].__module__, key[0].__name__) for key in made if CPU not in key} <= ON_THE_HOST


def peak(function):
    """The most bytes that a function has allocated at once."""
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = itertools.accumulate(
        event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())
    )
    return max(live)


TABLE_OF_FOUR = torch.zeros(4, 601, requires_grad=True)
COUNTED = {
    "relative_bias": (2, {"score_mod": relative_bias(TABLE_OF_FOUR)}, None),
    "of one sample": (1, {"score_mod": relative_bias(TABLE_OF_FOUR)}, None),
    "of eight samples": (8, {"score_mod": relative_bias(TABLE_OF_FOUR)}, None),
    "a bias": (2, {}, (2, 4)),
    "a bias by head": (2, {}, (4,)),
    "a bias for all": (2, {}, ()),
    "before and after softcap": (2, {"score_mod": chain(relative_bias(TABLE_OF_FOUR), softcap(2.0))}, (2, 4)),
    "both after": (2, {"score_mod": relative_bias(TABLE_OF_FOUR)}, (2, 4)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "options", "bias"), COUNTED.values(), ids=COUNTED)
def test_numbers_of_edges_are_counted(batch, options, bias, dtype, interpreted, monkeypatch):
    """Both passes allocate no more than is said, and at least two fifths of it, beyond a plain call."""
    needs("triton")
    from gnn_attention.backends.gpu.kernels import _common

    monkeypatch.setattr(_common, "launch", lambda *given, **more: None)
    monkeypatch.setattr(csr, "MOST_HANDED", 0)
    graph = patterns.causal(300)
    order = torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(0))
    graph = ga.TokenGraph.from_edges(graph.edge_index[:, order], 300)
    q = torch.zeros(batch, 4, 300, 16, dtype=dtype, requires_grad=True)
    numbers = None if bias is None else torch.zeros(*bias, graph.num_edges, dtype=dtype, requires_grad=True)
    given = {**options, "bias": numbers}

    def both(**given):
        out = ga.attend(q, q, q, graph, **given, backend="triton-rows")
        out.sum().backward()

    both(**given)
    both()
    found = peak(partial(both, **given)) - peak(both)
    said = triton.bytes_needed(AttentionCall.checked(q, q, q, graph, **given), "rows")
    said -= 2**26 + triton.bytes_of(graph, True)
    assert 0.4 * said <= found <= said


@pytest.mark.parametrize(("form", "needs_gradients"), [("rows", True), ("rows", False), ("tiles", True)])
def test_p_and_ds_are_counted(form, needs_gradients, interpreted, monkeypatch):
    """In training, in rows: two numbers for each edge and head, and 4 bytes for the place of each edge."""
    needs("triton")
    from gnn_attention.backends.gpu.kernels import _common

    monkeypatch.setattr(_common, "launch", lambda *given, **more: None)
    graph, found, said = patterns.causal(300), [], []
    q = torch.zeros(2, 4, 300, 16, requires_grad=needs_gradients)

    def both():
        out = ga.attend(q, q, q, graph, backend=f"triton-{form}")
        return torch.autograd.grad(out.sum(), q) if needs_gradients else out

    for most in (0, 2**28):
        monkeypatch.setattr(csr, "MOST_HANDED", most)
        both()
        found.append(peak(both))
        said.append(triton.bytes_needed(AttentionCall.checked(q, q, q, graph), form))
    handed = 2 * 4 * 8 * graph.num_edges if form == "rows" and needs_gradients else 0
    assert said[1] - said[0] == handed + (4 * graph.num_edges if handed else 0)
    assert 0.9 * handed <= found[1] - found[0] <= handed


def scattered(blocks):
    """An edge in each of ``blocks x blocks`` tiles of 64."""
    place = torch.cartesian_prod(torch.arange(blocks), torch.arange(blocks)).t() * 64
    return convert.from_edge_index(place.contiguous(), 64 * blocks, 64 * blocks)


def test_tiles_are_counted_for_the_form_tiles():
    """Two sides of an entry of 8 bytes and a mask of 64 words each; no rows, unless for a bias."""
    given, form = call(graph=scattered(3)), partial(triton.bytes_needed, form="tiles")
    assert form(given) == 2 * 9 * (8 + 64 * 8) + 2**26
    biased = call(graph=scattered(3), bias=torch.zeros(9))
    assert form(biased) == form(given) + triton.bytes_needed(biased, "rows") - 2**26
