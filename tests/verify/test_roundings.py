"""The rule by which a check passes, and what one rounding does to a problem whose SDPA error is 0 by luck."""

import math

import pytest
import torch

from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.verify.measure import Truth, judge, widen_by_roundings

EPS = torch.finfo(torch.float32).eps


def one_sender(inputs):
    """A query that attends to one key: its weight is 1, its lse the logit ``q k``."""
    out = torch.ones_like(inputs["q"]) * inputs["v"]
    return out, out, (inputs["q"] * inputs["k"]).squeeze(-1)


def widen_one_sender(q, v):
    leaves = {name: torch.full((1, 1, 1, 1), x) for name, x in (("q", q), ("k", 1.0), ("v", v))}
    gradients = {"q": torch.zeros(1, 1, 1, 1), "k": torch.zeros(1, 1, 1, 1), "v": torch.ones(1, 1, 1, 1)}
    zero_errors = dict.fromkeys(["out", *gradients], 0.0)
    truth = Truth(leaves["v"].double(), gradients, zero_errors, zero_errors)
    return widen_by_roundings(truth, one_sender, leaves, torch.ones(1, 1, 1, 1))


def test_lse_is_rounded_by_those_that_compute_weights_again():
    """Its size is that of the logit: 100 has a hundred times the roundings of 1, all of which the weight of 1
    gets.
    """
    for logit in (1.0, 100.0, 1e4):
        truth = widen_one_sender(logit, 0.0)
        assert truth.yardstick["v"] == 0
        assert 0.05 * logit * EPS < truth.fused_yardstick["v"] <= logit * EPS


def test_delta_is_rounded_by_everybody():
    """It is subtracted from ``grad_out . v``, its equal: a large v hides that the gradient of q is 0."""
    small, large = widen_one_sender(1.0, 1.0), widen_one_sender(1.0, 100.0)
    assert 0 < small.yardstick["q"] <= EPS * (1 + EPS)  # v is moved by up to EPS, too
    assert large.yardstick["q"] == pytest.approx(100 * small.yardstick["q"], rel=2 * EPS)


def test_the_output_has_the_roundings_of_its_inputs_alone():
    truth = widen_one_sender(100.0, 3.0)
    assert 0 < truth.yardstick["out"] <= 3 * EPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_keys_are_rounded_before_they_are_summed(dtype):
    """Two keys with one bias, whose gradient is 0 in theory: 1/4 of one key, - 1/4 of the other."""

    def layer(inputs):
        k = inputs["b"].expand(2)
        z = (k.softmax(0) * torch.tensor([2.0, 1.0], dtype=torch.float64)).sum().view(1, 1, 1, 1) - 1.5
        return z + 1.5, z, k.logsumexp(0).view(1, 1, 1), k  # z is 0: delta has no rounding

    true = Truth(torch.full((1, 1, 1, 1), 1.5), {"b": torch.zeros(1)}, {"out": 0.0, "b": 0.0}, {})
    truth = widen_by_roundings(true, layer, {"b": torch.zeros(1)}, torch.ones(1, 1, 1, 1, dtype=dtype))
    assert 0.05 / 4 < truth.yardstick["b"] / torch.finfo(dtype).eps <= 2 / 4 + 1e-3


def test_error_rule():
    """2 units for outputs, 3 for gradients; a unit is the yardstick or half an ulp; a NaN never passes."""
    true = torch.ones(3, dtype=torch.float64)
    truth = Truth(true, {"x": true}, {"out": 1e-3, "x": 1e-3}, {})

    def passes(out_error, gradient_error):
        return judge((true + out_error).float(), {"x": (true + gradient_error).float()}, truth).passed

    assert passes(1.9e-3, 2.9e-3)
    assert not any(passes(*errors) for errors in ((2.1e-3, 0), (0, 3.1e-3), (math.nan, 0), (0, math.nan)))
    exact = Truth(true, {"x": true}, {})
    assert judge(true + 9e-13, {"x": true - 9e-13}, exact).passed
    assert not judge(true + 2e-12, {"x": true}, exact).passed
    assert not judge(true[:2], {"x": true}, exact).passed


def test_the_fused_yardstick_is_for_gradients_of_backends_that_recompute():
    """And for nothing else: outputs, message passing and all other backends have the other yardstick."""
    true = torch.ones(3, dtype=torch.float64)
    truth = Truth(true, {"x": true}, {"out": 1e-3, "x": 1e-3}, {"x": 9e-3})
    assert truth.for_backend(BACKENDS["tiles"]).yardstick == {"out": 1e-3, "x": 9e-3}
    for other in (BACKENDS["dense"], BACKENDS["reference"], Backend("mine", BACKENDS["tiles"].run)):
        assert truth.for_backend(other).yardstick == {"out": 1e-3, "x": 1e-3}
