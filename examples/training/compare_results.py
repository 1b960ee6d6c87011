"""Results of a comparison of graphs: outcomes of trainings, rows of graphs, a table and a plot."""

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
    """The result of one training: one graph, one seed.

    ``key`` identifies the edges. Losses are in nats for a token, over the graph's own edges. ``induction`` is
    the score of the best head, None for a graph that differs by head. ``senders``: the most that a cache
    stores at any time.
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
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(statistics.fmean(values), error)

    def text(self, form: str) -> str:
        shown = f"{self.mean:{form}}"
        return shown if self.error is None else f"{shown} ± {self.error:{form.lstrip('+')}}"


@dataclass(frozen=True)
class Row:
    """The means of one graph; ``difference`` is its loss less the first graph's, seed by seed."""

    graph: str
    edges_per_token: float
    loss: Mean
    difference: Mean | None
    induction: Mean | None
    milliseconds: Mean
    speed: Mean
    senders: int


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """A row for each graph; the others are compared with the first on the same seeds."""
    of_graph: dict[str, list[Outcome]] = {one.key: [] for one in outcomes}
    for one in sorted(outcomes, key=lambda one: one.seed):
        of_graph[one.key].append(one)
    return [_row(ours, of_graph[outcomes[0].key]) for ours in of_graph.values()]


def _row(ours: Sequence[Outcome], first: Sequence[Outcome]) -> Row:
    reference = {one.seed: one.held_out_loss for one in first if ours is not first}
    differences = [one.held_out_loss - reference[one.seed] for one in ours if one.seed in reference]
    scores = [one.induction for one in ours if one.induction is not None]
    return Row(
        graph=ours[0].graph,
        edges_per_token=ours[0].edges_per_token,
        loss=Mean.of([one.held_out_loss for one in ours]),
        difference=Mean.of(differences) if differences else None,
        induction=Mean.of(scores) if scores else None,
        milliseconds=Mean.of([1000 * one.seconds_per_step for one in ours]),
        speed=Mean.of([one.tokens_per_second for one in ours]),
        senders=ours[0].senders,
    )


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("graph", lambda row: row.graph),
    ("edges/token", lambda row: f"{row.edges_per_token:.1f}"),
    ("loss, held out", lambda row: row.loss.text(".4f")),
    ("to the first", lambda row: row.difference.text("+.4f") if row.difference else "-"),
    ("induction", lambda row: row.induction.text(".2f") if row.induction else "-"),
    ("ms/step", lambda row: f"{row.milliseconds.mean:.1f}"),
    ("tokens/s", lambda row: f"{row.speed.mean:.0f}"),
    ("senders", lambda row: str(row.senders)),
)


def table(found: Sequence[Row]) -> str:
    """The rows to read, with the standard error over the seeds behind ``±``."""
    cells = [[name for name, _ in _COLUMNS], *([show(row) for _, show in _COLUMNS] for row in found)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [[f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)] for line in cells]
    return "\n".join("  ".join([f"{row[0].strip():<{widths[0]}}", *row[1:]]) for row in aligned)


def plot(found: Sequence[Row], title: str) -> Figure:
    """A point for each graph, with bars of one standard error, fewer edges to the left."""
    # Optional: only a plot needs it.
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8.0, 5.2), layout="constrained")
    axes = picture.subplots()
    for row in found:
        bar = row.loss.error or 0.0
        axes.errorbar(row.edges_per_token, row.loss.mean, bar, fmt="o", capsize=3, label=row.graph)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="edges per token (mean in-degree)", ylabel="loss, held out (nats a token)", title=title)
    axes.grid(alpha=0.3)
    for name in axes.legend().get_texts():
        # The name of a file may have a $.
        name.set_parse_math(False)
    return picture
