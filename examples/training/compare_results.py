"""Results of a comparison of graphs: outcomes of trainings, rows of graphs, a table and a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnn_attention._support.text import printable
from gnn_attention.draw import _axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
        ours[0].graph,
        ours[0].edges_per_token,
        Mean.of([one.held_out_loss for one in ours]),
        Mean.of(differences) if differences else None,
        Mean.of(scores) if scores else None,
        Mean.of([1000 * one.seconds_per_step for one in ours]),
        Mean.of([one.tokens_per_second for one in ours]),
        ours[0].senders,
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


def plot(found: Sequence[Row], title: str, facts: str) -> Figure:
    """A point for each graph with its name, bars of one standard error, fewer edges to the left."""
    (made, axes), (first, *others) = _axes.figure(8.0, 5.2), found
    for rows, colour, marker in ((others, _axes.BLUE, "o"), ([first], _axes.RED, "s")):
        x, y = [row.edges_per_token for row in rows], [row.loss.mean for row in rows]
        style = {"fmt": marker, "color": colour, "markersize": 6, "capsize": 3, "elinewidth": 1.2}
        axes.errorbar(x, y, [row.loss.error or 0.0 for row in rows], **style)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="edges per token (mean in-degree)", ylabel="loss, held out (nats a token)")
    axes.margins(x=0.12, y=0.15)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.3, linewidth=0.4)
    _name(axes, found)
    _axes.title(axes, title, facts)
    made.draw_without_rendering()
    return made


def check_plot(file: str) -> None:
    """ValueError for a file of an unknown format, ModuleNotFoundError without matplotlib."""
    endings = [f".{word}" for word in _axes.figure(1.0, 1.0)[0].canvas.get_supported_filetypes()]
    if Path(file).suffix.lower() not in endings:
        raise ValueError(f"--plot {file}: expected a file name that ends in one of {', '.join(endings)}")


def _name(axes: Axes, found: Sequence[Row]) -> None:
    # towards the middle of the picture, and below the point where another is close above
    places = {row.graph: axes.transData.transform((row.edges_per_token, row.loss.mean)) for row in found}
    middle = axes.transAxes.transform((0.5, 0.5))[0]
    pairs = pairwise(sorted(found, key=lambda row: row.loss.mean))
    crowded = {a.graph for a, b in pairs if abs(places[b.graph][1] - places[a.graph][1]) < 24}
    # a file's name may have a $
    style: dict[str, Any] = {"fontsize": 8.5, "color": _axes.BLACK, "textcoords": "offset points"}
    for row in found:
        x, side = (-8, "right") if places[row.graph][0] > middle else (8, "left")
        offset, point = (x, -11 if row.graph in crowded else 5), (row.edges_per_token, row.loss.mean)
        axes.annotate(printable(row.graph), point, offset, ha=side, **style, **_axes.AS_IT_IS)
