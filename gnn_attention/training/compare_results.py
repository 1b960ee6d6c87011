"""What a comparison of graphs found: an outcome for each training, a row for each graph, and the rows as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Mean", "Outcome", "Row", "rows", "table"]


@dataclass(frozen=True)
class Outcome:
    """One model, trained over one graph from one seed, and what it came to.

    ``key`` tells its edges from others'. Losses are in nats for a token, over the graph's own edges. ``induction`` is the score
    of the best head, None for a graph that differs by head. ``senders``: the most that a cache holds while tokens come.
    """

    graph: str
    key: str
    seed: int
    edges_per_token: float
    held_out_loss: float
    training_loss: float
    induction: float | None
    seconds_per_step: float
    tokens_per_second: float
    senders: int


@dataclass(frozen=True)
class Mean:
    """A mean over the seeds with its standard error, None where there is one seed alone."""

    mean: float
    error: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Of at least one value.

        >>> Mean.of([1.0, 2.0, 3.0])
        Mean(mean=2.0, error=0.5773502691896257)
        """
        mean, count = math.fsum(values) / len(values), len(values)
        if count == 1:
            return cls(mean, None)
        return cls(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count))

    def text(self, form: str) -> str:
        """As it is read in a table: ``mean ± error``, each written by ``form``."""
        shown = f"{self.mean:{form}}"
        return shown if self.error is None else f"{shown} ± {self.error:{form.lstrip('+')}}"


@dataclass(frozen=True)
class Row:
    """What the seeds of one graph came to; ``difference`` is its loss less the first graph's, seed by seed."""

    graph: str
    edges_per_token: float
    loss: Mean
    difference: Mean | None
    induction: Mean | None
    milliseconds: Mean
    speed: Mean
    senders: int


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """A row for each graph, in the order in which they come; the others are compared with the first on the same seeds."""
    of_graph: dict[str, list[Outcome]] = {}
    for one in sorted(outcomes, key=lambda one: one.seed):
        of_graph.setdefault(one.key, []).append(one)
    order = list(dict.fromkeys(one.key for one in outcomes))
    return [_row(of_graph[key], of_graph[order[0]]) for key in order]


def _row(ours: Sequence[Outcome], first: Sequence[Outcome]) -> Row:
    reference = {one.seed: one.held_out_loss for one in first}
    differences = [one.held_out_loss - reference[one.seed] for one in ours if one.seed in reference]
    scores = [one.induction for one in ours if one.induction is not None]
    return Row(
        ours[0].graph,
        ours[0].edges_per_token,
        Mean.of([one.held_out_loss for one in ours]),
        Mean.of(differences) if differences and ours is not first else None,
        Mean.of(scores) if scores else None,
        Mean.of([1000 * one.seconds_per_step for one in ours]),
        Mean.of([one.tokens_per_second for one in ours]),
        ours[0].senders,
    )


def _or_dash(value: Mean | None, form: str) -> str:
    return "-" if value is None else value.text(form)


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("graph", lambda row: row.graph),
    ("edges/token", lambda row: f"{row.edges_per_token:.1f}"),
    ("loss, held out", lambda row: row.loss.text(".4f")),
    ("to the first", lambda row: _or_dash(row.difference, "+.4f")),
    ("induction", lambda row: _or_dash(row.induction, ".2f")),
    ("ms/step", lambda row: f"{row.milliseconds.mean:.1f}"),
    ("tokens/s", lambda row: f"{row.speed.mean:.0f}"),
    ("senders", lambda row: str(row.senders)),
)


def table(found: Sequence[Row]) -> str:
    """The rows to read, with the standard error over the seeds behind ``±``.

    >>> made = [Outcome("causal", "a", seed, 4.5, 2.0 + seed / 10, 2.0, 0.5, 0.01, 300.0, 8) for seed in (0, 1)]
    >>> made += [Outcome("window(2)", "b", seed, 1.9, 2.1 + seed / 10, 2.0, None, 0.01, 320.0, 2) for seed in (0, 1)]
    >>> print(table(rows(made)))
    graph      edges/token   loss, held out      to the first    induction  ms/step  tokens/s  senders
    causal             4.5  2.0500 ± 0.0500                 -  0.50 ± 0.00     10.0       300        8
    window(2)          1.9  2.1500 ± 0.0500  +0.1000 ± 0.0000            -     10.0       320        2
    """
    cells = [[name for name, _ in _COLUMNS], *([show(row) for _, show in _COLUMNS] for row in found)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{'>' if place else '<'}{width}}" for place, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    )
