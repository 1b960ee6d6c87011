"""F1 and F2: random cases on every backend against the float64 formula, the output and every gradient.

F1 draws every dtype and judges by the rule of ``gnn_attention.verify``: at most twice the error of torch's
SDPA in the same dtype, for gradients three times. F2 draws the same cases in float64, where an error may be
1e-12 of the largest number. A NaN where the formula has a number fails, and so does every exception except a
named refusal.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from gnn_attention.backends import Backend
from gnn_attention.verify.measure import EXACT, Outcome, badness, holds, judge
from gnn_attention.verify.truth import Problem
from tests.guarantees.draws import Draw, Numbers
from tests.guarantees.guarantee import Guarantee, Measured, Tell
from tests.guarantees.problems import problem_of, results, usual_backends


@dataclass(frozen=True)
class DoubleDraw(Draw):
    """Case ``number`` of F1, in float64.

    >>> DoubleDraw(3).numbers.dtype
    'float64'
    """

    @cached_property
    def numbers(self) -> Numbers:
        return replace(Numbers.drawn(random.Random(self.number)), dtype="float64")


def outcomes(
    problem: Problem, backends: Mapping[str, Backend] | None = None
) -> Iterator[tuple[str, Outcome | None]]:
    """The errors of each backend on a problem, or None where the backend refuses it by name."""
    backends = usual_backends() if backends is None else backends
    for name, result in results(problem, backends):
        if result is None:
            yield name, None
        elif isinstance(result, Exception):
            yield name, holds(False, f"{type(result).__name__}: {str(result)[:200]}")
        else:
            yield name, judge(*result, problem.truth.for_backend(backends[name]))


def _measure(draw: type[Draw], count: int, tell: Tell) -> Measured:
    judged: Counter[str] = Counter()
    refused, worst, failures = 0, 0.0, []
    for number in range(count):
        tell(f"case {number:,} of {count:,}")
        case = draw(number)
        for name, outcome in outcomes(problem_of(case)):
            if outcome is None:
                refused += 1
                continue
            judged[name] += 1
            worst = max(worst, badness(outcome.share))
            if not outcome.passed:
                failures.append(f"case {case}, {name}: {outcome.where}")
    mismatches = len(failures)
    failures += [f"no case of {name} was judged" for name in usual_backends() if not judged[name]]
    calls = f"{judged.total():,} calls judged, {refused:,} refused by name"
    value = f"{mismatches} mismatches in {count:,} cases: {calls}, worst error {worst:.2g} of what is allowed"
    return Measured(value, tuple(failures))


GUARANTEES = (
    Guarantee(
        name="F1",
        promise=(
            "random graphs, sizes, dtypes and options on every backend equal the float64 formula, output and "
            "every gradient"
        ),
        bar="0 mismatches: at most twice the error of SDPA in the same dtype, for gradients three times",
        quick=100,
        full=1000,
        measure=partial(_measure, Draw),
    ),
    Guarantee(
        name="F2",
        promise=(
            "in float64, outputs and gradients of every backend and of the message-passing path are those of "
            "the formula"
        ),
        bar=f"0 mismatches: at most {EXACT:g} of the largest number",
        quick=25,
        full=200,
        measure=partial(_measure, DoubleDraw),
    ),
)
