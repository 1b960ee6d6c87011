"""F4: a non-edge carries nothing. One token is poisoned, and no token without a path to it may change.

The poison is 1e4, NaN or an infinity in one channel of a token's q, k or v in one sample. A receiver that does
not attend to it keeps its output, lse and gradient of q. A sender to which no such receiver attends keeps its
gradients of k and v. A poisoned query spoils its own row, and the gradients of its senders. All of this is
read off the definition of the graph. As a control, a NaN must be in all rows that attend to it, and an
infinity must spoil the rows that it spoils in the reference.

In the reference not a bit may change. Other backends may sum the same numbers in another order: two sums of n
numbers differ by less than ``6 sqrt(n) eps`` of the sum of absolute values, but for once in 10^7 (Higham and
Mary, SIAM J. Sci. Comput. 41, 2019, theorem 2.4), where eps is that of the dtype in which sums are taken. A
half is rounded once more, by up to its own eps. Where a number that is not finite sends a call edge by edge,
it is compared with ``rows``.
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
from gnn_attention.verify.measure import badness
from gnn_attention.verify.truth import make_leaves
from tests.guarantees.draws import DTYPES, Draw, Numbers
from tests.guarantees.guarantee import Finding, Guarantee, Measured, Tell, run_cases
from tests.guarantees.problems import attend_problem, call, usual_backends

LAMBDA = 6.0  # a sum of roundings is beyond LAMBDA sqrt(n) eps / 2 once in 10^7
POISONS = tuple(product("qkv", (1e4, math.nan, math.inf, -math.inf)))


@dataclass(frozen=True)
class PoisonedDraw(Draw):
    """Case ``number`` of F1 as a call of ``attend``; twelve cases in a row hold each poison once."""

    @cached_property
    def numbers(self) -> Numbers:
        """At least one sample, and each in memory of its own: the poison must stay in one."""
        numbers = Numbers.drawn(random.Random(self.number))
        layout = "as made" if numbers.layout == "one sample for all" else numbers.layout
        return replace(numbers, form="attend", batch=max(1, numbers.batch), layout=layout)

    @property
    def poison(self) -> tuple[str, float]:
        return POISONS[self.number % len(POISONS)]


class Poisoning:
    """A call without and with a poisoned token, and whom the poison may reach by the definition."""

    def __init__(self, draw: PoisonedDraw) -> None:
        self.draw, self.problem = draw, attend_problem(draw)
        self.clean = make_leaves(self.problem.inputs)
        self.poisoned = dict(self.clean)
        self.receivers = torch.zeros_like(draw.mask.any(-1))  # [batch, heads, dst]
        where, poison = draw.poison
        x, rng = self.clean[where].detach().clone(), random.Random(f"spot {draw.number}")
        if x.numel():
            sample, channel = rng.randrange(x.shape[0]), rng.randrange(x.shape[3])
            mask = draw.mask[sample]
            table = mask.any(0) if where == "q" else mask.any(0).T  # [token, whom it meets]
            partly = (table.any(-1) & ~table.all(-1)).nonzero().flatten().tolist()
            token = rng.choice(partly or range(x.shape[2]))
            x[sample, :, token, channel] = poison
            self.poisoned[where] = x.requires_grad_()
            if where == "q":
                self.receivers[sample, :, token] = mask[:, token].any(-1)
            else:
                self.receivers[sample] = mask[:, :, token]

    @cached_property
    def senders(self) -> Bool[Tensor, "batch kv_heads src"]:
        """Those to whom a spoiled receiver attends, in any head of their group."""
        spoiled = (self.draw.mask & self.receivers.unsqueeze(-1)).any(-2)
        numbers = self.draw.numbers
        return spoiled.view(numbers.batch, numbers.kv_heads, numbers.group, -1).any(2)

    def results(self, inputs: Mapping[str, Tensor], backend: Backend) -> dict[str, Tensor]:
        """Output, lse in every second dozen of cases, and the gradients of q, k and v in their places."""
        qkv, with_lse = self._laid_out(inputs), self.draw.number // len(POISONS) % 2 == 1
        found = call(self.problem, inputs, qkv, backend, return_info=with_lse)
        results = {"out": found[0], "lse": found[1].lse} if with_lse else {"out": found}
        outs = list(results.values())
        along = [self.problem.direction, *(torch.ones_like(x) for x in outs[1:])]
        gradients = torch.autograd.grad(outs, qkv, along, allow_unused=True, materialize_grads=True)
        named = zip("qkv", gradients, strict=True)
        return results | {f"gradient of {letter}": x for letter, x in named}

    def _laid_out(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(self.problem.layout(inputs[name]) for name in "qkv")

    def change(self, backend: Backend) -> tuple[float, str]:
        """The largest change of a stranger as a share of the allowed one, and what is wrong in words."""
        moves = backend.capabilities.visits_non_edges and not math.isfinite(self.draw.poison[1])
        before = self.results(self.clean, BACKENDS["rows"] if moves else backend)
        after = self.results(self.poisoned, backend)
        worst, reached = 0.0, []
        for name, x in before.items():
            spoiled = self.senders if name in ("gradient of k", "gradient of v") else self.receivers
            change = _largest_change(x[~spoiled], after[name][~spoiled])
            worst = max(worst, badness(change))
            if not change <= (0.0 if backend.name == "reference" else self.allowed):
                reached.append(f"{name} by {change:.3g}")
        if reached:
            return worst / self.allowed, f"strangers changed: {', '.join(reached)}"
        lost = int((self.spoiled_rows & after["out"].isfinite().all(-1)).sum())
        return worst / self.allowed, f"{lost} rows that attend to it are finite" if lost else ""

    @cached_property
    def allowed(self) -> float:
        """By how much two orders of the same sums may differ, as a share of the largest number.

        The longest chain of sums: the channels of a logit and of ``grad_out . v``, the softmax and its row
        over all senders, and the gradient of a key over all receivers of its group.
        """
        numbers, graph = self.draw.numbers, self.draw.graph
        dtype = DTYPES[numbers.dtype]
        wide, own = (torch.finfo(x).eps for x in (accumulation_dtype(dtype), dtype))
        terms = numbers.dim + numbers.value_dim + 2 * graph.num_src + numbers.group * graph.num_dst
        return LAMBDA * math.sqrt(terms) * wide + (own if own > wide else 0.0)

    @cached_property
    def spoiled_rows(self) -> Bool[Tensor, "batch heads dst"]:
        """Rows that cannot be finite: a NaN spoils all receivers, an infinity those of the reference."""
        if math.isnan(self.draw.poison[1]):
            return self.receivers
        with torch.no_grad():
            out: Tensor = call(
                self.problem, self.poisoned, self._laid_out(self.poisoned), BACKENDS["reference"]
            )
        return ~out.isfinite().all(-1)


def _largest_change(before: Tensor, after: Tensor) -> float:
    """As a share of the largest number, or of 1."""
    one, other = before.detach().double(), after.detach().double()
    changes = torch.where(one == other, 0.0, (one - other).abs())
    numbers = one[one.isfinite()].abs()
    size = float(numbers.max()) if numbers.numel() else 0.0
    return float(changes.max()) / max(1.0, size) if changes.numel() else 0.0


def _check(case: Poisoning, name: str) -> Iterator[Finding]:
    yield "changed", *case.change(BACKENDS[name])


def _measure(count: int, tell: Tell) -> Measured:
    cases = [Poisoning(PoisonedDraw(number)) for number in range(count)]
    labels = [f"case {case.draw}, {case.draw.poison[1]:g} in {case.draw.poison[0]}" for case in cases]
    tally = run_cases(zip(labels, cases, strict=True), usual_backends(), _check, tell)
    with_strangers = (
        case for case in cases if case.receivers.any() and not case.receivers.all() and not case.senders.all()
    )
    poisons = {str(case.draw.poison) for case in with_strangers}
    tally.failures += [
        f"no graph with {each} had strangers" for each in map(str, POISONS) if each not in poisons
    ]
    largest = f"{tally.worst.get('changed', 0.0):.2g} of what another order of sums may make"
    value = (
        f"{tally.wrong['changed']:,} of {tally.total('changed'):,} calls changed; largest change {largest}"
    )
    return tally.measured(value, product(["changed"], usual_backends()))


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
