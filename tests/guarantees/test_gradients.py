"""F6: the cases cover everything; a wrong derivative, a wrong second one and a missing refusal are seen."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import pytest
import torch

from gnn_attention.backends import BACKENDS, RefusalError
from tests.guarantees import gradients
from tests.guarantees.gradients import FORMS, GUARANTEE, KINDS, MEASURED, STEP, TRIPLES, GradientCase, measure
from tests.guarantees.guarantee import no_progress

pytestmark = pytest.mark.slow  # a guarantee is measured: by default those of test_guarantees alone


def test_cases_are_all_of_them_and_a_few_are_spread():
    """12 families, 4 forms, every backend and the walk; the same case from the same number."""
    assert len(KINDS) == 12
    assert gcd(STEP, len(TRIPLES)) == 1
    assert {GradientCase(number).triple for number in range(GUARANTEE.full)} == set(TRIPLES)
    few = [GradientCase(number).triple for number in range(GUARANTEE.quick)]
    assert {form for _, form, _ in few} == set(FORMS)
    assert {backend for backend, _, _ in few} >= set(MEASURED)
    assert len({kind for _, _, kind in few}) >= 6
    (_, one), (_, other) = (GradientCase(3).problem() for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def faulty(monkeypatch, run):
    """One that computes otherwise in the place of dense."""
    changed = replace(BACKENDS["dense"], run=run)
    monkeypatch.setitem(BACKENDS, "dense", changed)
    numbers = [n for n in range(GUARANTEE.full) if GradientCase(n).triple[:2] == ("dense", "attend")][:3]
    monkeypatch.setattr(gradients, "GradientCase", lambda number: GradientCase(numbers[number]))
    return [line for line in measure(len(numbers), no_progress).failures if line.startswith("case")]


class HalfGradient(torch.autograd.Function):
    """Right forward, half the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


class LostSecond(torch.autograd.Function):
    """Right forward and gradient, of which it loses track."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0].detach()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (HalfGradient.apply, "GradcheckError: Jacobian mismatch"),
        (LostSecond.apply, "GradcheckError: Jacobian mismatch"),
    ],
)
def test_a_wrong_derivative_is_seen(monkeypatch, change, message):
    """Of the first kind and of the second; the line names the case."""
    right = BACKENDS["dense"].run

    def run(call):
        out, lse = right(call)
        return change(out), lse

    lines = faulty(monkeypatch, run)
    assert len(lines) == 3
    assert all(message in line and "dense, attend" in line for line in lines)


def test_a_raw_error_and_a_refusal_where_none_is_promised_are_seen(monkeypatch):
    """An error from below is no refusal; dense may refuse no second derivative."""

    class NoSecond(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if torch.is_grad_enabled():
                raise RefusalError("no second derivative", "none")
            return grad.clone()

    right = BACKENDS["dense"].run
    assert all(
        "RefusalError" in line
        for line in faulty(monkeypatch, lambda call: (NoSecond.apply(right(call)[0]), None))
    )

    def raw(call):
        raise RuntimeError("from below")

    assert all("RuntimeError: from below" in line for line in faulty(monkeypatch, raw))
