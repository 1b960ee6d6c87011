"""What every picture is made of: figures, colours, axes, lines with a direction.

Figures are made without pyplot: nothing is shown or set globally, and a figure without references is freed.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention._support.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, distinct for colour-blind eyes too, and greys
BLUE, ORANGE, RED = "#0072B2", "#E69F00", "#D55E00"
BLACK, GREY, FAINT, LIGHT = "#222222", "#8C8C8C", "#CFCFCF", "#E9E9E9"

# no edge, edge as before, given up, new
CHANGES = [LIGHT, BLUE, GREY, ORANGE]

Names = Sequence[str] | None
Numbers = Sequence[float]
Points = Float[Tensor, "points 2"]
Curves = Float[Tensor, "edges points 2"]

LONGEST_SIDE = 4  # times the other side, up to which the cells of a mask are squares
FEW = 32  # tokens up to which each has its own label and each edge its own arrow
SMOOTHNESS = 24  # straight pieces of a curve
# a caller's text may hold a $ or a backslash
AS_IT_IS: dict[str, Any] = {"parse_math": False, "usetex": False}


def figure(width: float, height: float, **layout: Any) -> tuple[Figure, Any]:
    """A figure of so many inches and its axes; ``layout`` goes to ``Figure.subplots``."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"pictures need matplotlib ({error}): pip install matplotlib") from None
    made = Figure(figsize=(width, height), dpi=110, layout="compressed")
    FigureCanvasAgg(made)
    made._repr_png_ = partial(_png, made)  # type: ignore[attr-defined]
    return made, made.subplots(**layout)


def grid(count: int, *names: Names) -> tuple[Figure, list[Axes]]:
    """Axes for so many masks, four in a row, or eight where there are more than 16; larger with names."""
    in_a_row = 4 if count <= 16 else 8
    columns, rows = min(count, in_a_row), -(-count // in_a_row)
    side = max(2.7, min(0.6 + 0.17 * max(map(len, filter(None, names)), default=0), 22 / columns))
    width, height = 0.6 + side * columns + _room(names), 0.9 + (side + 0.2) * rows + _room(names)
    made, axes = figure(width, height, nrows=rows, ncols=columns, squeeze=False)
    for unused in axes.flat[count:]:
        unused.set_axis_off()
    return made, list(axes.flat[:count])


def of(ax: Axes | None, width: float, height: float, *names: Names) -> tuple[Figure, Axes]:
    made: Any = None if ax is None else ax.figure.figure
    return figure(width + _room(names), height + _room(names)) if ax is None else (made, ax)


def _room(names: Sequence[Names]) -> float:
    """Inches that the longest name takes."""
    return 0.075 * max((len(name) for some in names for name in some or ()), default=0)


def title(ax: Axes, name: str, facts: str = "", width: int = 64) -> None:
    """The name of the graph, broken into lines where it is long, over a line of facts."""
    lines = textwrap.wrap(printable(name), width)
    lines = [*lines[:3], "..."] if len(lines) > 3 else lines
    text = "\n".join([*lines, printable(facts)] if facts else lines)
    ax.set_title(text, fontsize=10, loc="left", color=BLACK, **AS_IT_IS)


def headline(made: Figure, name: str) -> None:
    made.suptitle(printable(name), fontsize=11, x=0.02, ha="left", **AS_IT_IS)


def finish(made: Figure, ax: Axes | None, handles: Sequence[Any] = (), write: Any = lambda: None) -> Figure:
    """The figure with a legend below; untouched where the axes are part of the caller's own."""
    write()
    if ax is not None:
        return made
    if handles:
        legend(made, handles, loc="outside lower left", ncols=3, frameon=False, fontsize=8.5)
    # the layout of axes with a fixed shape settles in the second of two passes, this is the first
    made.draw_without_rendering()
    # the names took room from the axes, which may have too little now for each of them
    write()
    return made


def legend(owner: Any, handles: Sequence[Any], **layout: Any) -> None:
    """The legend with every label as it is: matplotlib leaves out those that begin with ``_``."""
    labels = [printable(str(handle.get_label())) for handle in handles]
    made = owner.legend(handles=list(handles), labels=["label"] * len(labels), **layout)
    for text, label in zip(made.get_texts(), labels, strict=True):
        text.set(text=label, **AS_IT_IS)


def write_tokens(grid: Sequence[Axes], dst: tuple[Names, int, int], src: tuple[Names, int, int]) -> None:
    """The ticks of masks, of several the outer ones alone; a side is its names, number and offset."""
    for ax in grid:
        ticks(ax, "y", *dst)
        ticks(ax, "x", *src, slanted=len(grid) == 1)
        ax.set(xlabel="src (sender)", ylabel="dst (receiver)")
        if len(grid) > 1:
            ax.label_outer()


def ticks(ax: Axes, which: str, names: Names, count: int, offset: int = 0, slanted: bool = True) -> None:
    """A tick with a name for each token where there is room, else for every second, fourth, ... token."""
    axis, step = getattr(ax, f"{which}axis"), 1
    ax.apply_aspect()  # cells that are squares do not fill their axes
    inches = (ax.bbox.width if which == "x" else ax.bbox.height) / ax.figure.figure.dpi
    while count > FEW * step or inches < 0.15 * count / step:
        step *= 2
    step = max(step, _step(count)) if step > 1 else 1
    shown = [str(offset + token) if names is None else names[token] for token in range(0, count, step)]
    axis.set_ticks(range(0, count, step), shown, fontsize=9 if len(shown) <= 16 else 7, **AS_IT_IS)
    axis.set_tick_params(length=0 if step == 1 else 3)
    widths = [label.get_window_extent().width for label in axis.get_ticklabels()] if which == "x" else []
    if widths and max(widths) > 0.9 * ax.bbox.width * step / count:
        # not below one another in a narrow gap, nor below the next mask
        slanted = slanted and inches * step > 0.25 * count
        angle, side, mode = (40, "right", "anchor") if slanted else (90, "center", "default")
        for label in axis.get_ticklabels():
            label.set(rotation=angle, ha=side, rotation_mode=mode)


def _step(count: int) -> int:
    # the power of two that gives about eight ticks
    return 1 << max(0, (-(-count // 8) - 1).bit_length())


def mask_height(rows: int, columns: int) -> float:
    """Inches of a picture 6 inches wide: a mask with few rows is a flat picture."""
    return 1.2 + 5.2 * min(1.0, max(1 / LONGEST_SIDE, rows / max(columns, 1))) if rows else 6.4


def cells(ax: Axes, mask: Bool[Tensor, "dst src"]) -> None:
    """A dark cell for each True; thin gaps between the cells where there are few."""
    coloured(ax, mask.int(), [LIGHT, BLUE])


def changes(ax: Axes, mask: Bool[Tensor, "dst src"], before: Bool[Tensor, "dst src"]) -> None:
    """A cell for each edge, in another colour if it was none before, and for those that are none any more."""
    coloured(ax, mask.int() + 2 * (mask ^ before).int(), CHANGES)


def coloured(ax: Axes, mask: Int[Tensor, "dst src"], colours: list[str]) -> None:
    """A cell in the colour of each number; thin gaps between the cells where there are few."""
    from matplotlib.colors import ListedColormap

    image(ax, mask, ListedColormap(colours), 0, len(colours) - 1)


def heat(grid: Sequence[Axes], tables: Float[Tensor, "heads dst src"]) -> Any:
    """A table in each of the axes, all in one scale so that they can be compared; the last image.

    A cell is white at 0, blue above, orange below, and grey where there is no number.
    """
    from matplotlib.colors import LinearSegmentedColormap

    high = tables.abs().nan_to_num().max().item() if tables.numel() else 0.0
    low = -high if bool((tables < 0).any()) else 0.0
    colours = ["white", BLUE] if low == 0 else [ORANGE, "white", BLUE]
    scale = LinearSegmentedColormap.from_list("weights", colours).with_extremes(bad=FAINT)
    images = [image(ax, table, scale, low, high or 1.0) for ax, table in zip(grid, tables, strict=True)]
    return images[-1]


def image(ax: Axes, table: Tensor, colours: Any, low: float, high: float) -> Any:
    """The table as matplotlib's image, or None without cells; thin gaps between cells if there are few."""
    if table.numel() == 0:
        return None
    small = max(table.shape) <= 256
    look: dict[str, Any] = {"interpolation": "nearest"} if small else {"interpolation_stage": "rgba"}
    look["aspect"] = "equal" if max(table.shape) <= LONGEST_SIDE * min(table.shape) else "auto"
    ax.spines[:].set_visible(False)  # they would hide a sink, a column of one token, at the border
    if max(table.shape) <= FEW:
        for axis, count in ((ax.xaxis, table.shape[1]), (ax.yaxis, table.shape[0])):
            axis.set_ticks([place + 0.5 for place in range(count - 1)], minor=True)
        ax.grid(which="minor", color="white", linewidth=min(2.0, 36 / max(table.shape)))
        ax.tick_params(which="minor", length=0)
    return ax.imshow(table.numpy(), cmap=colours, vmin=low, vmax=high, **look)


def heights(ax: Axes, numbers: Sequence[int], offset: int, colour: str) -> None:
    """A bar for each of a few tokens, a filled curve for many, and their mean as a broken line."""
    from matplotlib.ticker import MaxNLocator

    places = range(offset, offset + len(numbers))
    if len(numbers) <= 2 * FEW:
        ax.bar(places, numbers, color=colour, width=0.8)
    else:
        ax.fill_between(places, numbers, color=colour, step="mid", linewidth=0)
    ax.axhline(sum(numbers) / max(len(numbers), 1), color=BLACK, linestyle="--", linewidth=1)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    open_box(ax)
    ax.set_ylim(0, 1.08 * max([*numbers, 1]))
    ax.margins(x=0.01)


def spread(numbers: Sequence[int]) -> str:
    mean = sum(numbers) / max(len(numbers), 1)
    return f"{min(numbers)} to {max(numbers)}, mean {mean:.4g} (broken line)" if numbers else "no tokens"


def curves(ax: Axes, counts: Sequence[Sequence[int]], token: int) -> None:
    """Counts of all tokens after each layer: those of one token, their mean, and the range of all."""
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    number, n = range(len(counts)), len(counts[0])
    few: dict[str, Any] = {"markersize": 5} if len(counts) <= FEW else {"markersize": 0}
    lowest, highest = list(map(min, counts)), list(map(max, counts))
    ax.fill_between(number, lowest, highest, color=LIGHT, label="all tokens: range")
    ax.plot(number, [sum(row) / n for row in counts], "s--", color=ORANGE, label="all tokens: mean", **few)
    ax.plot(number, [row[token] for row in counts], "o-", color=BLUE, label=f"token {token}", **few)
    ax.axhline(n, color=BLACK, linestyle=":", linewidth=1, label=f"all {n}")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_locator(MultipleLocator(_step(n)))
    open_box(ax)
    ax.set_ylim(0, 1.06 * n)


def open_box(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color=LIGHT, linewidth=0.8)
    ax.set_axisbelow(True)


def bezier(corners: Sequence[Points], steps: int = SMOOTHNESS) -> Curves:
    """The curves of two ends and the control points between them, in ``steps`` straight pieces."""
    t = torch.linspace(0, 1, steps + 1, dtype=torch.float64)[:, None]
    points = [corner[:, None].double() for corner in corners]
    while len(points) > 1:  # de Casteljau
        points = [a + t * (b - a) for a, b in pairwise(points)]
    return points[0]


def arrows(ax: Axes, curves: Curves, widths: Numbers, colours: Sequence[str], alphas: Numbers) -> None:
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path

    head: dict[str, Any] = {"arrowstyle": "-|>", "fill": True, "joinstyle": "miter"}
    for curve, width, colour, alpha in zip(curves.numpy(), widths, colours, alphas, strict=True):
        look: dict[str, Any] = {"linewidth": width, "color": colour, "alpha": alpha, **head}
        ax.add_patch(FancyArrowPatch(path=Path(curve), mutation_scale=6 + 3 * width, **look))


def tapered(ax: Axes, curves: Curves, widths: Numbers, colours: Sequence[str], alphas: Numbers) -> None:
    """Each curve thin at its sender and thick at its receiver: a direction without a head."""
    from matplotlib.collections import LineCollection

    pieces = curves.shape[1] - 1
    for quarter, scale in enumerate((0.3, 0.6, 1.0, 1.6)):
        part = list(curves[:, pieces * quarter // 4 : pieces * (quarter + 1) // 4 + 1].numpy())
        look: dict[str, Any] = {"colors": colours, "alpha": alphas, "capstyle": "butt"}
        ax.add_collection(LineCollection(part, linewidths=[scale * width for width in widths], **look))


def cell_handles() -> list[Any]:
    return _squares((BLUE, "edge: dst attends to src"), (LIGHT, "no edge"))


def weight_handles() -> list[Any]:
    return _squares((FAINT, "no edge"))


def change_handles() -> list[Any]:
    return _squares((BLUE, "edge, as before"), (ORANGE, "new"), (GREY, "given up"))


def _squares(*cells: tuple[str, str]) -> list[Any]:
    return [handle("s", text, color=c, markersize=9, markeredgecolor=GREY) for c, text in cells]


def shared(names: Sequence[str]) -> str:
    """What the graphs of some layers are called: one name if it is the same for all."""
    numbered = ", ".join(f"layer {number}: {name}" for number, name in enumerate(names, 1))
    return names[0] if len(set(names)) == 1 else numbered


def handle(kind: str, text: str, **look: Any) -> Any:
    """An entry of a legend: a ``"line"``, or the letter of a marker."""
    from matplotlib.lines import Line2D

    look = look if kind == "line" else {"linestyle": "none", "marker": kind, **look}
    return Line2D([], [], label=text, **look)


def _png(made: Figure) -> bytes:
    stream = io.BytesIO()
    made.savefig(stream, format="png")
    return stream.getvalue()
