"""F5: malformed inputs over the whole public surface, each answered by a named error, eager and under
``torch.compile``.

The cases are in the tables of this folder. A case is refused as it must be if the exception has the type that
is named and is this library's own code with one short sentence that names the argument, what came and what to
do, if nothing of the object changed, and if the next valid call on it gives the right numbers. What goes
through ``attend`` or a layer is run compiled, too.

>>> measure(0, print).holds, measure(1, lambda line: None).failures
(False, ())
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from tests.guarantees.guarantee import Guarantee, Measured, Tell
from tests.guarantees.malformed import caches, calls, graphs, hugging, layers, tools
from tests.guarantees.malformed.case import COMPILED, EAGER, Case, faults

__all__ = ["GUARANTEE", "cases", "measure"]

LEAST = 150  # cases that the promise speaks of
BETWEEN_LINES = 20  # cases


@cache
def cases() -> tuple[Case, ...]:
    """All of them, in the order of the tables; names are their own.

    >>> len({str(case) for case in cases()}) == len(cases()) >= LEAST
    True
    """
    return tuple(case for table in (calls, layers, caches, graphs, tools, hugging) for case in table.cases())


def measure(count: int, tell: Tell) -> Measured:
    """Ask ``count`` of the cases, spread evenly over them, each in all its ways; at most all of them."""
    chosen = _spread(cases(), count)
    counts = {EAGER: 0, COMPILED: 0}
    failures: list[str] = []
    skipped = [f"{case}: needs {case.subject.needs}" for case in chosen if case.subject.is_missing]
    for number, (case, way) in enumerate(_ways([case for case in chosen if not case.subject.is_missing])):
        counts[way] += 1
        failures += [f"{case} ({way}): {fault}" for fault in _faults(case, way)]
        if number % BETWEEN_LINES == 0:
            tell(f"{number} counts, {len(failures)} faults, at {case}")
    failures += [f"no case was run {way}" for way, times in counts.items() if not times]
    cases_run = f"{len(chosen)} of {len(cases())} malformed inputs run; {counts[EAGER]} eager, {counts[COMPILED]} compiled"
    return Measured(f"{cases_run}; {len(failures)} faults", tuple(failures), tuple(skipped))


def _spread(all_cases: Sequence[Case], count: int) -> list[Case]:
    count = min(count, len(all_cases))
    return [all_cases[place * len(all_cases) // count] for place in range(count)]


def _ways(chosen: Sequence[Case]) -> Iterator[tuple[Case, str]]:
    """Every case eager, and those that can be compiled; of few cases a sample, for its time."""
    compiled = [case for case in chosen if COMPILED in case.ways]
    few = compiled if len(chosen) >= LEAST else compiled[:: max(1, len(compiled))]
    yield from ((case, EAGER) for case in chosen)
    yield from ((case, COMPILED) for case in few)


def _faults(case: Case, way: str) -> list[str]:
    """A subject that cannot even be made is a fault like any other."""
    try:
        return faults(case, way)
    except Exception as error:
        return [f"the case itself fails: {type(error).__name__}: {str(error)[:200]}"]


GUARANTEE = Guarantee(
    name="F5",
    promise="malformed inputs are refused by name, eager and compiled, and the next valid call is right",
    bar=(
        f"every case of at least {LEAST}: the named exception, argument, what came and what to do; nothing "
        "half changed"
    ),
    quick=60,
    full=len(cases()),
    measure=measure,
)
