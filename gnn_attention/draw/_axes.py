"""What every picture is made of: figures, colours, axes, tables of coloured cells.

Figures are made without pyplot: nothing is shown or set globally, and a figure without references is freed.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention._support.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, distinct for colour-blind eyes too, and greys
BLUE, ORANGE, RED = "#0072B2", "#E69F00", "#D55E00"
BLACK, GREY, FAINT, LIGHT = "#222222", "#8C8C8C", "#CFCFCF", "#E9E9E9"

Names = Sequence[str] | None

LONGEST_SIDE = 4  # times the other side, up to which the cells of a mask are squares
FEW = 32  # tokens up to which each has its own label and each edge its own arrow
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


def _png(made: Figure) -> bytes:
    stream = io.BytesIO()
    made.savefig(stream, format="png")
    return stream.getvalue()


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
    """The caller's axes and their figure, or new ones with room for the names."""
    if ax is None:
        return figure(width + _room(names), height + _room(names))
    owner: Any = ax.figure.figure
    return owner, ax


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


def shared(names: Sequence[str]) -> str:
    """What the graphs of some layers are called: one name if it is the same for all."""
    numbered = ", ".join(f"layer {number}: {name}" for number, name in enumerate(names, 1))
    return names[0] if len(set(names)) == 1 else numbered


def finish(made: Figure, ax: Axes | None, handles: Sequence[Any] = ()) -> Figure:
    """The figure with a legend below; untouched where the axes are part of the caller's own."""
    if ax is None and handles:
        made.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=8.5)
    if ax is None:
        # the layout of axes with a fixed shape settles in the second of two passes, this is the first
        made.draw_without_rendering()
    return made


def squares(meanings: Mapping[str, str]) -> list[Any]:
    """An entry of a legend for each colour and what it means."""
    return [line(text, "s", color=c, markersize=9, markeredgecolor=GREY) for c, text in meanings.items()]


def line(text: str, marker: str = "", **look: Any) -> Any:
    """An entry of a legend: a line, or a marker without one."""
    from matplotlib.lines import Line2D

    look = {"linestyle": "none", "marker": marker, **look} if marker else look
    return Line2D([], [], label=text, **look)


def write_tokens(grid: Sequence[Axes], dst: tuple[Names, int, int], src: tuple[Names, int, int]) -> None:
    """The ticks of masks, of several the outer ones alone; a side is its names, number and offset."""
    for ax in grid:
        ticks(ax, "y", *dst)
        ticks(ax, "x", *src)
        ax.set(xlabel="src (sender)", ylabel="dst (receiver)")
        if len(grid) > 1:
            ax.label_outer()


def ticks(ax: Axes, which: str, names: Names, count: int, offset: int = 0) -> None:
    """A tick with a name for each token where there are few, else for about eight of them."""
    axis, step = getattr(ax, f"{which}axis"), 1 if count <= FEW else round_step(count)
    shown = [str(offset + token) if names is None else names[token] for token in range(0, count, step)]
    axis.set_ticks(range(0, count, step), shown, fontsize=9 if len(shown) <= 16 else 7, **AS_IT_IS)
    axis.set_tick_params(length=0 if step == 1 else 3)
    if which == "x" and len(shown) * (_room([shown]) + 0.1) * ax.figure.figure.dpi > ax.bbox.width:
        axis.set_tick_params(rotation=90)


def round_step(count: int) -> int:
    """The power of two that gives about eight ticks."""
    return 1 << max(0, (-(-count // 8) - 1).bit_length())


def mask_height(rows: int, columns: int) -> float:
    """Inches of a picture 6 inches wide: a mask with few rows is a flat picture."""
    return 1.2 + 5.2 * min(1.0, max(1 / LONGEST_SIDE, rows / max(columns, 1))) if rows else 6.4


def coloured(ax: Axes, table: Int[Tensor, "dst src"], colours: Sequence[str]) -> None:
    """A cell in the colour of each number; thin gaps between the cells where there are few."""
    from matplotlib.colors import ListedColormap

    image(ax, table, ListedColormap(colours), 0, len(colours) - 1)


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
    rows, columns = table.shape
    small = max(rows, columns) <= 256
    look: dict[str, Any] = {"interpolation": "nearest"} if small else {"interpolation_stage": "rgba"}
    look["aspect"] = "equal" if max(rows, columns) <= LONGEST_SIDE * min(rows, columns) else "auto"
    ax.spines[:].set_visible(False)  # they would hide a sink, a column of one token, at the border
    if max(rows, columns) <= FEW:
        ax.set_xticks([place + 0.5 for place in range(columns - 1)], minor=True)
        ax.set_yticks([place + 0.5 for place in range(rows - 1)], minor=True)
        ax.grid(which="minor", color="white", linewidth=min(2.0, 36 / max(rows, columns)))
        ax.tick_params(which="minor", length=0)
    return ax.imshow(table.numpy(), cmap=colours, vmin=low, vmax=high, **look)


def open_box(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color=LIGHT, linewidth=0.8)
    ax.set_axisbelow(True)
