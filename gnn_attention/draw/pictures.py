"""Draw graphs and weights. Each function returns a matplotlib ``Figure``, which notebooks display.

In every picture ``src`` is the sender and ``dst`` the receiver; a mask has a row for each
receiver. With ``ax=`` a picture is drawn into your axes; then only :func:`hops` has a legend.

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
from gnn_attention.draw._axes import BLACK, BLUE, DETAIL_LIMIT, FAINT, GREY, LIGHT, ORANGE, RED, Labels
from gnn_attention.graph import TokenGraph, rules

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Ax = Axes | None

Title = str | None
CELL_MEANINGS = {BLUE: "edge: dst attends to src", LIGHT: "no edge"}
EDGE_LABEL = "src → dst: dst attends to src"
CHANGE_MEANINGS = {BLUE: "kept edge", ORANGE: "new edge", GREY: "dropped edge"}
# Pictures of cells have at most 4096 tokens per side, and pictures of lines at most 1024.
MASK_LIMIT = 4096
LINE_LIMIT = 1024
MAX_TABLES = 64
MAX_LAYERS = 64


def mask(
    graph: TokenGraph, ax: Ax = None, labels: Labels = None, src_labels: Labels = None, title: Title = None
) -> Figure:
    """Draw the mask: a row for each receiver, a column for each sender, a dark cell for each edge.

    A graph that varies by head is drawn as one small mask for each head (up to 64).
    ``labels`` name the receivers in order, and also the senders if they are the same tokens.
    Raises ValueError above 4096 tokens per side, and for a graph that varies by sample.
    """
    can_split_heads = isinstance(graph, TokenGraph) and not graph.batch and ax is None
    num_heads = graph.heads or 0 if can_split_heads else 0
    if num_heads > MAX_TABLES:
        raise ValueError(f"mask() draws at most {MAX_TABLES} heads, got {num_heads}; use select(0, head)")
    graphs = [graph.select(0, head) for head in range(num_heads)] or [graph]
    _check_graph("mask", graphs[0], MASK_LIMIT)
    name = graph.name if title is None else title
    figure, grid = _axes.create_tables(ax, len(graphs), *_axes.read_sides(graph, labels, src_labels), name)
    for head, (head_graph, axes) in enumerate(zip(graphs, grid, strict=True)):
        _axes.draw_table(axes, head_graph.mask().int(), [LIGHT, BLUE], 0, 1)
        _axes.set_title(axes, f"head {head}" if len(graphs) > 1 else name, _describe_edges(head_graph))
    _axes.explain_colours(grid[0], CELL_MEANINGS)
    return _axes.finish(figure, ax)


def graph(
    graph: TokenGraph, ax: Ax = None, labels: Labels = None, src_labels: Labels = None, title: Title = None
) -> Figure:
    """Draw the nodes and links of a graph, with the tokens on a circle, clockwise from the top.

    If senders and receivers differ, they are drawn in two columns. An edge is an arrow from src
    to dst. Raises ValueError above 1024 tokens per side or 10,000 edges: draw the mask instead.
    """
    _check_graph("graph", graph, LINE_LIMIT)
    dst, src = _axes.read_sides(graph, labels, src_labels)
    figure, axes = _axes.get_axes(ax, 6.0, 6.4, 2 * max(dst.label_inches, src.label_inches))
    if is_square(graph):
        _node_layouts.draw_circle(axes, graph, dst)
    else:
        _node_layouts.draw_columns(axes, graph, dst, src)
    _axes.set_title(axes, graph.name if title is None else title, _describe_edges(graph))
    axes.plot([], [], color=BLUE, label=EDGE_LABEL)
    return _axes.finish(figure, ax)


_draw_graph = graph  # Other functions have a parameter `graph`.


def side_by_side(graph: TokenGraph, labels: Labels = None, src_labels: Labels = None) -> Figure:
    """Draw the mask next to the nodes and links. The limits are those of :func:`graph`."""
    _check_graph("side_by_side", graph, LINE_LIMIT)
    figure, (left, right) = _axes.create_figure(11.5, 6.2, ncols=2)
    mask(graph, left, labels, src_labels)
    if not is_square(graph):
        # This stretches the mask to the height of the columns next to it.
        left.set_aspect("auto")
    _draw_graph(graph, right, labels, src_labels, "the same graph as nodes and links")
    return _axes.finish(figure, None)


def arcs(
    graph: TokenGraph,
    ax: Ax = None,
    labels: Labels = None,
    weights: Tensor | None = None,
    lit: Collection[tuple[int, int]] = (),
    title: Title = None,
) -> Figure:
    """Draw tokens on a line: edges to the right (``src < dst``) are arcs above it, others below it.

    ``weights`` holds a number for each edge in ``graph.edge_index`` order: a weight of 1 adds
    4 points to the width. Edges ``(src, dst)`` in ``lit`` are red; all others are then grey.
    Raises ValueError above 1024 tokens or 10,000 edges, and if senders and receivers differ.
    """
    _check_graph("arcs", graph, LINE_LIMIT)
    if not is_square(graph):
        raise ValueError(f"arcs() needs the same senders and receivers, got {graph!r}; use mask() or graph()")
    tokens, _ = _axes.read_sides(graph, labels, None)
    checks.check_order("weights", weights)
    weights = None if weights is None else torch.as_tensor(weights).detach().double().flatten()
    if weights is not None and (len(weights) != graph.num_edges or not bool(weights.isfinite().all())):
        raise ValueError(
            f"weights must be {graph.num_edges} finite numbers, one for each edge, got {len(weights)} "
            f"numbers, {weights.isfinite().sum()} of them finite"
        )
    lit_edges = {(int(src), int(dst)) for src, dst in lit}
    edges = [(src, dst) for src, dst in graph.edge_index.T.tolist()]
    if non_edges := sorted(lit_edges - set(edges)):
        raise ValueError(f"lit must hold edges (src, dst) of {graph.name}, got {non_edges[0]}")
    is_lit = torch.tensor([edge in lit_edges for edge in edges], dtype=torch.bool)
    figure, axes = _axes.get_axes(ax, min(11.0, 3.6 + 0.8 * graph.num_dst), 2.9 if graph.is_causal() else 4.4)
    _node_layouts.draw_line(axes, graph, tokens, weights, is_lit)
    _axes.set_title(axes, graph.name if title is None else title, _describe_edges(graph), 100)
    axes.plot([], [], color=GREY if lit_edges else BLUE, label=EDGE_LABEL)
    if lit_edges:
        axes.plot([], [], color=RED, linewidth=2, label="highlighted edge")
    for weight in () if weights is None else (0.1, 0.5, 1.0):
        axes.plot([], [], color=BLUE, linewidth=0.3 + 4 * weight, label=f"weight {weight}")
    return _axes.finish(figure, ax)


def layers(
    graphs: TokenGraph | Sequence[TokenGraph],
    layers: int,
    token: int | None = None,
    ax: Ax = None,
    labels: Labels = None,
    residual: bool = True,
    title: Title = None,
) -> Figure:
    """Draw an unrolled network, with a row of tokens for each layer.

    Tokens and edges that reach ``token`` (default: the last) at the top are lit; numbers on the
    right count lit tokens. ``graphs`` is one graph for all layers, or a sequence that is repeated
    until all layers have one. With ``residual``, tokens also keep their state. Raises ValueError
    above 1024 tokens, 64 layers or 10,000 edges, and IndexError for a token that does not exist.
    """
    stack = _stack_layers("layers", graphs, layers)
    tokens, _ = _axes.read_sides(stack[0], labels, None)
    target = walks.check_token("token", stack[0].num_dst - 1 if token is None else token, stack[0].num_dst)
    # Each row, from the input up, marks the tokens from which the lit token at the top has received.
    lit_rows = [torch.arange(tokens.num_tokens) == target]
    for layer_graph in reversed(stack):
        lit_rows.insert(0, layer_graph.mask()[lit_rows[0]].any(0) | (lit_rows[0] & residual))
    figure, axes = _axes.get_axes(ax, 9.0, 1.9 + 0.85 * min(len(stack), 8))
    _node_layouts.draw_rows(axes, stack, torch.stack(lit_rows), tokens, residual)
    axes.plot([], [], color=BLUE, label="edge src → dst")
    if residual:
        axes.plot([], [], ":", color=BLACK, label="own state carried along")
    name = _axes.common_name([graph.name for graph in stack]) if title is None else title
    label = tokens.names[target] if tokens.names else target
    _axes.set_title(axes, name, f"lit: all tokens that reach token {label} in {len(stack)} layers", 90)
    return _axes.finish(figure, ax)


def over_time(
    graphs: Sequence[TokenGraph], titles: Sequence[str] | None = None, title: Title = None
) -> Figure:
    """Draw a selection over time: a mask for each step, with new and dropped edges in colours.

    The number in the title of a mask is its Jaccard index with the mask before
    (``analyse.overlap``). ``graphs`` are 1 to 64 graphs of the same tokens that do not differ
    by head or sample; others raise ValueError.
    """
    checks.check_order("graphs", graphs)
    checks.check_order("titles", titles)
    graphs = [graphs] if isinstance(graphs, TokenGraph) else list(graphs)
    for graph in graphs:
        _check_graph("over_time", graph, MASK_LIMIT)
    count = len(graphs)
    if not 1 <= count <= MAX_TABLES or len(titles or graphs) != count:
        raise ValueError(f"over_time() draws 1 to {MAX_TABLES} graphs with a title each, got {count}")
    overlap = analyse.overlap(graphs)
    name = _axes.common_name([graph.name for graph in graphs]) if title is None else title
    figure, grid = _axes.create_tables(None, count, *_axes.read_sides(graphs[0], None, None), name)
    for step, axes in enumerate(grid):
        previous, current = graphs[max(step - 1, 0)].mask(), graphs[step].mask()
        table = current.int() + 2 * (current ^ previous).int()
        _axes.draw_table(axes, table, [LIGHT, BLUE, GREY, ORANGE], 0, 3)
        label = f"step {step}" if titles is None else titles[step]
        _axes.set_title(axes, label + (f": {overlap[step - 1, step]:.2f}" if step else ""))
    _axes.explain_colours(grid[0], CHANGE_MEANINGS)
    return _axes.finish(figure, None)


def weights(
    weights: Any,
    heads: int | Sequence[int] | None = None,
    graph: TokenGraph | None = None,
    ax: Ax = None,
    labels: Labels = None,
    src_labels: Labels = None,
    title: str = "attention weights",
) -> Figure:
    """Draw the heat map of attention weights: a row for each receiver, a column for each sender.

    ``weights`` is a table ``[dst, src]``, ``[heads, dst, src]`` or ``[1, heads, dst, src]``; or a
    pair ``(edge_index, weights [E, heads])`` as the layer returns it, which needs ``graph``; or the
    ``AttentionInfo`` of ``attend`` with one sample; or a layer of ``trace.record``. Pairs that are
    not edges of ``graph`` are grey. Heads (all, or those in ``heads``, at most 64) are drawn side
    by side on one scale. Weight 0 is white, a negative number orange, NaN and -inf grey. ``labels``
    name the receivers, and the senders if they are the same. Raises TypeError, ValueError or
    IndexError for other arguments, and ValueError for +inf and above 4096 tokens per side.

    >>> picture = weights(torch.tensor([[1.0, torch.nan], [0.25, 0.75]]), labels=["the", "cat"])
    >>> picture.axes[0].get_title("left"), picture.axes[1].get_ylabel()
    ('attention weights', 'weight')
    """
    graph = weights.call.graph if isinstance(weights, AttentionInfo) else graph
    tables = _read_tables(weights, graph)
    head_indices = _select_heads(heads, len(tables), ax)
    tables = tables[head_indices]
    num_dst, num_src = tables.shape[1:]
    table_graph = graph or TokenGraph.from_rule(rules.all_pairs, num_dst, num_src, name="the weights")
    sides = _axes.read_sides(table_graph, labels, src_labels)
    figure, grid = _axes.create_tables(ax, len(head_indices), *sides, title)
    # All tables share one scale, so that they can be compared.
    high = tables.abs().nan_to_num().max().item() if tables.numel() else 0.0
    low = -high if bool((tables < 0).any()) else 0.0
    colours = ["white", BLUE] if low == 0 else [ORANGE, "white", BLUE]
    for head, table, axes in zip(head_indices, tables, grid, strict=True):
        image = _axes.draw_table(axes, table, colours, low, high or 1.0)
        _axes.set_title(axes, f"head {head}" if len(head_indices) > 1 else title)
    if ax is None and tables.numel():
        figure.colorbar(image, ax=grid, label="weight", shrink=0.8, fraction=0.05)
    if bool(tables.isnan().any()):
        _axes.explain_colours(grid[0], {FAINT: "no edge"})
    return _axes.finish(figure, ax)


def degrees(graph: TokenGraph, title: Title = None) -> Figure:
    """Draw the in-degree of each receiver above the out-degree of each sender."""
    _check_graph("degrees", graph, MASK_LIMIT)
    figure, (top, bottom) = _axes.create_figure(8.0, 5.4, nrows=2)
    top.set(xlabel="dst (receiver)", ylabel="senders it attends to")
    bottom.set(xlabel="src (sender)", ylabel="receivers that attend to it")
    charts = (top, graph, "in-degree", BLUE), (bottom, graph.T, "out-degree", ORANGE)
    for axes, g, name, colour in charts:
        degree = g.in_degree().tolist() or [0]
        mean = sum(degree) / len(degree)
        axes.stairs(degree, torch.arange(len(degree) + 1) + g.dst_offset - 0.5, fill=True, color=colour)
        axes.axhline(mean, color=BLACK, linestyle="--", linewidth=1)
        axes.set_ylim(0, 1.08 * max(*degree, 1))
        axes.margins(x=0.01)
        axes.locator_params(integer=True)
        _axes.set_title(axes, f"{name}: {min(degree)} to {max(degree)}, mean {mean:.4g} (dashed line)")
    _axes.set_headline(figure, graph.name if title is None else title)
    return _axes.finish(figure, None)


def hops(
    graphs: TokenGraph | Sequence[TokenGraph],
    layers: int | None = None,
    token: int | None = None,
    residual: bool = True,
    ax: Ax = None,
    title: Title = None,
) -> Figure:
    """Draw how many tokens have reached a token after each layer.

    The curves show ``token`` (default: the last), and the mean and range of all tokens. With
    ``layers=None`` they stop when nothing changes, or after 64 layers. ``graphs`` and ``residual`` are as
    in :func:`layers`. Raises ValueError above 1024 tokens, and IndexError for an unknown token.
    """
    stack = _stack_layers("hops", graphs, MAX_LAYERS if layers is None else layers)
    n = stack[0].num_dst
    target = walks.check_token("token", n - 1 if token is None else token, n)
    counts = _count_reached(stack, residual)
    while layers is None and len(counts) > 1 and counts[-1].equal(counts[-2]):
        counts = counts[:-1]
    x = range(len(counts))
    size = 5 if len(counts) <= DETAIL_LIMIT else 0
    figure, axes = _axes.get_axes(ax, 7.0, 4.6)
    axes.fill_between(x, counts.amin(1), counts.amax(1), color=LIGHT, label="all tokens: range")
    axes.plot(x, counts.mean(1), "s--", color=ORANGE, label="all tokens: mean", markersize=size)
    axes.plot(x, counts[:, target], "o-", color=BLUE, label=f"token {target}", markersize=size)
    axes.axhline(n, color=BLACK, linestyle=":", linewidth=1, label=f"all {n}")
    axes.set(xlabel="layers", ylabel="tokens reached", ylim=(0, 1.06 * n))
    axes.locator_params(integer=True)
    axes.grid(axis="y", color=LIGHT)
    _axes.set_title(axes, _axes.common_name([graph.name for graph in stack]) if title is None else title)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0, 0.95))
    return figure


def _select_heads(heads: int | Sequence[int] | None, num_heads: int, ax: Ax) -> list[int]:
    selection = range(num_heads) if heads is None else [heads] if isinstance(heads, int) else heads
    indices = [checks.index("heads", head, num_heads) for head in selection]
    if not 1 <= len(indices) <= MAX_TABLES:
        raise ValueError(f"weights() draws 1 to {MAX_TABLES} heads, got {len(indices)}: choose with heads=")
    if ax is not None and len(indices) > 1:
        raise ValueError(f"weights() draws one head into ax, got {len(indices)}: choose with heads=")
    return indices


def _read_tables(weights: Any, graph: TokenGraph | None) -> Float[Tensor, "heads dst src"]:
    """Return the weights in float64, with NaN for pairs that are not edges."""
    if isinstance(weights, AttentionInfo):
        tables = weights.weight_matrix()
    elif isinstance(weights, tuple) and len(weights) == 2 and graph is not None:
        (src, dst), edge_weights = weights
        if edge_weights.shape[:-1] != dst.shape:
            raise ValueError(f"weights must be [{len(dst)}, heads], got {list(edge_weights.shape)}")
        tables = edge_weights.new_zeros(edge_weights.shape[-1], graph.num_dst, graph.num_src)
        tables[:, dst, src] = edge_weights.detach().mT
    elif isinstance(weights, Tensor):
        tables = weights
    elif hasattr(weights, "__array__") and weights.__array__().dtype.kind in "fiub":
        tables = torch.from_numpy(weights.__array__().astype("float64", order="C"))
    elif hasattr(weights, "dense"):  # a LayerTrace, whose package may not be imported here
        no_edge = weights["attn.hook_attn_scores"] == -torch.inf
        tables = weights["attn.hook_pattern"].masked_fill(no_edge, torch.nan)
    else:
        raise TypeError(
            "weights must be a tensor, an array of numbers, an AttentionInfo, a LayerTrace (run.layers[0]), "
            f"or a pair (edge_index, weights) with graph=, got {checks.describe_type(weights)}"
        )
    tables = tables.detach().cpu().double()
    tables = tables[0] if tables.dim() == 4 and len(tables) == 1 else tables
    if tables.dim() not in (2, 3) or max(tables.shape[-2:]) > MASK_LIMIT:
        raise ValueError(
            f"weights must be [dst, src] or [heads, dst, src] of at most {MASK_LIMIT} tokens per side, got "
            f"{list(tables.shape)}: pass one sample, as weights[b], info.weight_matrix()[b] or pattern[b]"
        )
    tables = tables.unsqueeze(0) if tables.dim() == 2 else tables
    if graph is not None and tables.shape[1:] != (graph.num_dst, graph.num_src):
        raise ValueError(f"weights must fit {graph!r}, got {list(tables.shape)}")
    if graph is not None:
        tables = tables.masked_fill(~graph.mask().cpu().view(-1, *tables.shape[1:]), torch.nan)
    if bool(tables.isposinf().any()):
        raise ValueError("weights must be below +inf, got +inf in a table: -inf or NaN is drawn as no edge")
    return tables.masked_fill(tables.isneginf(), torch.nan)


def _check_graph(name: str, graph: TokenGraph, limit: int) -> None:
    if not isinstance(graph, TokenGraph):
        raise TypeError(f"{name}() draws a TokenGraph, got {type(graph).__name__}; use convert")
    if graph.varying_axes:
        raise ValueError(f"{name}() draws one slice, got {graph!r}; use select(batch, head)")
    if max(graph.num_dst, graph.num_src) > limit:
        raise ValueError(f"{name} draws at most {limit} tokens per side, got {graph!r}; use algebra.restrict")


def _describe_edges(graph: TokenGraph) -> str:
    density = graph.num_edges / max(graph.num_dst * graph.num_src, 1)
    return f"{graph.num_edges:,} edge{'s' * (graph.num_edges != 1)}, {100 * density:.3g} % of all pairs"


def _stack_layers(function: str, graphs: TokenGraph | Sequence[TokenGraph], depth: int) -> list[TokenGraph]:
    if checks.size("layers", depth, 1) > MAX_LAYERS:
        raise ValueError(f"layers must be at most {MAX_LAYERS} in a picture, got {depth}")
    stack = walks.check_graphs(graphs)
    if not stack[0].num_dst:
        raise ValueError(f"{function}() needs a graph with at least one token, got {stack[0]!r}")
    _check_graph(function, stack[0], LINE_LIMIT)
    return [stack[layer % len(stack)] for layer in range(depth)]


def _count_reached(stack: Sequence[TokenGraph], residual: bool) -> Float[Tensor, "rows tokens"]:
    """Count the tokens that have reached each token after 0, 1, ... layers."""
    has_received = torch.eye(stack[0].num_dst)
    counts = [has_received.sum(1)]
    for graph in stack:
        has_received = ((graph.mask().float() @ has_received + residual * has_received) > 0).float()
        counts.append(has_received.sum(1))
    return torch.stack(counts).double()
