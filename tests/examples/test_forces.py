"""``examples.forces`` learns forces, which are exact derivatives of an energy without direction."""

import sys

import pytest
import torch
from support.bounds import assert_exact
from support.extras import needs

from examples import clusters, derivatives, forces

ase, neighbors = needs("ase"), needs("ase.neighborlist")
STRUCTURES = [x.double() for x in clusters.draw_structures(3, torch.Generator().manual_seed(0))]


def test_neighbours_are_those_of_ase_and_of_the_same_structure():
    model = forces.Potential().double()
    for x in STRUCTURES:
        pairs = neighbors.neighbor_list("ij", ase.Atoms(positions=x.position.numpy()), clusters.CUTOFF)
        assert {*zip(*x.graph.edge_index.tolist(), strict=True)} == {*zip(*pairs, strict=True)}
    expected = torch.cat([forces.predict_forces(model, x) for x in STRUCTURES])
    assert_exact(forces.predict_forces(model, clusters.join(STRUCTURES)), expected)


@pytest.mark.parametrize("name", ["layers.0.bias.0.weight", "layers.0.qkv.weight", "layers.1.sink"])
def test_the_gradient_of_the_loss_is_that_of_central_differences(name):
    torch.manual_seed(0)
    parameter = (model := forces.Potential().double()).get_parameter(name)
    start, direction = parameter.detach().clone(), torch.randn_like(parameter)

    def loss(h):
        parameter.data = start + h * direction
        return forces.force_loss(model, lambda: STRUCTURES[0])

    slope = (torch.autograd.grad(loss(0.0), parameter)[0] * direction).sum()
    derivatives.check_derivative("loss", slope, lambda h: loss(h).detach())


def test_wrong_forces_raise_an_error(monkeypatch):
    forward, predict, model = forces.Potential.forward, forces.predict_forces, forces.Potential()
    monkeypatch.setattr(forces.Potential, "forward", lambda *x: forward(*x) + x[2][:, 0] ** 3)
    with pytest.raises(ArithmeticError, match="rotation: output"):
        forces.check_forces(model, STRUCTURES[0])
    monkeypatch.setattr(forces, "predict_forces", lambda *x: 1.001 * predict(*x))
    with pytest.raises(ArithmeticError, match="forces: error allowed"):
        forces.check_forces(model, STRUCTURES[0])


def test_the_command(capsys, monkeypatch):
    assert forces.main(["--structures", "3", "--steps", "2"]) == 0
    assert "2 steps on 3 structures" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "ase", None)
    assert forces.main([]) == 2
    assert "pip install ase" in capsys.readouterr().err


@pytest.mark.slow
def test_forces_are_much_better_than_none():
    _, trained, zero = forces.train(structures=160, steps=1500, seed=0)["errors"].values()
    assert trained < zero / 10
