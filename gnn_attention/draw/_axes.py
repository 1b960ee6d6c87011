"""Define the colours and create the figures, axes and tables of cells that all pictures use."""

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

# These are colours of Okabe and Ito, which colour-blind readers can tell apart, and greys.
BLUE, ORANGE, RED = "#0072B2", "#E69F00", "#D55E00"
BLACK, GREY, FAINT, LIGHT = "#222222", "#8C8C8C", "#CFCFCF", "#E9E9E9"

Labels = Sequence[str] | None
# A mask up to this aspect ratio is drawn with square cells.
MAX_ASPECT = 4
# Up to this many tokens, every token has a label, and gaps separate the cells.
DETAIL_LIMIT = 32
# A $ or a backslash in a caller's text must not be read as mathematics.
LITERAL: dict[str, Any] = {"parse_math": False, "usetex": False}


@dataclass(frozen=True)
class Side:
    """The receivers or the senders of a picture: their number, first position, and names."""

    num_tokens: int
    offset: int = 0
    names: Sequence[str] | None = None

    @property
    def label_inches(self) -> float:
        """The length of the longest name in inches."""
        return 0.075 * max(map(len, self.names or ()), default=0)

    def labels(self) -> dict[int, str]:
        """Return the name or position of each token, or of eight or fewer if there are many."""
        step = 1 if self.num_tokens <= DETAIL_LIMIT else 1 << (-(-self.num_tokens // 8) - 1).bit_length()
        tokens = range(0, self.num_tokens, step)
        return {i: self.names[i] if self.names else str(self.offset + i) for i in tokens}


def read_sides(graph: TokenGraph, labels: Labels, src_labels: Labels) -> tuple[Side, Side]:
    """Return the receivers and the senders, which share labels if they are the same tokens."""
    if src_labels is None and is_square(graph):
        src_labels = labels
    dst = _read_labels("labels", labels, graph.num_dst, f"receivers of {graph.name}")
    src = _read_labels("src_labels", src_labels, graph.num_src, f"senders of {graph.name}")
    return Side(graph.num_dst, graph.dst_offset, dst), Side(graph.num_src, graph.src_offset, src)


def _read_labels(argument: str, labels: Labels, count: int, kind: str) -> list[str] | None:
    if labels is None:
        return None
    return [token_label(str(name)) for name in checks.labels(argument, labels, count, kind)]


def create_figure(width: float, height: float, **layout: Any) -> tuple[Figure, Any]:
    """Create a figure of this size in inches and its axes, without pyplot and its global state."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"pictures need matplotlib ({error}): pip install matplotlib") from None
    figure = Figure(figsize=(width, height), dpi=110, layout="compressed")
    figure._repr_png_ = partial(_encode_png, figure)  # type: ignore[attr-defined]
    return figure, figure.subplots(**layout)


def _encode_png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def get_axes(ax: Axes | None, width: float, height: float, pad: float = 0) -> tuple[Figure, Axes]:
    """Return the caller's axes and their figure, or new ones with ``pad`` more inches for names."""
    if ax is None:
        return create_figure(width + pad, height + pad)
    figure: Any = ax.figure.figure
    return figure, ax


def create_tables(ax: Axes | None, count: int, dst: Side, src: Side, name: str) -> tuple[Figure, list[Axes]]:
    """Return a figure and axes for ``count`` tables; only the outer axes have labels."""
    pad = max(dst.label_inches, src.label_inches)
    if count == 1:
        # A table with few rows has a flatter figure.
        aspect = max(1 / MAX_ASPECT, min(1.0, dst.num_tokens / max(src.num_tokens, 1)))
        figure, axes = get_axes(ax, 6.0, 1.2 + 5.2 * aspect, pad)
        grid = [axes]
    else:
        ncols = min(count, 4 if count <= 16 else 8)
        nrows = -(-count // ncols)
        max_tokens = max(dst.num_tokens, src.num_tokens) if pad else 0
        table_inches = max(2.7, min(0.6 + 0.17 * max_tokens, 22 / ncols))
        width, height = 0.6 + table_inches * ncols + pad, 0.9 + (table_inches + 0.2) * nrows + pad
        figure, axes = create_figure(width, height, nrows=nrows, ncols=ncols, squeeze=False)
        grid = list(axes.flat[:count])
        for unused_axes in axes.flat[count:]:
            unused_axes.set_axis_off()
        set_headline(figure, name)
    for table_axes in grid:
        set_ticks(table_axes, "y", dst)
        set_ticks(table_axes, "x", src)
        table_axes.set(xlabel="src (sender)", ylabel="dst (receiver)")
        if count > 1:
            table_axes.label_outer()
    return figure, grid


def set_title(ax: Axes, name: str, subtitle: str = "", width: int = 64) -> None:
    lines = textwrap.wrap(make_printable(name), width, max_lines=3, placeholder=" ...")
    text = "\n".join([*lines, make_printable(subtitle)] if subtitle else lines)
    ax.set_title(text, fontsize=10, loc="left", color=BLACK, **LITERAL)


def set_headline(figure: Figure, name: str) -> None:
    figure.suptitle(make_printable(name), fontsize=11, x=0.02, ha="left", **LITERAL)


def common_name(names: Sequence[str]) -> str:
    """Return the name that all layers share, or else a list of the layers and their names."""
    layer_names = ", ".join(f"layer {layer}: {name}" for layer, name in enumerate(names, 1))
    return names[0] if len(set(names)) == 1 else layer_names


def explain_colours(ax: Axes, meanings: Mapping[str, str]) -> None:
    for colour, text in meanings.items():
        ax.plot([], [], "s", color=colour, markersize=9, markeredgecolor=GREY, label=text)


def finish(figure: Figure, ax: Axes | None) -> Figure:
    """Add a legend below the figure, unless the caller passed ``ax`` and so owns the figure."""
    if ax is None:
        handles = [handle for axes in figure.axes for handle in axes.get_legend_handles_labels()[0]]
        if handles:
            figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=8.5)
        # The layout of axes with a fixed aspect settles in two passes, of which this is the first.
        figure.draw_without_rendering()
    return figure


def set_ticks(ax: Axes, axis_name: str, side: Side) -> None:
    """Label the tokens of a side, vertically if names would overlap horizontally."""
    axis = getattr(ax, f"{axis_name}axis")
    labels = side.labels()
    axis.set_ticks(list(labels), list(labels.values()), fontsize=9 if len(labels) <= 24 else 7, **LITERAL)
    axis.set_tick_params(length=0 if side.num_tokens <= DETAIL_LIMIT else 3)
    if axis_name == "x" and len(labels) * (side.label_inches + 0.1) * ax.figure.figure.dpi > ax.bbox.width:
        axis.set_tick_params(rotation=90)


def draw_table(ax: Axes, table: Tensor, colours: Sequence[str], vmin: float, vmax: float) -> Any:
    """Draw a table, with gaps between its cells if it is small. Return its image, or None if empty.

    The colours are spaced evenly from ``vmin`` to ``vmax`` and blend in between; NaN is grey.
    """
    from matplotlib.colors import LinearSegmentedColormap

    if table.numel() == 0:
        return None
    rows, columns = table.shape
    # A frame would hide a sink, which is a single column at the border.
    ax.spines[:].set_visible(False)
    if max(rows, columns) <= DETAIL_LIMIT:
        ax.set_xticks([column + 0.5 for column in range(columns - 1)], minor=True)
        ax.set_yticks([row + 0.5 for row in range(rows - 1)], minor=True)
        ax.grid(which="minor", color="white", linewidth=min(2.0, 36 / max(rows, columns)))
        ax.tick_params(which="minor", length=0)
    colour_map = LinearSegmentedColormap.from_list("cells", colours).with_extremes(bad=FAINT)
    style: dict[str, Any] = {"vmin": vmin, "vmax": vmax, "interpolation_stage": "rgba"}
    style["aspect"] = "equal" if max(rows, columns) <= MAX_ASPECT * min(rows, columns) else "auto"
    return ax.imshow(table.numpy(), cmap=colour_map, **style)
