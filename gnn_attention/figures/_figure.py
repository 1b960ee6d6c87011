"""What a figure of trust is: a promise with a bar, a command's worth of cases, and what came of measuring them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Figure", "Measured", "Tell"]

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """What came of a figure: ``value`` in words with its numbers, whether the bar holds, and every case that fails."""

    value: str
    failures: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()  # cases that could not be run here, each with its reason: the bar does not hold on them

    @property
    def holds(self) -> bool:
        """True if no case failed and none was skipped.

        >>> Measured("0 of 10 mismatches").holds, Measured("1 of 10 mismatches", ("case 7: output 2.1",)).holds
        (True, False)
        """
        return not self.failures and not self.skipped


@dataclass(frozen=True)
class Figure:
    """A promise that ``gnn-attention verify --figures`` measures.

    ``measure(count, tell)`` runs ``count`` cases and calls ``tell(text)`` now and then, with what it is at; it never raises for a
    failing case. ``quick`` cases are those of the ordinary tests, ``full`` those of the figure.
    """

    name: str
    promise: str
    bar: str
    quick: int
    full: int
    measure: Callable[[int, Tell], Measured]
