"""F1: random cases on every backend against the float64 formula, output and every gradient.

The rule is that of ``gnn_attention.verify``: at most twice the error of torch's SDPA in the same dtype
(gradients three times), in float64 1e-12 of the largest number. A NaN where the truth has a number fails; so
does every error that a backend raises, except a named refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gnn_attention.backends import BACKENDS, Backend, RefusalError
from gnn_attention.verify.measure import ALLOWED_GRADIENT, ALLOWED_OUTPUT, Outcome, judge
from tests.guarantees.draws import Draw
from tests.guarantees.guarantee import Guarantee, Measured, Tell
from tests.guarantees.problems import LayerProblem, Problem, problem_of


@dataclass(frozen=True)
class Mismatch:
    """A backend that is not equal to the formula on a draw: ``--case NUMBER`` repeats it."""

    number: int
    backend: str
    message: str
    case: str


@dataclass(frozen=True)
class Tally:
    """What came of some draws: calls judged, calls refused by name, and every mismatch."""

    cases: int
    judged: int
    refused: int
    worst: float
    mismatches: tuple[Mismatch, ...]


def run(
    numbers: Iterable[int],
    backends: Sequence[Backend] | None = None,
    tell: Callable[[int], None] | None = None,
) -> Tally:
    """Judge these draws; ``tell(number)`` is called after each."""
    cases = judged = refused = 0
    worst, mismatches = 0.0, []
    for number in numbers:
        cases += 1
        for _, found in case(number, backends):
            refused += found is None
            judged += found is not None
            if isinstance(found, Mismatch):
                mismatches.append(found)
            elif found is not None:
                worst = max(worst, _share(number, found))
        if tell is not None:
            tell(number)
    return Tally(cases, judged, refused, worst, tuple(mismatches))


def _share(number: int, found: Outcome) -> float:
    strict = Draw(number).numbers.dtype == "float64"
    return max(
        found.output / (1.0 if strict else ALLOWED_OUTPUT),
        found.gradient / (1.0 if strict else ALLOWED_GRADIENT),
    )


def case(
    number: int, backends: Sequence[Backend] | None = None
) -> Iterator[tuple[str, Outcome | Mismatch | None]]:
    """For each backend what came of the draw: its errors, a mismatch, or None where it refuses by name."""
    draw = Draw(number)
    problem = problem_of(draw)
    usual: list[Backend | None] = [backend for backend in BACKENDS.values() if not backend.compiled]
    for backend in usual if backends is None else backends:
        name = "walk" if backend is None else backend.name
        yield name, _judged(problem, backend, name)
    if backends is None and isinstance(problem, LayerProblem) and draw.edges is not None:
        yield "walk", _judged(problem, None, "walk")


def _judged(problem: Problem, backend: Backend | None, name: str) -> Outcome | Mismatch | None:
    try:
        found = judge(*problem.run(backend), problem.truth.for_backend(backend))
    except RefusalError:
        return None
    except Exception as error:  # whatever it raises is a mismatch
        return Mismatch(problem.draw.number, name, f"{type(error).__name__}: {error}", str(problem.draw))
    if found.passed:
        return found
    message = f"output {found.output:.3g}, gradient {found.gradient:.3g} of the yardstick"
    return Mismatch(problem.draw.number, name, message, str(problem.draw))


def _measure(count: int, tell: Tell) -> Measured:
    tally = run(range(count), tell=lambda number: tell(f"case {number:,} of {count:,}"))
    value = (
        f"{len(tally.mismatches)} mismatches in {tally.cases:,} cases: {tally.judged:,} calls judged, "
        f"{tally.refused:,} refused "
        f"by name, worst error {tally.worst:.2f} of what is allowed"
    )
    failures = [
        f"case {wrong.number} [{wrong.backend}] {wrong.message} ({wrong.case})" for wrong in tally.mismatches
    ]
    if tally.judged < 4 * max(tally.cases, 1):
        failures.append(f"only {tally.judged} calls were judged in {tally.cases} cases")
    return Measured(value, tuple(failures))


GUARANTEE = Guarantee(
    name="F1",
    promise=(
        "random graphs, sizes, dtypes and options on every backend equal the float64 formula, output and "
        "every gradient"
    ),
    bar="0 mismatches in 10,000 cases",
    quick=100,
    full=10_000,
    measure=_measure,
)
