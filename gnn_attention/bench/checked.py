"""Right before fast: every method is held against a float64 oracle before it is timed.

On large graphs some receivers stand for all: their outputs are exact dense attention over their own in-edges, and with a
``grad_out`` that is 0 elsewhere the gradients of *all* inputs are exact from those receivers alone. Half of the receivers are
neighbours of one another, so that pieces which meet are seen. The rule is the one of ``verify``: at most twice the error of
torch's SDPA in the same dtype for outputs, three times for gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.bench.methods import Prepared
from gnn_attention.bench.workloads import Problem
from gnn_attention.verify import oracle
from gnn_attention.verify.measure import Truth, gradients_of, judge, worst_errors

__all__ = ["Checked", "Verdict", "sampled_receivers"]

SAMPLED, FEW, LONG = 64, 16, 2**15  # receivers; fewer of them above LONG senders
ORDERS = 3  # in which the yardstick is taken

Core = Callable[..., Tensor]


@dataclass(frozen=True)
class Verdict:
    """Errors in units of the yardstick (SDPA's own), and whether they are allowed."""

    passed: bool
    output: float
    gradient: float | None

    def __str__(self) -> str:
        """As a reason for leaving a method out."""
        gradient = "" if self.gradient is None else f", gradient {self.gradient:.3g} (allowed 3)"
        return f"error {self.output:.3g} of SDPA's own (allowed 2){gradient}"


def sampled_receivers(num_dst: int, num_src: int) -> Tensor:
    """All receivers of a small graph; else the first, the last, random ones and a run of neighbours.

    >>> len(sampled_receivers(40, 40)), len(sampled_receivers(10_000, 10_000))
    (40, 64)
    """
    count = SAMPLED if num_src <= LONG else FEW
    if num_dst <= count or num_dst * num_src <= 256**2:
        return torch.arange(num_dst)
    rng = torch.Generator().manual_seed(1)
    first = int(torch.randint(1, num_dst - count // 2, (1,), generator=rng))
    drawn = torch.randperm(num_dst, generator=rng)[: 2 * count].tolist()
    ordered = dict.fromkeys([0, num_dst - 1, *range(first, first + count // 2), *drawn])
    return torch.tensor(sorted(list(ordered)[:count]))


class Checked:
    """The truth about a problem on some receivers, and the verdict on methods."""

    def __init__(self, problem: Problem) -> None:
        """Work out the float64 output, its gradients, and how far SDPA in float32 is from them."""
        self.problem = problem
        self.rows = sampled_receivers(problem.graph.num_dst, problem.graph.num_src)
        self.mask = _mask_rows(problem, self.rows)
        axis = 1 if problem.layer is not None else 2
        self.direction = problem.grad_out.index_select(axis, self.rows)
        self.grad_out = torch.zeros_like(problem.grad_out).index_copy(axis, self.rows, self.direction)
        self.axis = axis
        out, gradients = self._solved(torch.float64, oracle.attention)
        q_rows, senders = len(self.rows), problem.graph.num_src
        orders = [oracle.Order.draw(number, 1, q_rows, senders, problem.dim, "cpu") for number in range(ORDERS)]
        attempts = (self._solved(problem.inputs[0].dtype, partial(oracle.reordered_sdpa, order)) for order in orders)
        self.truth = Truth(out, gradients, worst_errors(attempts, out, gradients))

    def verdict(self, prepared: Prepared, backward: bool) -> Verdict:
        """Run a method once, forward and, if it can, backward."""
        leaves = _leaves(self.problem, self.problem.inputs[0].dtype, backward)
        with torch.set_grad_enabled(backward):
            out = prepared.call(*leaves.values())
        gradients: Mapping[str, Tensor] = gradients_of(out, self.grad_out, leaves) if backward else {}
        outcome = judge(out.index_select(self.axis, self.rows), gradients, self.truth)
        return Verdict(outcome.passed, outcome.output, outcome.gradient if backward else None)

    def _solved(self, dtype: torch.dtype, core: Core) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = _leaves(self.problem, dtype, True)
        out = self._formula(leaves, core)
        return out.detach(), gradients_of(out, self.direction, leaves)

    def _formula(self, leaves: Mapping[str, Tensor], core: Core) -> Tensor:
        scale, layer = self.problem.dim**-0.5, self.problem.layer
        if layer is None:
            q, k, v = leaves.values()
            return core(q[:, :, self.rows], k, v, self.mask, scale)
        x, W_O = leaves["x"], layer.W_O
        assert W_O is not None
        q, k, v = (torch.einsum("btw,hwd->bhtd", x, W.to(x.dtype)) for W in (layer.W_Q, layer.W_K, layer.W_V))
        return torch.einsum("bhtd,hdw->btw", core(q[:, :, self.rows], k, v, self.mask, scale), W_O.to(x.dtype))


def _leaves(problem: Problem, dtype: torch.dtype, backward: bool) -> dict[str, Tensor]:
    names = "qkv" if problem.layer is None else "x"
    return {name: x.detach().to(dtype).requires_grad_(backward) for name, x in zip(names, problem.inputs, strict=True)}


def _mask_rows(problem: Problem, rows: Tensor) -> Tensor:
    """The mask of some receivers over all senders ``[1, 1, rows, src]``, straight from the rule."""
    zero, senders = torch.zeros(1, 1, dtype=torch.int64), torch.arange(problem.graph.num_src)
    rule: Any = problem.graph.rule
    mask: Tensor = rule(zero, zero, rows.unsqueeze(1), senders.unsqueeze(0))
    return mask.expand(len(rows), len(senders)).view(1, 1, len(rows), len(senders))
