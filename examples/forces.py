"""Train a graph attention network on the forces of atoms, which are derivatives of its energy.

``python -m examples.forces --structures 160 --steps 1500``

Atoms attend to the atoms within a cutoff, and the energy is a sum over atoms. Positions enter only through
distances, from which a small MLP computes the bias of each edge and head, so that energies do not change
when atoms are rotated. The forces are ``F = -dE/dx``, and the gradient of their loss differentiates the
attention twice. At the end the command compares forces with central differences of the energy, and forces
of rotated atoms with rotated forces.

The true forces are those of ASE's effective medium theory for clusters of copper and aluminium.

Sources: Behler and Parrinello 2007 (doi 10.1103/PhysRevLett.98.146401), a sum of energies of atoms; Schütt et
al. 2017, SchNet (arXiv 1706.08566), radial functions of distances and the loss of forces.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

import gnn_attention as ga
from examples import commands, derivatives
from examples.clusters import CUTOFF, NUMBERS, Atoms, draw_structures, join, radius_graph
from gnn_attention._support import atomic_files, checks
from gnn_attention._support.shapes import Float, Int, Tensor

LAYERS, WIDTH, HEADS = 2, 32, 8
# The number of radial functions of a distance.
RADIAL = 16
BATCH, LEARNING_RATE = 16, 3e-3
HELD_OUT = 48


class Layer(nn.Module):
    """Attention with a bias of each edge and a sink of each head, then an MLP of each atom.

    The sink lets the sum of the weights depend on the number of near atoms.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Sequential(nn.Linear(RADIAL, WIDTH), nn.SiLU(), nn.Linear(WIDTH, HEADS))
        self.sink = nn.Parameter(torch.zeros(HEADS))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, radial: Tensor, log_envelope: Tensor, graph: ga.TokenGraph) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(1, (3, HEADS, -1))
        q, k, v = qkv.permute(1, 2, 0, 3).unsqueeze(1)
        bias = self.bias(radial).T[None] + log_envelope
        messages = ga.attend(q, k, v, graph, bias=bias, sink_logits=self.sink)
        x = x + self.out(messages[0].transpose(0, 1).flatten(1))
        y: Tensor = x + self.mlp(x)
        return y


class Potential(nn.Module):
    """Compute the energy of each atom in eV, up to a constant, from elements and distances."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(NUMBERS), WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(
        self, element: Int[Tensor, " atoms"], position: Float[Tensor, "atoms three"], graph: ga.TokenGraph
    ) -> Float[Tensor, " atoms"]:
        src, dst = graph.edge_index
        distance = (position[src] - position[dst]).norm(dim=1)
        centres = torch.linspace(1.8, CUTOFF, RADIAL).to(distance)
        radial = torch.exp(-(((distance[:, None] - centres) / (centres[1] - centres[0])) ** 2) / 2)
        # The weight of an edge is proportional to the envelope, which is 0 at the cutoff.
        log_envelope = 2 * (1 - (distance / CUTOFF) ** 2).clamp(min=1e-6).log()
        x = self.embed(element)
        for layer in self.layers:
            x = layer(x, radial, log_envelope, graph)
        energy: Tensor = self.energy(x).squeeze(1)
        return energy


def predict_forces(model: Potential, atoms: Atoms, create_graph: bool = False) -> Tensor:
    """Return ``-dE/dx`` for the energy E of all atoms; with ``create_graph`` it can be differentiated."""
    position = atoms.position.detach().requires_grad_()
    energy = model(atoms.element, position, atoms.graph).sum()
    (gradient,) = torch.autograd.grad(energy, position, create_graph=create_graph)
    return -gradient


def force_loss(model: Potential, draw_batch: Callable[[], Atoms]) -> Tensor:
    """Return the mean squared error of the components of forces."""
    batch = draw_batch()
    return nn.functional.mse_loss(predict_forces(model, batch, create_graph=True), batch.force)


def mean_absolute_error(model: Potential, atoms: Atoms) -> float:
    """Return the mean absolute error of the components of forces."""
    return float((predict_forces(model, atoms) - atoms.force).abs().mean())


def check_forces(model: Potential, atoms: Atoms) -> dict[str, float]:
    """Compare forces with differences of the energy, and forces of rotated atoms, in float64."""
    model, atoms = copy.deepcopy(model).double(), atoms.double()
    forces, x = predict_forces(model, atoms), atoms.position
    steps = torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)

    @torch.no_grad()
    def energies(h: float) -> Tensor:
        return torch.stack([model(atoms.element, x - h * step, atoms.graph).sum() for step in steps])

    error = derivatives.check_derivative("forces", forces.flatten(), energies)
    generator = torch.randn(3, 3, dtype=x.dtype)
    rotation = torch.linalg.matrix_exp(generator - generator.T)
    rotated_atoms = replace(atoms, position=x @ rotation, graph=radius_graph(x @ rotation))
    rotated_forces = predict_forces(model, rotated_atoms)
    exact = derivatives.check_exact("rotation", rotated_forces, forces @ rotation)
    return {"central differences of the energy": error, "rotated forces": exact}


def train(structures: int, steps: int, seed: int) -> dict[str, Any]:
    """Train, check the forces, and return the measured numbers."""
    structures, steps = checks.size("structures", structures, 1), checks.size("steps", steps, 1)
    rng = torch.Generator().manual_seed(checks.size("seed", seed))
    clusters, test = draw_structures(structures, rng), join(draw_structures(HELD_OUT, rng))
    batches = [join(clusters[i : i + BATCH]) for i in range(0, structures, BATCH)]
    record: dict[str, Any] = {"structures": structures, "held out": HELD_OUT, "steps": steps}
    record |= {"atoms": len(test.element), "edges": test.graph.num_edges}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Potential()
        errors = {"untrained": mean_absolute_error(model, test)}
        loss = partial(force_loss, model, partial(random.Random(seed).choice, batches))
        record["seconds"] = commands.minimise("forces", loss, model.parameters(), steps, LEARNING_RATE)
        record["differences"] = check_forces(model, clusters[0])
    errors |= {"trained": mean_absolute_error(model, test), "predicting 0": float(test.force.abs().mean())}
    return record | {"errors": errors}


def report(record: dict[str, Any]) -> str:
    """Return the measured numbers as text."""
    lines = [f"{record['steps']} steps on {record['structures']} structures in {record['seconds']:.0f} s"]
    held_out = f"{record['held out']} other structures ({record['atoms']} atoms, {record['edges']:,} edges)"
    lines.append(f"mean absolute error of a component of the force on {held_out}:")
    lines += [f"  {name:<14}{error:.4f} eV/angstrom" for name, error in record["errors"].items()]
    lines.append("largest difference of the trained model's forces in float64:")
    lines += [f"  {error:.1e} eV/angstrom from {name}" for name, error in record["differences"].items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, by default with the arguments of ``sys.argv``, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.forces", description=__doc__)
    add, default = parser.add_argument, "(default %(default)s)"
    add("--structures", type=int, default=160, help=f"structures to train on {default}")
    add("--steps", type=int, default=1500, help=f"batches to train on {default}")
    add("--seed", type=int, default=0, help=f"seed of parameters and structures {default}")
    atomic_files.add_json(parser)

    def run(args: argparse.Namespace) -> None:
        record = train(args.structures, args.steps, args.seed)
        atomic_files.write_json(args.json, record, report(record))

    return commands.run(parser, arguments, run)


if __name__ == "__main__":
    sys.exit(main())
