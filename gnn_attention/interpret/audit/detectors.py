"""The three detectors of an audit: gradients, replaced inputs and NaN, each for every pair of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.interpret.audit.runner import ROUNDS, Runner

WITNESSES = ("jacobian", "perturbation", "nan")
Pairs = Bool[Tensor, "dst src"]


@dataclass(frozen=True)
class Detections:
    """The gradient sizes, the pairs that each detector found, and the number of cotangents (``probes``)."""

    sizes: Float[Tensor, "dst src"]
    found: dict[str, Pairs]
    probes: int

    @classmethod
    def run(cls, runner: Runner, chosen: Sequence[str], tolerance: float) -> Detections:
        num_dst, num_src = runner.num_dst, runner.shape[0]
        sizes = torch.zeros(num_dst, num_src, dtype=torch.float64, device="cpu")
        found = dict.fromkeys(WITNESSES, torch.zeros_like(sizes, dtype=torch.bool))
        # NaN is tried at one random input and at the caller's.
        nan_rounds = [number for number in range(runner.rounds) if number == 0 or number >= ROUNDS]
        passes = 2 * runner.rounds * ("perturbation" in chosen) + len(nan_rounds) * ("nan" in chosen)
        probes = runner.rounds * num_dst * ("jacobian" in chosen)
        runner.expected = runner.forwards + passes * math.ceil(num_src / runner.samples)
        runner.expected += math.ceil(probes / runner.samples)
        if "jacobian" in chosen:
            sizes = _gradient_sizes(runner)
            found["jacobian"] = sizes > tolerance * _largest(sizes)
        if "perturbation" in chosen:
            found["perturbation"] = _by_sender(runner, runner.changed, range(runner.rounds))
        if "nan" in chosen:
            found["nan"] = _by_sender(runner, runner.reached_by_nan, nan_rounds)
        return cls(sizes, found, probes)

    @property
    def flow(self) -> Pairs:
        """Where information flows: NaN alone is no proof."""
        return self.found["jacobian"] | self.found["perturbation"]

    def seen(self, src: int, dst: int) -> tuple[tuple[str, ...], float]:
        """The detectors that found a pair, and its gradient as a share of the largest one."""
        names = tuple(name for name in WITNESSES if bool(self.found[name][dst, src]))
        return names, float(self.sizes[dst, src]) / (_largest(self.sizes) or 1.0)


def _gradient_sizes(runner: Runner) -> Float[Tensor, "dst src"]:
    """The largest gradient of each pair over the rounds: a cotangent for every receiver alone."""
    alone = torch.eye(runner.num_dst, dtype=torch.bool, device="cpu")
    sizes = [runner.gradients(runner.probe(number), alone, number) for number in range(runner.rounds)]
    return torch.stack(sizes).amax(0)


def _by_sender(
    runner: Runner, reached: Callable[[Int[Tensor, " batch"], int], Tensor], rounds: Iterable[int]
) -> Pairs:
    """Where ``reached(senders, round) [senders, dst]`` is true in any round, for all senders."""
    senders = torch.split(torch.arange(runner.shape[0], device="cpu"), runner.samples)
    with torch.no_grad():
        by_round = [torch.cat([reached(part, number) for part in senders]) for number in rounds]
    return torch.stack(by_round).any(0).T


def _largest(sizes: Tensor) -> float:
    finite = sizes[sizes.isfinite()]
    return float(finite.max()) if len(finite) else 0.0
