"""Where tokens stand and how edges run between them: circle, columns, line, layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.analyse._walks import is_square
from gnn_attention.draw import _axes
from gnn_attention.draw._axes import AS_IT_IS, BLACK, BLUE, FAINT, FEW, GREY, LIGHT, RED, Curves, Points
from gnn_attention.graph import TokenGraph

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LINES = 4000  # edges drawn; of more, a random sample of so many
MOST_ARROWS = 600  # lines with heads; of more, width shows the direction

Names = _axes.Names


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
        pairs, lit = [(src, dst) for src, dst in graph.edge_index.T.tolist()], lit or set()
        if missing := sorted(lit - set(pairs)):
            raise ValueError(f"lit must hold edges (src, dst) of {graph.name}, {missing[0]} is none")
        shines = torch.tensor([pair in lit for pair in pairs], dtype=torch.bool)
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))
        shown = torch.zeros(len(pairs), dtype=torch.bool).index_fill(0, order[:MOST_LINES], True)
        src, dst = graph.edge_index
        return cls(graph, src, dst, weights, shines)._some(shown | shines)

    @property
    def few(self) -> bool:
        """True if every edge gets an arrow and every token a label."""
        return max(self.graph.num_dst, self.graph.num_src) <= FEW and len(self.src) <= MOST_ARROWS

    def without_loops(self) -> Drawn:
        return self._some(self.src != self.dst)

    def _some(self, chosen: Tensor) -> Drawn:
        weights = None if self.weights is None else self.weights[chosen]
        return Drawn(self.graph, self.src[chosen], self.dst[chosen], weights, self.lit[chosen])

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
    graph, inset = drawn.graph, 0.03 if drawn.few else 0.008
    left, right = _column(0.0, graph.num_src), _column(1.0, graph.num_dst)
    start, end = left[drawn.src, 1], right[drawn.dst, 1]
    corners = ((inset, start), (0.45, start), (0.55, end), (1.0 - inset, end))
    drawn.link(ax, _axes.bezier([_points(torch.full_like(y, x), y) for x, y in corners]))
    size = 8 if drawn.few else 3
    senders = (0, left, "right", "s", src_names, graph.src_offset, "src (senders)")
    receivers = (1, right, "left", "o", names, graph.dst_offset, "dst (receivers)")
    for x, places, turn, shape, words, offset, title in (senders, receivers):
        ax.plot(*places.T, shape, markersize=size, markerfacecolor="white", markeredgecolor=BLACK)
        step = 1 if len(places) <= FEW else -(-len(places) // 8)
        shift = torch.tensor([0.1 * x - 0.05, 0.0])
        _write(ax, places + shift, range(0, len(places), step), offset, words, turn)
        ax.text(x, 0.04, title, ha="center", fontsize=10)
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
        box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": BLACK, "linewidth": 0.9}
        look: dict[str, Any] = {"va": "center", "fontsize": 10 if n <= 12 else 9 if n <= 24 else 7}
        for token in range(n):
            name = _name(drawn.graph.dst_offset, token, names)
            ax.text(token, 0, name, ha="center", bbox=box, **look, **AS_IT_IS)
        ax.set_axis_off()
    else:
        places = torch.arange(n, dtype=torch.float64)
        size = max(1.2, min(5.0, 500 / n))
        _dots(ax, _points(places, 0 * places), self_loops(drawn.graph), size)
        _axes.ticks(ax, "x", names, n, drawn.graph.dst_offset)
        ax.set_yticks([])
        ax.spines[:].set_visible(False)
        ax.set_xlabel("token: src at the thin end, dst at the thick end")
    heights = [-gap, 0.8, *curves[..., 1].flatten().tolist()]
    ax.set(xlim=(-0.7, n - 0.3), ylim=(min(heights) - 0.06, max(heights) + 0.06))


def _arcs(src: Tensor, dst: Tensor, gap: float) -> Curves:
    # half rounds: short ones start and end further apart, so that they cross no long ones
    way, loop = (dst - src).sign(), src == dst
    length = (dst - src).abs() / max([4.0, *(dst - src).abs().tolist()])
    inset, height = way * (0.04 + 0.26 * (1 - length)), 4 / 3 * length**0.7
    corners = []
    ends = ((src, 1, 0), (src, 1, 1), (dst, -1, 1), (dst, -1, 0))
    of_loops = ((-0.14, 0.0), (-0.3, 0.42), (0.3, 0.42), (0.14, 0.0))
    for (end, sign, up), (aside, down) in zip(ends, of_loops, strict=True):
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
        for chosen, width, colour in ((~lit, 0.7, FAINT), (lit, 1.1, BLUE)):
            n = int(chosen.sum())
            _axes.arrows(ax, curves[chosen], [width] * n, [colour] * n, [0.9] * n)
    else:
        alpha = max(0.15, min(0.9, 12 / math.sqrt(max(count, 1))))
        _axes.tapered(ax, _axes.bezier(corners, 4)[lit], [0.8] * count, [BLUE] * count, [alpha] * count)
    if residual and drawn.few:
        for token, (loop, carried) in enumerate(zip(self_loops(drawn.graph), above, strict=True)):
            if carried and not loop:
                ax.plot([token] * 2, [level + inset, level + 1 - inset], ":", color=BLACK, linewidth=1.1)


def rows(ax: Axes, reached: list[list[bool]], last: int, names: Names) -> None:
    n, size = len(reached[0]), max(1.2, min(9.0, 330 / len(reached[0])))
    dark: dict[str, Any] = {"markerfacecolor": "white", "color": GREY} if n <= FEW else {"color": LIGHT}
    for level, lit in enumerate(reached):
        for yes, look in ((False, dark), (True, {"color": BLUE})):
            tokens = [token for token in range(n) if lit[token] is yes]
            ax.plot(tokens, [level] * len(tokens), "o", markersize=size, **look)
        right = ax.get_yaxis_transform()
        ax.text(1.01, level, f"{sum(lit)} of {n}", va="center", fontsize=9, transform=right)
    ax.plot([last], [len(reached) - 1], "D", color=RED, markersize=max(size, 6))
    words = ["input", *(f"after layer {level}" for level in range(1, len(reached)))]
    ax.set_yticks(range(len(reached)), words)
    _axes.ticks(ax, "x", names, n)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set(xlim=(-0.02 * n - 0.4, 1.02 * n - 0.6), ylim=(-0.35, len(reached) - 0.65), xlabel="token")


def handles(drawn: Drawn) -> list[Any]:
    if drawn.few:
        lit = bool(drawn.lit.any())
        colour = GREY if lit else BLUE
        edge = _axes.handle("line", "src → dst: dst attends to src", color=colour, linewidth=1.4)
        shown = () if drawn.weights is None else (0.1, 0.5, 1.0)
        widths = [_axes.handle("line", f"weight {w}", color=BLUE, linewidth=0.3 + 4 * w) for w in shown]
        return [edge, *[_axes.handle("line", "chosen edge", color=RED, linewidth=2)] * lit, *widths]
    edge = _axes.handle("line", "thin end src, thick end dst: dst attends to src", color=BLUE, linewidth=1.4)
    if not is_square(drawn.graph):
        return [edge]
    dots = ((True, BLACK, "attends to itself"), (False, "white", "does not attend to itself"))
    look, loops = {"markeredgecolor": BLACK, "markersize": 5}, self_loops(drawn.graph)
    kinds = [(colour, text) for kind, colour, text in dots if kind in loops]
    return [edge, *(_axes.handle("o", text, markerfacecolor=colour, **look) for colour, text in kinds)]


def layer_handles(carried: bool) -> list[Any]:
    entries = [
        _axes.handle("D", "the token", color=RED, markersize=7),
        _axes.handle("o", "its state reaches the token", color=BLUE, markersize=7),
        _axes.handle("o", "it does not", markerfacecolor="white", color=GREY, markersize=7),
        _axes.handle("line", "edge src → dst", color=BLUE, linewidth=1.3),
        _axes.handle("line", "own state carried along", color=BLACK, linestyle=":", linewidth=1.2),
    ]
    return entries if carried else entries[:-1]


def self_loops(graph: TokenGraph) -> list[bool]:
    src, dst = graph.edge_index
    loops = set(dst[src == dst].tolist())
    return [token in loops for token in range(graph.num_dst)]


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
