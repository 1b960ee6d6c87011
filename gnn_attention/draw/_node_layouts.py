"""Place tokens on a circle, in columns, on a line or in layers, and draw the edges between them.

An edge is a cubic Bezier curve from its sender to its receiver, stored as four control points.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from gnn_attention._support.shapes import Bool, Float, Tensor
from gnn_attention.draw import _axes
from gnn_attention.draw._axes import BLACK, BLUE, DETAIL_LIMIT, FAINT, GREY, LITERAL, RED, Side
from gnn_attention.graph import TokenGraph

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_EDGES = 10_000

Curves = Float[Tensor, "edges 4 2"]


def draw_edges(
    ax: Axes,
    curves: Curves,
    weights: Float[Tensor, " edges"] | None = None,
    is_lit: Bool[Tensor, " edges"] | None = None,
    colours: tuple[str, str] = (RED, BLUE),
) -> None:
    """Draw edges with arrowheads at their receivers.

    Weights set the widths; without them, lit edges are thicker. Lit edges have the first colour.
    """
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path

    if len(curves) > MAX_EDGES:
        raise ValueError(f"at most {MAX_EDGES} edges fit, got {len(curves)}: use algebra.restrict or mask()")
    if not len(curves):
        return
    spacing = 10 / math.sqrt(len(curves))
    is_lit = torch.zeros(len(curves), dtype=torch.bool) if is_lit is None else is_lit
    if weights is None:
        width = max(0.55, min(1.2, spacing)) * torch.where(is_lit, 1.8, 1.0)
        alpha = torch.full(width.shape, max(0.25, min(0.9, 2 * spacing)))
    else:
        width, alpha = 0.3 + 4 * weights, (0.15 + 1.2 * weights).clamp(0.05, 1.0)
    order = is_lit.int().argsort(stable=True)
    curves, width, alpha = curves[order], width[order], alpha[order]
    edge_colours = [colours[0] if lit else colours[1] for lit in is_lit[order].tolist()]
    paths = [Path(points, [Path.MOVETO, *[Path.CURVE4] * 3]) for points in curves.numpy()]
    style: dict[str, Any] = {"alpha": alpha.numpy(), "linewidths": width, "facecolors": "none"}
    ax.add_collection(PathCollection(paths, edgecolors=edge_colours, **style))
    # quiver draws only the heads, whose shafts are the curves.
    length = 0.15 if weights is not None else max(0.045, min(0.1, 0.2 * spacing))
    direction = torch.nn.functional.normalize(curves[:, 3] - curves[:, 2])
    head: dict[str, Any] = {"headwidth": 4, "headlength": 5, "headaxislength": 5, "pivot": "middle"}
    head |= {"units": "inches", "scale_units": "inches", "scale": 1 / length, "width": length / 5}
    ax.quiver(*curves[:, 3].T, *direction.T, color=edge_colours, alpha=alpha.numpy(), angles="xy", **head)


def draw_circle(ax: Axes, graph: TokenGraph, tokens: Side) -> None:
    """Draw tokens on a circle, clockwise from the top, with chords inside it and loops outside."""
    from matplotlib.collections import EllipseCollection

    n, (src, dst) = graph.num_dst, graph.edge_index
    radius = min(0.05, 1.5 / max(n, 1))
    angle = math.pi / 2 - 2 * math.pi * torch.arange(n, dtype=torch.float64) / max(n, 1)
    # Here a point (x, y) is the complex number x + iy.
    points = torch.polar(torch.ones_like(angle), angle)
    left, right = radius * points * cmath.exp(0.6j), radius * points * cmath.exp(-0.6j)
    loops = points[:, None] + torch.stack([left, 6 * left, 6 * right, 1.5 * right], 1)
    start, end = points[src], points[dst]
    # A chord bends to the left of its direction, so that it does not cover the reverse edge.
    middle = 0.4 * (start + end) + 0.1j * (end - start)
    first_point = start + radius * (middle - start).sgn()
    last_point = end + 1.8 * radius * (middle - end).sgn()
    chords = torch.stack([first_point, middle, middle, last_point], 1)
    draw_edges(ax, torch.view_as_real(torch.where((src == dst)[:, None], loops[src], chords)))
    style: dict[str, Any] = {"facecolors": "white", "edgecolors": BLACK, "zorder": 3, "units": "xy"}
    style |= {"offsets": torch.view_as_real(points), "offset_transform": ax.transData}
    ax.add_collection(EllipseCollection(2 * radius, 2 * radius, 0, **style))
    # If there are many tokens, their names point outwards, so that they do not overlap.
    is_radial = tokens.names is not None and n > 16
    for token, name in tokens.labels().items():
        x, y = ((1 + 6 * radius) * torch.view_as_real(points)[token]).tolist()
        align = "center" if abs(x) < 0.1 and not is_radial else "left" if x > 0 else "right"
        style = {"ha": align, "rotation": math.degrees(math.atan(y / x)) if is_radial else 0}
        ax.text(x, y, name, va="center", rotation_mode="anchor", fontsize=9, **style, **LITERAL)
    border = 1.4 + 0.47 * tokens.label_inches
    ax.set(xlim=(-border, border), ylim=(-border, border), aspect="equal")
    ax.set_axis_off()


def draw_columns(ax: Axes, graph: TokenGraph, receivers: Side, senders: Side) -> None:
    """Draw senders on the left and receivers on the right."""
    src, dst = graph.edge_index
    left, right = (-(torch.arange(x.num_tokens) + 0.5) / max(x.num_tokens, 1) for x in (senders, receivers))
    draw_edges(ax, _straight_curves(left[src], right[dst], 0.02).flip(-1))
    columns = (0, left, senders, "right", "src (senders)"), (1, right, receivers, "left", "dst (receivers)")
    for x, y, side, align, title in columns:
        size = 8 if side.num_tokens <= DETAIL_LIMIT else 3
        ax.plot([x] * len(y), y, "o", markersize=size, markerfacecolor="white", markeredgecolor=BLACK)
        for token, name in side.labels().items():
            ax.text(1.1 * x - 0.05, float(y[token]), name, ha=align, va="center", fontsize=9, **LITERAL)
        ax.text(x, 0.04, title, ha="center", fontsize=10)
    ax.set(xlim=(-0.35, 1.35), ylim=(-1.02, 0.1))
    ax.set_axis_off()


def _straight_curves(start: Float[Tensor, " edges"], end: Float[Tensor, " edges"], inset: float) -> Curves:
    """Return straight lines from ``(start, inset)`` to ``(end, 1 - inset)``."""
    t = torch.tensor([0.0, 0.3, 0.7, 1.0], dtype=torch.float64)
    x = start[:, None] + (end - start)[:, None] * t
    return torch.stack([x, (inset + (1 - 2 * inset) * t).expand_as(x)], -1)


def draw_line(ax: Axes, graph: TokenGraph, tokens: Side, weights: Tensor | None, is_lit: Tensor) -> None:
    """Draw tokens on a line, with edges to the right above it and all other edges below it."""
    n, (src, dst) = graph.num_dst, graph.edge_index.double()
    gap = 0.07
    direction = (dst - src).sign()
    length = (dst - src).abs() / max([4.0, *(dst - src).abs().tolist()])
    lean, low, high = 0.15 * (dst - src), torch.full_like(src, gap), gap + 1.3 * length**0.7
    x = torch.stack([src + 0.1 * direction, src + lean, dst - lean, dst - 0.1 * direction], 1)
    y = direction[:, None] * torch.stack([low, high, high, low], 1)
    loop = torch.tensor([[-0.1, -gap], [-0.4, -0.45], [0.4, -0.45], [0.1, -gap]], dtype=torch.float64)
    loops = loop + torch.stack([src, 0 * src], 1)[:, None]
    curves = torch.where((src == dst)[:, None, None], loops, torch.stack([x, y], -1))
    draw_edges(ax, curves, weights, is_lit, (RED, GREY if bool(is_lit.any()) else BLUE))
    size = max(1.2, min(7.0, 330 / max(n, 1)))
    ax.plot(range(n), [0] * n, "o", markersize=size, markerfacecolor="white", markeredgecolor=BLACK)
    heights = [0.0, 0.8, *curves[..., 1].flatten().tolist()]
    ax.set(xlim=(-0.7, n - 0.3), ylim=(0.75 * min(heights) - 0.06, 0.75 * max(heights) + 0.06))
    _axes.set_ticks(ax, "x", tokens)
    ax.set_yticks([])
    ax.spines[:].set_visible(False)


def draw_rows(
    ax: Axes, stack: Sequence[TokenGraph], is_lit: Bool[Tensor, "rows tokens"], tokens: Side, residual: bool
) -> None:
    """Draw a row of tokens before and after each layer; lit tokens, and edges to them, are blue."""
    n, inset = tokens.num_tokens, 0.1
    size = max(1.2, min(9.0, 330 / n))
    for level, graph in enumerate(stack):
        src, dst = graph.edge_index
        curves = _straight_curves(src, dst, inset) + torch.tensor([0.0, level])
        draw_edges(ax, curves, is_lit=is_lit[level + 1][dst], colours=(BLUE, FAINT))
        has_residual = is_lit[level + 1].index_fill(0, dst[src == dst], False) & residual
        ax.vlines(has_residual.nonzero(), level + inset, level + 1 - inset, colors=BLACK, linestyles=":")
    transform = ax.get_yaxis_transform()
    for level, row in enumerate(is_lit):
        ax.text(1.01, level, f"{row.sum()} of {n}", va="center", fontsize=9, transform=transform)
    top, token = is_lit[-1:].nonzero().T
    ax.plot(token, top + len(stack), "D", color=RED, markersize=max(size, 6), zorder=3, label="the token")
    kinds = (is_lit, BLUE, BLUE, "its state reaches the token"), (~is_lit, GREY, "white", "does not reach it")
    for is_kind, colour, face, text in kinds:
        level, token = is_kind.nonzero().T
        ax.plot(token, level, "o", color=colour, markerfacecolor=face, markersize=size, label=text)
    _axes.set_ticks(ax, "x", tokens)
    ax.set_yticks(range(len(is_lit)), ["input", *(f"after layer {i}" for i in range(1, len(is_lit)))])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set(xlim=(-0.02 * n - 0.4, 1.02 * n - 0.6), ylim=(-0.35, len(stack) + 0.35), xlabel="token")
