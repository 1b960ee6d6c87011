"""F12: memory. A call takes what its edges and tokens are worth, and what would exhaust memory is refused
before it begins.

Three kinds of cases: one call of a backend, both passes (``peaks``); what is refused with an estimate or a
limit, and what is answered although a careless way would need terabytes (``refusals``). The first few cases
meet all kinds, as many as there are cells meet every one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

from tests.guarantees import peaks, refusals
from tests.guarantees.guarantee import Guarantee, Measured, Tell

STRIDE = 37  # from one call to the next: prime, so that few of them meet every backend


@dataclass(frozen=True)
class Refused:
    """Something that must be refused by name."""

    name: str

    def __str__(self) -> str:
        return f"refused: {self.name}"


@dataclass(frozen=True)
class Answered:
    """Something that must be answered within little memory."""

    name: str

    def __str__(self) -> str:
        return f"answered: {self.name}"


Cell = peaks.Cell | Refused | Answered


def _cells() -> Iterator[Cell]:
    """One call, two refusals, one answer, ...: until each kind is used up."""
    calls = [peaks.CELLS[number * STRIDE % len(peaks.CELLS)] for number in range(len(peaks.CELLS))]
    names = [Refused(name) for name in refusals.REFUSED]
    for together in zip_longest(calls, names[::2], names[1::2], map(Answered, refusals.ANSWERED)):
        yield from (cell for cell in together if cell is not None)


CELLS: tuple[Cell, ...] = tuple(_cells())


@dataclass
class _Seen:
    calls: int = 0
    refused: int = 0
    answered: int = 0
    forward: float = 0.0
    backward: float = 0.0
    piece: float = 0.0
    failures: list[str] = field(default_factory=list)

    def value(self) -> str:
        calls = f"{self.calls:,} calls took at most {self.forward:.2f} and {self.backward:.2f} of what is allowed to each pass"
        pieces = f"largest piece {self.piece:.2f} of E H C"
        return (
            f"{calls}, {pieces}; {self.refused:,} refused and {self.answered:,} answered, "
            f"{len(self.failures):,} failures"
        )

    def call(self, cell: peaks.Cell, seed: int, name: str) -> None:
        self.calls += 1
        found = peaks.measured(cell, seed)
        self.forward, self.backward = max(self.forward, found.forward), max(self.backward, found.backward)
        self.piece = max(self.piece, found.piece)
        if found.forward > 1 or found.backward > 1:
            self.failures.append(f"{name}: {found.what}")
        if found.piece >= 1:
            self.failures.append(f"{name}: a piece of {found.piece:.2f} of E H C numbers; {found.what}")

    def one(self, cell: Cell, seed: int, name: str) -> None:
        if isinstance(cell, peaks.Cell):
            return self.call(cell, seed, name)
        refused = isinstance(cell, Refused)
        ask: Callable[[str], str | None] = refusals.refused if refused else refusals.answered
        self.refused, self.answered = self.refused + refused, self.answered + (not refused)
        fault = ask(cell.name)
        if fault is not None:
            self.failures.append(f"{name}: {fault}")
        return None


def case(number: int) -> tuple[Cell, int]:
    """The cell of a case and its seed.

    >>> [str(case(number)[0]) for number in (0, 1)]
    ['auto, window, plain', 'refused: the mask of a million tokens']
    """
    seed, place = divmod(number, len(CELLS))
    return CELLS[place], seed + place


def measure(count: int, tell: Tell) -> Measured:
    seen = _Seen()
    for number in range(count):
        cell, seed = case(number)
        name = f"case {number}: {cell}, seed {seed}"
        try:
            seen.one(cell, seed, name)
        except Exception as error:  # whatever is raised is a failure
            seen.failures.append(f"{name}: {type(error).__name__}: {error}"[:300])
        tell(name)
    kinds = (("call", seen.calls), ("refusal", seen.refused), ("answer", seen.answered))
    skipped = tuple(f"no {word} was measured: ask for {len(CELLS)} cases" for word, many in kinds if not many)
    return Measured(seen.value(), tuple(seen.failures), skipped)


GUARANTEE = Guarantee(
    name="F12",
    promise="a call takes memory by its edges and tokens, and what would exhaust memory is refused by name",
    bar=(
        "forward and backward within 6 (E H + N H C) numbers, or within the workspace that a backend states "
        "where that is more; "
        "never a tensor of E H C outside of the reference; the reference and all that cannot fit refused "
        "with the estimate"
    ),
    quick=4,
    full=len(CELLS),
    measure=measure,
)
