"""A logit of +inf, and lse over no edges: what is not finite stays in its rows, gradients too."""

import pytest
import torch

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends import BACKENDS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("backend", ["tiles", "mixed", "rows", "dense"])
def test_a_logit_of_plus_infinity_stays_with_those_who_have_it(backend, where, dtype):
    """Token 60 of 100 holds it: a causal query spoils its own row, a key those of all later tokens."""
    rng = torch.Generator().manual_seed(0)
    tokens = [torch.randn(1, 1, 100, 16, generator=rng).to(dtype).abs() for _ in range(3)]
    tokens["qk".index(where)][0, 0, 60, 0] = torch.inf
    q, k, v = (x.requires_grad_() for x in tokens)
    out, info = ga.attend(q, k, v, patterns.causal(100), backend=backend, return_info=True)
    gradients = torch.autograd.grad((out.float().sum(), info.lse.sum()), [q, k, v])
    spoiled = torch.arange(100) == 60 if where == "q" else torch.arange(100) >= 60
    assert torch.equal(~out[0, 0].isfinite().all(-1), spoiled)
    assert gradients[0][0, 0, ~spoiled].isfinite().all()
    # tokens that no spoiled receiver attends to
    others = torch.arange(100) > 60 if where == "q" else torch.zeros(100, dtype=torch.bool)
    for gradient in gradients[1:]:
        assert gradient[0, 0, others].isfinite().all()


EAGER = [name for name, backend in BACKENDS.items() if not backend.compiled and name != "varlen"]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("backend", EAGER)
def test_lse_over_no_edges_has_a_gradient_of_zero(backend, with_bias):
    if with_bias and not BACKENDS[backend].capabilities.bias:
        pytest.skip("it takes no bias")
    bias, q = torch.zeros(0) if with_bias else None, torch.randn(1, 1, 4, 3, requires_grad=True)
    out, info = ga.attend(q, q, q, patterns.window(4, 0), bias=bias, backend=backend, return_info=True)
    hidden = ga.attend(q, q, q.detach() * torch.nan, patterns.window(4, 0), backend=backend)
    (gradient,) = torch.autograd.grad([hidden, info.lse], [q], [out + 1, torch.ones(1, 1, 4)])
    assert torch.equal(gradient, torch.zeros_like(q))
