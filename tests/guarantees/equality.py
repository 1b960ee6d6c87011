"""F1 and F2: outputs and gradients of random cases on every backend equal those of the float64 formula.

F1 draws every dtype and judges by the rule of ``gnn_attention.verify``: an error is at most twice that of torch's
SDPA in the same dtype, and three times for gradients. F2 draws the same cases in float64, where an error may be
1e-12 of the largest number. A NaN in place of a number fails, and so does every exception but a refusal.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product

from gnn_attention.backends import BACKENDS
from gnn_attention.verify.measure import FLOAT64_RTOL, judge
from gnn_attention.verify.truth import Problem
from tests.guarantees.draws import Draw, Numbers
from tests.guarantees.guarantee import Finding, Guarantee, Tally, Tell, Verdict, run_cases
from tests.guarantees.problems import problem_of, takes, usual_backends


@dataclass(frozen=True)
class DoubleDraw(Draw):
    """Case ``number`` of F1, in float64.

    >>> DoubleDraw(3).numbers.dtype
    'float64'
    """

    @cached_property
    def numbers(self) -> Numbers:
        return replace(Numbers.draw(random.Random(self.number)), dtype="float64")


def compare(draws: Iterable[Draw], tell: Tell) -> Tally:
    """Compare every backend on every draw with the formula, by the rule of ``verify``."""
    cases = ((f"case {draw}", problem_of(draw)) for draw in draws)
    return run_cases(cases, usual_backends(), _check, tell)


def _check(problem: Problem, name: str) -> Iterator[Finding]:
    if takes(problem, name):
        outcome = judge(*problem.solve(BACKENDS[name]), problem.truth.for_backend(BACKENDS[name]))
        yield "judged call", outcome.share, outcome.where


def _measure(draw: type[Draw], count: int, tell: Tell) -> Verdict:
    tally = compare(map(draw, range(count)), tell)
    calls = f"{tally.total('judged call'):,} calls judged, {tally.total('refused'):,} refused by name"
    mismatches = f"{len(tally.failures)} mismatches in {count:,} cases"
    error = f"worst error {tally.largest.get('judged call', 0.0):.2g} of what is allowed"
    return tally.outcome(f"{mismatches}: {calls}, {error}", product(["judged call"], usual_backends()))


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
        bar=f"0 mismatches: at most {FLOAT64_RTOL:g} of the largest number",
        quick=25,
        full=200,
        measure=partial(_measure, DoubleDraw),
    ),
)
