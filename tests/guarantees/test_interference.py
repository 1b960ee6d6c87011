"""F4: poison reaches no token without a path to it; faults are seen, and what was wrong stays right."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.nn import functional

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends import BACKENDS, nonfinite
from tests.guarantees import interference
from tests.guarantees.guarantee import no_progress
from tests.guarantees.interference import GUARANTEE

pytestmark = pytest.mark.slow  # a guarantee is measured: by default those of test_guarantees alone


def masked_sdpa(call):
    """What a dense kernel makes of hidden tokens: 0 times NaN."""
    mask = call.graph.mask().expand(*call.q.shape[:3], call.k.shape[2])
    out = functional.scaled_dot_product_attention(
        call.q, call.k, call.v, mask, scale=call.scale, enable_gqa=True
    )
    return out, BACKENDS["rows"].run(call)[1]


def cleaned(call):
    """A NaN that is dropped."""
    q, k, v = nonfinite.cleaned(call.q, call.k, call.v)
    return BACKENDS["rows"].run(replace(call, q=q, k=k, v=v))


def failures_of(monkeypatch, name, run, count):
    wrong = replace(BACKENDS[name], run=run)
    monkeypatch.setattr(interference, "usual_backends", lambda: {name: wrong})
    return GUARANTEE.measure(count, no_progress).failures


@pytest.mark.parametrize(
    ("fault", "word"), [(masked_sdpa, "it reached strangers"), (cleaned, "rows that attend to it are finite")]
)
def test_planted_faults_are_seen(fault, word, monkeypatch):
    failures = failures_of(monkeypatch, "tiles", fault, 24)
    assert any("F4, case" in line and "tiles: " in line and word in line for line in failures), failures[:5]


def test_one_bit_in_the_reference_is_seen(monkeypatch):
    def run(call):
        out, lse = sound.run(call)
        return out + 1e-12 * call.v.detach().abs().sum().to(out.dtype).nan_to_num(9.0), lse

    sound = BACKENDS["reference"]
    assert any(
        "reference: it reached strangers" in line for line in failures_of(monkeypatch, "reference", run, 36)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", [0, 1], ids=["q", "k"])
@pytest.mark.parametrize("backend", ["tiles", "mixed", "rows", "dense"])
def test_a_logit_of_plus_infinity_stays_with_those_who_have_it(backend, which, dtype):
    """Its lse is +inf: gradients of senders outside its row were NaN, and in halves the output was finite."""
    rng = torch.Generator().manual_seed(0)
    tokens = [torch.randn(1, 1, 100, 16, generator=rng).to(dtype).abs() for _ in range(3)]
    tokens[which][0, 0, 60, 0] = torch.inf
    q, k, v = (x.requires_grad_() for x in tokens)
    out, info = ga.attend(q, k, v, patterns.causal(100), backend=backend, return_info=True)
    grads = torch.autograd.grad((out.float().sum(), info.lse.sum()), [q, k, v])
    spoiled = torch.arange(100) == 60 if which == 0 else torch.arange(100) >= 60
    assert torch.equal(~out[0, 0].isfinite().all(-1), spoiled)
    strangers = torch.arange(100) > 60 if which == 0 else torch.zeros(100, dtype=torch.bool)
    assert grads[0][0, 0, ~spoiled].isfinite().all()
    assert grads[1][0, 0, strangers].isfinite().all()
    assert grads[2][0, 0, strangers].isfinite().all()


EAGER = [name for name, backend in BACKENDS.items() if not backend.compiled and name != "varlen"]
BIASES = {"plain": None, "bias": torch.zeros(0)}


@pytest.mark.parametrize(
    ("backend", "bias"), [pair for pair in product(EAGER, BIASES) if pair != ("mixed", "bias")]
)
def test_lse_over_no_edges_has_a_gradient(backend, bias):
    """It was cut off in tiles with a bias: a backward pass raised torch's own error."""
    bias = BIASES[bias]
    q = torch.randn(1, 1, 4, 3, requires_grad=True)
    _, info = ga.attend(q, q, q, patterns.window(4, 0), bias=bias, backend=backend, return_info=True)
    (grad,) = torch.autograd.grad(info.lse, [q], torch.ones(1, 1, 4))
    assert torch.equal(grad, torch.zeros_like(q))
