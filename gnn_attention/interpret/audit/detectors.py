"""The three witnesses of an audit: gradients, replaced inputs and NaN, each asked about every pair of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.interpret.audit import probe_groups
from gnn_attention.interpret.audit.runner import Runner

__all__ = ["WITNESSES", "Seen"]

WITNESSES = ("jacobian", "perturbation", "nan")
ROUNDS = 2  # random inputs: what is dead or cancels at one of them does so at the other with probability 0


@dataclass(frozen=True)
class Seen:
    """What each witness saw, ``[dst, src]``: how large a gradient, which of them is a flow, whose output changed, whose was NaN.

    ``largest`` is the largest gradient of all, and ``probes`` says how many cotangents it took.
    """

    sizes: Float[Tensor, "dst src"]
    jacobian: Bool[Tensor, "dst src"]
    perturbation: Bool[Tensor, "dst src"]
    nan: Bool[Tensor, "dst src"]
    largest: float
    probes: int

    @classmethod
    def by(cls, runner: Runner, allowed: Bool[Tensor, "dst src"], witnesses: Sequence[str], tolerance: float) -> Seen:
        """Hear the witnesses; who is not named has seen nothing."""
        changed = poisoned = torch.zeros_like(allowed)
        sizes, probes = torch.zeros(allowed.shape, dtype=torch.float64, device="cpu"), 0
        of_senders = 2 * ROUNDS * ("perturbation" in witnesses) + ("nan" in witnesses)
        runner.expected = runner.forwards + of_senders * math.ceil(allowed.shape[1] / runner.samples)
        if "jacobian" in witnesses:
            sizes, probes = _gradient_sizes(runner, allowed, tolerance)
        if "perturbation" in witnesses:
            changed = _of_each_sender(runner, lambda part, number: runner.changed(runner.draw(number), part, number + ROUNDS))
        if "nan" in witnesses:
            poisoned = _of_each_sender(runner, lambda part, _: runner.reached_by_nan(runner.draw(0), part), rounds=1)
        return cls(sizes, sizes > tolerance * _largest(sizes), changed, poisoned, _largest(sizes), probes)

    @property
    def flow(self) -> Bool[Tensor, "dst src"]:
        """Where information flows: NaN alone is no proof."""
        return self.jacobian | self.perturbation

    def witnesses(self, src: int, dst: int) -> tuple[str, ...]:
        """The names of those who saw it."""
        return tuple(name for name in WITNESSES if bool(getattr(self, name)[dst, src]))

    def size(self, src: int, dst: int) -> float:
        """The gradient as a share of the largest one."""
        return float(self.sizes[dst, src]) / (self.largest or 1.0)


def _gradient_sizes(runner: Runner, allowed: Tensor, tolerance: float) -> tuple[Tensor, int]:
    """The largest gradient of each pair over the rounds, and how many cotangents it took.

    Where a group hears a stranger, whom none of it may hear, every receiver is asked alone. Else nobody leaks, and what a
    group answers about a sender whom one member alone may hear is about that member.
    """
    groups = probe_groups.groups(allowed)
    alone = torch.eye(len(allowed), dtype=torch.bool, device="cpu")
    sizes, probes = torch.zeros(allowed.shape, dtype=torch.float64, device="cpu"), 0
    runner.expected += ROUNDS * math.ceil(len(groups) / runner.samples)
    for number in range(ROUNDS):
        answers, probes = runner.gradients(runner.draw(number), groups, number), probes + len(groups)
        strangers = groups.float() @ allowed.float() == 0
        if len(groups) < len(alone) and bool((answers[strangers] > tolerance * _largest(answers)).any()):
            groups = alone
            answers, probes = runner.gradients(runner.draw(number), groups, number), probes + len(groups)
        sizes = sizes.maximum(_by_pair(answers, groups, allowed))
    return sizes, probes


def _by_pair(
    answers: Float[Tensor, "groups src"], groups: Bool[Tensor, "groups dst"], allowed: Bool[Tensor, "dst src"]
) -> Float[Tensor, "dst src"]:
    """What the answers say of pairs: of lone receivers everything, of a group where one member alone may hear the sender."""
    if len(groups) == len(allowed):
        return answers
    sizes = torch.zeros(allowed.shape, dtype=torch.float64, device="cpu")
    for group, answer in zip(groups, answers, strict=True):
        hearers = allowed & group[:, None]
        sizes = sizes.maximum(torch.where(hearers & (hearers.sum(0) == 1), answer, 0))
    return sizes


def _of_each_sender(runner: Runner, ask: Callable[[Int[Tensor, " batch"], int], Tensor], rounds: int = ROUNDS) -> Tensor:
    """``ask(senders, round)`` tells who was reached, ``[senders, dst]``; here of all senders in any round, ``[dst, src]``."""
    senders = torch.split(torch.arange(runner.shape[0], device="cpu"), runner.samples)
    with torch.no_grad():
        return torch.stack([torch.cat([ask(part, number) for part in senders]) for number in range(rounds)]).any(0).T


def _largest(sizes: Tensor) -> float:
    finite = sizes[sizes.isfinite()]
    return float(finite.max()) if len(finite) else 0.0
