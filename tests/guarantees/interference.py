"""F4: a non-edge carries nothing. If one token is poisoned, no token without a path to it may change.

The poison is 1e4, NaN or an infinity in one channel of a token's q, k or v in one sample. A receiver that does not
attend to the token keeps its output, lse and gradient of q. A sender to which no poisoned receiver attends keeps
its gradients of k and v. A poisoned query affects its own row and the gradients of its senders. All of this is
read off the definition of the graph. As a control, a NaN must reach every row that attends to it, and an infinity
must reach the rows that it reaches in the reference.

In the reference not a bit may change. Other backends may sum the same numbers in another order. Two sums of n
numbers differ by less than ``6 sqrt(n) eps`` of the sum of absolute values, except once in 10^7 (Higham and Mary,
SIAM J. Sci. Comput. 41, 2019, theorem 2.4); eps is that of the dtype in which sums are taken. A half is rounded
once more, by up to its own eps. A backend that computes a call edge by edge because a number is not finite is
compared with ``rows``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import torch

from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.edge_softmax import accumulation_dtype
from gnn_attention.verify.measure import nan_to_inf
from gnn_attention.verify.truth import make_leaves
from tests.guarantees.draws import DTYPES, Draw, Numbers
from tests.guarantees.guarantee import Finding, Guarantee, Tell, Verdict, run_cases
from tests.guarantees.problems import attend_problem, call, usual_backends

LAMBDA = 6.0  # a sum of n roundings exceeds LAMBDA sqrt(n) eps / 2 once in 10^7
POISONS = tuple(product("qkv", (1e4, math.nan, math.inf, -math.inf)))


@dataclass(frozen=True)
class PoisonedDraw(Draw):
    """Case ``number`` of F1 as a call of ``attend``; twelve consecutive cases have each poison once."""

    @cached_property
    def numbers(self) -> Numbers:
        """Draw at least one sample, and store each separately, since only one is poisoned."""
        numbers = Numbers.draw(random.Random(self.number))
        layout = "as made" if numbers.layout == "one sample for all" else numbers.layout
        return replace(numbers, form="attend", batch=max(1, numbers.batch), layout=layout)

    @property
    def poison(self) -> tuple[str, float]:
        return POISONS[self.number % len(POISONS)]


class Poisoning:
    """A call without and with a poisoned token, and the tokens that the poison may reach by definition."""

    def __init__(self, draw: PoisonedDraw) -> None:
        self.draw, self.problem = draw, attend_problem(draw)
        self.clean = make_leaves(self.problem.inputs)
        self.poisoned = dict(self.clean)
        self.receivers = torch.zeros_like(draw.mask.any(-1))  # [batch, heads, dst]
        name, poison = draw.poison
        x = self.clean[name].detach().clone()
        rng = random.Random(f"spot {draw.number}")
        if x.numel():
            sample, channel = rng.randrange(x.shape[0]), rng.randrange(x.shape[3])
            mask = draw.mask[sample]
            table = mask.any(0) if name == "q" else mask.any(0).T  # [token, its senders or receivers]
            # A token that reaches some others but not all leaves something to compare.
            candidates = (table.any(-1) & ~table.all(-1)).nonzero().flatten().tolist()
            token = rng.choice(candidates or range(x.shape[2]))
            x[sample, :, token, channel] = poison
            self.poisoned[name] = x.requires_grad_()
            if name == "q":
                self.receivers[sample, :, token] = mask[:, token].any(-1)
            else:
                self.receivers[sample] = mask[:, :, token]

    @cached_property
    def senders(self) -> Bool[Tensor, "batch kv_heads src"]:
        """Senders to which a poisoned receiver attends in any head of their group."""
        poisoned = (self.draw.mask & self.receivers.unsqueeze(-1)).any(-2)
        numbers = self.draw.numbers
        return poisoned.view(numbers.batch, numbers.kv_heads, numbers.group, -1).any(2)

    def results(self, inputs: Mapping[str, Tensor], backend: Backend) -> dict[str, Tensor]:
        """Compute the output, lse in every second dozen of cases, and the gradients of q, k and v."""
        qkv = self._lay_out(inputs)
        with_lse = self.draw.number // len(POISONS) % 2 == 1
        output = call(self.problem, inputs, qkv, backend, return_info=with_lse)
        results = {"out": output[0], "lse": output[1].lse} if with_lse else {"out": output}
        outs = list(results.values())
        directions = [self.problem.direction, *(torch.ones_like(x) for x in outs[1:])]
        gradients = torch.autograd.grad(outs, qkv, directions, allow_unused=True, materialize_grads=True)
        return results | {f"gradient of {name}": x for name, x in zip("qkv", gradients, strict=True)}

    def _lay_out(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(self.problem.layout(inputs[name]) for name in "qkv")

    def change(self, backend: Backend) -> tuple[float, str]:
        """Return the largest change of an unreached token as a share of the allowed one, and the fault or ""."""
        is_rerouted = backend.capabilities.visits_non_edges and not math.isfinite(self.draw.poison[1])
        before = self.results(self.clean, BACKENDS["rows"] if is_rerouted else backend)
        after = self.results(self.poisoned, backend)
        largest_change, changes = 0.0, []
        for name, x in before.items():
            reached = self.senders if name in ("gradient of k", "gradient of v") else self.receivers
            change = _largest_change(x[~reached], after[name][~reached])
            largest_change = max(largest_change, nan_to_inf(change))
            if not change <= (0.0 if backend.name == "reference" else self.allowed):
                changes.append(f"{name} by {change:.3g}")
        if changes:
            return largest_change / self.allowed, f"strangers changed: {', '.join(changes)}"
        count = int((self.nonfinite_rows & after["out"].isfinite().all(-1)).sum())
        return largest_change / self.allowed, f"{count} rows that attend to it are finite" if count else ""

    @cached_property
    def allowed(self) -> float:
        """The allowed difference between two orders of the same sums, as a share of the largest number.

        The longest chain of sums has the channels of a logit and of ``grad_out . v``, the softmax and its row
        over all senders, and the gradient of a key over all receivers of its group.
        """
        numbers, graph = self.draw.numbers, self.draw.graph
        dtype = DTYPES[numbers.dtype]
        wide_eps, eps = (torch.finfo(x).eps for x in (accumulation_dtype(dtype), dtype))
        terms = numbers.dim + numbers.value_dim + 2 * graph.num_src + numbers.group * graph.num_dst
        return LAMBDA * math.sqrt(terms) * wide_eps + (eps if eps > wide_eps else 0.0)

    @cached_property
    def nonfinite_rows(self) -> Bool[Tensor, "batch heads dst"]:
        """Rows that cannot be finite: receivers of a NaN, or those that an infinity reaches in the reference."""
        if math.isnan(self.draw.poison[1]):
            return self.receivers
        with torch.no_grad():
            out: Tensor = call(
                self.problem, self.poisoned, self._lay_out(self.poisoned), BACKENDS["reference"]
            )
        return ~out.isfinite().all(-1)


def _largest_change(before: Tensor, after: Tensor) -> float:
    """Return the largest change as a share of the largest number, or of 1 if that is larger."""
    before, after = before.detach().double(), after.detach().double()
    changes = torch.where(before == after, 0.0, (before - after).abs())
    numbers = before[before.isfinite()].abs()
    size = float(numbers.max()) if numbers.numel() else 0.0
    return float(changes.max()) / max(1.0, size) if changes.numel() else 0.0


def _check(case: Poisoning, name: str) -> Iterator[Finding]:
    yield "changed", *case.change(BACKENDS[name])


def _measure(count: int, tell: Tell) -> Verdict:
    cases = [Poisoning(PoisonedDraw(number)) for number in range(count)]
    labels = [f"case {case.draw}, {case.draw.poison[1]:g} in {case.draw.poison[0]}" for case in cases]
    tally = run_cases(zip(labels, cases, strict=True), usual_backends(), _check, tell)
    partial_cases = (
        case for case in cases if case.receivers.any() and not case.receivers.all() and not case.senders.all()
    )
    poisons = {str(case.draw.poison) for case in partial_cases}
    tally.failures += [
        f"no graph with {poison} had strangers" for poison in map(str, POISONS) if poison not in poisons
    ]
    largest = f"{tally.largest.get('changed', 0.0):.2g} of what another order of sums may make"
    value = (
        f"{tally.faults['changed']:,} of {tally.total('changed'):,} calls changed; largest change {largest}"
    )
    return tally.outcome(value, product(["changed"], usual_backends()))


GUARANTEE = Guarantee(
    name="F4",
    promise=(
        "a non-edge carries nothing: a poisoned token changes no token that has no path to it, nor its "
        "gradients"
    ),
    bar=(
        "0 calls changed: not a bit in the reference, elsewhere 6 sqrt(n) eps for sums of n numbers, and a "
        "half's rounding"
    ),
    quick=48,
    full=200,
    measure=_measure,
)
