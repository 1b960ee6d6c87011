"""Where tokens stand and how edges run between them: circle, columns, line, layers.

An edge is a cubic curve of four control points, from its sender to its receiver.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from gnn_attention._support.shapes import Bool, Float, Tensor
from gnn_attention.draw import _axes
from gnn_attention.draw._axes import AS_IT_IS, BLACK, BLUE, FAINT, FEW, GREY, RED, SMALLER, Side
from gnn_attention.graph import TokenGraph

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_EDGES = 10_000

Curves = Float[Tensor, "edges 4 2"]


def draw_edges(
    ax: Axes,
    curves: Curves,
    weights: Float[Tensor, " edges"] | None = None,
    lit: Bool[Tensor, " edges"] | None = None,
    colours: tuple[str, str] = (RED, BLUE),
) -> None:
    """Draw the edges with heads at their receivers.

    Heavy ones are wider; lit ones are thick, in the first colour, and drawn last.
    """
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path

    if len(curves) > MOST_EDGES:
        raise ValueError(
            f"a picture has at most {MOST_EDGES} edges, got {len(curves)}; use mask() or {SMALLER}"
        )
    if not len(curves):
        return
    room = 10 / math.sqrt(len(curves))
    lit = torch.zeros(len(curves), dtype=torch.bool) if lit is None else lit
    if weights is None:
        width = max(0.55, min(1.2, room)) * torch.where(lit, 1.8, 1.0)
        alpha = torch.full(width.shape, max(0.25, min(0.9, 2 * room)))
    else:
        width, alpha = 0.3 + 4 * weights, (0.15 + 1.2 * weights).clamp(0.05, 1.0)
    order = lit.int().argsort(stable=True)
    curves, width, alpha = curves[order], width[order], alpha[order]
    colour = [colours[0] if is_lit else colours[1] for is_lit in lit[order].tolist()]
    paths = [Path(points, [Path.MOVETO, *[Path.CURVE4] * 3]) for points in curves.numpy()]
    look: dict[str, Any] = {"alpha": alpha.numpy(), "linewidths": width, "facecolors": "none"}
    ax.add_collection(PathCollection(paths, edgecolors=colour, **look))
    # An arrow that is no longer than its head has no shaft: the curve, which ends in its middle, is that.
    length = 0.15 if weights is not None else max(0.045, min(0.1, 0.2 * room))
    way = torch.nn.functional.normalize(curves[:, 3] - curves[:, 2])
    size = {"units": "inches", "scale_units": "inches", "scale": 1 / length, "width": length / 5}
    head: dict[str, Any] = {"headwidth": 4, "headlength": 5, "headaxislength": 5, "pivot": "middle", **size}
    ax.quiver(*curves[:, 3].T, *way.T, color=colour, alpha=alpha.numpy(), angles="xy", **head)


def circle(ax: Axes, graph: TokenGraph, tokens: Side) -> None:
    """Tokens on a circle, clockwise from the top; chords run inside it and loops outside."""
    from matplotlib.collections import EllipseCollection

    n, (src, dst) = graph.num_dst, graph.edge_index
    radius = min(0.05, 1.5 / max(n, 1))
    angle = math.pi / 2 - 2 * math.pi * torch.arange(n, dtype=torch.float64) / max(n, 1)
    # points are complex numbers
    places = torch.polar(torch.ones_like(angle), angle)
    left, right = radius * places * cmath.exp(0.6j), radius * places * cmath.exp(-0.6j)
    loops = places[:, None] + torch.stack([left, 6 * left, 6 * right, 1.5 * right], 1)
    start, end = places[src], places[dst]
    # to the left of the way from start to end
    middle = 0.4 * (start + end) + 0.1j * (end - start)
    rims = start + radius * (middle - start).sgn(), end + 1.8 * radius * (middle - end).sgn()
    chords = torch.stack([rims[0], middle, middle, rims[1]], 1)
    draw_edges(ax, torch.view_as_real(torch.where((src == dst)[:, None], loops[src], chords)))
    size, where = 2 * radius, {"offsets": torch.view_as_real(places), "offset_transform": ax.transData}
    look: dict[str, Any] = {"facecolors": "white", "edgecolors": BLACK, "zorder": 3, "units": "xy", **where}
    ax.add_collection(EllipseCollection(size, size, 0, **look))
    # Long names of many tokens point outwards, so that they do not lie on each other.
    outwards = tokens.names is not None and n > 16
    for token, name in tokens.labels().items():
        x, y = ((1 + 6 * radius) * torch.view_as_real(places)[token]).tolist()
        side = "center" if abs(x) < 0.1 and not outwards else "left" if x > 0 else "right"
        look = {"ha": side, "rotation": math.degrees(math.atan(y / x)) if outwards else 0}
        ax.text(x, y, name, va="center", rotation_mode="anchor", fontsize=9, **look, **AS_IT_IS)
    border = 1.4 + 0.47 * tokens.room
    ax.set(xlim=(-border, border), ylim=(-border, border), aspect="equal")
    ax.set_axis_off()


def columns(ax: Axes, graph: TokenGraph, receivers: Side, senders: Side) -> None:
    """Senders on the left, receivers on the right."""
    src, dst = graph.edge_index
    left, right = (-(torch.arange(side.count) + 0.5) / max(side.count, 1) for side in (senders, receivers))
    draw_edges(ax, _straight(left[src], right[dst], 0.02).flip(-1))
    sides = (0, left, senders, "right", "src (senders)"), (1, right, receivers, "left", "dst (receivers)")
    for x, y, side, align, title in sides:
        size = 8 if side.count <= FEW else 3
        ax.plot([x] * side.count, y, "o", markersize=size, markerfacecolor="white", markeredgecolor=BLACK)
        for token, name in side.labels().items():
            ax.text(1.1 * x - 0.05, float(y[token]), name, ha=align, va="center", fontsize=9, **AS_IT_IS)
        ax.text(x, 0.04, title, ha="center", fontsize=10)
    ax.set(xlim=(-0.35, 1.35), ylim=(-1.02, 0.1))
    ax.set_axis_off()


def _straight(start: Float[Tensor, " edges"], end: Float[Tensor, " edges"], inset: float) -> Curves:
    """Straight lines from ``(start, inset)`` to ``(end, 1 - inset)``."""
    t = torch.tensor([0.0, 0.3, 0.7, 1.0], dtype=torch.float64)
    along = start[:, None] + (end - start)[:, None] * t
    return torch.stack([along, (inset + (1 - 2 * inset) * t).expand_as(along)], -1)


def line(ax: Axes, graph: TokenGraph, tokens: Side, weights: Tensor | None, lit: Tensor) -> None:
    """Tokens on a line, edges as arcs: above it to the right, below it to the left, and loops below."""
    n, (src, dst) = graph.num_dst, graph.edge_index.double()
    gap, way = 0.07, (dst - src).sign()
    length = (dst - src).abs() / max([4.0, *(dst - src).abs().tolist()])
    lean, low, high = 0.15 * (dst - src), torch.full_like(src, gap), gap + 1.3 * length**0.7
    x = torch.stack([src + 0.1 * way, src + lean, dst - lean, dst - 0.1 * way], 1)
    y = way[:, None] * torch.stack([low, high, high, low], 1)
    loop = torch.tensor([[-0.1, -gap], [-0.4, -0.45], [0.4, -0.45], [0.1, -gap]], dtype=torch.float64)
    loops = loop + torch.stack([src, 0 * src], 1)[:, None]
    curves = torch.where((src == dst)[:, None, None], loops, torch.stack([x, y], -1))
    draw_edges(ax, curves, weights, lit, (RED, GREY if bool(lit.any()) else BLUE))
    size = max(1.2, min(7.0, 330 / max(n, 1)))
    ax.plot(range(n), [0] * n, "o", markersize=size, markerfacecolor="white", markeredgecolor=BLACK)
    heights = [0.0, 0.8, *curves[..., 1].flatten().tolist()]
    ax.set(xlim=(-0.7, n - 0.3), ylim=(0.75 * min(heights) - 0.06, 0.75 * max(heights) + 0.06))
    _axes.ticks(ax, "x", tokens)
    ax.set_yticks([])
    ax.spines[:].set_visible(False)


def rows(
    ax: Axes, stack: Sequence[TokenGraph], reached: Bool[Tensor, "rows tokens"], tokens: Side, residual: bool
) -> None:
    """A row of tokens before and after each layer; blue are those reached and the edges that lead there."""
    n, inset = tokens.count, 0.1
    size = max(1.2, min(9.0, 330 / n))
    for level, graph in enumerate(stack):
        src, dst = graph.edge_index
        curves = _straight(src, dst, inset) + torch.tensor([0.0, level])
        draw_edges(ax, curves, lit=reached[level + 1][dst], colours=(BLUE, FAINT))
        own = reached[level + 1].index_fill(0, dst[src == dst], False) & residual
        ax.vlines(own.nonzero(), level + inset, level + 1 - inset, colors=BLACK, linestyles=":")
    for level, row in enumerate(reached):
        right = ax.get_yaxis_transform()
        ax.text(1.01, level, f"{row.sum()} of {n}", va="center", fontsize=9, transform=right)
    top, last = reached[-1:].nonzero().T
    ax.plot(last, top + len(stack), "D", color=RED, markersize=max(size, 6), zorder=3, label="the token")
    kinds = (reached, BLUE, BLUE, "its state reaches the token"), (~reached, GREY, "white", "it does not")
    for chosen, colour, face, text in kinds:
        level, token = chosen.nonzero().T
        ax.plot(token, level, "o", color=colour, markerfacecolor=face, markersize=size, label=text)
    _axes.ticks(ax, "x", tokens)
    words = ["input", *(f"after layer {level}" for level in range(1, len(reached)))]
    ax.set_yticks(range(len(reached)), words)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set(xlim=(-0.02 * n - 0.4, 1.02 * n - 0.6), ylim=(-0.35, len(stack) + 0.35), xlabel="token")
