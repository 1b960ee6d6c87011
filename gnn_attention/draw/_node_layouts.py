"""Where tokens stand and how edges run between them: circle, columns, line, layers. Only ``draw`` uses it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from gnn_attention.draw import _axes
from gnn_attention.draw._axes import (
    AS_IT_IS,
    BLACK,
    BLUE,
    FAINT,
    FEW,
    GREY,
    LIGHT,
    RED,
    Curve,
    Point,
    Stroke,
    handle,
)
from gnn_attention.graph import TokenGraph

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LINES = 4000  # edges drawn; of more, a random sample of so many
MOST_ARROWS = 600  # lines with heads; of more, width shows the direction

Edge = tuple[int, int]
Names = Sequence[str] | None


@dataclass(frozen=True)
class Drawn:
    """The edges ``(src, dst)`` of a graph that a picture shows, and how each looks."""

    graph: TokenGraph
    edges: list[Edge]
    weights: list[float] | None
    lit: set[Edge]

    @classmethod
    def of(cls, graph: TokenGraph, weights: list[float] | None = None, lit: set[Edge] | None = None) -> Drawn:
        """All edges, or a random sample of them that keeps those to be lit."""
        pairs = [(int(src), int(dst)) for src, dst in graph.edge_index.T.tolist()]
        if missing := sorted((lit or set()) - set(pairs)):
            raise ValueError(f"lit must hold edges (src, dst) of {graph.name}, {missing[0]} is none")
        chosen = list(range(len(pairs)))
        if len(pairs) > MOST_LINES:
            order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))[:MOST_LINES]
            chosen = sorted(
                {*order.tolist(), *(number for number, pair in enumerate(pairs) if lit and pair in lit)}
            )
        drawn_weights = None if weights is None else [weights[number] for number in chosen]
        return cls(graph, [pairs[number] for number in chosen], drawn_weights, lit or set())

    @property
    def few(self) -> bool:
        """True if every edge gets an arrow and every token a label."""
        return max(self.graph.num_dst, self.graph.num_src) <= FEW and len(self.edges) <= MOST_ARROWS

    def without_loops(self) -> Drawn:
        """The edges between two tokens: a loop is not drawn where the token itself shows it."""
        chosen = [number for number, (src, dst) in enumerate(self.edges) if src != dst]
        weights = None if self.weights is None else [self.weights[number] for number in chosen]
        return replace(self, edges=[self.edges[number] for number in chosen], weights=weights)

    def link(self, ax: Axes, curves: Sequence[Curve]) -> None:
        """Draw the edges along their curves; heavy ones wider, lit ones thick, in red, and last."""
        room, other = 10 / math.sqrt(max(len(self.edges), 1)), GREY if self.lit else BLUE
        strokes = []
        for number, (edge, curve) in enumerate(zip(self.edges, curves, strict=True)):
            width, alpha = max(0.55, min(1.2, room)), max(0.25, min(0.9, 2 * room))
            if self.weights is not None:
                width, alpha = (
                    0.3 + 4 * self.weights[number],
                    min(1.0, max(0.05, 0.15 + 1.2 * self.weights[number])),
                )
            chosen = edge in self.lit
            strokes.append(
                Stroke(
                    curve,
                    width * (1.8 if chosen and not self.weights else 1),
                    RED if chosen else other,
                    alpha,
                )
            )
        strokes.sort(key=lambda stroke: stroke.colour == RED)
        (_axes.arrows if self.few else _axes.tapered)(ax, strokes)


def circle(ax: Axes, drawn: Drawn, names: Names) -> None:
    """Tokens on a circle, clockwise from the top."""
    n = drawn.graph.num_dst
    places = [(math.sin(2 * math.pi * t / n), math.cos(2 * math.pi * t / n)) for t in range(n)]
    size = min(0.13, 2.2 / max(n, 1)) if drawn.few else 0.0
    shown = drawn if drawn.few else drawn.without_loops()
    shown.link(ax, [_chord(places[src], places[dst], size) for src, dst in shown.edges])
    if drawn.few:
        for token, place in enumerate(places):
            _node(ax, place, size, _name(drawn.graph.dst_offset, token, names))
    else:
        _dots(ax, places, self_loops(drawn.graph), max(1.5, min(5.0, 900 / n)))
        for token in _landmarks(n):
            x, y = places[token]
            ax.text(
                1.1 * x,
                1.1 * y,
                _name(drawn.graph.dst_offset, token, names),
                ha="center",
                va="center",
                fontsize=9,
                **AS_IT_IS,
            )
    ax.set(xlim=(-1.34, 1.34), ylim=(-1.34, 1.34), aspect="equal")
    ax.set_axis_off()


def _chord(start: Point, end: Point, size: float) -> Curve:
    """A curve inside the circle, to the left of its direction; a loop outside it."""
    if start == end:
        return _loop(start, size)
    dx, dy = end[0] - start[0], end[1] - start[1]
    middle = (0.4 * (start[0] + end[0]) - 0.1 * dy, 0.4 * (start[1] + end[1]) + 0.1 * dx)
    return _axes.bezier([_axes.trimmed(start, middle, size), middle, _axes.trimmed(end, middle, size)])


def _loop(place: Point, size: float) -> Curve:
    x, y = place
    corners = []
    for turn, length in ((0.6, 1.0), (0.75, 2.9), (-0.75, 2.9), (-0.6, 1.0)):
        across, out = math.sin(turn) * size * length, math.cos(turn) * size * length
        corners.append((x + out * x - across * y, y + out * y + across * x))
    return _axes.bezier(corners)


def columns(ax: Axes, drawn: Drawn, names: Names, src_names: Names) -> None:
    """Senders on the left, receivers on the right, each from top to bottom."""
    graph = drawn.graph
    left, right = (
        [(x, -(t + 0.5) / count) for t in range(count)]
        for x, count in ((0.0, graph.num_src), (1.0, graph.num_dst))
    )
    inset = 0.03 if drawn.few else 0.008
    drawn.link(ax, [_across(left[src], right[dst], inset) for src, dst in drawn.edges])
    for places, side, shape, own, offset in (
        (left, -1, "s", src_names, graph.src_offset),
        (right, 1, "o", names, graph.dst_offset),
    ):
        look: dict[str, Any] = {
            "markersize": 8 if drawn.few else 3,
            "markerfacecolor": "white",
            "markeredgecolor": BLACK,
        }
        ax.plot([x for x, _ in places], [y for _, y in places], shape, **look)
        for token in range(len(places)) if len(places) <= FEW else _landmarks(len(places)):
            x, y = places[token]
            turn = "right" if side < 0 else "left"
            ax.text(
                x + 0.05 * side, y, _name(offset, token, own), ha=turn, va="center", fontsize=9, **AS_IT_IS
            )
    ax.text(0, 0.04, "src (senders)", ha="center", fontsize=10)
    ax.text(1, 0.04, "dst (receivers)", ha="center", fontsize=10)
    ax.set(xlim=(-0.35, 1.35), ylim=(-1.02, 0.1))
    ax.set_axis_off()


def _across(start: Point, end: Point, inset: float) -> Curve:
    first, last = (start[0] + inset, start[1]), (end[0] - inset, end[1])
    return _axes.bezier([first, (0.45, start[1]), (0.55, end[1]), last])


def line(ax: Axes, drawn: Drawn, names: Names) -> None:
    """Tokens on a line, edges as arcs: above it to the right, below it to the left, and loops below."""
    n = drawn.graph.num_dst
    longest = max([abs(dst - src) for src, dst in drawn.edges] + [4])
    gap = 0.11 if drawn.few else 0.03
    shown = drawn if drawn.few else drawn.without_loops()
    curves = [_arc(src, dst, longest, gap) for src, dst in shown.edges]
    shown.link(ax, curves)
    if drawn.few:
        for token in range(n):
            box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": BLACK, "linewidth": 0.9}
            text = _name(drawn.graph.dst_offset, token, names)
            ax.text(
                token,
                0,
                text,
                ha="center",
                va="center",
                fontsize=10 if n <= 12 else 9 if n <= 24 else 7,
                bbox=box,
                **AS_IT_IS,
            )
    else:
        _dots(
            ax,
            [(float(token), 0.0) for token in range(n)],
            self_loops(drawn.graph),
            max(1.2, min(5.0, 500 / n)),
        )
    heights = [y for curve in curves for _, y in curve]
    low, high = min([*heights, -gap]), max([*heights, 0.8])
    if drawn.few:
        ax.set_axis_off()
    else:
        _axes.ticks(ax, "x", names, n, drawn.graph.dst_offset)
        ax.set_yticks([])
        ax.spines[:].set_visible(False)
        ax.set_xlabel("token: src at the thin end, dst at the thick end")
    ax.set(xlim=(-0.7, n - 0.3), ylim=(low - 0.06, high + 0.06))


def _arc(src: int, dst: int, longest: int, gap: float) -> Curve:
    """Half of a round: short ones start and end further apart, so that they cross no long ones."""
    if src == dst:
        return _axes.bezier(
            [(src - 0.14, -gap), (src - 0.3, -gap - 0.42), (src + 0.3, -gap - 0.42), (src + 0.14, -gap)]
        )
    way, length = (1 if dst > src else -1), abs(dst - src)
    inset = 0.04 + 0.26 * (1 - length / longest)
    start, end, height = src + way * inset, dst - way * inset, 4 / 3 * (length / longest) ** 0.7
    return _axes.bezier(
        [(x, way * (gap + y)) for x, y in ((start, 0.0), (start, height), (end, height), (end, 0.0))]
    )


def between(ax: Axes, drawn: Drawn, level: int, below: list[bool], above: list[bool], residual: bool) -> None:
    """The edges between two rows of tokens: those that lead to the lit token in blue, the others faint."""
    inset = 0.13 if drawn.few else 0.06
    curves = {
        (src, dst): [(float(src), level + inset), (float(dst), level + 1 - inset)] for src, dst in drawn.edges
    }
    lit = [curve for (_, dst), curve in curves.items() if above[dst]]
    faint = [curve for (_, dst), curve in curves.items() if not above[dst]]
    if drawn.few:
        _axes.arrows(ax, [Stroke(curve, 0.7, FAINT) for curve in faint])
        _axes.arrows(ax, [Stroke(curve, 1.1) for curve in lit])
    else:
        alpha = max(0.15, min(0.9, 12 / math.sqrt(max(len(lit), 1))))
        _axes.tapered(ax, [Stroke(_axes.bezier(curve, 4), 0.8, BLUE, alpha) for curve in lit])
    carried = [
        token
        for token, yes in enumerate(above)
        if yes and (token, token) not in curves and residual and drawn.few
    ]
    for token in carried:
        ax.plot([token, token], [level + inset, level + 1 - inset], linestyle=":", color=BLACK, linewidth=1.1)


def rows(ax: Axes, reached: list[list[bool]], last: int, names: Names) -> None:
    """The tokens of each row, lit ones filled; how many are lit stands on the right."""
    n, size = len(reached[0]), max(1.2, min(9.0, 330 / len(reached[0])))
    for level, lit in enumerate(reached):
        for yes, look in ((False, {"markerfacecolor": "white", "color": GREY}), (True, {"color": BLUE})):
            tokens = [token for token in range(n) if lit[token] is yes]
            few: dict[str, Any] = look if n <= FEW else {"color": BLUE if yes else LIGHT}
            ax.plot(tokens, [level] * len(tokens), "o", markersize=size, **few)
        ax.text(
            1.01, level, f"{sum(lit)} of {n}", va="center", fontsize=9, transform=ax.get_yaxis_transform()
        )
    ax.plot([last], [len(reached) - 1], "D", color=RED, markersize=max(size, 6))
    ax.set_yticks(
        range(len(reached)), ["input", *(f"after layer {level}" for level in range(1, len(reached)))]
    )
    _axes.ticks(ax, "x", names, n)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set(xlim=(-0.02 * n - 0.4, 1.02 * n - 0.6), ylim=(-0.35, len(reached) - 0.65), xlabel="token")


def handles(drawn: Drawn) -> list[Any]:
    """What the lines and the dots mean."""
    if drawn.few:
        edge = handle(
            "line", "src → dst: dst attends to src", color=GREY if drawn.lit else BLUE, linewidth=1.4
        )
        return [edge, handle("line", "chosen edge", color=RED, linewidth=2)] if drawn.lit else [edge]
    edge = handle("line", "thin end src, thick end dst: dst attends to src", color=BLUE, linewidth=1.4)
    if (drawn.graph.num_dst, drawn.graph.dst_offset) != (drawn.graph.num_src, drawn.graph.src_offset):
        return [edge]
    own, other = self_loops(drawn.graph), {"markeredgecolor": BLACK, "markersize": 5}
    entries = [(True, handle("o", "attends to itself", color=BLACK, markersize=5))]
    entries += [(False, handle("o", "does not attend to itself", markerfacecolor="white", **other))]
    return [edge, *(entry for kind, entry in entries if kind in own)]


def weight_handles(drawn: Drawn) -> list[Any]:
    """What the width means, where there are weights."""
    if drawn.weights is None:
        return []
    return [
        handle("line", f"weight {weight}", color=BLUE, linewidth=0.3 + 4 * weight)
        for weight in (0.1, 0.5, 1.0)
    ]


def layer_handles(carried: bool) -> list[Any]:
    """What is lit, and by which edges."""
    entries = [
        handle("D", "the token", color=RED, markersize=7),
        handle("o", "its state reaches the token", color=BLUE, markersize=7),
        handle("o", "it does not", markerfacecolor="white", color=GREY, markersize=7),
        handle("line", "edge src → dst", color=BLUE, linewidth=1.3),
    ]
    own = handle("line", "own state carried along", color=BLACK, linestyle=":", linewidth=1.2)
    return [*entries, own] if carried else entries


def _node(ax: Axes, place: Point, size: float, name: str) -> None:
    from matplotlib.patches import Circle

    ax.add_patch(Circle(place, size, facecolor="white", edgecolor=BLACK, linewidth=1.0, zorder=3))
    ax.text(*place, name, ha="center", va="center", fontsize=min(10, 95 * size), zorder=4, **AS_IT_IS)


def _dots(ax: Axes, places: Sequence[Point], filled: list[bool], size: float) -> None:
    for yes in (False, True):
        shown = [place for place, own in zip(places, filled, strict=True) if own is yes]
        look: dict[str, Any] = {
            "markersize": size,
            "markeredgecolor": BLACK,
            "markeredgewidth": min(0.8, size / 4),
            "zorder": 3,
        }
        ax.plot(
            [x for x, _ in shown],
            [y for _, y in shown],
            "o",
            markerfacecolor=BLACK if yes else "white",
            **look,
        )


def self_loops(graph: TokenGraph) -> list[bool]:
    """For each token of a square graph, whether it does."""
    src, dst = graph.edge_index
    own = torch.zeros(graph.num_dst, dtype=torch.bool)
    own[dst[src == dst]] = True
    found: list[bool] = own.tolist()
    return found


def _landmarks(n: int) -> range:
    return range(0, n, max(1, -(-n // 8)))


def _name(offset: int, token: int, names: Names) -> str:
    return str(offset + token) if names is None else names[token]
