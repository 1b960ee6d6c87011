"""The results of a comparison of graphs: outcomes of trainings, their means by graph, a table and a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Outcome:
    """The result of training along one graph from one seed.

    Graphs with the same edges have the same ``key``. Losses are in nats per token, along this graph.
    ``induction`` is the score of the best head, or None if each head has its own graph. ``senders`` is the
    largest number of tokens that a cache stores at any time.
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
    """A mean over the seeds and its standard error, which is None for a single seed."""

    mean: float
    error: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(statistics.fmean(values), error)

    def format(self, spec: str) -> str:
        mean = f"{self.mean:{spec}}"
        return mean if self.error is None else f"{mean} ± {self.error:{spec.lstrip('+')}}"


@dataclass(frozen=True)
class Row:
    """The means of one graph; ``difference`` is the mean over seeds of its loss minus the first graph's."""

    graph: str
    edges_per_token: float
    loss: Mean
    difference: Mean | None
    induction: Mean | None
    milliseconds: Mean
    speed: Mean
    senders: int


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return a row for each graph; all others are compared with the first graph on the same seeds."""
    by_graph: dict[str, list[Outcome]] = {outcome.key: [] for outcome in outcomes}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.seed):
        by_graph[outcome.key].append(outcome)
    return [_row(group, by_graph[outcomes[0].key]) for group in by_graph.values()]


def _row(group: Sequence[Outcome], first: Sequence[Outcome]) -> Row:
    reference = {run.seed: run.held_out_loss for run in first if group is not first}
    differences = [run.held_out_loss - reference[run.seed] for run in group if run.seed in reference]
    scores = [run.induction for run in group if run.induction is not None]
    return Row(
        graph=group[0].graph,
        edges_per_token=group[0].edges_per_token,
        loss=Mean.of([run.held_out_loss for run in group]),
        difference=Mean.of(differences) if differences else None,
        induction=Mean.of(scores) if scores else None,
        milliseconds=Mean.of([1000 * run.seconds_per_step for run in group]),
        speed=Mean.of([run.tokens_per_second for run in group]),
        senders=group[0].senders,
    )


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("graph", lambda row: row.graph),
    ("edges/token", lambda row: f"{row.edges_per_token:.1f}"),
    ("loss, held out", lambda row: row.loss.format(".4f")),
    ("to the first", lambda row: row.difference.format("+.4f") if row.difference else "-"),
    ("induction", lambda row: row.induction.format(".2f") if row.induction else "-"),
    ("ms/step", lambda row: f"{row.milliseconds.mean:.1f}"),
    ("tokens/s", lambda row: f"{row.speed.mean:.0f}"),
    ("senders", lambda row: str(row.senders)),
)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, with the standard error over the seeds after ``±``."""
    cells = [[name for name, _ in _COLUMNS], *([show(row) for _, show in _COLUMNS] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [[f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)] for line in cells]
    return "\n".join("  ".join([f"{row[0].strip():<{widths[0]}}", *row[1:]]) for row in aligned)


def plot(rows: Sequence[Row], title: str) -> Figure:
    """Draw the loss of each graph against its edges, with bars of one standard error."""
    # matplotlib is an optional dependency.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.2), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        bar = row.loss.error or 0.0
        axes.errorbar(row.edges_per_token, row.loss.mean, bar, fmt="o", capsize=3, label=row.graph)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="edges per token (mean in-degree)", ylabel="loss, held out (nats a token)", title=title)
    axes.grid(alpha=0.3)
    for name in axes.legend().get_texts():
        # A $ in the name of a file does not start a formula.
        name.set_parse_math(False)
    return figure
