"""A guarantee is a promise with a threshold, which cases measure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from gnn_attention.backends import RefusalError
from gnn_attention.verify.measure import nan_to_inf

Tell = Callable[[str], None]
# A finding is the kind of a comparison, its error as a share of the allowed one, and the fault or "".
Finding = tuple[str, float, str]
Case = TypeVar("Case")


@dataclass(frozen=True)
class Verdict:
    """The verdict on a guarantee: the measurement in words, and every case that failed."""

    value: str
    failures: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """True if no case failed.

        >>> Verdict("0 of 10 differ").holds, Verdict("1 of 10 differs", ("case 7: off by 2",)).holds
        (True, False)
        """
        return not self.failures


@dataclass(frozen=True)
class Guarantee:
    """A promise that ``python -m tests.guarantees`` measures.

    ``measure(count, tell)`` runs ``count`` cases and reports its progress by ``tell(text)``. It returns failures
    and never raises them. The slow tests run ``quick`` cases, the command ``full``.
    """

    name: str
    promise: str
    bar: str
    quick: int
    full: int
    measure: Callable[[int, Tell], Verdict]


@dataclass
class Tally:
    """Count comparisons by kind and subject, and keep the faults and the largest share of each kind."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    largest: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def total(self, kind: str) -> int:
        """Return the number of comparisons of a kind, over all subjects."""
        return sum(count for (name, _), count in self.counts.items() if name == kind)

    def outcome(self, value: str, expected: Iterable[tuple[str, str]]) -> Verdict:
        """Return the verdict; an expected pair of kind and subject that was never compared is a failure."""
        missing = [f"no {kind} of {name}".strip() for kind, name in expected if not self.counts[kind, name]]
        return Verdict(value, (*self.failures, *missing))


def run_cases(
    cases: Iterable[tuple[object, Case]],
    subjects: Iterable[str],
    check: Callable[[Case, str], Iterable[Finding]],
    tell: Tell,
) -> Tally:
    """Check every subject, such as a backend, on every pair of a label and a case.

    A finding with a fault is a failure, as is every exception but a refusal, which is counted.
    """
    tally, subjects = Tally(), list(subjects)
    for label, case in cases:
        tell(str(label))
        for subject in subjects:
            name = f"{label}, {subject}".removesuffix(", ")
            try:
                for kind, share, fault in check(case, subject):
                    tally.counts[kind, subject] += 1
                    tally.largest[kind] = max(tally.largest.get(kind, 0.0), nan_to_inf(share))
                    if fault:
                        tally.faults[kind] += 1
                        tally.failures.append(f"{name}: {fault}"[:500])
            except RefusalError:
                tally.counts["refused", subject] += 1
            except Exception as error:  # a guarantee reports every exception as a failure
                message = " ".join(str(error).split())
                tally.failures.append(f"{name}: {type(error).__name__}: {message}"[:500])
    return tally
