"""Train a MeanFlow on closed curves with attention along a local graph, and sample in one step.

``python -m examples.meanflow --points 64 --steps 600 --out curves.png``

A MeanFlow learns the average velocity ``u(z, r, t)`` of a flow between noise (t = 1) and data (t = 0) from
time r to t. Its target ``v - (t - r) du/dt`` has the derivative of the network along ``(dz, dr, dt) =
(v, 0, 1)``, which ``torch.func.jvp`` computes through the attention. A sample is ``e - u(e, 0, 1)``.

The points of a curve are tokens, and each attends to its neighbours on the curve. First the command compares
the derivative along the edges with that of dense attention, and with central differences.

Source: Geng et al. 2025, Mean Flows for One-step Generative Modeling (arXiv 2505.13447), algorithms 1 and 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import tau
from typing import Any

import torch
from torch import nn

from examples import commands, derivatives
from examples.curves import Curves, angles, draw_curves, draw_rows, energy_distance, figure_for, ring
from gnn_attention import MessagePassingAttention, StandardHeads, TokenGraph
from gnn_attention._support import atomic_files, checks
from gnn_attention._support.shapes import Float, Tensor

Times = Float[Tensor, " curves"]
Velocity = Callable[[Curves, Times, Times], Curves]
# Training computes attention edge by edge, also where dense attention is faster.
BACKEND = "rows"
LAYERS, WIDTH, HEADS = 2, 48, 3
BATCH, LEARNING_RATE = 32, 1e-2
# Distances compare this number of curves, with this number of other draws of the data.
SAMPLES, DRAWS = 2048, 5


class Block(nn.Module):
    """Attention and an MLP, each after a norm whose scale and shift depend on the times."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attention = MessagePassingAttention(StandardHeads(WIDTH, HEADS, bias=True), backend=BACKEND)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.modulation = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor, times: Tensor, graph: TokenGraph) -> Tensor:
        scale, shift, mlp_scale, mlp_shift = self.modulation(times).unsqueeze(1).chunk(4, -1)
        x = x + self.attention(self.norm(x) * (1 + scale) + shift, graph)
        y: Tensor = x + self.mlp(self.norm(x) * (1 + mlp_scale) + mlp_shift)
        return y


class AverageVelocity(nn.Module):
    """Compute ``u(z, r, t)`` of curves ``z [B, points, 2]`` by attention along the graph."""

    def __init__(self, graph: TokenGraph) -> None:
        super().__init__()
        self.graph = graph
        self.embed = nn.Linear(8, WIDTH)
        self.times = nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU())
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.velocity = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2))

    def forward(self, z: Curves, r: Times, t: Times) -> Curves:
        places = angles(self.graph.num_dst).to(z)[:, None] * torch.tensor([1, 2, 4])
        places = torch.cat([places.cos(), places.sin()], -1).expand(len(z), -1, -1)
        phase = torch.stack([t, t - r], -1)[..., None] * torch.arange(1, 5) * (tau / 4)
        times = self.times(torch.cat([phase.cos(), phase.sin()], -1).flatten(1))
        x = self.embed(torch.cat([z, places], -1))
        for block in self.blocks:
            x = block(x, times, self.graph)
        u: Tensor = self.velocity(x)
        return u

    def use(self, backend: str) -> AverageVelocity:
        """Compute attention on this backend, and return the model."""
        for module in self.modules():
            if isinstance(module, MessagePassingAttention):
                module.backend = backend
        return self


def differentiate(model: Velocity, z: Curves, r: Times, t: Times, v: Curves) -> tuple[Curves, Curves]:
    """Return ``u(z, r, t)`` and its derivative along ``(dz, dr, dt) = (v, 0, 1)``."""
    result = torch.func.jvp(model, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    return result[0], result[1]


def meanflow_loss(model: Velocity, draw_batch: Callable[[], Curves]) -> Tensor:
    """Return the mean of ``e / stop(e + 0.01)`` with ``e = mean |u - stop(v - (t - r) du/dt)|^2``.

    Curves, noise and times ``r <= t``, which are equal with probability 1/2, are drawn anew.
    """
    x = draw_batch()
    v = torch.randn_like(x) - x
    r, t = torch.rand(2, len(x), dtype=x.dtype).sort(0).values.unbind()
    r = torch.where(torch.rand(len(x)) < 0.5, r, t)
    u, du_dt = differentiate(model, x + t[:, None, None] * v, r, t, v)
    error = (u - (v - (t - r)[:, None, None] * du_dt).detach()).square().mean((1, 2))
    loss: Tensor = (error / (error.detach() + 0.01)).mean()
    return loss


@torch.no_grad()
def sample(model: Velocity, noise: Curves, r: float = 0.0) -> Curves:
    """Return ``noise - u(noise, r, 1)``: one step along the velocity of t = 1 for r = 1."""
    one = torch.ones(len(noise))
    return noise - model(noise, r * one, one)


def check_jvp(graph: TokenGraph) -> dict[str, float]:
    """Compare the derivative along the edges with dense attention and central differences, in float64."""
    model = AverageVelocity(graph).double()
    z, v = torch.randn(2, 4, graph.num_dst, 2, dtype=torch.float64).unbind()
    r, t = torch.rand(2, 4, dtype=torch.float64).unbind()
    _, du_dt = differentiate(model, z, r, t, v)
    error = derivatives.check_derivative("jvp", du_dt, lambda h: model(z + h * v, r, t + h))
    _, dense = differentiate(model.use("dense"), z, r, t, v)
    return {"dense attention": derivatives.check_exact("jvp", du_dt, dense), "central differences": error}


def measure_times(model: AverageVelocity) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of a forward pass and of its derivative, for a batch of training."""
    z, r, t = torch.randn(BATCH, model.graph.num_dst, 2), torch.rand(BATCH), torch.rand(BATCH)
    calls = {"forward": partial(model, z, r, t), "jvp": partial(differentiate, model, z, r, t, z)}
    milliseconds = {}
    for backend in ("dense", BACKEND):
        model.use(backend)
        milliseconds[backend] = {name: commands.median_milliseconds(call) for name, call in calls.items()}
    return milliseconds


def train(points: int, steps: int, seed: int) -> tuple[dict[str, Any], dict[str, Curves]]:
    """Check the derivative, train, and return the measured numbers and the curves of each kind."""
    graph = ring(checks.size("points", points, 16), points // 16)
    steps = checks.size("steps", steps, 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(checks.size("seed", seed))
        record: dict[str, Any] = {"graph": graph.name, "edges": graph.num_edges, "steps": steps}
        record["errors"] = check_jvp(graph)
        model, noise = AverageVelocity(graph), torch.randn(SAMPLES, points, 2)
        record["milliseconds"] = measure_times(model)
        curves = {"untrained, e - u(e, 0, 1)": sample(model, noise)}
        loss = partial(meanflow_loss, model, partial(draw_curves, BATCH, points))
        record["seconds"] = commands.minimise("meanflow", loss, model.parameters(), steps, LEARNING_RATE)
        curves["trained, e - u(e, 1, 1)"] = sample(model, noise, r=1.0)
        curves["trained, e - u(e, 0, 1)"] = sample(model, noise)
        data, *draws = (draw_curves(SAMPLES, points) for _ in range(1 + DRAWS))
    record["distances"] = {name: energy_distance(x, data) for name, x in curves.items()}
    record["distances of draws"] = [energy_distance(x, data) for x in draws]
    return record, {**curves, "data": data}


def report(record: dict[str, Any]) -> str:
    """Return the measured numbers as text."""
    lines = [f"{record['graph']}: {record['edges']:,} edges; largest difference of jvp in float64:"]
    lines += [f"  {error:.1e} from {name}" for name, error in record["errors"].items()]
    for backend, times in record["milliseconds"].items():
        forward, jvp = times.values()
        lines.append(
            f"{backend}: forward {forward:.1f} ms, jvp {jvp:.1f} ms, {jvp / forward:.1f} times as long"
        )
    lines.append(
        f"{record['steps']} steps in {record['seconds']:.0f} s; energy distance to {SAMPLES} curves:"
    )
    lines += [f"  {name:<26}{distance:.4f}" for name, distance in record["distances"].items()]
    draws = record["distances of draws"]
    return "\n".join([*lines, f"  {'other draws of the data':<26}{min(draws):.4f} to {max(draws):.4f}"])


def _run(args: argparse.Namespace) -> None:
    figure = figure_for(args.out)
    record, curves = train(args.points, args.steps, args.seed)
    if figure is not None:
        draw_rows(figure, curves)
        figure.savefig(args.out)
    atomic_files.write_json(args.json, record, report(record))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, by default with the arguments of ``sys.argv``, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.meanflow", description=__doc__)
    add, default = parser.add_argument, "(default %(default)s)"
    add("--points", type=int, default=64, help=f"points of a curve, at least 16 {default}")
    add("--steps", type=int, default=600, help=f"batches to train on {default}")
    add("--seed", type=int, default=0, help=f"seed of parameters, data and noise {default}")
    add("--out", metavar="FIGURE", help="draw curves into a file (.png, .svg, .pdf); needs matplotlib")
    atomic_files.add_json(parser)
    return commands.run(parser, arguments, _run)


if __name__ == "__main__":
    sys.exit(main())
