"""What every picture is made of: figures, colours, axes, tables of coloured cells.

Figures are made without pyplot: nothing is shown or set globally, and a figure without references is freed.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention._support.text import make_printable, token_label
from gnn_attention.analyse._walks import is_square
from gnn_attention.graph import TokenGraph

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, distinct for colour-blind eyes too, and greys
BLUE, ORANGE, RED = "#0072B2", "#E69F00", "#D55E00"
BLACK, GREY, FAINT, LIGHT = "#222222", "#8C8C8C", "#CFCFCF", "#E9E9E9"

Labels = Sequence[str] | None
LONGEST_SIDE = 4  # times the other side, up to which the cells of a mask are squares
FEW = 32  # tokens up to which each has its own label and each edge its own arrow
SMALLER = "take algebra.restrict"
# a caller's text may hold a $ or a backslash
AS_IT_IS: dict[str, Any] = {"parse_math": False, "usetex": False}


@dataclass(frozen=True)
class Side:
    """The receivers or the senders: how many they are, the position of the first, and their names."""

    count: int
    offset: int = 0
    names: Sequence[str] | None = None

    @property
    def room(self) -> float:
        """Inches that the longest name takes."""
        return 0.075 * max(map(len, self.names or ()), default=0)

    def labels(self) -> dict[int, str]:
        """The name or position of every token where there are few, else of about eight of them."""
        step = 1 if self.count <= FEW else 1 << (-(-self.count // 8) - 1).bit_length()
        shown = range(0, self.count, step)
        return {token: self.names[token] if self.names else str(self.offset + token) for token in shown}


def read_sides(graph: TokenGraph, labels: Labels, src_labels: Labels) -> tuple[Side, Side]:
    """The receivers and the senders; where these are the same tokens, they have the same labels."""
    if src_labels is None and is_square(graph):
        src_labels = labels
    dst = _read_labels("labels", labels, f"{graph.num_dst} receivers of {graph.name}", graph.num_dst)
    src = _read_labels("src_labels", src_labels, f"{graph.num_src} senders of {graph.name}", graph.num_src)
    return Side(graph.num_dst, graph.dst_offset, dst), Side(graph.num_src, graph.src_offset, src)


def _read_labels(word: str, labels: Labels, tokens: str, count: int) -> list[str] | None:
    if labels is None:
        return None
    return [token_label(str(name)) for name in checks.labels(word, labels, count, tokens)]


def figure(width: float, height: float, **layout: Any) -> tuple[Figure, Any]:
    """A figure of so many inches and its axes; ``layout`` goes to ``Figure.subplots``."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"pictures need matplotlib ({error}): pip install matplotlib") from None
    made = Figure(figsize=(width, height), dpi=110, layout="compressed")
    made._repr_png_ = partial(_png, made)  # type: ignore[attr-defined]
    return made, made.subplots(**layout)


def _png(made: Figure) -> bytes:
    stream = io.BytesIO()
    made.savefig(stream, format="png")
    return stream.getvalue()


def of(ax: Axes | None, width: float, height: float, room: float = 0) -> tuple[Figure, Axes]:
    """The caller's axes and their figure, or new ones with so many inches more for names."""
    if ax is None:
        return figure(width + room, height + room)
    owner: Any = ax.figure.figure
    return owner, ax


def tables(ax: Axes | None, count: int, dst: Side, src: Side, name: str) -> tuple[Figure, list[Axes]]:
    """Axes for so many tables of receivers and senders, with names at the outer ones; larger with names.

    There are four in a row, or eight where there are more than 16, under a headline.
    """
    room = max(dst.room, src.room)
    if count == 1:
        # a table with few rows is a flat picture
        flat = max(1 / LONGEST_SIDE, min(1.0, dst.count / max(src.count, 1)))
        made, axes = of(ax, 6.0, 1.2 + 5.2 * flat, room)
        grid = [axes]
    else:
        columns = min(count, 4 if count <= 16 else 8)
        rows = -(-count // columns)
        longest = max(dst.count, src.count) if room else 0
        side = max(2.7, min(0.6 + 0.17 * longest, 22 / columns))
        width, height = 0.6 + side * columns + room, 0.9 + (side + 0.2) * rows + room
        made, axes = figure(width, height, nrows=rows, ncols=columns, squeeze=False)
        grid = list(axes.flat[:count])
        for unused in axes.flat[count:]:
            unused.set_axis_off()
        headline(made, name)
    for each in grid:
        ticks(each, "y", dst)
        ticks(each, "x", src)
        each.set(xlabel="src (sender)", ylabel="dst (receiver)")
        if count > 1:
            each.label_outer()
    return made, grid


def title(ax: Axes, name: str, facts: str = "", width: int = 64) -> None:
    """The name of the graph, broken into lines where it is long, over a line of facts."""
    lines = textwrap.wrap(make_printable(name), width, max_lines=3, placeholder=" ...")
    text = "\n".join([*lines, make_printable(facts)] if facts else lines)
    ax.set_title(text, fontsize=10, loc="left", color=BLACK, **AS_IT_IS)


def headline(made: Figure, name: str) -> None:
    made.suptitle(make_printable(name), fontsize=11, x=0.02, ha="left", **AS_IT_IS)


def common_name(names: Sequence[str]) -> str:
    """What the graphs of some layers are called: one name if it is the same for all."""
    numbered = ", ".join(f"layer {number}: {name}" for number, name in enumerate(names, 1))
    return names[0] if len(set(names)) == 1 else numbered


def name_colours(ax: Axes, meanings: Mapping[str, str]) -> None:
    """An entry of the legend for each colour of cells."""
    for colour, text in meanings.items():
        ax.plot([], [], "s", color=colour, markersize=9, markeredgecolor=GREY, label=text)


def finish(made: Figure, ax: Axes | None) -> Figure:
    """The figure with a legend below; untouched where the axes are part of the caller's own."""
    if ax is None:
        handles = [handle for axes in made.axes for handle in axes.get_legend_handles_labels()[0]]
        if handles:
            made.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=8.5)
        # the layout of axes with a fixed shape settles in the second of two passes, this is the first
        made.draw_without_rendering()
    return made


def ticks(ax: Axes, which: str, side: Side) -> None:
    """The labels of a side, upright where they would lie on each other."""
    axis, labels = getattr(ax, f"{which}axis"), side.labels()
    axis.set_ticks(list(labels), list(labels.values()), fontsize=9 if len(labels) <= 24 else 7, **AS_IT_IS)
    axis.set_tick_params(length=0 if side.count <= FEW else 3)
    if which == "x" and len(labels) * (side.room + 0.1) * ax.figure.figure.dpi > ax.bbox.width:
        axis.set_tick_params(rotation=90)


def image(ax: Axes, table: Tensor, colours: Sequence[str], low: float, high: float) -> Any:
    """The table as matplotlib's image, or None without cells; thin gaps between cells if there are few.

    The colours stand for numbers at equal distances from low to high, and grey for NaN.
    """
    from matplotlib.colors import LinearSegmentedColormap

    if table.numel() == 0:
        return None
    rows, columns = table.shape
    ax.spines[:].set_visible(False)  # they would hide a sink, a column of one token, at the border
    if max(rows, columns) <= FEW:
        ax.set_xticks([place + 0.5 for place in range(columns - 1)], minor=True)
        ax.set_yticks([place + 0.5 for place in range(rows - 1)], minor=True)
        ax.grid(which="minor", color="white", linewidth=min(2.0, 36 / max(rows, columns)))
        ax.tick_params(which="minor", length=0)
    look: dict[str, Any] = {"vmin": low, "vmax": high, "interpolation_stage": "rgba"}
    look["aspect"] = "equal" if max(rows, columns) <= LONGEST_SIDE * min(rows, columns) else "auto"
    scale = LinearSegmentedColormap.from_list("cells", colours).with_extremes(bad=FAINT)
    return ax.imshow(table.numpy(), cmap=scale, **look)
