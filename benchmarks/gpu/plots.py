"""Pictures of a record of a GPU: time of every method with its prediction, and the share of the ceiling.
Needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.methods import AGAIN
from benchmarks.gpu.workloads import PASSES
from benchmarks.plots import panels, written
from benchmarks.records import Record
from gnn_attention._support.text import printable
from gnn_attention.draw._axes import AS_IT_IS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["save", "shares", "times"]


def save(record: Record, folder: Path) -> list[Path]:
    """Write the pictures as SVG, a panel for each workload that something was measured of; returns the files,
    none without.
    """
    return written({"gpu-times": times(record), "gpu-shares": shares(record)}, folder)


def times(record: Record) -> Figure | None:
    """Milliseconds of every method, forward and backward, with what was predicted as a stroke."""
    return _bars(record, "seconds", 1e3, "ms", logarithmic=True)


def shares(record: Record) -> Figure | None:
    """Which share of the measured ceiling of its work every method reached."""
    return _bars(record, "share", 100.0, "% of the ceiling", logarithmic=False)


def _bars(record: Record, quantity: str, factor: float, words: str, logarithmic: bool) -> Figure | None:
    measured = [case for case in record["cases"] if case["status"] == "measured" and case["method"] != AGAIN]
    workloads = [
        about
        for about in record["workloads"]
        if any(case["workload"] == about["workload"] for case in measured)
    ]
    if not workloads:
        return None
    made, found = panels(len(workloads), 1, (9.0, 2.4 * len(workloads)))
    for axes, about in zip(found, workloads, strict=True):
        _draw(
            axes,
            about,
            [case for case in measured if case["workload"] == about["workload"]],
            quantity,
            factor,
        )
        axes.set(ylabel=words, yscale="log" if logarithmic else "linear")
    found[0].legend(fontsize=7)
    return made


def _draw(axes: Axes, about: Record, cases: list[Record], quantity: str, factor: float) -> None:
    """One workload: two bars for each method."""
    methods = list(dict.fromkeys(case["method"] for case in cases))
    for number, which in enumerate(PASSES):
        found = [case for case in cases if case["pass"] == which]
        places = [methods.index(case["method"]) + 0.4 * number - 0.2 for case in found]
        axes.bar(places, [case[quantity] * factor for case in found], 0.38, label=which)
        if quantity == "seconds":
            points = [
                (x, c["predicted_s"] * factor)
                for x, c in zip(places, found, strict=True)
                if "predicted_s" in c
            ]
            axes.scatter([x for x, _ in points], [y for _, y in points], marker="_", color="black", zorder=3)
    axes.set(xticks=range(len(methods)))
    axes.set_title(printable(about["title"]), **AS_IT_IS)
    axes.set_xticklabels(
        [printable(method) for method in methods], rotation=20, ha="right", fontsize=7, **AS_IT_IS
    )
    axes.grid(alpha=0.3, axis="y", linewidth=0.4)
