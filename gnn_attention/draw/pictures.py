"""Pictures of graphs. Each function returns a matplotlib ``Figure``, which a notebook shows.

In every picture ``src`` is the sender and ``dst`` the receiver; masks have receivers in rows and senders in
columns. With ``ax=`` a picture is drawn into axes of your own, without a legend. Needs matplotlib.

>>> from gnn_attention import patterns
>>> axes = mask(patterns.window(8, 3)).axes[0]
>>> axes.get_xlabel(), axes.get_ylabel()
('src (sender)', 'dst (receiver)')
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from gnn_attention import analyse
from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention._support.text import token_label
from gnn_attention.analyse import _walks as walks
from gnn_attention.analyse._walks import is_square
from gnn_attention.draw import _axes, _node_layouts
from gnn_attention.draw._axes import BLACK, BLUE, FEW, GREY, LIGHT, ORANGE
from gnn_attention.draw._node_layouts import Drawn
from gnn_attention.graph import TokenGraph

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Where = Axes | None

Text = str | None
Labels = Sequence[str] | None
CELLS = {BLUE: "edge: dst attends to src", LIGHT: "no edge"}
CHANGES = {BLUE: "edge, as before", ORANGE: "new", GREY: "given up"}
LARGEST_MASK = 4096  # tokens a side of what is drawn cell by cell
LARGEST_LINES = 1024  # tokens a side of what is drawn edge by edge
MOST_HEADS = 16
MOST_LAYERS = 64


def mask(
    graph: TokenGraph, ax: Where = None, labels: Labels = None, src_labels: Labels = None, title: Text = None
) -> Figure:
    """The mask: a row for each receiver, a column for each sender, a dark cell for each edge.

    A graph that differs by head is drawn as one small mask for each (up to 16). ``labels`` name the
    receivers, and the senders too where there are as many: a list in their order.
    ValueError above 4096 tokens a side, and for a graph that differs by sample.
    """
    if isinstance(graph, TokenGraph) and graph.heads and not graph.batch and ax is None:
        return _each_head(graph, title)
    _check("mask", graph, LARGEST_MASK)
    names, src_names = _names(graph, labels, src_labels)
    made, axes = _axes.of(ax, 6.0, _axes.mask_height(graph.num_dst, graph.num_src), names, src_names)
    _axes.coloured(axes, graph.mask().int(), [LIGHT, BLUE])
    _axes.title(axes, graph.name if title is None else title, _facts(graph))
    dst, src = (names, graph.num_dst, graph.dst_offset), (src_names, graph.num_src, graph.src_offset)
    _axes.write_tokens([axes], dst, src)
    return _axes.finish(made, ax, _axes.squares(CELLS))


def graph(
    graph: TokenGraph, ax: Where = None, labels: Labels = None, src_labels: Labels = None, title: Text = None
) -> Figure:
    """Nodes and links: tokens on a circle, clockwise from the top.

    Two columns where senders are not the receivers. An edge runs from src to dst: as an arrow where there are
    few, else as a line that is thin at its sender and thick at its receiver. Of more than 4000 edges a random
    sample is drawn, and the title says so. ValueError above 1024 tokens a side.
    """
    _check("graph", graph, LARGEST_LINES)
    names, src_names = _names(graph, labels, src_labels)
    made, axes = _axes.of(ax, 6.0, 6.4)
    drawn = Drawn.of(graph)
    if is_square(graph):
        _node_layouts.circle(axes, drawn, names)
    else:
        _node_layouts.columns(axes, drawn, names, src_names)
    _axes.title(axes, graph.name if title is None else title, _facts(graph, drawn))
    return _axes.finish(made, ax, _node_layouts.handles(drawn))


_graph = graph  # where a parameter has the same name


def side_by_side(graph: TokenGraph, labels: Labels = None, src_labels: Labels = None) -> Figure:
    """The mask next to the nodes and links: two readings of one graph. Refuses what these two refuse."""
    _check("side_by_side", graph, LARGEST_LINES)
    made, (left, right) = _axes.figure(11.5, 6.2, ncols=2)
    mask(graph, left, labels, src_labels)
    if not is_square(graph):
        left.set_aspect("auto")  # as high as the columns next to it
    _graph(graph, right, labels, src_labels, "the same graph as nodes and links")
    return _axes.finish(made, None, [_axes.squares(CELLS)[0], *_node_layouts.handles(Drawn.of(graph))])


def arcs(
    graph: TokenGraph,
    ax: Where = None,
    labels: Labels = None,
    weights: Tensor | None = None,
    lit: Collection[tuple[int, int]] = (),
    title: Text = None,
) -> Figure:
    """Tokens on a line: edges to the right (``src < dst``) are arcs above it, those to the left below it.

    ``weights``: a number for each edge in ``graph.edge_index`` order, drawn as width, 1 = 4 points. ``lit``:
    edges ``(src, dst)`` to stand out in orange, the others grey. ValueError above 1024 tokens, unless square.
    """
    _check("arcs", graph, LARGEST_LINES, square=True)
    names, _ = _names(graph, labels, None)
    checks.check_order("weights", weights)
    weights = None if weights is None else torch.as_tensor(weights).detach().double().flatten()
    if weights is not None and len(weights) != graph.num_edges:
        raise ValueError(f"weights must be {graph.num_edges} numbers, one for each edge, got {len(weights)}")
    if weights is not None and not bool(weights.isfinite().all()):
        raise ValueError("weights must be finite, as each is the width of a line, got inf or NaN")
    drawn = Drawn.of(graph, weights, {(int(src), int(dst)) for src, dst in lit})
    height = 2.9 if bool((drawn.src <= drawn.dst).all()) else 4.4
    made, axes = _axes.of(ax, min(11.0, 3.6 + 0.8 * graph.num_dst), height)
    _node_layouts.line(axes, drawn, names)
    _axes.title(axes, graph.name if title is None else title, _facts(graph, drawn), 100)
    return _axes.finish(made, ax, _node_layouts.handles(drawn))


def layers(
    graphs: TokenGraph | Sequence[TokenGraph],
    layers: int,
    token: int | None = None,
    ax: Where = None,
    labels: Labels = None,
    residual: bool = True,
    title: Text = None,
) -> Figure:
    """A network unrolled, a row of tokens for each layer.

    Lit is all that reaches ``token`` (default: the last) at the top. ``graphs``: one graph for all layers, or
    one for each, layer 1 first; they are used in turn if there are more layers. ``residual``: a token's own
    state is carried along. The numbers on the right count the lit tokens of each row. ValueError above 1024
    tokens and 64 layers, IndexError for a token that is not there.
    """
    stack = _stack("layers", graphs, layers)
    names, _ = _names(stack[0], labels, None)
    last = _token(stack[0], token)
    reached = _reach_by_row(stack, last, residual)
    made, axes = _axes.of(ax, 9.0, 1.9 + 0.85 * min(len(stack), 8))
    for level, each in enumerate(stack):
        _node_layouts.between(axes, Drawn.of(each), level, reached[level + 1], residual)
    _node_layouts.rows(axes, reached, last, names)
    shown = _axes.shared([each.name for each in stack]) if title is None else title
    who = names[last] if names else last
    _axes.title(axes, shown, f"lit: from which token {who} has received from after {len(stack)} layers", 90)
    return _axes.finish(made, ax, _node_layouts.layer_handles(residual))


def over_time(
    graphs: Sequence[TokenGraph], titles: Sequence[str] | None = None, title: Text = None
) -> Figure:
    """A selection over time: a mask for each step, or layer, with what is new and what was given up.

    Each is compared with the one before; the share in its title is Jaccard's index of the two
    (``analyse.overlap``). ``graphs``: 1 to 16 plain graphs of the same tokens; ValueError for others.
    """
    checks.check_order("graphs", graphs)
    checks.check_order("titles", titles)
    graphs = [graphs] if isinstance(graphs, TokenGraph) else list(graphs)
    for each in graphs:
        _check("over_time", each, LARGEST_MASK)
    count = len(graphs)
    if not 1 <= count <= MOST_HEADS or len(titles or graphs) != count:
        raise ValueError(f"over_time() draws 1 to {MOST_HEADS} graphs, a title for each, got {count}")
    alike, (made, grid) = analyse.overlap(graphs), _axes.grid(count)
    for step, axes in enumerate(grid):
        before, now = graphs[max(step - 1, 0)].mask(), graphs[step].mask()
        _axes.coloured(axes, now.int() + 2 * (now ^ before).int(), [LIGHT, BLUE, GREY, ORANGE])
        named = f"step {step}" if titles is None else titles[step]
        _axes.title(axes, named + (f": {alike[step - 1, step]:.2f}" if step else ""))
        axes.set(xlabel="src (sender)", ylabel="dst (receiver)")
        axes.label_outer()
    _axes.headline(made, _axes.shared([each.name for each in graphs]) if title is None else title)
    return _axes.finish(made, None, _axes.squares(CHANGES))


def degrees(graph: TokenGraph, title: Text = None) -> Figure:
    """The in-degree of each receiver, over the out-degree of each sender."""
    _check("degrees", graph, LARGEST_MASK)
    made, (top, bottom) = _axes.figure(8.0, 5.4, nrows=2)
    top.set(xlabel="dst (receiver)", ylabel="senders it attends to")
    bottom.set(xlabel="src (sender)", ylabel="receivers that attend to it")
    both = (top, graph, "in-degree", BLUE), (bottom, graph.T, "out-degree", ORANGE)
    for axes, each, word, colour in both:
        degree, span = each.in_degree(), "no tokens"
        if len(degree):
            mean = degree.double().mean().item()
            span = f"{degree.min()} to {degree.max()}, mean {mean:.4g} (broken line)"
            borders = torch.arange(len(degree) + 1) + each.dst_offset - 0.5
            axes.stairs(degree, borders, fill=True, color=colour)
            axes.axhline(mean, color=BLACK, linestyle="--", linewidth=1)
        axes.set_ylim(0, 1.08 * max([*degree.tolist(), 1]))
        axes.margins(x=0.01)
        axes.locator_params(integer=True)
        _axes.open_box(axes)
        _axes.title(axes, f"{word}: {span}")
    _axes.headline(made, graph.name if title is None else title)
    return _axes.finish(made, None)


def hops(
    graphs: TokenGraph | Sequence[TokenGraph],
    layers: int | None = None,
    token: int | None = None,
    residual: bool = True,
    ax: Where = None,
    title: Text = None,
) -> Figure:
    """How many tokens have been reached after each layer.

    By ``token`` (default: the last), and by all tokens on average. ``layers=None``: until nothing changes any
    more, at most 64. ``graphs`` and ``residual`` as in :func:`layers`. ValueError above 1024 tokens,
    IndexError for a token that is not there.
    """
    stack = _stack("hops", graphs, MOST_LAYERS if layers is None else layers)
    last, n = _token(stack[0], token), stack[0].num_dst
    counts = _reached_counts(stack, residual)
    while layers is None and len(counts) > 1 and counts[-1] == counts[-2]:
        counts.pop()
    number, size = range(len(counts)), 5 if len(counts) <= FEW else 0
    made, axes = _axes.of(ax, 7.0, 4.6)
    lowest, highest = list(map(min, counts)), list(map(max, counts))
    axes.fill_between(number, lowest, highest, color=LIGHT, label="all tokens: range")
    mean = [sum(row) / n for row in counts]
    axes.plot(number, mean, "s--", color=ORANGE, label="all tokens: mean", markersize=size)
    axes.plot(number, [row[last] for row in counts], "o-", color=BLUE, label=f"token {last}", markersize=size)
    axes.axhline(n, color=BLACK, linestyle=":", linewidth=1, label=f"all {n}")
    axes.set_yticks(range(0, n + 1, _axes.round_step(n)))
    axes.set(xlabel="layers", ylabel="tokens reached", ylim=(0, 1.06 * n))
    axes.locator_params(axis="x", integer=True)
    _axes.open_box(axes)
    _axes.title(axes, _axes.shared([each.name for each in stack]) if title is None else title)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0, 0.95))
    return _axes.finish(made, ax)


def _each_head(graph: TokenGraph, title: Text) -> Figure:
    if (count := graph.heads or 0) > MOST_HEADS:
        raise ValueError(f"mask() draws at most {MOST_HEADS} heads, got {count}; take select(0, head)")
    made, grid = _axes.grid(count)
    for head, axes in enumerate(grid):
        mask(graph.select(0, head), axes, title=f"head {head}")
        axes.label_outer()
    _axes.headline(made, graph.name if title is None else title)
    return _axes.finish(made, None, _axes.squares(CELLS))


def _check(function: str, graph: TokenGraph, largest: int, square: bool = False) -> None:
    if not isinstance(graph, TokenGraph):
        raise TypeError(f"{function}() draws a TokenGraph, got {type(graph).__name__}; see convert")
    wanted = ""
    if graph.varying_axes:
        wanted = f"one plain graph, got {graph!r}; take one with select(batch, head)"
    elif max(graph.num_dst, graph.num_src) > largest:
        hint = "take algebra.quotient(graph, block) or algebra.restrict(graph, tokens)"
        wanted = f"at most {largest} tokens a side, got {graph!r}; {hint}"
    elif square and not is_square(graph):
        wanted = f"graphs whose senders are their receivers, got {graph!r}; use mask() or graph()"
    if wanted:
        raise ValueError(f"{function}() draws {wanted}")


def _names(
    graph: TokenGraph, labels: Labels, src_labels: Labels
) -> tuple[list[str] | None, list[str] | None]:
    if src_labels is None and is_square(graph):
        src_labels = labels
    dst = side_names("labels", labels, f"{graph.num_dst} receivers of {graph.name}", graph.num_dst)
    src = side_names("src_labels", src_labels, f"{graph.num_src} senders of {graph.name}", graph.num_src)
    return dst, src


def side_names(word: str, labels: Labels, tokens: str, count: int) -> list[str] | None:
    """The labels of one side as a picture shows them; ``tokens`` says in an error of what."""
    if labels is None:
        return None
    names = checks.labels(word, labels, count, tokens)
    return [token_label(str(name)) for name in names]


def _facts(graph: TokenGraph, drawn: Drawn | None = None) -> str:
    pairs = graph.num_dst * graph.num_src
    text = f"{graph.num_edges:,} edges, {100 * graph.num_edges / pairs if pairs else 0:.3g} % of all pairs"
    sampled = drawn is not None and len(drawn.src) < graph.num_edges
    return f"{text}; {len(drawn.src):,} drawn, chosen at random" if drawn and sampled else text


def _stack(function: str, graphs: TokenGraph | Sequence[TokenGraph], count: int) -> list[TokenGraph]:
    if checks.size("layers", count, 1) > MOST_LAYERS:
        raise ValueError(f"layers must be at most {MOST_LAYERS} in a picture, got {count}")
    given = walks.stack(graphs)
    if not given[0].num_dst:
        raise ValueError(f"{function}() needs a graph with at least one token, got {given[0]!r}")
    _check(function, given[0], LARGEST_LINES)
    return [given[layer % len(given)] for layer in range(count)]


def _token(graph: TokenGraph, token: int | None) -> int:
    return graph.num_dst - 1 if token is None else walks.token("token", token, graph.num_dst)


def _reach_by_row(stack: list[TokenGraph], token: int, residual: bool) -> list[list[bool]]:
    """For each row of tokens, the input first: which of them ``token`` has received from at the top."""
    lit = torch.arange(stack[0].num_dst) == token
    rows = [lit.tolist()]
    for each in reversed(stack):
        lit = each.mask()[lit].any(0) | (lit & residual)
        rows.insert(0, lit.tolist())
    return rows


def _reached_counts(stack: Sequence[TokenGraph], residual: bool) -> list[list[int]]:
    """The number of senders that each token has received from after 0, 1, ... layers."""
    reached = torch.eye(stack[0].num_dst)
    counts = [[1] * stack[0].num_dst]
    for each in stack:
        further = each.mask().float() @ reached
        reached = ((further + reached if residual else further) > 0).float()
        counts.append(reached.sum(1).int().tolist())
    return counts
