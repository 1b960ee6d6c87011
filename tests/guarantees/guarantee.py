"""What a guarantee is: a promise with a threshold, the cases that measure it, and the outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """The outcome of a guarantee: what was measured in words, every case that failed or could not run.

    ``skipped`` cases could not run on this machine. Each has its reason, and the guarantee does not hold.
    """

    value: str
    failures: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """True if no case failed and none was skipped.

        >>> Measured("0 of 10 differ").holds, Measured("1 of 10 differs", ("case 7: off by 2",)).holds
        (True, False)
        """
        return not self.failures and not self.skipped


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
