"""``examples.meanflow`` has the loss of its paper, checks its derivative, and samples in one step."""

import pytest
import torch
from support.bounds import assert_exact
from support.extras import needs
from support.inputs import randn

from examples import curves, derivatives, meanflow
from gnn_attention.verify.measure import FLOAT64_RTOL


def test_the_loss_of_an_exact_average_velocity_is_0():
    """For data that are one curve x, ``u = (z - x) / t``, and any c solves ``d/dt ((t - r) u) = v``."""
    x = randn(16, 2).expand(64, -1, -1)

    def exact(z, r, t, c=0.0):
        return (z - x) / t[:, None, None] + c / torch.where(t > r, t - r, torch.inf)[:, None, None]

    assert_exact(meanflow.sample(exact, randn(64, 16, 2, seed=1)), x)
    assert meanflow.meanflow_loss(lambda *z: exact(*z, c=0.1), lambda: x) < FLOAT64_RTOL
    assert meanflow.meanflow_loss(lambda *z: 2 * exact(*z), lambda: x) > 0.1


def test_energy_distance_is_that_of_scipy():
    a, b = randn(40), randn(30, seed=1) + 0.5
    expected = needs("scipy.stats").energy_distance(a, b) ** 2
    assert_exact(curves.energy_distance(a.view(40, 1, 1), b.view(30, 1, 1)), expected)


def test_a_wrong_derivative_raises_an_error(monkeypatch):
    differentiate = meanflow.differentiate
    monkeypatch.setattr(meanflow, "differentiate", lambda *x: (0, 1.001 * differentiate(*x)[1]))
    with pytest.raises(ArithmeticError, match="jvp: error allowed"):
        meanflow.check_jvp(curves.ring(16, 1))
    with pytest.raises(ArithmeticError, match=r"jvp: output\[0\]: expected 1, got 1.001"):
        derivatives.check_exact("jvp", torch.tensor([1.001]).double(), torch.ones(1).double())


def test_the_command(tmp_path, capsys, monkeypatch):
    needs("matplotlib")
    monkeypatch.setattr(meanflow, "SAMPLES", 32)
    figure = tmp_path / "curves.png"
    options = ["--points", "16", "--steps", "2", "--out", str(figure)]
    assert meanflow.main(options) == 0
    assert "ring(16, 1): 48 edges" in capsys.readouterr().out
    assert figure.read_bytes().startswith(b"\x89PNG")
    for wrong, message in (
        (["--points", "15"], "at least 16, got 15"),
        (["--out", "a.txt"], "ends in one of"),
    ):
        assert meanflow.main([*options, *wrong]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_one_step_is_much_closer_to_the_data_than_without_training():
    record, _ = meanflow.train(points=64, steps=600, seed=0)
    untrained, instantaneous, one_step = record["distances"].values()
    assert one_step < min(untrained / 50, instantaneous / 5)
