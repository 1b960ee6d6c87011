"""The three detectors of an audit: gradients, replaced inputs and NaN, each for every pair of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.interpret.audit import probe_groups
from gnn_attention.interpret.audit.runner import Runner

WITNESSES = ("jacobian", "perturbation", "nan")
# random inputs: what is 0 or cancels at one of them does so at the other with probability 0
ROUNDS = 2


@dataclass(frozen=True)
class Detections:
    """The gradient sizes, the pairs that each detector found, and the number of cotangents (``probes``)."""

    sizes: Float[Tensor, "dst src"]
    found: dict[str, Bool[Tensor, "dst src"]]
    probes: int

    @classmethod
    def run(
        cls, runner: Runner, allowed: Bool[Tensor, "dst src"], chosen: Sequence[str], tolerance: float
    ) -> Detections:
        """Run the chosen detectors; the others find nothing."""
        sizes, probes = torch.zeros(allowed.shape, dtype=torch.float64, device="cpu"), 0
        found = dict.fromkeys(WITNESSES, torch.zeros_like(allowed))
        passes = 2 * ROUNDS * ("perturbation" in chosen) + ("nan" in chosen)
        runner.expected = runner.forwards + passes * math.ceil(allowed.shape[1] / runner.samples)
        if "jacobian" in chosen:
            sizes, probes = _gradient_sizes(runner, allowed, tolerance)
            found["jacobian"] = sizes > tolerance * _largest(sizes)
        if "perturbation" in chosen:
            found["perturbation"] = _by_sender(runner, runner.changed)
        if "nan" in chosen:
            found["nan"] = _by_sender(runner, runner.reached_by_nan, rounds=1)
        return cls(sizes, found, probes)

    @property
    def flow(self) -> Bool[Tensor, "dst src"]:
        """Where information flows: NaN alone is no proof."""
        return self.found["jacobian"] | self.found["perturbation"]

    def witnesses(self, src: int, dst: int) -> tuple[str, ...]:
        return tuple(name for name in WITNESSES if bool(self.found[name][dst, src]))

    def share(self, src: int, dst: int) -> float:
        """The gradient as a share of the largest one."""
        return float(self.sizes[dst, src]) / (_largest(self.sizes) or 1.0)


def _gradient_sizes(runner: Runner, allowed: Tensor, tolerance: float) -> tuple[Tensor, int]:
    # the largest gradient of each pair over the rounds, and the number of cotangents: where a group depends
    # on a sender forbidden to all its members, every receiver is probed alone; otherwise there is no leak
    groups = probe_groups.groups(allowed)
    alone = torch.eye(len(allowed), dtype=torch.bool, device="cpu")
    sizes, probes = torch.zeros(allowed.shape, dtype=torch.float64, device="cpu"), 0
    runner.expected += ROUNDS * math.ceil(len(groups) / runner.samples)
    for number in range(ROUNDS):
        found, probes = runner.gradients(runner.draw(number), groups, number), probes + len(groups)
        forbidden = groups.float() @ allowed.float() == 0
        if len(groups) < len(alone) and bool((found[forbidden] > tolerance * _largest(found)).any()):
            groups = alone
            found, probes = runner.gradients(runner.draw(number), groups, number), probes + len(groups)
        sizes = sizes.maximum(_by_pair(found, groups, allowed))
    return sizes, probes


def _by_pair(found: Tensor, groups: Tensor, allowed: Tensor) -> Float[Tensor, "dst src"]:
    # of lone receivers everything, of a group where the sender is allowed for one member only
    if len(groups) == len(allowed):
        return found
    sizes = torch.zeros(allowed.shape, dtype=torch.float64, device="cpu")
    for group, gradient in zip(groups, found, strict=True):
        members = allowed & group[:, None]
        sizes = sizes.maximum(torch.where(members & (members.sum(0) == 1), gradient, 0))
    return sizes


def _by_sender(
    runner: Runner, reached: Callable[[Int[Tensor, " batch"], int], Tensor], rounds: int = ROUNDS
) -> Bool[Tensor, "dst src"]:
    # reached(senders, round) is [senders, dst]; here of all senders in any round
    senders = torch.split(torch.arange(runner.shape[0], device="cpu"), runner.samples)
    with torch.no_grad():
        by_round = [torch.cat([reached(part, number) for part in senders]) for number in range(rounds)]
    return torch.stack(by_round).any(0).T


def _largest(sizes: Tensor) -> float:
    finite = sizes[sizes.isfinite()]
    return float(finite.max()) if len(finite) else 0.0
