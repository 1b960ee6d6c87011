"""Backends are values: users define them, and they declare capabilities and limits of memory and edges."""

import re

import pytest
import torch
from support.inputs import qkv

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention._support import memory
from gnn_attention.backends import BACKENDS, Backend, rows, tiles
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.cost_model import Work

OUT, LSE = (2, 4, 9, 6), (2, 4, 9)
QKV = torch.zeros(2, 4, 9, 8), torch.zeros(2, 2, 9, 8), torch.zeros(2, 2, 9, 6)


def test_user_defined_backend():
    backend = Backend("mine", lambda call: (torch.full(OUT, 7.0), None))
    out, info = ga.attend(*QKV, patterns.causal(9), backend=backend, return_info=True)
    assert (out == 7).all()
    with pytest.raises(NotImplementedError, match="returned no lse"):
        _ = info.lse
    backend_with_lse = Backend("mine", lambda call: (torch.ones(OUT), torch.zeros(LSE)))
    info = ga.attend(*QKV, patterns.causal(9), backend=backend_with_lse, return_info=True)[1]
    assert torch.equal(info.lse, torch.zeros(LSE))
    picky_backend = Backend("picky", backend.run, unsupported_reason=lambda call: "it is Friday")
    message = r"backend .picky. does not support this call on .*causal.*: it is Friday"
    with pytest.raises(ga.RefusalError, match=message) as refusal:
        ga.attend(*QKV, patterns.causal(9), backend=picky_backend)
    assert refusal.value.reason == "it is Friday"


WRONG_BACKENDS = {
    r"run of a Backend must be a function \(call\) -> .*, got 3 of type int": ("mine", 3),
    "unsupported_reason of a Backend must be a function .* got 'no' of type str": ("mine", max, "", "no"),
    r"bytes_needed of a Backend must be a function .* got 7 of type int": ("mine", max, "", max, 7),
    "name of a Backend must be a string, got 3 of type int": (3, max),
}


@pytest.mark.parametrize("message", WRONG_BACKENDS)
def test_backends_with_wrong_fields_are_refused(message):
    with pytest.raises(TypeError, match=message):
        Backend(*WRONG_BACKENDS[message])


NO_RESULT = r"must return \(out, lse \| None\)"
WRONG_RESULTS = [
    (None, TypeError, NO_RESULT + ", got None"),
    ([torch.ones(OUT), None], TypeError, NO_RESULT),
    ((torch.ones(OUT), "lse"), TypeError, NO_RESULT),
    ((torch.ones(2, 4, 9, 4), None), ValueError, r"got \[2, 4, 9, 4\] and None"),
    ((torch.ones(OUT), torch.ones(2, 4, 8)), ValueError, r"and \[2, 4, 8\]"),
    ((torch.ones(OUT), torch.ones(OUT)), ValueError, r"and \[2, 4, 9, 6\]"),
]


# A user-defined backend may have the name of one of the library.
@pytest.mark.parametrize("name", ["mine", "dense"])
@pytest.mark.parametrize(("result", "error", "message"), WRONG_RESULTS)
def test_wrong_results_of_a_user_defined_backend_are_refused(result, error, message, name):
    with pytest.raises(error, match=message):
        ga.attend(*QKV, patterns.causal(9), backend=Backend(name, lambda call: result))


@pytest.mark.parametrize("name", ["dense", "mixed", "reference", "rows", "tiles"])
def test_second_derivatives_pass_through_backends_that_declare_them(name):
    q, k, v = qkv()
    out = ga.attend(q, k, v, patterns.window(9, 3), backend=name)
    (gradient,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
    if BACKENDS[name].capabilities.double_backward:
        assert torch.autograd.grad(gradient.sum(), q)[0].any()
    else:
        with pytest.raises(NotImplementedError, match="second derivatives do not pass"):
            torch.autograd.grad(gradient.sum(), q)


Q, K = torch.zeros(2, 6, 32, 8), torch.zeros(2, 3, 32, 8)
CALL = AttentionCall(Q, K, K, patterns.window(32, 4), 1.0)


@pytest.mark.parametrize("more", [0, 1])
def test_calls_beyond_the_limit_of_a_backend_are_refused(monkeypatch, more):
    """A call at a limit is supported; one more edge or byte is refused."""
    monkeypatch.setattr(memory, "available", lambda: 2**33)
    monkeypatch.setattr(rows, "MAX_BYTES", rows.bytes_needed(CALL) - more)
    counts = {tiles.mixed_work: Work(edges=2**28 + more), tiles.mask_bytes: 2**32 + more}
    monkeypatch.setattr(tiles, "memoized", lambda count, graph: counts[count])
    messages = {
        "rows": "its list of edges would need about 0.0 GiB, the limit is 0 GiB",
        "mixed": "268435457 edges are left outside of well filled tiles, the limit is 268435456",
        "tiles": "would need 4.0 GiB, the limit is 4 GiB; use backend='rows'",
    }
    for name, message in messages.items():
        reason = BACKENDS[name].unsupported_reason(CALL)
        assert re.search(message, reason) if more else reason is None


@pytest.mark.parametrize("name", ["tiles", "rows", "dense"])
def test_available_memory_limits_calls_on_a_cpu(monkeypatch, name):
    assert BACKENDS[name].unsupported_reason(CALL) is None
    monkeypatch.setattr(memory, "shortage", lambda needed: "too little")
    assert "too little" in BACKENDS[name].unsupported_reason(CALL)


VALUES, ENDS = torch.ones(2, 4, 9), torch.arange(9)
# Each line has a name of release 0.2.0, a call by that name, and the same call by the new name.
OLD_NAMES = {
    "modified": (lambda call: call.modified(VALUES, ENDS, ENDS), lambda call: VALUES),
    "dropped": (
        lambda call: call.dropped(VALUES, ENDS, ENDS),
        lambda call: call.apply_dropout(VALUES, ENDS, ENDS),
    ),
    "parts": (lambda call: call.parts()[0][0].q, lambda call: call.slices()[0][0].q),
    "part": (lambda call: call.part(1, 2).k, lambda call: call.select(1, 2).k),
    "checked": (lambda call: call.checked(*QKV, patterns.causal(9)).v, lambda call: call.v),
}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_methods_of_a_call_keep_their_names_of_the_last_release(name):
    call = AttentionCall.from_arguments(*QKV, patterns.causal(9), dropout=0.5)
    call_old, call_new = OLD_NAMES[name]
    with pytest.warns(DeprecationWarning, match=f"{name} is now called"):
        result = call_old(call)
    assert torch.equal(result, call_new(call))
