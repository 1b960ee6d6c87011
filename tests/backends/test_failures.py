"""If a kernel fails to compile or launch, ``auto`` warns once and chooses the next backend."""

import warnings
from dataclasses import replace

import pytest
import torch
from support.bounds import assert_exact
from support.inputs import qkv
from torch._dynamo.exc import TorchDynamoException

import gnn_attention as ga
from gnn_attention import patterns, score_mods
from gnn_attention._support import devices
from gnn_attention.backends import BACKENDS, dispatch, failures, flex
from gnn_attention.backends.gpu import ops, row_attention

LAUNCH_FAILED = RuntimeError("launch failed")


@pytest.fixture(autouse=True)
def simulate_gpu(monkeypatch):
    """Use the candidates for CUDA that also run on a CPU, and forget earlier failures."""
    candidates = tuple(x for x in dispatch.ON_CUDA if x.backend in ("dense", "rows", "reference"))
    monkeypatch.setattr(dispatch, "_rank_candidates", lambda call: candidates)
    monkeypatch.setattr(devices, "ASYNCHRONOUS", ("cpu",))
    monkeypatch.setattr(failures, "_FAILURES", {})


def fail(monkeypatch, name, error=LAUNCH_FAILED):
    """Make the backend ``name`` raise an error, and return the list of its calls."""
    calls = []

    def run(call):
        calls.append(call)
        raise error

    monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], run=run))
    return calls


def make_inputs(dtype=torch.float64, tokens=200):
    return [x.detach() for x in qkv(tokens, dim=8, dtype=dtype)]


def test_the_next_backend_runs_the_call_with_one_warning(monkeypatch):
    """``dense``, the first choice on a causal graph, fails, and ``rows`` follows.

    Calls of the same kind skip ``dense``, but calls of another dtype try it; a call by name raises the error.
    """
    calls = fail(monkeypatch, "dense")
    graph = patterns.causal(200)
    message = (
        r"backend 'dense' failed on cpu in torch.float64 \(RuntimeError: launch failed\); "
        "backend='auto' takes 'rows' for such calls from now on"
    )
    with pytest.warns(RuntimeWarning, match=message) as record:
        out = ga.attend(*make_inputs(), graph)
    assert len(record) == 1
    assert_exact(out, ga.attend(*make_inputs(), graph, backend="reference"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for next_graph in (graph, patterns.causal(200), patterns.causal(300)):
            ga.attend(*make_inputs(tokens=next_graph.num_dst), next_graph)
    assert len(calls) == 1
    with pytest.warns(RuntimeWarning, match="failed on cpu in torch.float32"):
        ga.attend(*make_inputs(torch.float32), graph)
    with pytest.raises(RuntimeError, match="launch failed"):
        ga.attend(*make_inputs(), graph, backend="dense")


def test_a_kernel_that_flex_cannot_compile_is_replaced(monkeypatch):
    """An error of flex's compiler names the call, but counts as a failure of the kernel."""
    error = flex._translate_error(TorchDynamoException("no kernel"))
    assert isinstance(error, NotImplementedError)
    fail(monkeypatch, "dense", error)
    with pytest.warns(RuntimeWarning, match="cannot compile this call"):
        out = ga.attend(*make_inputs(), patterns.causal(200))
    assert_exact(out, ga.attend(*make_inputs(), patterns.causal(200), backend="reference"))


@pytest.mark.parametrize(
    "error", [ValueError("wrong call"), TypeError("wrong call"), torch.OutOfMemoryError("no memory")]
)
def test_an_error_of_the_call_or_of_memory_is_raised(error, monkeypatch):
    fail(monkeypatch, "dense", error)
    with pytest.raises(type(error), match=str(error)):
        ga.attend(*make_inputs(), patterns.causal(200))
    assert not failures._FAILURES


def test_the_last_error_is_raised_if_no_backend_remains(monkeypatch):
    for name in ("dense", "rows"):
        fail(monkeypatch, name)
    with pytest.warns(RuntimeWarning) as record, pytest.raises(RuntimeError, match="launch failed"):
        ga.attend(*make_inputs(), patterns.causal(200))
    assert ["'dense' failed" in str(warning.message) for warning in record] == [True, False]


@pytest.fixture
def failing_kernel(monkeypatch):
    """Make the kernel of rows available but failing, and return the list of its calls."""
    monkeypatch.setattr(row_attention, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(row_attention, "HAS_TRITON", True)
    calls = []

    def run(problem, rows):
        calls.append(problem)
        raise LAUNCH_FAILED

    monkeypatch.setattr(ops, "attention", run)
    return calls


def sparse_rule(b, h, dst, src):
    return (dst - src - h - 2 * b) % 50 == 0


CASES = {
    "plain": (patterns.dilated(200, 5, 8), {}),
    "score_mod": (patterns.dilated(200, 5, 8), {"score_mod": score_mods.softcap(2.0)}),
    "by head": (ga.TokenGraph.from_rule(sparse_rule, 200, heads=4), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_uses_torch_operators_after_its_kernel_failed(name, failing_kernel):
    """There is one warning, and the kernel is not tried again."""
    graph, options = CASES[name]
    with pytest.warns(RuntimeWarning, match=r"backend 'rows' failed .*launch failed.*takes 'rows'") as record:
        out = ga.attend(*make_inputs(), graph, **options)
    assert len(record) == 1
    assert_exact(out, ga.attend(*make_inputs(), graph, **options, backend="reference"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ga.attend(*make_inputs(), graph, **options)
        ga.attend(*make_inputs(), graph, **options, backend="rows")
    assert len(failing_kernel) == 1


def test_a_compiled_program_avoids_a_failed_backend(monkeypatch):
    """The program compiles without a graph break."""
    graph, qkv_inputs = patterns.causal(200), make_inputs()
    fail(monkeypatch, "dense")
    with pytest.warns(RuntimeWarning, match="takes 'rows'"):
        expected = ga.attend(*qkv_inputs, graph)
    torch._dynamo.reset()
    program = torch.compile(lambda *x: ga.attend(*x, graph), fullgraph=True, backend="eager")
    assert_exact(program(*qkv_inputs), expected)


def test_a_cached_choice_is_replaced_too(request):
    """The choice was cached by a call with another score_mod, whose kernel did not fail."""
    graph, qkv_inputs = patterns.dilated(200, 5, 8), make_inputs()
    ga.attend(*qkv_inputs, graph, score_mod=score_mods.softcap(2.0))
    request.getfixturevalue("failing_kernel")
    alibi = score_mods.alibi(score_mods.alibi_slopes(4))
    with pytest.warns(RuntimeWarning, match="backend 'rows' failed"):
        out = ga.attend(*qkv_inputs, graph, score_mod=alibi)
    assert_exact(out, ga.attend(*qkv_inputs, graph, score_mod=alibi, backend="reference"))
