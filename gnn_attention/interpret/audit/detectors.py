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
ROUNDS = 2  # random inputs: what is dead or cancels at one of them does so at the other with probability 0


@dataclass(frozen=True)
class Detections:
    """The gradient sizes ``[dst, src]``, and the pairs that each detector found.

    ``largest`` is the largest gradient of all, ``probes`` the number of cotangents.
    """

    sizes: Float[Tensor, "dst src"]
    jacobian: Bool[Tensor, "dst src"]
    perturbation: Bool[Tensor, "dst src"]
    nan: Bool[Tensor, "dst src"]
    largest: float
    probes: int

    @classmethod
    def run(
        cls, runner: Runner, allowed: Bool[Tensor, "dst src"], chosen: Sequence[str], tolerance: float
    ) -> Detections:
        """Run the chosen detectors; the others report no flow."""
        changed = nan = torch.zeros_like(allowed)
        sizes, probes = torch.zeros(allowed.shape, dtype=torch.float64, device="cpu"), 0
        passes = 2 * ROUNDS * ("perturbation" in chosen) + ("nan" in chosen)
        runner.expected = runner.forwards + passes * math.ceil(allowed.shape[1] / runner.samples)
        if "jacobian" in chosen:
            sizes, probes = _gradient_sizes(runner, allowed, tolerance)
        if "perturbation" in chosen:
            changed = _by_sender(runner, lambda part, n: runner.changed(runner.draw(n), part, n + ROUNDS))
        if "nan" in chosen:
            nan = _by_sender(runner, lambda part, _: runner.reached_by_nan(runner.draw(0), part), rounds=1)
        largest = _largest(sizes)
        return cls(sizes, sizes > tolerance * largest, changed, nan, largest, probes)

    @property
    def flow(self) -> Bool[Tensor, "dst src"]:
        """Where information flows: NaN alone is no proof."""
        return self.jacobian | self.perturbation

    def witnesses(self, src: int, dst: int) -> tuple[str, ...]:
        """The detectors that found the pair."""
        return tuple(name for name in WITNESSES if bool(getattr(self, name)[dst, src]))

    def size(self, src: int, dst: int) -> float:
        """The gradient as a share of the largest one."""
        return float(self.sizes[dst, src]) / (self.largest or 1.0)


def _gradient_sizes(runner: Runner, allowed: Tensor, tolerance: float) -> tuple[Tensor, int]:
    """The largest gradient of each pair over the rounds, and the number of cotangents.

    Where a group depends on a sender that none of its members may depend on, every receiver is probed alone.
    Otherwise there is no leak, and a group's gradient by a sender allowed for one member only is that
    member's.
    """
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
