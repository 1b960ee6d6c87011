"""Pictures of a record: time and memory against tokens, and the density at which sparse overtakes dense.
Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.records import Record, cases_of, workload_of
from gnn_attention._support import atomic_files
from gnn_attention.draw import _axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

__all__ = ["against_tokens", "crossover", "panels", "save", "written"]

FAMILIES = {"b": "window of 256", "e": "random in-degree 32"}
STYLES = {"tiles": "-", "edges": "--"}
SIZE = (10.0, 4.2)
PASSES = {"forward": "forward", "both": "forward and backward"}


def save(record: Record, folder: Path) -> list[Path]:
    """Write every picture the record has data for, as SVG; returns the files."""
    pictures = {
        f"{family}-{quantity}": against_tokens(record, family, quantity)
        for family in FAMILIES
        for quantity in AXES
    }
    pictures["crossover"] = crossover(record)
    return written(pictures, folder)


def written(pictures: Mapping[str, Figure | None], folder: Path) -> list[Path]:
    """Write those that are there as SVG; returns the files."""
    drawn = {folder / f"{name}.svg": picture for name, picture in pictures.items() if picture is not None}
    for file, picture in drawn.items():
        with atomic_files.written(file) as stream:
            picture.savefig(stream, format="svg")
    return list(drawn)


AXES = {"seconds": "seconds", "memory_mb": "peak memory of a call, MB"}


def against_tokens(record: Record, family: str, quantity: str, allocator: str = "default") -> Figure | None:
    """Time or memory of every method against tokens, one panel for each pass; None without two sizes of the
    family.
    """
    lines = {which: _lines(record, family, quantity, which, allocator) for which in PASSES}
    if not any(len(points) > 1 for found in lines.values() for points in found.values()):
        return None
    made, both = panels(1, 2, SIZE)
    for axes, (which, title) in zip(both, PASSES.items(), strict=True):
        for method, points in lines[which].items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=method)
        shown = list(axes.lines)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="tokens",
            ylabel=AXES[quantity],
            title=f"{FAMILIES[family]}, {title}",
        )
        _finish(axes, shown)
    return made


def _lines(
    record: Record, family: str, quantity: str, which: str, allocator: str
) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for case in cases_of(record, allocator=allocator, **{"pass": which}):
        workload = workload_of(record, case["workload"], allocator)
        plain = case["workload"][0] == family and "x" not in case["workload"]  # not the other degrees of e
        if workload is not None and plain and case.get(quantity):
            found.setdefault(case["method"], []).append((workload["tokens"], case[quantity]))
    return {method: sorted(points) for method, points in found.items()}


def crossover(record: Record) -> Figure | None:
    """How many times faster than SDPA with a mask ours is, against density; None where the record has
    none.
    """
    rows = [row for row in record["crossover"] if len(row["points"]) > 1]
    if not rows:
        return None
    made, both = panels(1, 2, SIZE)
    for axes, (which, title) in zip(both, PASSES.items(), strict=True):
        for row in rows:
            if row["pass"] == which:
                label = f"{row['method']}, {row['kind']}"
                axes.plot(
                    *zip(*row["points"], strict=True),
                    STYLES[row["kind"]],
                    marker="o",
                    markersize=3,
                    label=label,
                )
        shown = list(axes.lines)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="density",
            ylabel="times faster than SDPA with a mask",
            title=title,
        )
        _finish(axes, shown)
    return made


def panels(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """An empty picture that needs no display, and its panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(made)
    return made, list(made.subplots(rows, columns, squeeze=False).flat)


def _finish(axes: Axes, shown: Sequence[Line2D]) -> None:
    axes.grid(alpha=0.3, which="both", linewidth=0.4)
    if shown:
        _axes.legend(axes, shown, fontsize=7)
