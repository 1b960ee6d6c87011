"""What a guarantee is: a promise with a threshold, the cases that measure it, and the outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from gnn_attention.backends import RefusalError
from gnn_attention.verify.measure import badness

Tell = Callable[[str], None]
# a kind of comparison, its error as a share of the allowed one, and what is wrong
Finding = tuple[str, float, str]
Case = TypeVar("Case")


@dataclass(frozen=True)
class Measured:
    """The outcome of a guarantee: what was measured in words, and every case that failed."""

    value: str
    failures: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """True if no case failed.

        >>> Measured("0 of 10 differ").holds, Measured("1 of 10 differs", ("case 7: off by 2",)).holds
        (True, False)
        """
        return not self.failures


@dataclass(frozen=True)
class Guarantee:
    """A promise that ``python -m tests.guarantees`` measures.

    ``measure(count, tell)`` runs ``count`` cases and calls ``tell(text)`` now and then to report what it
    does. It returns failures and never raises them. The slow tests run ``quick`` cases, the command ``full``.
    """

    name: str
    promise: str
    bar: str
    quick: int
    full: int
    measure: Callable[[int, Tell], Measured]


@dataclass
class Tally:
    """What came of all cases: comparisons and failures by kind and subject, and the worst share of each kind."""

    compared: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def total(self, kind: str) -> int:
        """How many comparisons of a kind there were, of all subjects."""
        return sum(count for (each, _), count in self.compared.items() if each == kind)

    def measured(self, value: str, due: Iterable[tuple[str, str]]) -> Measured:
        """The outcome in words. Every kind and subject that is due must have been compared."""
        missing = [f"no {kind} of {name}".strip() for kind, name in due if not self.compared[kind, name]]
        return Measured(value, (*self.failures, *missing))


def run_cases(
    cases: Iterable[tuple[object, Case]],
    subjects: Iterable[str],
    check: Callable[[Case, str], Iterable[Finding]],
    tell: Tell,
) -> Tally:
    """Check every subject, such as a backend, on every case, which comes with its label.

    A finding with words is a failure, as is every exception but a refusal by name, which is counted.
    """
    tally, subjects = Tally(), list(subjects)
    for label, case in cases:
        tell(str(label))
        for subject in subjects:
            place = f"{label}, {subject}".removesuffix(", ")
            try:
                for kind, share, wrong in check(case, subject):
                    tally.compared[kind, subject] += 1
                    tally.worst[kind] = max(tally.worst.get(kind, 0.0), badness(share))
                    if wrong:
                        tally.wrong[kind] += 1
                        tally.failures.append(f"{place}: {wrong}"[:500])
            except RefusalError:
                tally.compared["refused", subject] += 1
            except Exception as error:  # a guarantee reports whatever is raised
                said = " ".join(str(error).split())
                tally.failures.append(f"{place}: {type(error).__name__}: {said}"[:500])
    return tally
