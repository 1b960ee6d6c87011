"""The truth about one call of attention, and how far SDPA is from it: what outputs and gradients are judged
by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.verify import oracle
from gnn_attention.verify.measure import Truth, gradients_of, worst_errors
from gnn_attention.verify.roundings import lse_of, rounded

ORDERS = 8  # in which the yardstick of lse is taken
NEIGHBOURS = 16  # problems over which that of outputs and gradients is taken, itself among them
FAR = 8  # roundings by which a neighbour's inputs are off at most: enough for the last bits of every product to be others
FUSED = ("q", "k", "v", "sink_logits")  # what that kernel gives a gradient: no mask, and so no bias

Attempt = tuple[Tensor, Mapping[str, Tensor]]  # an output and its gradients
Dense = Callable[[Mapping[str, Tensor], Tensor], Tensor]  # inputs, logits [B, H, dst, src] -> logits


def unchanged(inputs: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    return logits


@torch.enable_grad()
def attention_truth(
    inputs: Mapping[str, Tensor],
    mask: Tensor,
    direction: Tensor,
    scale: float,
    dense: Dense = unchanged,
    additive: bool = True,
    factors: Tensor | None = None,
    device: str = "cpu",
) -> Truth:
    """Dense attention in float64 on rounded inputs, its gradients, and SDPA's errors in the dtype of the
    inputs.

    ``inputs`` holds "q", "k", "v", perhaps "sink_logits", and what ``dense`` makes logits of. Gradients are
    those of ``(out * direction).sum()`` for all of them. ``mask [B, H, dst, src]``; ``factors`` multiply the
    weights. Where SDPA cannot express the call (``additive`` False, or factors), the yardstick is the plain
    formula in the dtype of the inputs.

    SDPA's largest error on one problem of few numbers is luck (a half to twice what it mostly is). So it is
    taken over 16
    problems: this one, and 15 :func:`nearby`, each in another order and with a truth of its own.
    """
    problem = DenseProblem(mask, direction, scale, dense, additive, factors, device)
    out, gradients = problem.solved(inputs)
    if direction.dtype == torch.float64:
        return Truth(out, gradients, {})

    def neighbour(number: int, widened: bool) -> Attempt:
        return problem.baseline({name: nearby(x, number) for name, x in inputs.items()}, number, widened)

    def solved(number: int) -> Attempt:
        return problem.solved({name: nearby(x, number) for name, x in inputs.items()})

    truth = Truth(out, gradients, *yardsticks(neighbour, solved))
    return rounded(truth, problem.rows, inputs, direction)


def yardsticks(
    baseline: Callable[[int, bool], Attempt], solved: Callable[[int], Attempt]
) -> tuple[dict[str, float], dict[str, float]]:
    """The largest errors of SDPA, and of its fused kernel, over neighbouring problems by their numbers."""
    truths = [solved(number) for number in range(NEIGHBOURS)]

    def worst(widened: bool) -> dict[str, float]:
        errors = [worst_errors([baseline(n, widened)], *true) for n, true in enumerate(truths)]
        return {name: max(error[name] for error in errors) for name in errors[0]}

    return worst(widened=False), worst(widened=True)


def nearby(x: Tensor, number: int) -> Tensor:
    """Every number moved by up to ``FAR`` roundings of its dtype: the same problem, but for its roundings.
    Number 0 as it is.

    >>> x = torch.ones(3, dtype=torch.bfloat16)
    >>> nearby(x, 0).equal(x), bool(0 < (nearby(x, 1) - x).abs().max() <= FAR * torch.finfo(x.dtype).eps)
    (True, True)
    """
    if not number:
        return x
    rng = torch.Generator().manual_seed(number)
    moves = 2 * torch.rand(x.shape, generator=rng, dtype=torch.float64) - 1
    return (x.detach().cpu().double() * (1 + FAR * torch.finfo(x.dtype).eps * moves)).to(x.device, x.dtype)


@dataclass(frozen=True, eq=False)
class DenseProblem:
    """A call of attention, but for its inputs."""

    mask: Tensor
    direction: Tensor
    scale: float
    dense: Dense = unchanged
    additive: bool = True
    factors: Tensor | None = None
    device: str = "cpu"

    def solved(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Output and gradients in float64."""
        wide = _leaves(inputs, torch.float64, "cpu")
        sinks = wide.get("sink_logits")
        out = oracle.attention(
            *_qkv(wide), self.mask, self.scale, lambda x: self.dense(wide, x), sinks, self.factors
        )
        return out.detach(), gradients_of(out, self.direction.cpu().double(), wide)

    def rows(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The output, again as what heads sum, and lse, of float64 inputs."""
        (q, k, v), sinks, dense = _qkv(inputs), inputs.get("sink_logits"), partial(self.dense, inputs)
        out = oracle.attention(q, k, v, self.mask, self.scale, dense, sinks, self.factors)
        return out, out, lse_of(q, k, self.mask, self.scale, dense, sinks)

    def baseline(
        self, inputs: Mapping[str, Tensor], number: int, widened: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Output and gradients of SDPA in the given order; of the plain formula where SDPA cannot express the
        call.
        """
        leaves = _leaves(inputs, self.direction.dtype, self.device)
        (q, k, v), sinks, mask = _qkv(leaves), leaves.get("sink_logits"), self.mask.to(self.device)
        order = oracle.Order.draw(number, len(q), q.shape[2], k.shape[2], q.shape[3], self.device, widened)
        if self.additive and self.factors is None:
            added = self.dense(leaves, q.new_zeros(mask.shape))
            out = oracle.reordered_sdpa(order, q, k, v, mask, self.scale, added, sinks)
        else:
            factors = None if self.factors is None else self.factors.to(self.device)
            out = oracle.reordered_attention(
                order, q, k, v, mask, self.scale, lambda x: self.dense(leaves, x), sinks, factors
            )
        learned = {name: x for name, x in leaves.items() if name in FUSED} if widened else leaves
        return out.detach(), gradients_of(out, self.direction.to(self.device), learned)


def _leaves(inputs: Mapping[str, Tensor], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    return {name: x.detach().to(device, dtype, copy=True).requires_grad_() for name, x in inputs.items()}


def _qkv(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """``k`` and ``v`` may have one sample for all."""
    q, k, v = (inputs[name] for name in "qkv")
    return q, k.expand(len(q), -1, -1, -1), v.expand(len(q), -1, -1, -1)
