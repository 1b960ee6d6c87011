"""Test the rule of a check, and the effect of roundings where the error of SDPA is 0 by luck."""

import math

import pytest
import torch

from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.verify.measure import Truth, judge, widen_by_roundings

EPS = torch.finfo(torch.float32).eps


def one_sender(inputs):
    """Return output, mixture and lse of a query with one key: the weight is 1, and lse is ``q k``."""
    out = torch.ones_like(inputs["q"]) * inputs["v"]
    return out, out, (inputs["q"] * inputs["k"]).squeeze(-1)


def widen_one_sender(q, v):
    leaves = {name: torch.full((1, 1, 1, 1), x) for name, x in (("q", q), ("k", 1.0), ("v", v))}
    gradients = {"q": torch.zeros(1, 1, 1, 1), "k": torch.zeros(1, 1, 1, 1), "v": torch.ones(1, 1, 1, 1)}
    zero_errors = dict.fromkeys(["out", *gradients], 0.0)
    truth = Truth(leaves["v"].double(), gradients, zero_errors, zero_errors)
    return widen_by_roundings(truth, one_sender, leaves, torch.ones(1, 1, 1, 1))


def test_lse_is_rounded_by_those_that_compute_weights_again():
    """The rounding of lse grows with the logit, and the recomputed weight of 1 gets all of it."""
    for logit in (1.0, 100.0, 1e4):
        truth = widen_one_sender(logit, 0.0)
        assert truth.yardstick["v"] == 0
        assert 0.05 * logit * EPS < truth.fused_yardstick["v"] <= logit * EPS


def test_delta_is_rounded_by_everybody():
    """Delta is subtracted from an equal number, so q has gradient 0, but its rounding grows with v."""
    small, large = widen_one_sender(1.0, 1.0), widen_one_sender(1.0, 100.0)
    # v, too, is perturbed by up to EPS.
    assert 0 < small.yardstick["q"] <= EPS * (1 + EPS)
    assert large.yardstick["q"] == pytest.approx(100 * small.yardstick["q"], rel=2 * EPS)


def test_the_output_has_the_roundings_of_its_inputs_alone():
    truth = widen_one_sender(100.0, 3.0)
    assert 0 < truth.yardstick["out"] <= 3 * EPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_keys_are_rounded_before_they_are_summed(dtype):
    """A bias of two keys has gradient 0 in theory, the sum of 1/4 from one key and -1/4 from the other."""

    def layer(inputs):
        k = inputs["b"].expand(2)
        z = (k.softmax(0) * torch.tensor([2.0, 1.0], dtype=torch.float64)).sum().view(1, 1, 1, 1) - 1.5
        # As z is 0, delta has no rounding.
        return z + 1.5, z, k.logsumexp(0).view(1, 1, 1), k

    exact_truth = Truth(torch.full((1, 1, 1, 1), 1.5), {"b": torch.zeros(1)}, {"out": 0.0, "b": 0.0}, {})
    truth = widen_by_roundings(exact_truth, layer, {"b": torch.zeros(1)}, torch.ones(1, 1, 1, 1, dtype=dtype))
    assert 0.05 / 4 < truth.yardstick["b"] / torch.finfo(dtype).eps <= 2 / 4 + 1e-3


def test_error_rule():
    """Outputs may be off by 2 yardsticks and gradients by 3, or by 1e-12 in float64; a NaN never passes."""
    ones = torch.ones(3, dtype=torch.float64)
    truth = Truth(ones, {"x": ones}, {"out": 1e-3, "x": 1e-3}, {})

    def passes(out_error, gradient_error):
        return judge((ones + out_error).float(), {"x": (ones + gradient_error).float()}, truth).passed

    assert passes(1.9e-3, 2.9e-3)
    assert not any(passes(*errors) for errors in ((2.1e-3, 0), (0, 3.1e-3), (math.nan, 0), (0, math.nan)))
    exact_truth = Truth(ones, {"x": ones}, {})
    assert judge(ones + 9e-13, {"x": ones - 9e-13}, exact_truth).passed
    assert not judge(ones + 2e-12, {"x": ones}, exact_truth).passed
    assert not judge(ones[:2], {"x": ones}, exact_truth).passed


def test_the_fused_yardstick_is_for_gradients_of_backends_that_recompute():
    """Outputs, and gradients of all other backends, have the yardstick of SDPA's unfused kernel."""
    ones = torch.ones(3, dtype=torch.float64)
    truth = Truth(ones, {"x": ones}, {"out": 1e-3, "x": 1e-3}, {"x": 9e-3})
    assert truth.for_backend(BACKENDS["tiles"]).yardstick == {"out": 1e-3, "x": 9e-3}
    for backend in (BACKENDS["dense"], BACKENDS["reference"], Backend("mine", BACKENDS["tiles"].run)):
        assert truth.for_backend(backend).yardstick == {"out": 1e-3, "x": 1e-3}
