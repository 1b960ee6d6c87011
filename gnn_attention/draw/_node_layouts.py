"""Where tokens stand and how edges run between them: circle, columns, line, layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.analyse._walks import is_square
from gnn_attention.draw import _axes
from gnn_attention.draw._axes import AS_IT_IS, BLACK, BLUE, FAINT, FEW, GREY, LIGHT, RED, Names
from gnn_attention.graph import TokenGraph

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Numbers = Sequence[float]
Points = Float[Tensor, "points 2"]
Curves = Float[Tensor, "edges points 2"]

MOST_LINES = 4000  # edges drawn; of more, a random sample of so many
MOST_ARROWS = 600  # lines with heads; of more, width shows the direction
# how far along a curve each of its points is
T = torch.linspace(0, 1, 25, dtype=torch.float64)


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
        is_lit = torch.tensor([pair in lit for pair in pairs], dtype=torch.bool)
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))
        src, dst = graph.edge_index
        return cls(graph, src, dst, weights, is_lit).some(is_lit | (order < MOST_LINES))

    @property
    def few(self) -> bool:
        """True if every edge gets an arrow and every token a label."""
        return max(self.graph.num_dst, self.graph.num_src) <= FEW and len(self.src) <= MOST_ARROWS

    def some(self, chosen: Tensor) -> Drawn:
        weights = None if self.weights is None else self.weights[chosen]
        return Drawn(self.graph, self.src[chosen], self.dst[chosen], weights, self.lit[chosen])

    def link(self, ax: Axes, curves: Curves, lit_colour: str = RED, other: str = GREY) -> None:
        """Draw the edges along their curves; heavy ones wider, lit ones thick, in a colour, and last."""
        room = 10 / math.sqrt(max(len(curves), 1))
        if self.weights is None:
            width = max(0.55, min(1.2, room)) * torch.where(self.lit, 1.8, 1.0)
            alpha = torch.full(width.shape, max(0.25, min(0.9, 2 * room)))
        else:
            width, alpha = 0.3 + 4 * self.weights, (0.15 + 1.2 * self.weights).clamp(0.05, 1.0)
        order = self.lit.int().argsort(stable=True)
        other = BLUE if other == GREY and not bool(self.lit.any()) else other
        colours = [lit_colour if lit else other for lit in self.lit[order].tolist()]
        stroke = _arrows if self.few else _tapered
        stroke(ax, curves[order], width[order].tolist(), colours, alpha[order].tolist())


def _arrows(ax: Axes, curves: Curves, widths: Numbers, colours: Sequence[str], alphas: Numbers) -> None:
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path

    head: dict[str, Any] = {"arrowstyle": "-|>", "fill": True, "joinstyle": "miter"}
    for curve, width, colour, alpha in zip(curves.numpy(), widths, colours, alphas, strict=True):
        look: dict[str, Any] = {"linewidth": width, "color": colour, "alpha": alpha, **head}
        ax.add_patch(FancyArrowPatch(path=Path(curve), mutation_scale=6 + 3 * width, **look))


def _tapered(ax: Axes, curves: Curves, widths: Numbers, colours: Sequence[str], alphas: Numbers) -> None:
    """Each curve thin at its sender and thick at its receiver: a direction without a head."""
    from matplotlib.collections import LineCollection

    pieces = len(T) - 1
    for quarter, scale in enumerate((0.3, 0.6, 1.0, 1.6)):
        part = list(curves[:, pieces * quarter // 4 : pieces * (quarter + 1) // 4 + 1].numpy())
        look: dict[str, Any] = {"colors": colours, "alpha": alphas, "capstyle": "butt"}
        ax.add_collection(LineCollection(part, linewidths=[scale * width for width in widths], **look))


def circle(ax: Axes, drawn: Drawn, names: Names) -> None:
    n = drawn.graph.num_dst
    angle = math.pi / 2 - 2 * math.pi * torch.arange(n, dtype=torch.float64) / max(n, 1)
    places = _direction(angle)
    size = min(0.13, 2.2 / max(n, 1)) if drawn.few else 0.0
    shown = drawn if drawn.few else drawn.some(drawn.src != drawn.dst)
    curves = _chords(places[shown.src], places[shown.dst], size)
    loops = _loops(places[shown.src], angle[shown.src], size)
    shown.link(ax, torch.where((shown.src == shown.dst)[:, None, None], loops, curves))
    if drawn.few:
        from matplotlib.patches import Circle

        for place in places.tolist():
            ax.add_patch(Circle(place, size, facecolor="white", edgecolor=BLACK, linewidth=1.0, zorder=3))
        look = {"ha": "center", "fontsize": min(10, 95 * size)}
        _write(ax, places, range(n), drawn.graph.dst_offset, names, look)
    else:
        _dots(ax, places, self_loops(drawn.graph), max(1.5, min(5.0, 900 / n)))
        _write(ax, 1.1 * places, range(0, n, -(-n // 8)), drawn.graph.dst_offset, names, {"ha": "center"})
    ax.set(xlim=(-1.34, 1.34), ylim=(-1.34, 1.34), aspect="equal")
    ax.set_axis_off()


def _chords(start: Points, end: Points, size: float) -> Curves:
    """Curves inside the circle, to the left of their direction, from the rim of a node to that of another."""
    way = end - start
    middle = 0.4 * (start + end) + 0.1 * torch.stack([-way[:, 1], way[:, 0]], 1)
    start, end = (at + size * torch.nn.functional.normalize(middle - at) for at in (start, end))
    t = T[:, None]
    return (1 - t) ** 2 * start[:, None] + 2 * t * (1 - t) * middle[:, None] + t**2 * end[:, None]


def _loops(places: Points, outwards: Tensor, size: float) -> Curves:
    """A loop at each place, most of a circle that lies in the direction of the angle ``outwards``."""
    angle = outwards[:, None] + math.pi - 0.7 - (2 * math.pi - 1.4) * T
    return (places + 1.6 * size * _direction(outwards))[:, None] + 0.75 * size * _direction(angle)


def _direction(angle: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin()], -1)


def columns(ax: Axes, drawn: Drawn, names: Names, src_names: Names) -> None:
    graph, size = drawn.graph, 8 if drawn.few else 3
    left, right = _column(0.0, graph.num_src), _column(1.0, graph.num_dst)
    drawn.link(ax, _lines(left[drawn.src], right[drawn.dst], 0.03 if drawn.few else 0.008))
    senders = (0, left, "right", "s", src_names, graph.src_offset, "src (senders)")
    receivers = (1, right, "left", "o", names, graph.dst_offset, "dst (receivers)")
    for x, places, side, marker, words, offset, title in (senders, receivers):
        ax.plot(*places.T, marker, markersize=size, markerfacecolor="white", markeredgecolor=BLACK)
        step = 1 if len(places) <= FEW else -(-len(places) // 8)
        shift = torch.tensor([0.1 * x - 0.05, 0.0])
        _write(ax, places + shift, range(0, len(places), step), offset, words, {"ha": side})
        ax.text(x, 0.04, title, ha="center", fontsize=10)
    ax.set(xlim=(-0.35, 1.35), ylim=(-1.02, 0.1))
    ax.set_axis_off()


def _column(x: float, count: int) -> Points:
    y = -(torch.arange(count, dtype=torch.float64) + 0.5) / max(count, 1)
    return torch.stack([torch.full_like(y, x), y], 1)


def _lines(start: Points, end: Points, inset: float) -> Curves:
    """Straight lines without a part ``inset`` of their length at both ends."""
    t = inset + (1 - 2 * inset) * T[:, None]
    return start[:, None] + (end - start)[:, None] * t


def line(ax: Axes, drawn: Drawn, names: Names) -> None:
    """Tokens on a line, edges as arcs: above it to the right, below it to the left, and loops below."""
    n, gap = drawn.graph.num_dst, 0.11 if drawn.few else 0.03
    shown = drawn if drawn.few else drawn.some(drawn.src != drawn.dst)
    places = torch.stack([torch.arange(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)], 1)
    below = torch.full(shown.src.shape, -math.pi / 2, dtype=torch.float64)
    loops = _loops(places[shown.src], below, 0.22)
    arcs = _arcs(shown.src.double(), shown.dst.double(), gap)
    curves = torch.where((shown.src == shown.dst)[:, None, None], loops, arcs)
    shown.link(ax, curves)
    if drawn.few:
        box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": BLACK, "linewidth": 0.9}
        look = {"ha": "center", "bbox": box, "fontsize": 10 if n <= 12 else 9 if n <= 24 else 7}
        _write(ax, places, range(n), drawn.graph.dst_offset, names, look)
        ax.set_axis_off()
    else:
        _dots(ax, places, self_loops(drawn.graph), max(1.2, min(5.0, 500 / n)))
        _axes.ticks(ax, "x", names, n, drawn.graph.dst_offset)
        ax.set_yticks([])
        ax.spines[:].set_visible(False)
        ax.set_xlabel("token: src at the thin end, dst at the thick end")
    heights = [-gap, 0.8, *curves[..., 1].flatten().tolist()]
    ax.set(xlim=(-0.7, n - 0.3), ylim=(min(heights) - 0.06, max(heights) + 0.06))


def _arcs(src: Tensor, dst: Tensor, gap: float) -> Curves:
    # short ones start and end further apart, so that they cross no long ones
    way = (dst - src).sign()[:, None]
    length = ((dst - src).abs() / max([4.0, *(dst - src).abs().tolist()]))[:, None]
    middle = (src + dst)[:, None] / 2
    half = (dst - src)[:, None] / 2 - way * (0.04 + 0.26 * (1 - length))
    x = middle - half * (math.pi * T).cos()
    return torch.stack([x, way * (gap + length**0.7 * (math.pi * T).sin())], -1)


def between(ax: Axes, drawn: Drawn, level: int, above: list[bool], residual: bool) -> None:
    """The edges between two rows of tokens: those that lead to the lit token in blue, the others faint."""
    start = torch.stack([drawn.src.double(), torch.full(drawn.src.shape, float(level))], 1)
    end = torch.stack([drawn.dst.double(), torch.full(drawn.dst.shape, level + 1.0)], 1)
    lit = torch.tensor(above, dtype=torch.bool)[drawn.dst]
    inset = 0.13 if drawn.few else 0.06
    replace(drawn, lit=lit).link(ax, _lines(start, end, inset), BLUE, FAINT)
    for token, has_loop in enumerate(self_loops(drawn.graph)):
        if drawn.few and residual and above[token] and not has_loop:
            ax.plot([token] * 2, [level + inset, level + 1 - inset], ":", color=BLACK, linewidth=1.1)


def rows(ax: Axes, reached: list[list[bool]], last: int, names: Names) -> None:
    n, size = len(reached[0]), max(1.2, min(9.0, 330 / len(reached[0])))
    dark: dict[str, Any] = {"markerfacecolor": "white", "color": GREY} if n <= FEW else {"color": LIGHT}
    for level, lit in enumerate(reached):
        for is_lit, look in ((False, dark), (True, {"color": BLUE})):
            tokens = [token for token in range(n) if lit[token] is is_lit]
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
        edge = _axes.line("src → dst: dst attends to src", color=colour, linewidth=1.4)
        shown = () if drawn.weights is None else (0.1, 0.5, 1.0)
        widths = [_axes.line(f"weight {w}", color=BLUE, linewidth=0.3 + 4 * w) for w in shown]
        return [edge, *[_axes.line("chosen edge", color=RED, linewidth=2)] * lit, *widths]
    edge = _axes.line("thin end src, thick end dst: dst attends to src", color=BLUE, linewidth=1.4)
    if not is_square(drawn.graph):
        return [edge]
    dots = {BLACK: "attends to itself", "white": "does not attend to itself"}
    look = {"markeredgecolor": BLACK, "markersize": 5}
    return [edge, *(_axes.line(text, "o", markerfacecolor=colour, **look) for colour, text in dots.items())]


def layer_handles(carried: bool) -> list[Any]:
    entries = [
        _axes.line("the token", "D", color=RED, markersize=7),
        _axes.line("its state reaches the token", "o", color=BLUE, markersize=7),
        _axes.line("it does not", "o", markerfacecolor="white", color=GREY, markersize=7),
        _axes.line("edge src → dst", color=BLUE, linewidth=1.3),
        _axes.line("own state carried along", color=BLACK, linestyle=":", linewidth=1.2),
    ]
    return entries if carried else entries[:-1]


def self_loops(graph: TokenGraph) -> list[bool]:
    src, dst = graph.edge_index
    loops = set(dst[src == dst].tolist())
    return [token in loops for token in range(graph.num_dst)]


def _dots(ax: Axes, places: Points, filled: list[bool], size: float) -> None:
    look: dict[str, Any] = {"markersize": size, "markeredgecolor": BLACK, "zorder": 3}
    for is_filled, colour in ((False, "white"), (True, BLACK)):
        shown = places[torch.tensor(filled, dtype=torch.bool) == is_filled]
        ax.plot(*shown.T, "o", markerfacecolor=colour, markeredgewidth=min(0.8, size / 4), **look)


def _write(ax: Axes, places: Points, tokens: range, offset: int, names: Names, look: dict[str, Any]) -> None:
    look = {"va": "center", "fontsize": 9, "zorder": 4, **look, **AS_IT_IS}
    for token in tokens:
        x, y = places[token].tolist()
        ax.text(x, y, str(offset + token) if names is None else names[token], **look)
