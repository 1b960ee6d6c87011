"""The picture of a comparison: loss against edges per token. Needs matplotlib, which is imported when something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from gnn_attention._support.text import printable
from gnn_attention.draw import _axes
from gnn_attention.training.compare_results import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check", "figure"]


def figure(found: Sequence[Row], title: str, facts: str) -> Figure:
    """A point for each graph with its name, bars of one standard error, fewer edges to the left."""
    made, axes = _axes.figure(8.0, 5.2)
    first, *others = found
    for rows, colour, marker in ((others, _axes.BLUE, "o"), ([first], _axes.RED, "s")):
        axes.errorbar(
            [row.edges_per_token for row in rows],
            [row.loss.mean for row in rows],
            [row.loss.error or 0.0 for row in rows],
            fmt=marker,
            color=colour,
            markersize=6,
            capsize=3,
            elinewidth=1.2,
        )
    axes.set_xscale("log", base=2)
    axes.set(xlabel="edges per token (mean number of senders that a token hears)", ylabel="loss, held out (nats a token)")
    axes.margins(x=0.12, y=0.15)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.3, linewidth=0.4)
    _name(axes, found)
    _axes.title(axes, title, facts)
    made.draw_without_rendering()
    return made


def check(file: str) -> None:
    """ValueError for a file whose ending says nothing that can be drawn, ModuleNotFoundError without matplotlib."""
    made, _ = _axes.figure(1.0, 1.0)
    endings = made.canvas.get_supported_filetypes()
    if Path(file).suffix.removeprefix(".").lower() not in endings:
        raise ValueError(f"--plot {file}: expected a file name that ends in one of {', '.join(f'.{word}' for word in endings)}")


def _name(axes: Axes, found: Sequence[Row]) -> None:
    """The names beside their points: towards the middle of the picture, and below where another stands close above."""
    places = {row.graph: axes.transData.transform((row.edges_per_token, row.loss.mean)) for row in found}
    middle = axes.transAxes.transform((0.5, 0.5))[0]
    ordered = sorted(found, key=lambda row: row.loss.mean)
    crowded = {lower.graph for lower, upper in pairwise(ordered) if abs(places[upper.graph][1] - places[lower.graph][1]) < 24}
    for row in found:
        left = places[row.graph][0] > middle
        axes.annotate(
            printable(row.graph),
            (row.edges_per_token, row.loss.mean),
            (-8 if left else 8, -11 if row.graph in crowded else 5),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize=8.5,
            color=_axes.BLACK,
            **_axes.AS_IT_IS,  # a file's name may hold a $
        )
