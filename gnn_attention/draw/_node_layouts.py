"""Where tokens stand and how edges run between them: circle, columns, line, layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from gnn_attention._support.shapes import Bool, Float, Int, Tensor
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
    Curves,
    Points,
    handle,
)
from gnn_attention.graph import TokenGraph

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LINES = 4000  # edges drawn; of more, a random sample of so many
MOST_ARROWS = 600  # lines with heads; of more, width shows the direction

Names = Sequence[str] | None


@dataclass(frozen=True)
class Drawn:
    """The edges of a graph that a picture shows, and how each looks."""

    graph: TokenGraph
    src: Int[Tensor, " edges"]
    dst: Int[Tensor, " edges"]
    weights: Float[Tensor, " edges"] | None
    lit: Bool[Tensor, " edges"]

    @classmethod
    def of(
        cls, graph: TokenGraph, weights: Tensor | None = None, lit: set[tuple[int, int]] | None = None
    ) -> Drawn:
        """All edges, or a random sample of them and those that are lit."""
        pairs = [(src, dst) for src, dst in graph.edge_index.T.tolist()]
        if missing := sorted((lit or set()) - set(pairs)):
            raise ValueError(f"lit must hold edges (src, dst) of {graph.name}, {missing[0]} is none")
        shines = torch.tensor([pair in (lit or set()) for pair in pairs], dtype=torch.bool)
        src, dst = graph.edge_index
        drawn = cls(graph, src, dst, weights, shines)
        if len(pairs) <= MOST_LINES:
            return drawn
        sample = torch.zeros(len(pairs), dtype=torch.bool)
        sample[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))[:MOST_LINES]] = True
        return drawn._some(sample | shines)

    @property
    def few(self) -> bool:
        """True if every edge gets an arrow and every token a label."""
        return max(self.graph.num_dst, self.graph.num_src) <= FEW and len(self.src) <= MOST_ARROWS

    def without_loops(self) -> Drawn:
        """The edges between two tokens, where the tokens themselves show the loops."""
        return self._some(self.src != self.dst)

    def _some(self, chosen: Tensor) -> Drawn:
        weights = None if self.weights is None else self.weights[chosen]
        return replace(
            self, src=self.src[chosen], dst=self.dst[chosen], weights=weights, lit=self.lit[chosen]
        )

    def link(self, ax: Axes, curves: Curves) -> None:
        """Draw the edges along their curves; heavy ones wider, lit ones thick, in red, and last."""
        room = 10 / math.sqrt(max(len(curves), 1))
        if self.weights is None:
            width = max(0.55, min(1.2, room)) * torch.where(self.lit, 1.8, 1.0)
            alpha = torch.full(width.shape, max(0.25, min(0.9, 2 * room)))
        else:
            width, alpha = 0.3 + 4 * self.weights, (0.15 + 1.2 * self.weights).clamp(0.05, 1.0)
        order = self.lit.int().argsort(stable=True)
        other = GREY if bool(self.lit.any()) else BLUE
        colours = [RED if lit else other for lit in self.lit[order].tolist()]
        stroke = _axes.arrows if self.few else _axes.tapered
        stroke(ax, curves[order], width[order].tolist(), colours, alpha[order].tolist())


def circle(ax: Axes, drawn: Drawn, names: Names) -> None:
    """Tokens on a circle, clockwise from the top."""
    n = drawn.graph.num_dst
    angle = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    places = torch.stack([angle.sin(), angle.cos()], 1)
    size = min(0.13, 2.2 / max(n, 1)) if drawn.few else 0.0
    shown = drawn if drawn.few else drawn.without_loops()
    shown.link(ax, _chords(places[shown.src], places[shown.dst], size))
    if drawn.few:
        for token, place in enumerate(places.tolist()):
            _node(ax, place, size, _name(drawn.graph.dst_offset, token, names))
    else:
        _dots(ax, places, self_loops(drawn.graph), max(1.5, min(5.0, 900 / n)))
        _write(ax, 1.1 * places, range(0, n, -(-n // 8)), drawn.graph.dst_offset, names, "center")
    ax.set(xlim=(-1.34, 1.34), ylim=(-1.34, 1.34), aspect="equal")
    ax.set_axis_off()


def _chords(start: Points, end: Points, size: float) -> Curves:
    """Curves inside the circle, to the left of their direction; loops outside it."""
    middle = 0.4 * (start + end) + 0.1 * _left(end - start)
    curves = _axes.bezier([_trim(start, middle, size), middle, _trim(end, middle, size)])
    corners = [
        start * (1 + size * length * math.cos(turn)) + size * length * math.sin(turn) * _left(start)
        for turn, length in ((0.6, 1.0), (0.75, 2.9), (-0.75, 2.9), (-0.6, 1.0))
    ]
    loops = (start == end).all(1)[:, None, None]
    return torch.where(loops, _axes.bezier(corners), curves)


def _left(direction: Points) -> Points:
    return torch.stack([-direction[:, 1], direction[:, 0]], 1)


def _trim(start: Points, end: Points, by: float) -> Points:
    """The points ``by`` away from ``start``, on the way to ``end``."""
    way = end - start
    length: Tensor = way.norm(dim=1, keepdim=True)
    return start + by * way / length.clamp(min=max(by, 1e-9))


def columns(ax: Axes, drawn: Drawn, names: Names, src_names: Names) -> None:
    """Senders on the left, receivers on the right, each from top to bottom."""
    graph, inset = drawn.graph, 0.03 if drawn.few else 0.008
    left, right = _column(0.0, graph.num_src), _column(1.0, graph.num_dst)
    start, end = left[drawn.src], right[drawn.dst]
    corners = ((inset, start), (0.45, start), (0.55, end), (1.0 - inset, end))
    drawn.link(ax, _axes.bezier([_points(torch.full_like(ends[:, 1], x), ends[:, 1]) for x, ends in corners]))
    size = 8 if drawn.few else 3
    for places, turn, shape, words, offset in (
        (left, "right", "s", src_names, graph.src_offset),
        (right, "left", "o", names, graph.dst_offset),
    ):
        ax.plot(*places.T, shape, markersize=size, markerfacecolor="white", markeredgecolor=BLACK)
        label_at = places + torch.tensor([0.05 if turn == "left" else -0.05, 0.0])
        step = 1 if len(places) <= FEW else -(-len(places) // 8)
        _write(ax, label_at, range(0, len(places), step), offset, words, turn)
    ax.text(0, 0.04, "src (senders)", ha="center", fontsize=10)
    ax.text(1, 0.04, "dst (receivers)", ha="center", fontsize=10)
    ax.set(xlim=(-0.35, 1.35), ylim=(-1.02, 0.1))
    ax.set_axis_off()


def _column(x: float, count: int) -> Points:
    y = -(torch.arange(count, dtype=torch.float64) + 0.5) / max(count, 1)
    return _points(torch.full_like(y, x), y)


def _points(x: Tensor, y: Tensor) -> Points:
    return torch.stack([x, y], 1)


def line(ax: Axes, drawn: Drawn, names: Names) -> None:
    """Tokens on a line, edges as arcs: above it to the right, below it to the left, and loops below."""
    n, gap = drawn.graph.num_dst, 0.11 if drawn.few else 0.03
    shown = drawn if drawn.few else drawn.without_loops()
    curves = _arcs(shown.src.double(), shown.dst.double(), gap)
    shown.link(ax, curves)
    if drawn.few:
        look: dict[str, Any] = {
            "ha": "center",
            "va": "center",
            "fontsize": 10 if n <= 12 else 9 if n <= 24 else 7,
        }
        look["bbox"] = {
            "boxstyle": "round,pad=0.25",
            "facecolor": "white",
            "edgecolor": BLACK,
            "linewidth": 0.9,
        }
        for token in range(n):
            ax.text(token, 0, _name(drawn.graph.dst_offset, token, names), **look, **AS_IT_IS)
        ax.set_axis_off()
    else:
        places = torch.arange(n, dtype=torch.float64)
        size = max(1.2, min(5.0, 500 / n))
        _dots(ax, _points(places, torch.zeros_like(places)), self_loops(drawn.graph), size)
        _axes.ticks(ax, "x", names, n, drawn.graph.dst_offset)
        ax.set_yticks([])
        ax.spines[:].set_visible(False)
        ax.set_xlabel("token: src at the thin end, dst at the thick end")
    heights = [-gap, 0.8, *curves[..., 1].flatten().tolist()]
    ax.set(xlim=(-0.7, n - 0.3), ylim=(min(heights) - 0.06, max(heights) + 0.06))


def _arcs(src: Tensor, dst: Tensor, gap: float) -> Curves:
    """Half rounds: short ones start and end further apart, so that they cross no long ones."""
    way, loop = (dst - src).sign(), src == dst
    length = (dst - src).abs() / max([4.0, *(dst - src).abs().tolist()])
    inset, height = way * (0.04 + 0.26 * (1 - length)), 4 / 3 * length**0.7
    corners = []
    for end, sign, up, aside, down in (
        (src, 1, 0, -0.14, 0.0),
        (src, 1, 1, -0.3, 0.42),
        (dst, -1, 1, 0.3, 0.42),
        (dst, -1, 0, 0.14, 0.0),
    ):
        x = torch.where(loop, src + aside, end + sign * inset)
        corners.append(_points(x, torch.where(loop, -gap - down, way * (gap + up * height))))
    return _axes.bezier(corners)


def between(ax: Axes, drawn: Drawn, level: int, above: list[bool], residual: bool) -> None:
    """The edges between two rows of tokens: those that lead to the lit token in blue, the others faint."""
    inset = 0.13 if drawn.few else 0.06
    ends = ((drawn.src.double(), level + inset), (drawn.dst.double(), level + 1 - inset))
    corners = [_points(x, torch.full_like(x, y)) for x, y in ends]
    lit = torch.tensor(above, dtype=torch.bool)[drawn.dst]
    count = int(lit.sum())
    if drawn.few:
        curves = _axes.bezier(corners, 1)
        faint = len(lit) - count
        _axes.arrows(ax, curves[~lit], [0.7] * faint, [FAINT] * faint, [0.9] * faint)
        _axes.arrows(ax, curves[lit], [1.1] * count, [BLUE] * count, [0.9] * count)
    else:
        alpha = max(0.15, min(0.9, 12 / math.sqrt(max(count, 1))))
        _axes.tapered(ax, _axes.bezier(corners, 4)[lit], [0.8] * count, [BLUE] * count, [alpha] * count)
    if residual and drawn.few:
        for token, (loop, carried) in enumerate(zip(self_loops(drawn.graph), above, strict=True)):
            if carried and not loop:
                ax.plot([token] * 2, [level + inset, level + 1 - inset], ":", color=BLACK, linewidth=1.1)


def rows(ax: Axes, reached: list[list[bool]], last: int, names: Names) -> None:
    """The tokens of each row, lit ones filled; how many are lit stands on the right."""
    n, size = len(reached[0]), max(1.2, min(9.0, 330 / len(reached[0])))
    for level, lit in enumerate(reached):
        for yes, look in ((False, {"markerfacecolor": "white", "color": GREY}), (True, {"color": BLUE})):
            tokens = [token for token in range(n) if lit[token] is yes]
            few: dict[str, Any] = look if n <= FEW else {"color": BLUE if yes else LIGHT}
            ax.plot(tokens, [level] * len(tokens), "o", markersize=size, **few)
        count, right = f"{sum(lit)} of {n}", ax.get_yaxis_transform()
        ax.text(1.01, level, count, va="center", fontsize=9, transform=right)
    ax.plot([last], [len(reached) - 1], "D", color=RED, markersize=max(size, 6))
    words = ["input", *(f"after layer {level}" for level in range(1, len(reached)))]
    ax.set_yticks(range(len(reached)), words)
    _axes.ticks(ax, "x", names, n)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set(xlim=(-0.02 * n - 0.4, 1.02 * n - 0.6), ylim=(-0.35, len(reached) - 0.65), xlabel="token")


def handles(drawn: Drawn) -> list[Any]:
    """What the lines and the dots mean."""
    if drawn.few:
        lit = bool(drawn.lit.any())
        edge = handle("line", "src → dst: dst attends to src", color=GREY if lit else BLUE, linewidth=1.4)
        return [edge, handle("line", "chosen edge", color=RED, linewidth=2)] if lit else [edge]
    edge = handle("line", "thin end src, thick end dst: dst attends to src", color=BLUE, linewidth=1.4)
    if (drawn.graph.num_dst, drawn.graph.dst_offset) != (drawn.graph.num_src, drawn.graph.src_offset):
        return [edge]
    loops, look = self_loops(drawn.graph), {"markeredgecolor": BLACK, "markersize": 5}
    filled = handle("o", "attends to itself", color=BLACK, markersize=5)
    empty = handle("o", "does not attend to itself", markerfacecolor="white", **look)
    return [edge, *(entry for kind, entry in ((True, filled), (False, empty)) if kind in loops)]


def weight_handles(drawn: Drawn) -> list[Any]:
    """What the width means, where there are weights."""
    shown = () if drawn.weights is None else (0.1, 0.5, 1.0)
    return [handle("line", f"weight {w}", color=BLUE, linewidth=0.3 + 4 * w) for w in shown]


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


def self_loops(graph: TokenGraph) -> list[bool]:
    """For each token of a square graph, whether it attends to itself."""
    src, dst = graph.edge_index
    loops = torch.zeros(graph.num_dst, dtype=torch.bool)
    loops[dst[src == dst]] = True
    found: list[bool] = loops.tolist()
    return found


def _node(ax: Axes, place: tuple[float, float], size: float, name: str) -> None:
    from matplotlib.patches import Circle

    ax.add_patch(Circle(place, size, facecolor="white", edgecolor=BLACK, linewidth=1.0, zorder=3))
    ax.text(*place, name, ha="center", va="center", fontsize=min(10, 95 * size), zorder=4, **AS_IT_IS)


def _dots(ax: Axes, places: Points, filled: list[bool], size: float) -> None:
    look: dict[str, Any] = {"markersize": size, "markeredgecolor": BLACK, "zorder": 3}
    for yes, colour in ((False, "white"), (True, BLACK)):
        shown = places[torch.tensor(filled, dtype=torch.bool) == yes]
        ax.plot(*shown.T, "o", markerfacecolor=colour, markeredgewidth=min(0.8, size / 4), **look)


def _write(ax: Axes, places: Points, tokens: range, offset: int, names: Names, turn: str) -> None:
    for token in tokens:
        x, y = places[token].tolist()
        ax.text(x, y, _name(offset, token, names), ha=turn, va="center", fontsize=9, **AS_IT_IS)


def _name(offset: int, token: int, names: Names) -> str:
    return str(offset + token) if names is None else names[token]
