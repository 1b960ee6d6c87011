"""What one rounding does to a problem: where SDPA's error is 0 by luck, and the least that can be promised is
known by hand.
"""

import pytest
import torch

from gnn_attention.verify.measure import Truth
from gnn_attention.verify.roundings import rounded
from tests.guarantees import equality

pytestmark = pytest.mark.slow  # a guarantee is measured: by default those of test_guarantees alone

EPS = torch.finfo(torch.float32).eps


def one_sender(inputs):
    """A query that attends to one key: its weight is 1, its lse the logit ``q k``."""
    out = torch.ones_like(inputs["q"]) * inputs["v"]
    return out, out, (inputs["q"] * inputs["k"]).squeeze(-1)


def by_one_rounding(q, v):
    leaves = {name: torch.full((1, 1, 1, 1), x) for name, x in (("q", q), ("k", 1.0), ("v", v))}
    gradients = {"q": torch.zeros(1, 1, 1, 1), "k": torch.zeros(1, 1, 1, 1), "v": torch.ones(1, 1, 1, 1)}
    lucky = dict.fromkeys(["out", *gradients], 0.0)
    truth = Truth(leaves["v"].double(), gradients, lucky, lucky)
    return rounded(truth, one_sender, leaves, torch.ones(1, 1, 1, 1))


def test_lse_is_rounded_by_those_that_compute_weights_again():
    """Its size is that of the logit: 100 has a hundred times the roundings of 1, all of which the weight of 1
    gets.
    """
    for logit in (1.0, 100.0, 1e4):
        found = by_one_rounding(logit, 0.0)
        assert found.yardstick["v"] == 0
        assert 0.05 * logit * EPS < found.fused["v"] <= logit * EPS


def test_delta_is_rounded_by_everybody():
    """It is subtracted from ``grad_out . v``, its equal: a large v hides that the gradient of q is 0."""
    small, large = by_one_rounding(1.0, 1.0), by_one_rounding(1.0, 100.0)
    assert 0 < small.yardstick["q"] <= EPS * (1 + EPS)  # v is moved by up to EPS, too
    assert large.yardstick["q"] == pytest.approx(100 * small.yardstick["q"], rel=2 * EPS)


def test_the_output_has_the_roundings_of_its_inputs_alone():
    found = by_one_rounding(100.0, 3.0)
    assert 0 < found.yardstick["out"] <= 3 * EPS


@pytest.mark.parametrize("number", [4037, 5635, 6326, 8208, 3079])
def test_cases_that_were_taken_for_mismatches(number):
    """F1's first whole run: lse of hundreds in float32, and the fused kernel of SDPA where its yardstick was
    the unfused one.
    """
    found = dict(equality.case(number))
    assert not [mismatch for mismatch in found.values() if isinstance(mismatch, equality.Mismatch)]
