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
    def run(cls, runner: Runner, allowed: Pairs, chosen: Sequence[str], tolerance: float) -> Detections:
        sizes, probes = torch.zeros(allowed.shape, dtype=torch.float64, device="cpu"), 0
        found = dict.fromkeys(WITNESSES, torch.zeros_like(allowed))
        # NaN at one random input and at the caller's
        nan_rounds = [number for number in range(runner.rounds) if number == 0 or number >= ROUNDS]
        passes = 2 * runner.rounds * ("perturbation" in chosen) + len(nan_rounds) * ("nan" in chosen)
        runner.expected = runner.forwards + passes * math.ceil(allowed.shape[1] / runner.samples)
        if "jacobian" in chosen:
            sizes, probes = _gradient_sizes(runner, allowed, tolerance)
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


def _gradient_sizes(runner: Runner, allowed: Tensor, tolerance: float) -> tuple[Tensor, int]:
    # the largest of each pair over the rounds, and the number of cotangents; every receiver is probed alone
    # where a group depends on a sender forbidden to all its members: otherwise there is no leak
    groups = groups_of(allowed)
    alone = torch.eye(len(allowed), dtype=torch.bool, device="cpu")
    sizes, probes = torch.zeros(allowed.shape, dtype=torch.float64, device="cpu"), 0
    runner.expected += runner.rounds * math.ceil(len(groups) / runner.samples)
    for number in range(runner.rounds):
        found, probes = runner.gradients(runner.probe(number), groups, number), probes + len(groups)
        forbidden = groups.float() @ allowed.float() == 0
        if len(groups) < len(alone) and bool((found[forbidden] > tolerance * _largest(found)).any()):
            groups = alone
            found, probes = runner.gradients(runner.probe(number), groups, number), probes + len(groups)
        sizes = sizes.maximum(_by_pair(found, groups, allowed))
    return sizes, probes


def _by_pair(found: Tensor, groups: Tensor, allowed: Tensor) -> Float[Tensor, "dst src"]:
    if len(groups) == len(allowed):
        return found
    sizes = torch.zeros(allowed.shape, dtype=torch.float64, device="cpu")
    for group, gradient in zip(groups, found, strict=True):
        members = allowed & group[:, None]
        sizes = sizes.maximum(torch.where(members & (members.sum(0) == 1), gradient, 0))
    return sizes


def _by_sender(
    runner: Runner, reached: Callable[[Int[Tensor, " batch"], int], Tensor], rounds: Iterable[int]
) -> Pairs:
    # reached(senders, round) is [senders, dst]; here of all senders in any round
    senders = torch.split(torch.arange(runner.shape[0], device="cpu"), runner.samples)
    with torch.no_grad():
        by_round = [torch.cat([reached(part, number) for part in senders]) for number in rounds]
    return torch.stack(by_round).any(0).T


def _largest(sizes: Tensor) -> float:
    finite = sizes[sizes.isfinite()]
    return float(finite.max()) if len(finite) else 0.0


def groups_of(allowed: Pairs) -> Bool[Tensor, "groups dst"]:
    """Groups of receivers for one backward pass, far fewer than receivers where ``allowed`` is sparse.

    A backward pass from a group gives for every sender whether *any* member depends on it. So every pair
    ``(dst, src)`` has a group with dst in it and no other member allowed for src: together they decide all
    pairs, the allowed ones (is the edge used?) and the others (does it leak?). Greedy: the group that settles
    most open pairs, then the next. At least as many groups as a sender has receivers are needed; where that
    is an eighth of all, or greedy groups are no fewer, every receiver is probed alone.
    """
    alone = torch.eye(len(allowed), dtype=torch.bool, device="cpu")
    if 8 * int(allowed.sum(0).max()) >= len(allowed):
        return alone
    senders, open_pairs = allowed.float(), torch.ones(allowed.shape, device="cpu")
    found, edges = list[Tensor](), allowed.nonzero().T
    while bool(open_pairs.any()):
        if len(found) == len(allowed) - 1:
            return alone
        group = _best_group(senders, edges, open_pairs)
        settled = (group @ senders - senders == 0) & (group[:, None] > 0)
        open_pairs[settled] = 0
        found.append(group > 0)
    return torch.stack(found)


def _best_group(senders: Tensor, edges: Tensor, open_pairs: Tensor) -> Tensor:
    # receiver by receiver, as long as another one settles more open pairs than it takes away; gain and loss
    # are updated by the senders of each new member, not by all pairs
    member = torch.zeros(len(senders), device="cpu")
    # for each sender: how many of its open pairs the group settles, and whether no member may depend on it
    settled, free = (make(senders.shape[1], device="cpu") for make in (torch.zeros, torch.ones))
    gain, loss, (dst, src) = open_pairs.sum(1), torch.zeros(len(senders), device="cpu"), edges
    by_sender = open_pairs.T.contiguous()
    while True:
        worth = (gain - loss).masked_fill(member > 0, -1)
        best = int(worth.argmax())
        if worth[best] <= 0:
            return member
        now = torch.where(senders[best] > 0, 0, settled) + open_pairs[best] * free
        loss.index_add_(0, dst, (now - settled)[src])
        taken = (senders[best] * free).nonzero().flatten()
        gain = gain - by_sender[taken].sum(0)
        settled, free, member[best] = now, free * (1 - senders[best]), 1
