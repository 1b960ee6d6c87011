"""What a guarantee is: a promise with a threshold, the cases that measure it, and the outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Tell = Callable[[str], None]


def no_progress(text: str) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class Measured:
    """What came of a guarantee: ``value`` in words, and every case that fails or could not be run here."""

    value: str
    failures: tuple[str, ...] = ()
    skipped: tuple[
        str, ...
    ] = ()  # cases that could not be run here, each with its reason: the bar does not hold on them

    @property
    def holds(self) -> bool:
        """True if no case failed and none was skipped.

        >>> Measured("0 of 10 mismatches").holds, Measured("1 of 10 mismatches", ("case 7: output 2.1",)).holds
        (True, False)
        """
        return not self.failures and not self.skipped


@dataclass(frozen=True)
class Guarantee:
    """A promise that ``python -m tests.guarantees`` measures.

    ``measure(count, tell)`` runs ``count`` cases and calls ``tell(text)`` now and then, with what it is at;
    it never raises for a failing case. ``quick`` cases are those of the ordinary tests, ``full`` those of the
    guarantee.
    """

    name: str
    promise: str
    bar: str
    quick: int
    full: int
    measure: Callable[[int, Tell], Measured]
