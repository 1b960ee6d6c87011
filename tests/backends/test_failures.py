"""A kernel that cannot be compiled or launched: ``auto`` says so once, and takes the next backend.

A CPU stands in the place of a GPU, by the list of rules for CUDA.
"""

import warnings
from dataclasses import replace

import pytest
import torch
from support.bounds import assert_exact
from support.inputs import qkv
from torch._dynamo.exc import TorchDynamoException

import gnn_attention as ga
from gnn_attention import patterns, score_mods
from gnn_attention.backends import BACKENDS, devices, dispatch, failures, flex
from gnn_attention.backends.gpu import ops, row_attention

LAUNCH_FAILED = RuntimeError("launch failed")


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """The rules for CUDA, without those whose kernels a CPU has not; nothing has failed yet."""
    rules = tuple(rule for rule in dispatch.ON_CUDA if rule.backend in ("dense", "rows", "reference"))
    monkeypatch.setattr(dispatch, "_rules", lambda call: rules)
    monkeypatch.setattr(devices, "ASYNCHRONOUS", ("cpu",))
    monkeypatch.setattr(failures, "_FAILURES", {})


def fail(monkeypatch, name, error=LAUNCH_FAILED):
    """The backend ``name`` raises from now on; the calls that it is given."""
    calls = []

    def run(call):
        calls.append(call)
        raise error

    monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], run=run))
    return calls


def inputs(dtype=torch.float64, tokens=200):
    return [x.detach() for x in qkv(tokens, dim=8, dtype=dtype)]


def test_the_next_backend_takes_the_call_and_one_warning_says_so(monkeypatch):
    """Here ``rows`` takes a causal graph after ``dense``, which is one SDPA call without a mask.

    Calls of the same kind do not try it again, those of another dtype do; one that names it raises.
    """
    calls = fail(monkeypatch, "dense")
    graph = patterns.causal(200)
    message = (
        r"backend 'dense' failed on cpu in torch.float64 \(RuntimeError: launch failed\); "
        "backend='auto' takes 'rows' for such calls from now on"
    )
    with pytest.warns(RuntimeWarning, match=message) as caught:
        out = ga.attend(*inputs(), graph)
    assert len(caught) == 1
    assert_exact(out, ga.attend(*inputs(), graph, backend="reference"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for other in (graph, patterns.causal(200), patterns.causal(300)):
            ga.attend(*inputs(tokens=other.num_dst), other)
    assert len(calls) == 1
    with pytest.warns(RuntimeWarning, match="failed on cpu in torch.float32"):
        ga.attend(*inputs(torch.float32), graph)
    with pytest.raises(RuntimeError, match="launch failed"):
        ga.attend(*inputs(), graph, backend="dense")


def test_a_kernel_that_flex_cannot_compile_is_replaced(monkeypatch):
    """Its errors of a compiler name the call, and are no refusal of the call."""
    error = flex._translate_error(TorchDynamoException("no kernel"))
    assert isinstance(error, NotImplementedError)
    fail(monkeypatch, "dense", error)
    with pytest.warns(RuntimeWarning, match="cannot compile this call"):
        out = ga.attend(*inputs(), patterns.causal(200))
    assert_exact(out, ga.attend(*inputs(), patterns.causal(200), backend="reference"))


@pytest.mark.parametrize(
    "error", [ValueError("of the call"), TypeError("of the call"), torch.OutOfMemoryError("no memory")]
)
def test_an_error_of_the_call_or_of_memory_is_raised(error, monkeypatch):
    fail(monkeypatch, "dense", error)
    with pytest.raises(type(error), match=str(error)):
        ga.attend(*inputs(), patterns.causal(200))
    assert not failures._FAILURES


def test_the_last_error_is_raised_where_no_backend_is_left(monkeypatch):
    for name in ("dense", "rows"):
        fail(monkeypatch, name)
    with pytest.warns(RuntimeWarning) as caught, pytest.raises(RuntimeError, match="launch failed"):
        ga.attend(*inputs(), patterns.causal(200))
    assert ["'dense' failed" in str(each.message) for each in caught] == [True, False]


@pytest.fixture
def failing_kernel(monkeypatch):
    """The kernel of rows is asked and fails; the calls that it was given."""
    monkeypatch.setattr(row_attention, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(row_attention, "INSTALLED", True)
    calls = []

    def run(problem, rows):
        calls.append(problem)
        raise LAUNCH_FAILED

    monkeypatch.setattr(ops, "attention", run)
    return calls


def differing(b, h, dst, src):
    return (dst - src - h - 2 * b) % 50 == 0


CASES = {
    "plain": (patterns.dilated(200, 5, 8), {}),
    "score_mod": (patterns.dilated(200, 5, 8), {"score_mod": score_mods.softcap(2.0)}),
    "by head": (ga.TokenGraph.from_rule(differing, 200, heads=4), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_go_on_by_operators_of_torch(name, failing_kernel):
    """Where the kernel failed, with one warning; the kernel is not asked again."""
    graph, options = CASES[name]
    with pytest.warns(RuntimeWarning, match=r"backend 'rows' failed .*launch failed.*takes 'rows'") as caught:
        out = ga.attend(*inputs(), graph, **options)
    assert len(caught) == 1
    assert_exact(out, ga.attend(*inputs(), graph, **options, backend="reference"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ga.attend(*inputs(), graph, **options)
        ga.attend(*inputs(), graph, **options, backend="rows")
    assert len(failing_kernel) == 1


def test_a_compiled_program_takes_what_is_left(monkeypatch):
    """Without a break in its graph."""
    graph, given = patterns.causal(200), inputs()
    fail(monkeypatch, "dense")
    with pytest.warns(RuntimeWarning, match="takes 'rows'"):
        exact = ga.attend(*given, graph)
    torch._dynamo.reset()
    program = torch.compile(lambda *x: ga.attend(*x, graph), fullgraph=True, backend="eager")
    assert_exact(program(*given), exact)


def test_a_choice_that_is_cached_is_replaced_too(request):
    """A call of the same graph and shapes had another score_mod, whose kernel did not fail."""
    graph, given = patterns.dilated(200, 5, 8), inputs()
    ga.attend(*given, graph, score_mod=score_mods.softcap(2.0))
    request.getfixturevalue("failing_kernel")
    alibi = score_mods.alibi(score_mods.alibi_slopes(4))
    with pytest.warns(RuntimeWarning, match="backend 'rows' failed"):
        out = ga.attend(*given, graph, score_mod=alibi)
    assert_exact(out, ga.attend(*given, graph, score_mod=alibi, backend="reference"))
