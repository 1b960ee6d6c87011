"""Pictures of a record of a GPU: time of every method beside its prediction, and the share of the ceiling. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnn_attention._support import atomic_files
from gnn_attention._support.text import printable
from gnn_attention.bench.gpu.methods import AGAIN
from gnn_attention.bench.gpu.workloads import PASSES
from gnn_attention.draw._axes import AS_IT_IS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["save", "shares", "times"]

Record = dict[str, Any]


def save(record: Record, folder: Path) -> list[Path]:
    """Write the pictures as SVG, a panel for each workload that something was measured of; returns the files, none without."""
    pictures = {"gpu-times": times(record), "gpu-shares": shares(record)}
    drawn = {folder / f"{name}.svg": figure for name, figure in pictures.items() if figure is not None}
    for file, figure in drawn.items():
        with atomic_files.written(file) as stream:
            figure.savefig(stream, format="svg")
    return list(drawn)


def times(record: Record) -> Figure | None:
    """Milliseconds of every method, forward and backward, with what was predicted as a stroke."""
    return _bars(record, "seconds", 1e3, "ms", logarithmic=True)


def shares(record: Record) -> Figure | None:
    """Which share of the measured ceiling of its work every method reached."""
    return _bars(record, "share", 100.0, "% of the ceiling", logarithmic=False)


def _bars(record: Record, quantity: str, factor: float, words: str, logarithmic: bool) -> Figure | None:
    measured = [case for case in record["cases"] if case["status"] == "measured" and case["method"] != AGAIN]
    workloads = [about for about in record["workloads"] if any(case["workload"] == about["workload"] for case in measured)]
    if not workloads:
        return None
    made = _figure(len(workloads))
    panels = made.subplots(len(workloads), 1, squeeze=False)[:, 0]
    for axes, about in zip(panels, workloads, strict=True):
        cases = [case for case in measured if case["workload"] == about["workload"]]
        methods = list(dict.fromkeys(case["method"] for case in cases))
        for number, which in enumerate(PASSES):
            found = [case for case in cases if case["pass"] == which]
            places = [methods.index(case["method"]) + 0.4 * number - 0.2 for case in found]
            axes.bar(places, [case[quantity] * factor for case in found], 0.38, label=which)
            if quantity == "seconds":
                told = [
                    (place, case["predicted_s"] * factor)
                    for place, case in zip(places, found, strict=True)
                    if "predicted_s" in case
                ]
                axes.scatter([x for x, _ in told], [y for _, y in told], marker="_", color="black", zorder=3)
        axes.set(ylabel=words, xticks=range(len(methods)), yscale="log" if logarithmic else "linear")
        axes.set_title(printable(about["title"]), **AS_IT_IS)
        names = [printable(method) for method in methods]
        axes.set_xticklabels(names, rotation=20, ha="right", fontsize=7, **AS_IT_IS)
        axes.grid(alpha=0.3, axis="y", linewidth=0.4)
    panels[0].legend(fontsize=7)
    return made


def _figure(panels: int) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(9.0, 2.4 * panels), layout="constrained")
    FigureCanvasAgg(made)
    return made
