"""F9: decoding. Chunks through the caches equal all tokens at once; greedy text of Hugging Face models is
that of eager.

A case is its number: which of the cells (way, family and chunk, or architecture, cache and padding) and which
seed. As many cases as there are cells meet every one of them once; the first few of them meet every kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isnan

from gnn_attention.verify.measure import ALLOWED_OUTPUT
from tests.guarantees import chunked, greedy
from tests.guarantees.guarantee import Guarantee, Measured, Tell

CELLS: tuple[chunked.Cell | greedy.Cell, ...] = (*chunked.CELLS, *greedy.CELLS)
# from one case to the next through the cells: a prime that does not divide their number, and 23 meet all
# kinds
STRIDE = 103


@dataclass
class _Seen:
    chunks: int = 0
    texts: int = 0
    tokens: int = 0
    share: float = 0.0
    margin: float = inf
    difference: float = 0.0
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def value(self) -> str:
        parts = []
        if self.chunks:
            parts.append(
                f"{self.chunks:,} decoded in chunks, largest error {self.share:.2g} of what is allowed"
            )
        if self.texts:
            text = f"{self.texts:,} greedy texts, {self.tokens:,} tokens; the two best scores came as near as {self.margin:.2g}"
            parts.append(f"{text}, scores differed by {self.difference:.2g}")
        return (
            f"{len(self.failures):,} of {self.chunks + self.texts:,} differ: "
            f"{'; '.join(parts) or 'nothing was measured'}"
        )

    def chunk(self, cell: chunked.Cell, seed: int, name: str) -> None:
        self.chunks += 1
        found = chunked.judged(cell, seed)
        share = found.output / (1.0 if "float64" in cell.way else ALLOWED_OUTPUT)
        self.share = _worse(self.share, share)
        if not found.passed:
            self.failures.append(
                f"{name}: error {found.error:.3g}, {found.output:.3g} of the yardstick {found.unit:.3g}"
            )

    def text(self, cell: greedy.Cell, seed: int, name: str) -> None:
        self.texts += 1
        found = greedy.compared(cell, seed)
        self.tokens += found.tokens
        self.margin, self.difference = (
            min(self.margin, found.margin),
            _worse(self.difference, found.difference),
        )
        if found.differs is not None:
            self.failures.append(f"{name}: {found.differs}")


def _worse(one: float, other: float) -> float:
    """The larger of two errors; NaN is the largest."""
    return max(one, other, key=lambda error: inf if isnan(error) else error)


def case(number: int) -> tuple[chunked.Cell | greedy.Cell, int]:
    """The cell of a case and its seed.

    >>> str(case(0)[0]), case(len(CELLS))[1]
    ('attend, float64, causal, chunks of 1', 1)
    """
    seed, place = divmod(number, len(CELLS))
    return CELLS[place * STRIDE % len(CELLS)], seed


def measure(count: int, tell: Tell) -> Measured:
    """The first ``count`` cases; without transformers those of its models are skipped, under one line."""
    seen, missing = _Seen(), greedy.available()
    for number in range(count):
        cell, seed = case(number)
        name = f"case {number}: {cell}, seed {seed}"
        if isinstance(cell, greedy.Cell) and missing is not None:
            seen.skipped = [f"greedy text of {', '.join(greedy.ARCHITECTURES)}: {missing}"]
            continue
        try:
            seen.text(cell, seed, name) if isinstance(cell, greedy.Cell) else seen.chunk(cell, seed, name)
        except Exception as error:  # whatever is raised is a failure
            seen.failures.append(f"{name}: {type(error).__name__}: {error}"[:300])
        tell(name)
    unmeasured = [
        word for word, many in (("chunk", seen.chunks), ("text", seen.texts or len(seen.skipped))) if not many
    ]
    seen.skipped += [f"no {word} was measured: ask for {len(CELLS)} cases" for word in unmeasured]
    return Measured(seen.value(), tuple(seen.failures), tuple(seen.skipped))


GUARANTEE = Guarantee(
    name="F9",
    promise="decoding token by token gives what all tokens at once give",
    bar=(
        "8 families x chunks of 1, 3 and 7, through every cache, within the rule of verify; greedy tokens "
        "of 5 Hugging Face "
        "architectures x 3 caches x 4 paddings all those of eager attention"
    ),
    quick=24,
    full=len(CELLS),
    measure=measure,
)
