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
from typing import TYPE_CHECKING, Any

import torch

from gnn_attention import analyse
from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.analyse import _walks as walks
from gnn_attention.analyse._walks import is_square
from gnn_attention.attend import AttentionInfo
from gnn_attention.draw import _axes, _node_layouts
from gnn_attention.draw._axes import BLACK, BLUE, FAINT, FEW, GREY, LIGHT, ORANGE, RED, SMALLER, Labels
from gnn_attention.graph import TokenGraph, rules

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Where = Axes | None

Text = str | None
CELLS = {BLUE: "edge: dst attends to src", LIGHT: "no edge"}
EDGE = "src → dst: dst attends to src"
CHANGES = {BLUE: "edge, as before", ORANGE: "new", GREY: "given up"}
LARGEST_MASK = 4096  # tokens a side of what is drawn cell by cell
LARGEST_LINES = 1024  # tokens a side of what is drawn edge by edge
MOST_TABLES = 64
MOST_LAYERS = 64


def mask(
    graph: TokenGraph, ax: Where = None, labels: Labels = None, src_labels: Labels = None, title: Text = None
) -> Figure:
    """The mask: a row for each receiver, a column for each sender, a dark cell for each edge.

    A graph that differs by head is drawn as one small mask for each (up to 64). ``labels`` name the
    receivers, and the senders too where there are as many: a list in their order.
    ValueError above 4096 tokens a side, and for a graph that differs by sample.
    """
    by_head = isinstance(graph, TokenGraph) and not graph.batch and ax is None
    count = graph.heads or 0 if by_head else 0
    if count > MOST_TABLES:
        raise ValueError(f"mask() draws at most {MOST_TABLES} heads, got {count}; take select(0, head)")
    graphs = [graph.select(0, head) for head in range(count)] or [graph]
    _check("mask", graphs[0], LARGEST_MASK)
    name = graph.name if title is None else title
    made, grid = _axes.tables(ax, len(graphs), *_axes.read_sides(graph, labels, src_labels), name)
    for head, (each, axes) in enumerate(zip(graphs, grid, strict=True)):
        _axes.image(axes, each.mask().int(), [LIGHT, BLUE], 0, 1)
        _axes.title(axes, f"head {head}" if len(graphs) > 1 else name, _facts(each))
    _axes.name_colours(grid[0], CELLS)
    return _axes.finish(made, ax)


def graph(
    graph: TokenGraph, ax: Where = None, labels: Labels = None, src_labels: Labels = None, title: Text = None
) -> Figure:
    """Nodes and links: tokens on a circle, clockwise from the top.

    Two columns where senders are not the receivers. An edge is an arrow from src to dst. ValueError above
    1024 tokens a side or 10,000 edges: draw the mask.
    """
    _check("graph", graph, LARGEST_LINES)
    dst, src = _axes.read_sides(graph, labels, src_labels)
    made, axes = _axes.of(ax, 6.0, 6.4, 2 * max(dst.room, src.room))
    if is_square(graph):
        _node_layouts.circle(axes, graph, dst)
    else:
        _node_layouts.columns(axes, graph, dst, src)
    _axes.title(axes, graph.name if title is None else title, _facts(graph))
    axes.plot([], [], color=BLUE, label=EDGE)
    return _axes.finish(made, ax)


_graph = graph  # where a parameter has the same name


def side_by_side(graph: TokenGraph, labels: Labels = None, src_labels: Labels = None) -> Figure:
    """The mask next to the nodes and links: two readings of one graph. Refuses what these two refuse."""
    _check("side_by_side", graph, LARGEST_LINES)
    made, (left, right) = _axes.figure(11.5, 6.2, ncols=2)
    mask(graph, left, labels, src_labels)
    if not is_square(graph):
        left.set_aspect("auto")  # as high as the columns next to it
    _graph(graph, right, labels, src_labels, "the same graph as nodes and links")
    return _axes.finish(made, None)


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
    edges ``(src, dst)`` to stand out in orange, the others grey. ValueError above 1024
    tokens or 10,000 edges, and where the senders are not the receivers.
    """
    _check("arcs", graph, LARGEST_LINES)
    if not is_square(graph):
        needed = "graphs whose senders are their receivers"
        raise ValueError(f"arcs() draws {needed}, got {graph!r}; use mask() or graph()")
    tokens, _ = _axes.read_sides(graph, labels, None)
    checks.check_order("weights", weights)
    weights = None if weights is None else torch.as_tensor(weights).detach().double().flatten()
    if weights is not None and (len(weights) != graph.num_edges or not bool(weights.isfinite().all())):
        got = f"{len(weights)} of which {weights.isfinite().sum()} are"
        raise ValueError(f"weights must be {graph.num_edges} finite numbers, one for each edge, got {got}")
    chosen = {(int(src), int(dst)) for src, dst in lit}
    pairs = [(src, dst) for src, dst in graph.edge_index.T.tolist()]
    if missing := sorted(chosen - set(pairs)):
        raise ValueError(f"lit must hold edges (src, dst) of {graph.name}, {missing[0]} is none")
    is_lit = torch.tensor([pair in chosen for pair in pairs], dtype=torch.bool)
    height = 2.9 if graph.is_causal() else 4.4
    made, axes = _axes.of(ax, min(11.0, 3.6 + 0.8 * graph.num_dst), height)
    _node_layouts.line(axes, graph, tokens, weights, is_lit)
    _axes.title(axes, graph.name if title is None else title, _facts(graph), 100)
    axes.plot([], [], color=GREY if chosen else BLUE, label=EDGE)
    if chosen:
        axes.plot([], [], color=RED, linewidth=2, label="chosen edge")
    for weight in () if weights is None else (0.1, 0.5, 1.0):
        axes.plot([], [], color=BLUE, linewidth=0.3 + 4 * weight, label=f"weight {weight}")
    return _axes.finish(made, ax)


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
    tokens, 64 layers or 10,000 edges of a layer, IndexError for a token that is not there.
    """
    stack = _stack("layers", graphs, layers)
    tokens, _ = _axes.read_sides(stack[0], labels, None)
    last = walks.check_token("token", stack[0].num_dst - 1 if token is None else token, stack[0].num_dst)
    # for each row of tokens, the input first: which of them the token at the top has received from
    reached = [torch.arange(tokens.count) == last]
    for each in reversed(stack):
        reached.insert(0, each.mask()[reached[0]].any(0) | (reached[0] & residual))
    made, axes = _axes.of(ax, 9.0, 1.9 + 0.85 * min(len(stack), 8))
    _node_layouts.rows(axes, stack, torch.stack(reached), tokens, residual)
    axes.plot([], [], color=BLUE, label="edge src → dst")
    if residual:
        axes.plot([], [], ":", color=BLACK, label="own state carried along")
    shown = _axes.common_name([each.name for each in stack]) if title is None else title
    who = tokens.names[last] if tokens.names else last
    _axes.title(axes, shown, f"lit: from which token {who} has received from after {len(stack)} layers", 90)
    return _axes.finish(made, ax)


def over_time(
    graphs: Sequence[TokenGraph], titles: Sequence[str] | None = None, title: Text = None
) -> Figure:
    """A selection over time: a mask for each step, or layer, with what is new and what was given up.

    Each is compared with the one before; the share in its title is Jaccard's index of the two
    (``analyse.overlap``). ``graphs``: 1 to 64 plain graphs of the same tokens; ValueError for others.
    """
    checks.check_order("graphs", graphs)
    checks.check_order("titles", titles)
    graphs = [graphs] if isinstance(graphs, TokenGraph) else list(graphs)
    for each in graphs:
        _check("over_time", each, LARGEST_MASK)
    count = len(graphs)
    if not 1 <= count <= MOST_TABLES or len(titles or graphs) != count:
        raise ValueError(f"over_time() draws 1 to {MOST_TABLES} graphs, a title for each, got {count}")
    alike = analyse.overlap(graphs)
    name = _axes.common_name([each.name for each in graphs]) if title is None else title
    made, grid = _axes.tables(None, count, *_axes.read_sides(graphs[0], None, None), name)
    for step, axes in enumerate(grid):
        before, now = graphs[max(step - 1, 0)].mask(), graphs[step].mask()
        _axes.image(axes, now.int() + 2 * (now ^ before).int(), [LIGHT, BLUE, GREY, ORANGE], 0, 3)
        named = f"step {step}" if titles is None else titles[step]
        _axes.title(axes, named + (f": {alike[step - 1, step]:.2f}" if step else ""))
    _axes.name_colours(grid[0], CHANGES)
    return _axes.finish(made, None)


def weights(
    weights: Any,
    heads: int | Sequence[int] | None = None,
    graph: TokenGraph | None = None,
    ax: Where = None,
    labels: Labels = None,
    src_labels: Labels = None,
    title: str = "attention weights",
) -> Figure:
    """The heat map of attention weights: a row for each receiver, a column for each sender.

    ``weights``: a table ``[dst, src]``, ``[heads, dst, src]`` or ``[1, heads, dst, src]``, a tensor or NumPy
    array, with the ``graph`` whose non-edges are grey; ``(edge_index, weights [E, heads])``, as the layer
    returns them, with the ``graph``; the ``AttentionInfo`` of a call of ``attend`` with one sample; or a
    layer of ``trace.record``. Several heads (up to 64) are drawn side by side in one scale; ``heads``
    chooses one or some of them. Weight 0 is white, a negative number orange, NaN and -inf grey.
    ``labels`` name the receivers, and the senders too where there are as many. TypeError, ValueError or
    IndexError for other arguments, and ValueError for +inf and above 4096 tokens a side.

    >>> picture = weights(torch.tensor([[1.0, torch.nan], [0.25, 0.75]]), labels=["the", "cat"])
    >>> picture.axes[0].get_title("left"), picture.axes[1].get_ylabel()
    ('attention weights', 'weight')
    """
    graph = weights.call.graph if isinstance(weights, AttentionInfo) else graph
    tables = _read_tables(weights, graph)
    numbers = _choose_heads(heads, len(tables), ax)
    tables = tables[numbers]
    num_dst, num_src = tables.shape[1:]
    frame = graph or TokenGraph.from_rule(rules.all_pairs, num_dst, num_src, name="the weights")
    made, grid = _axes.tables(ax, len(numbers), *_axes.read_sides(frame, labels, src_labels), title)
    # all tables have one scale, so that they can be compared
    high = tables.abs().nan_to_num().max().item() if tables.numel() else 0.0
    low = -high if bool((tables < 0).any()) else 0.0
    colours = ["white", BLUE] if low == 0 else [ORANGE, "white", BLUE]
    for head, table, axes in zip(numbers, tables, grid, strict=True):
        image = _axes.image(axes, table, colours, low, high or 1.0)
        _axes.title(axes, f"head {head}" if len(numbers) > 1 else title)
    if ax is None and tables.numel():
        made.colorbar(image, ax=grid, label="weight", shrink=0.8, fraction=0.05)
    if bool(tables.isnan().any()):
        _axes.name_colours(grid[0], {FAINT: "no edge"})
    return _axes.finish(made, ax)


def degrees(graph: TokenGraph, title: Text = None) -> Figure:
    """The in-degree of each receiver, over the out-degree of each sender."""
    _check("degrees", graph, LARGEST_MASK)
    made, (top, bottom) = _axes.figure(8.0, 5.4, nrows=2)
    top.set(xlabel="dst (receiver)", ylabel="senders it attends to")
    bottom.set(xlabel="src (sender)", ylabel="receivers that attend to it")
    both = (top, graph, "in-degree", BLUE), (bottom, graph.T, "out-degree", ORANGE)
    for axes, each, word, colour in both:
        degree = each.in_degree().tolist() or [0]
        mean = sum(degree) / len(degree)
        axes.stairs(degree, torch.arange(len(degree) + 1) + each.dst_offset - 0.5, fill=True, color=colour)
        axes.axhline(mean, color=BLACK, linestyle="--", linewidth=1)
        axes.set_ylim(0, 1.08 * max(*degree, 1))
        axes.margins(x=0.01)
        axes.locator_params(integer=True)
        _axes.title(axes, f"{word}: {min(degree)} to {max(degree)}, mean {mean:.4g} (broken line)")
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
    n = stack[0].num_dst
    last = walks.check_token("token", n - 1 if token is None else token, n)
    counts = _reached_counts(stack, residual)
    while layers is None and len(counts) > 1 and counts[-1].equal(counts[-2]):
        counts = counts[:-1]
    number, size = range(len(counts)), 5 if len(counts) <= FEW else 0
    made, axes = _axes.of(ax, 7.0, 4.6)
    axes.fill_between(number, counts.amin(1), counts.amax(1), color=LIGHT, label="all tokens: range")
    axes.plot(number, counts.mean(1), "s--", color=ORANGE, label="all tokens: mean", markersize=size)
    axes.plot(number, counts[:, last], "o-", color=BLUE, label=f"token {last}", markersize=size)
    axes.axhline(n, color=BLACK, linestyle=":", linewidth=1, label=f"all {n}")
    axes.set(xlabel="layers", ylabel="tokens reached", ylim=(0, 1.06 * n))
    axes.locator_params(integer=True)
    axes.grid(axis="y", color=LIGHT)
    _axes.title(axes, _axes.common_name([each.name for each in stack]) if title is None else title)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0, 0.95))
    return made


def _choose_heads(heads: int | Sequence[int] | None, count: int, ax: Where) -> list[int]:
    numbers = range(count) if heads is None else [heads] if isinstance(heads, int) else heads
    numbers = [checks.index("heads", head, count) for head in numbers]
    if not 1 <= len(numbers) <= MOST_TABLES or (ax is not None and len(numbers) > 1):
        most = f"1 to {MOST_TABLES} heads" if ax is None else "one head into axes of your own"
        raise ValueError(f"weights() draws {most}, got {len(numbers)}: choose with heads=")
    return numbers


def _read_tables(weights: Any, graph: TokenGraph | None) -> Float[Tensor, "heads dst src"]:
    """The weights in float64, NaN where there is no edge."""
    if isinstance(weights, AttentionInfo):
        tables = weights.weight_matrix()
    elif isinstance(weights, tuple) and len(weights) == 2 and graph is not None:
        (src, dst), by_edge = weights
        if by_edge.shape[:-1] != dst.shape:
            raise ValueError(f"weights must be [{len(dst)}, heads], got {list(by_edge.shape)}")
        tables = by_edge.new_zeros(by_edge.shape[-1], graph.num_dst, graph.num_src)
        tables[:, dst, src] = by_edge.detach().mT
    elif isinstance(weights, Tensor):
        tables = weights
    elif hasattr(weights, "__array__") and weights.__array__().dtype.kind in "fiub":
        tables = torch.from_numpy(weights.__array__().astype("float64", order="C"))
    elif hasattr(weights, "dense"):  # a LayerTrace, which stands above this package
        no_edge = weights["attn.hook_attn_scores"] == -torch.inf
        tables = weights["attn.hook_pattern"].masked_fill(no_edge, torch.nan)
    else:
        raise TypeError(
            "weights must be a tensor, an array of numbers, an AttentionInfo, a LayerTrace (run.layers[0]), "
            f"or a pair (edge_index, weights) with graph=, got {checks.describe_type(weights)}"
        )
    tables = tables.detach().cpu().double()
    tables = tables[0] if tables.dim() == 4 and len(tables) == 1 else tables
    if tables.dim() not in (2, 3) or max(tables.shape[-2:]) > LARGEST_MASK:
        raise ValueError(
            "weights must be [dst, src] or [heads, dst, src] of one sample and at most "
            f"{LARGEST_MASK} tokens a side, got {list(tables.shape)}: choose a sample: weights[b], of an "
            "AttentionInfo weight_matrix()[b], of a LayerTrace ['attn.hook_pattern'][b]"
        )
    tables = tables.unsqueeze(0) if tables.dim() == 2 else tables
    if graph is not None and tables.shape[1:] != (graph.num_dst, graph.num_src):
        raise ValueError(f"weights must fit {graph!r}, got {list(tables.shape)}")
    if graph is not None:
        tables = tables.masked_fill(~graph.mask().cpu().view(-1, *tables.shape[1:]), torch.nan)
    if bool(tables.isposinf().any()):
        raise ValueError("weights must be below +inf, got +inf in a table: -inf or NaN is drawn as no edge")
    return tables.masked_fill(tables.isneginf(), torch.nan)


def _check(name: str, graph: TokenGraph, largest: int) -> None:
    if not isinstance(graph, TokenGraph):
        raise TypeError(f"{name}() draws a TokenGraph, got {type(graph).__name__}; see convert")
    if graph.varying_axes:
        raise ValueError(f"{name}() draws one plain graph, got {graph!r}; take one with select(batch, head)")
    if max(graph.num_dst, graph.num_src) > largest:
        raise ValueError(f"{name}() draws at most {largest} tokens a side, got {graph!r}; {SMALLER}")


def _facts(graph: TokenGraph) -> str:
    pairs = graph.num_dst * graph.num_src
    return f"{graph.num_edges:,} edges, {100 * graph.num_edges / pairs if pairs else 0:.3g} % of all pairs"


def _stack(function: str, graphs: TokenGraph | Sequence[TokenGraph], count: int) -> list[TokenGraph]:
    if checks.size("layers", count, 1) > MOST_LAYERS:
        raise ValueError(f"layers must be at most {MOST_LAYERS} in a picture, got {count}")
    given = walks.stack(graphs)
    if not given[0].num_dst:
        raise ValueError(f"{function}() needs a graph with at least one token, got {given[0]!r}")
    _check(function, given[0], LARGEST_LINES)
    return [given[layer % len(given)] for layer in range(count)]


def _reached_counts(stack: Sequence[TokenGraph], residual: bool) -> Float[Tensor, "rows tokens"]:
    """The number of senders that each token has received from after 0, 1, ... layers."""
    reached = torch.eye(stack[0].num_dst)
    counts = [reached.sum(1)]
    for each in stack:
        reached = ((each.mask().float() @ reached + residual * reached) > 0).float()
        counts.append(reached.sum(1))
    return torch.stack(counts).double()
