"""Settings and drawings of the notebooks that are longer than a cell should be."""

import math
import warnings

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import PathPatch
from matplotlib.path import Path

BLUE, ORANGE, RED, GREY = "#0072B2", "#E69F00", "#D55E00", "#999999"  # told apart by colour-blind eyes too
# grey where there is no edge
COLOURS = LinearSegmentedColormap.from_list("orange-white-blue", [ORANGE, "white", BLUE]).with_extremes(
    bad="#E4E4E4"
)

# Importing this module silences two warnings that no reader can act on; torch_geometric raises the first one when it is imported.
warnings.filterwarnings("ignore", message="IProgress not found")
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


def use_house_style():
    """Set the look of the figures."""
    plt.rcParams.update({"figure.dpi": 100, "font.size": 11, "axes.titlesize": 12, "axes.spines.top": False})
    plt.rcParams.update({"axes.spines.right": False, "figure.constrained_layout.use": True})


def draw_table(ax, table, rows, columns, title="", limit=1.0, digits=2, mask=None, aspect="equal"):
    """A table of numbers: blue above zero, orange below, grey where ``mask`` has no edge. ``digits=None`` writes no numbers."""
    table = torch.as_tensor(table).double()
    ax.imshow(
        table if mask is None else table.masked_fill(~mask, math.nan),
        cmap=COLOURS,
        vmin=-limit,
        vmax=limit,
        aspect=aspect,
    )
    ax.set_xticks(range(len(columns)), columns, rotation=40, ha="right", rotation_mode="anchor")
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xticks([c + 0.5 for c in range(len(columns) - 1)], minor=True)
    ax.set_yticks([r + 0.5 for r in range(len(rows) - 1)], minor=True)
    ax.grid(which="minor", color="white" if mask is not None else "#DDDDDD")
    ax.tick_params(which="both", length=0)
    ax.set_title(title)
    for r, row in enumerate(table.tolist() if digits is not None else []):
        for c, value in enumerate(row):
            if mask is None or mask[r, c]:
                colour = "white" if value > 0.6 * limit else "black"
                ax.text(
                    c, r, f"{value + 0.0:.{digits}f}", ha="center", va="center", color=colour, fontsize=10
                )


def draw_curve(ax, points, width, colour):
    """A smooth line through a start, two handles and an end."""
    codes = [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
    ax.add_patch(
        PathPatch(Path(points, codes), fill=False, linewidth=width, edgecolor=colour, capstyle="round")
    )


def draw_streams(ax, run, below, above):
    """Streams upwards; what each block writes is a line from where it was read. Widths: the length of what was written."""
    levels, last = len(run.phases), len(below) - 1
    ax.vlines(range(last + 1), -0.1, levels + 0.1, color="#CCCCCC", linewidth=3, zorder=0)
    for level, phase in enumerate(run.phases):
        if phase.name == "communication":
            call = run.layers[phase.layer]
            written = call.carried(call.edge_index)[0].sum(1).norm(dim=-1)  # over all heads
            for (src, dst), size in zip(call.edge_index.T.tolist(), written.tolist(), strict=True):
                side = 0.3 if src == dst else 0.0
                points = [
                    (src, level),
                    (src - side, level + 0.5),
                    (dst - side, level + 0.5),
                    (dst, level + 1),
                ]
                draw_curve(ax, points, 0.6 * size, BLUE)
        else:
            for token, size in enumerate(phase.update[0].norm(dim=-1).tolist()):
                points = [
                    (token, level),
                    (token + 0.45, level + 0.3),
                    (token + 0.45, level + 0.7),
                    (token, level + 1),
                ]
                draw_curve(ax, points, 0.6 * size, ORANGE)
        ax.text(last + 0.7, level + 0.5, f"layer {phase.layer}\n{phase.name}", va="center", fontsize=9)
    ax.plot(
        [x for x in range(last + 1) for _ in run.states],
        list(range(levels + 1)) * (last + 1),
        "o",
        color="black",
        markersize=3,
    )
    for token, (start, end) in enumerate(zip(below, above, strict=True)):
        ax.text(token, -0.25, start, ha="center", va="top")
        ax.text(token, levels + 0.25, end, ha="center", va="bottom")
    ax.set(xlim=(-0.8, last + 2.4), ylim=(-0.7, levels + 0.7))
    ax.set_axis_off()


def draw_cloud(ax, points, judgement, title):
    """Points of space as dots, from red (bad) to blue (good)."""
    colours, edge = plt.get_cmap("coolwarm_r", 5), {"edgecolor": "black", "linewidth": 0.3}
    ax.scatter(*points.T, c=judgement, cmap=colours, s=22, depthshade=False, **edge)
    ax.set(
        xticklabels=[], yticklabels=[], zticklabels=[], xlim=(-2.3, 2.3), ylim=(-2.3, 2.3), zlim=(-1.9, 1.9)
    )
    ax.set_title(title, y=0.98)
    ax.view_init(24, -72)


def write_numbers(ax, table, least, dark):
    """The numbers of a table of at least that size, in its cells; white above ``dark``."""
    for row, column in (table.abs() >= least).nonzero().tolist():
        value = float(table[row, column])
        colour = "white" if value > dark else "black"
        ax.text(column, row, f"{value:.1f}", ha="center", va="center", color=colour, fontsize=9)


def draw_mask(ax, graph, title):
    """The mask of a graph without numbers: a row for each receiver, a column for each sender."""
    draw_table(
        ax, graph.mask(), range(graph.num_dst), range(graph.num_src), title, mask=graph.mask(), digits=None
    )
    ax.set_xticks(range(graph.num_src), range(graph.num_src), rotation=0, ha="center")
    ax.set(xlabel="src (sender)", ylabel="dst (receiver)")


def draw_ring(graph, ax):
    """An undirected graph with its tokens on a circle, clockwise from the top: each line is two edges, a loop one."""
    angle = math.pi / 2 - 2 * math.pi * torch.arange(graph.num_dst) / graph.num_dst
    x, y = angle.cos(), angle.sin()
    for src, dst in graph.edge_index.T.tolist():
        ax.plot([x[src], x[dst]], [y[src], y[dst]], color=BLUE, linewidth=1.5, zorder=1)
        if src == dst:
            ax.add_patch(plt.Circle((1.1 * x[src], 1.1 * y[src]), 0.1, fill=False, color=BLUE, linewidth=1.5))
    ax.scatter(x, y, s=60, color="white", edgecolor="black", zorder=2)
    for token in range(graph.num_dst):
        ax.text(1.35 * x[token], 1.35 * y[token], token, ha="center", va="center")
    ax.set(aspect="equal", xlim=(-1.5, 1.5), ylim=(-1.5, 1.5))
    ax.set_axis_off()


def draw_pairs(graphs, draw_links, titles, links_height=1.0):
    """A column for each graph: its mask above, and below it the same graph, drawn by ``draw_links(graph, ax)``."""
    size = (4.1 * len(graphs), 3.6 + 3.2 * links_height)
    figure, axes = plt.subplots(2, len(graphs), figsize=size, height_ratios=[1, links_height])
    for graph, title, (top, bottom) in zip(graphs, titles, axes.T, strict=True):
        draw_mask(top, graph, title)
        draw_links(graph, bottom)
        bottom.set_title("", loc="left")
        if bottom.get_legend():
            bottom.get_legend().remove()
    return figure


def write_words(ax, points, words, avoid, size=8.5):
    """Write each word beside its dot, clear of other words, dots and the points ``avoid``, if there is space. Return their number."""
    ax.figure.canvas.draw()  # the layout is final from here on
    ax.figure.set_layout_engine("none")
    dots = ax.transData.transform(points.numpy())
    obstacles = [*dots, *ax.transData.transform(avoid.numpy())]
    places = [(7, 0), (-7, 0), (0, 6), (0, -6), (5, 5), (-5, 5), (5, -5), (-5, -5)]
    sides, levels = {1: "left", 0: "center", -1: "right"}, {1: "bottom", 0: "center", -1: "top"}
    taken = []
    for word, dot in zip(words, dots, strict=True):
        for right, up in places:
            label = ax.annotate(
                word,
                ax.transData.inverted().transform(dot),
                (right, up),
                textcoords="offset points",
                ha=sides[(right > 0) - (right < 0)],
                va=levels[(up > 0) - (up < 0)],
                fontsize=size,
            )
            box = label.get_window_extent()
            inside = ax.bbox.x0 <= box.x0 and box.x1 <= ax.bbox.x1
            if inside and not any(map(box.overlaps, taken)) and not box.padded(2).count_contains(obstacles):
                taken.append(box)
                break
            label.remove()
    return len(taken)
