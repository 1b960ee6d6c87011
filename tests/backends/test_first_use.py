"""The first use of a kernel on a GPU, with a CPU in its place: failures, mismatches, warnings."""

import warnings
from dataclasses import replace

import pytest
import torch
from support.bounds import assert_exact
from support.inputs import qkv

import gnn_attention as ga
from gnn_attention import patterns, score_mods
from gnn_attention.backends import BACKENDS, Backend, dispatch, first_use, nonfinite, reference
from gnn_attention.backends.gpu import devices

GRAPH = patterns.window(90, 7)
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.fixture
def calls(monkeypatch):
    """A CPU as if it were an unverified GPU, where auto takes triton, then rows; the calls of its kernel."""
    seen = []
    # with which no choice is cached yet
    monkeypatch.setitem(globals(), "GRAPH", patterns.window(90, 7))
    monkeypatch.setattr(nonfinite, "ASYNCHRONOUS", ("cpu",))
    monkeypatch.setattr(first_use, "_FAILED", {})
    monkeypatch.setattr(first_use, "_RIGHT", set())
    monkeypatch.setattr(dispatch, "_by_time", lambda call: ("triton", "flex", "rows"))
    monkeypatch.setitem(BACKENDS, "flex", replace(BACKENDS["flex"], unsupported_reason=lambda call: "no"))

    def plant(run):
        def watched(call):
            seen.append(call)
            return run(call)

        for name in [name for name in BACKENDS if name.startswith("triton")]:
            supported = replace(BACKENDS[name].capabilities, devices=())
            monkeypatch.setitem(BACKENDS, name, Backend(name, watched, capabilities=supported))
        return seen

    return plant


def given(dtype=torch.float64, requires_grad=False):
    return [x.detach().to(dtype).requires_grad_(requires_grad) for x in qkv(90, dim=8, value_dim=8)]


def formula(call):
    """What kernels do: sums in float32 or more."""
    out, lse = reference.BACKEND.run(call)
    return out, lse


def error_of(error):
    def run(call):
        raise error

    return run


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Triton Error [CUDA]: out of resources"),
        NotImplementedError("no such instruction"),
        type("PTXASError", (Exception,), {})("ptxas failed"),
    ],
)
def test_a_kernel_that_cannot_be_launched_is_replaced_once(error, calls):
    """The warning names kernel, device and error; a second call is quiet, another dtype is tried."""
    seen, inputs = calls(error_of(error)), given()
    message = (
        rf"kernel 'triton \w+' failed on cpu in torch.float64 \({type(error).__name__}: {str(error)[:9]}"
    )
    with pytest.warns(RuntimeWarning, match=message.replace("[", r"\[")) as found:
        out = ga.attend(*inputs, GRAPH)
    assert "backend='auto' takes 'rows' from now on" in str(found[0].message)
    assert_exact(out, ga.attend(*inputs, GRAPH, backend="reference"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ga.attend(*inputs, GRAPH)
        ga.attend(*given(), patterns.window(90, 7))
    assert len(seen) == 1
    with pytest.warns(RuntimeWarning, match=r"in torch.float32"):
        ga.attend(*given(torch.float32), GRAPH)
    assert len(seen) == 2


@pytest.mark.parametrize("error", [ValueError("of the call"), torch.OutOfMemoryError("no memory")])
def test_an_error_of_the_call_or_of_memory_is_raised(error, calls):
    calls(error_of(error))
    with pytest.raises(type(error), match=str(error)):
        ga.attend(*given(), GRAPH)
    assert not first_use._FAILED


def test_a_backend_that_was_named_never_falls_back(calls):
    calls(error_of(RuntimeError("out of resources")))
    with pytest.raises(RuntimeError, match="out of resources"):
        ga.attend(*given(), GRAPH, backend="triton")


OPTIONS = {
    "plain": {},
    "softcap": {"score_mod": score_mods.softcap(2.0)},
    "bias": {"bias": torch.linspace(-1, 1, GRAPH.num_edges, dtype=torch.float64)},
    "sinks": {"sink_logits": torch.linspace(-1, 1, 4, dtype=torch.float64)},
    "dropout": {"dropout": 0.5},
    "lse": {"return_info": True},
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_right_kernel_is_looked_at_once_and_taken(options, dtype, requires_grad, calls):
    """At 64 receivers, with gradients where there will be some; then it runs alone."""
    seen, inputs = calls(formula), given(dtype, requires_grad)
    options = {name: x.to(dtype) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for runs in (3 if requires_grad else 1, 1):
            seen.clear()
            ga.attend(*inputs, GRAPH, **options)
            assert len(seen) == runs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", [30, 45, 60, 89])
def test_a_wrong_kernel_is_named_and_replaced(dtype, where, calls):
    """A tenth more at one of the receivers that are looked at."""

    def wrong(call):
        out, lse = formula(call)
        factor = torch.ones(out.shape[2], 1, dtype=out.dtype)
        factor[where] = 1.1
        return out * factor, lse

    calls(wrong)
    message = (
        r"kernel 'triton \w+' failed .*its output differs from the formula by .*takes 'rows' from now on"
    )
    with pytest.warns(RuntimeWarning, match=message):
        out = ga.attend(*given(dtype), GRAPH)
    assert torch.equal(out, ga.attend(*given(dtype), GRAPH, backend="rows"))


def test_a_wrong_gradient_is_named(calls):
    """Of which the output is right."""

    def wrong(call):
        out, lse = formula(replace(call, v=call.v + (call.v - call.v.detach())))
        return out, lse

    calls(wrong)
    with pytest.warns(RuntimeWarning, match="its gradient of v differs from the formula"):
        ga.attend(*given(requires_grad=True), GRAPH)


def test_a_nan_of_the_kernel_is_a_mismatch(calls):
    calls(lambda call: (reference.BACKEND.run(call)[0] * torch.nan, None))
    with pytest.warns(RuntimeWarning, match="differs from the formula by inf"):
        ga.attend(*given(), GRAPH)


def test_on_a_verified_device_nothing_is_looked_at(calls, monkeypatch):
    """But a kernel that cannot be launched is still replaced."""
    monkeypatch.setitem(devices.VERIFIED, "GPU", "a record")
    assert devices.GENERIC.verified == "a record"
    calls(lambda call: (reference.BACKEND.run(call)[0] + 1, None))
    exact = ga.attend(*given(), GRAPH, backend="reference")
    assert_exact(ga.attend(*given(), GRAPH), exact + 1)
    calls(error_of(RuntimeError("out of resources")))
    with pytest.warns(RuntimeWarning, match="out of resources"):
        assert_exact(ga.attend(*given(), GRAPH), exact)


@pytest.mark.parametrize("failed", [False, True])
def test_a_compiled_program_has_no_break_and_takes_what_was_found(failed, calls):
    seen, inputs = calls(formula), given()
    if failed:
        calls(error_of(RuntimeError("out of resources")))
        with pytest.warns(RuntimeWarning):
            ga.attend(*inputs, GRAPH)
        seen = calls(formula)
    seen.clear()
    exact = ga.attend(*inputs, GRAPH, backend="reference")
    torch._dynamo.reset()
    out = torch.compile(lambda *x: ga.attend(*x, GRAPH), fullgraph=True, backend="eager")(*inputs)
    assert_exact(out, exact)
    assert not first_use._RIGHT
