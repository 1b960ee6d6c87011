"""Pictures show the edges, weights and names of graphs at the right places and in the right direction."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import combinations, pairwise

import pytest
import torch
from support.bounds import assert_exact
from support.extras import needs
from support.refusals import assert_errors

from gnn_attention import MessagePassingAttention, StandardHeads, TokenGraph, attend, draw, patterns, trace

Figure, to_hex = needs("matplotlib.figure").Figure, needs("matplotlib.colors").to_hex
collections, Quiver = needs("matplotlib.collections"), needs("matplotlib.quiver").Quiver
LineCollection, PathCollection = collections.LineCollection, collections.PathCollection
RED, BLUE, GREY = "#d55e00", "#0072b2", "#8c8c8c"
# Only the edge between 0 and 2 has its reverse.
ONE_WAY = TokenGraph.from_edges(torch.tensor([[0, 3, 1, 2], [2, 1, 1, 0]]), 4, name="one_way")
BY_HEAD = TokenGraph.from_rule(lambda b, h, dst, src: (dst - src) == h, 6, heads=3, name="by_head")
BY_SAMPLE = TokenGraph.from_rule(lambda b, h, dst, src: (dst - src) == b, 6, batch=3, name="by_sample")


def read_edges(axes):
    """Return the ends of all edges in drawing order, and assert that an arrowhead points along each edge."""
    edges = []
    curves, heads = (
        [c for c in axes.collections if isinstance(c, kind)] for kind in (PathCollection, Quiver)
    )
    for curve, head in zip(curves, heads, strict=True):
        for path, tip, x, y in zip(curve.get_paths(), head.XY, head.U, head.V, strict=True):
            start, _, before, end = path.vertices
            assert tuple(tip) == tuple(end)
            assert x * (end - before)[0] + y * (end - before)[1] > 0
            edges.append((tuple(start), tuple(end)))
    return edges


def read_colours(axes):
    return [to_hex(c) for s in axes.collections if isinstance(s, PathCollection) for c in s.get_edgecolors()]


def find_nearest(point, points):
    return min(range(len(points)), key=lambda number: math.dist(point, points[number]))


def circle_points(n):
    """Return points on a circle, clockwise from the top."""
    angles = [math.pi / 2 - 2 * math.pi * t / n for t in range(n)]
    return [(math.cos(angle), math.sin(angle)) for angle in angles]


def read_texts(axes):
    return [text.get_text() for text in axes.texts]


def tick_names(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def assert_no_overlap(axis):
    """Assert that no label overlaps the next one."""
    for first, second in pairwise(axis.get_ticklabels()):
        assert not first.get_window_extent().overlaps(second.get_window_extent())


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def title(axes):
    return axes.get_title(loc="left")


def find_circle_edges(axes, n):
    """Return the sorted edges of a picture on a circle, by the nearest tokens."""
    return sorted(tuple(find_nearest(end, circle_points(n)) for end in pair) for pair in read_edges(axes))


def list_edges(graph):
    return sorted(map(tuple, graph.edge_index.T.tolist()))


class TestMask:
    @pytest.mark.parametrize(
        "graph", [ONE_WAY, patterns.window(64, 8), patterns.cross(3, 7), patterns.window(512, 9)]
    )
    def test_cells_are_the_mask(self, graph):
        (axes,) = draw.mask(graph).axes
        assert axes.images[0].get_array().tolist() == graph.mask().int().tolist()
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("src (sender)", "dst (receiver)")

    def test_a_long_name_is_broken_into_lines(self):
        graph = patterns.window(9, 2)
        for number in range(1, 9):
            graph |= patterns.global_tokens(9, [number])
        lines = title(draw.mask(graph).axes[0]).split("\n")
        assert len(lines) == 4
        assert max(map(len, lines)) <= 64
        assert lines[2].endswith(" ...")

    def test_labels(self):
        (axes,) = draw.mask(ONE_WAY, labels="abcd").axes
        assert tick_names(axes.xaxis) == tick_names(axes.yaxis) == list("abcd")
        (axes,) = draw.mask(patterns.cross(2, 3), labels="xy", src_labels="abc").axes
        assert (tick_names(axes.xaxis), tick_names(axes.yaxis)) == (list("abc"), list("xy"))

    def test_signs_stand_for_what_has_no_letters(self):
        names = ["\n", "  ", "):\r\n", "a" * 300, " b"]
        labels = ["⏎", "␣␣", "):⏎", "a" * 31 + "…", " b"]
        (axes,) = draw.mask(patterns.causal(5), labels=names).axes
        assert tick_names(axes.xaxis) == tick_names(axes.yaxis) == labels
        assert read_texts(draw.graph(patterns.causal(5), labels=names).axes[0]) == labels

    def test_heads_side_by_side(self):
        figure = draw.mask(BY_HEAD)
        assert [title(axes).split("\n")[0] for axes in figure.axes] == ["head 0", "head 1", "head 2"]
        for head, axes in enumerate(figure.axes):
            assert torch.equal(torch.tensor(axes.images[0].get_array()), BY_HEAD.select(0, head).mask())
        assert figure.get_suptitle() == "by_head"

    def test_empty_graphs(self):
        for graph in (patterns.window(3, 0), patterns.causal(0), patterns.cross(0, 3)):
            assert draw.mask(graph)._repr_png_()
            assert read_edges(draw.graph(graph).axes[0]) == []
        assert title(draw.degrees(patterns.causal(0)).axes[0]).startswith("in-degree: 0 to 0")


class TestGraph:
    @pytest.mark.parametrize(
        "graph", [ONE_WAY, patterns.window(8, 3), patterns.causal(20).T, patterns.sinks(64, 2, causal=False)]
    )
    def test_each_edge_is_an_arrow_from_src_to_dst(self, graph):
        figure = draw.graph(graph)
        assert find_circle_edges(figure.axes[0], graph.num_dst) == list_edges(graph)
        assert legend(figure) == ["src → dst: dst attends to src"]

    def test_a_loop_lies_outside_the_circle(self):
        (axes,) = draw.graph(patterns.self_loops(5)).axes
        (loops,) = [c for c in axes.collections if isinstance(c, PathCollection)]
        for token, path in enumerate(loops.get_paths()):
            inside, outside = path.vertices[[0, 3]].mean(0), path.vertices[1:3].mean(0)
            assert find_nearest(outside, circle_points(5)) == token
            assert math.hypot(*outside) > math.hypot(*inside) > 1

    @pytest.mark.parametrize("count", [8, 30])
    def test_names_lie_apart(self, count):
        """Names stand beside their nodes without overlap, and point outwards if there are many."""
        figure = draw.graph(patterns.window(count, 3), labels=["infrastructure", "of"] * (count // 2))
        figure.draw_without_rendering()
        (axes,) = figure.axes
        assert len(axes.texts) == count
        assert {text.get_rotation() == 0 for text in axes.texts} == {count == 8}
        boxes = [text.get_window_extent() for text in axes.texts]
        assert count == 30 or not any(first.overlaps(second) for first, second in combinations(boxes, 2))

    @pytest.mark.parametrize(
        "graph", [patterns.cross(3, 5), patterns.causal(6).rows(4, 6), patterns.causal(64).rows(60, 62)]
    )
    def test_two_columns_where_senders_are_not_the_receivers(self, graph):
        (axes,) = draw.graph(graph).axes
        sides = (0, graph.num_src), (1, graph.num_dst)
        left, right = ([(x, -(t + 0.5) / count) for t in range(count)] for x, count in sides)
        edges = [(find_nearest(start, left), find_nearest(end, right)) for start, end in read_edges(axes)]
        assert sorted(edges) == list_edges(graph)
        assert {"src (senders)", "dst (receivers)", str(graph.dst_offset)} <= set(read_texts(axes))


class TestArcs:
    def test_above_to_the_right_below_to_the_left(self):
        (axes,) = draw.arcs(ONE_WAY).axes
        edges = read_edges(axes)
        for (x0, y0), (x1, y1) in edges:
            assert (min(y0, y1) > 0) if round(x0) < round(x1) else (max(y0, y1) < 0)
        assert sorted((round(x0), round(x1)) for (x0, _), (x1, _) in edges) == list_edges(ONE_WAY)
        assert tick_names(axes.xaxis) == ["0", "1", "2", "3"]

    def test_weights_are_widths(self):
        weights = torch.tensor([0.0, 1.0, 0.5, 0.25])
        figure = draw.arcs(ONE_WAY, weights=weights)
        widths = figure.axes[0].collections[0].get_linewidths()
        for width, weight in zip(widths, weights.tolist(), strict=True):
            assert_exact(float(width), 0.3 + 4 * weight)
        assert legend(figure) == ["src → dst: dst attends to src", "weight 0.1", "weight 0.5", "weight 1.0"]

    def test_lit_edges_are_red_and_last(self):
        figure = draw.arcs(ONE_WAY, lit=[(3, 1)])
        assert read_colours(figure.axes[0]) == [GREY, GREY, GREY, RED]
        (x0, _), (x1, _) = read_edges(figure.axes[0])[-1]
        assert (round(x0), round(x1)) == (3, 1)
        assert "highlighted edge" in legend(figure)


class TestLayers:
    def filled(self, axes, level):
        """Return the tokens of a row that are filled."""
        return sorted(
            x
            for line in axes.lines
            if line.get_marker() == "o" and line.get_markerfacecolor() != "white"
            for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
            if y == level
        )

    def test_the_reach_of_a_window_grows_by_its_width(self):
        n = 64
        figure = draw.layers(patterns.window(n, 3), 3)
        (axes,) = figure.axes
        for level in range(4):
            assert self.filled(axes, level) == list(range(n - 1 - 2 * (3 - level), n))
        assert read_texts(axes) == [f"{count} of {n}" for count in (7, 5, 3, 1)]
        assert tick_names(axes.yaxis) == ["input", "after layer 1", "after layer 2", "after layer 3"]
        assert f"lit: all tokens that reach token {n - 1} in 3 layers" in title(axes)
        assert "the token" in legend(figure)

    def test_edges_to_lit_tokens_are_blue(self):
        (axes,) = draw.layers(patterns.window(8, 3), 2, token=4).axes
        coloured_edges = list(zip(read_edges(axes), read_colours(axes), strict=True))
        assert len(coloured_edges) == 2 * patterns.window(8, 3).num_edges
        blue = [edge for edge, colour in coloured_edges if colour == BLUE]
        lit_edges = sorted((round(end[1]), round(start[0]), round(end[0])) for start, end in blue)
        first_layer = [(1, s, d) for s in range(5) for d in range(2, 5) if 0 <= d - s < 3]
        assert lit_edges == first_layer + [(2, s, 4) for s in (2, 3, 4)]

    def test_own_state_is_carried_along(self):
        graph = patterns.strict_causal(4)
        figure = draw.layers(graph, 2, token=2)
        assert [self.filled(figure.axes[0], level) for level in (0, 1, 2)] == [[0, 1, 2], [0, 1, 2], [2]]
        dotted = [c for c in figure.axes[0].collections if isinstance(c, LineCollection)]
        assert sum(len(lines.get_segments()) for lines in dotted) == 4
        assert "own state carried along" in legend(figure)
        figure = draw.layers(graph, 2, token=2, residual=False)
        assert [self.filled(figure.axes[0], level) for level in (0, 1, 2)] == [[0], [0, 1], [2]]
        assert "own state carried along" not in legend(figure)


class TestDegrees:
    def test_bars(self):
        figure = draw.degrees(ONE_WAY)
        top, bottom = figure.axes
        steps = [axes.patches[0].get_data() for axes in (top, bottom)]
        assert [data.values.tolist() for data in steps] == [[1, 2, 1, 0], [1, 1, 1, 1]]
        assert steps[0].edges.tolist() == [-0.5, 0.5, 1.5, 2.5, 3.5]
        assert (top.get_xlabel(), bottom.get_xlabel()) == ("dst (receiver)", "src (sender)")
        assert title(top) == "in-degree: 0 to 2, mean 1 (dashed line)"
        assert figure.get_suptitle() == "one_way"


class TestHops:
    def curve(self, figure, label):
        (axes,) = figure.axes
        (line,) = [line for line in axes.lines if line.get_label() == label]
        return list(line.get_ydata())

    @pytest.mark.parametrize(("n", "w"), [(8, 3), (17, 2), (64, 8)])
    def test_a_window_grows_by_its_width(self, n, w):
        figure = draw.hops(patterns.window(n, w))
        layers = math.ceil((n - 1) / (w - 1))
        counts = [[min(token + 1, k * (w - 1) + 1) for token in range(n)] for k in range(layers + 1)]
        assert self.curve(figure, f"token {n - 1}") == [row[-1] for row in counts]
        for mean, row in zip(self.curve(figure, "all tokens: mean"), counts, strict=True):
            assert_exact(float(mean), sum(row) / n)
        assert self.curve(figure, f"all {n}") == [n, n]


class TestFigures:
    """Figures do not use pyplot, so nothing global changes."""

    @pytest.mark.parametrize("picture", [draw.mask, draw.graph, draw.arcs, draw.hops])
    def test_into_given_axes(self, picture):
        figure = Figure()
        left, right = figure.subplots(1, 2)
        assert picture(patterns.window(6, 2), ax=right) is figure
        assert not left.has_data()
        assert figure.legends == []
        assert "window(6, 2)" in title(right)

    @pytest.mark.slow
    def test_nothing_global_is_touched(self):
        program = (
            "import sys\nfrom gnn_attention import draw, patterns\nassert 'matplotlib' not in sys.modules\n"
            "import matplotlib\nbefore, g = matplotlib.rcParams.copy(), patterns.window(6, 2)\n"
            "[f(g) for f in (draw.mask, draw.graph, draw.side_by_side, draw.arcs, draw.degrees, draw.hops)]\n"
            "draw.layers(g, 2)\nassert 'matplotlib.pyplot' not in sys.modules\n"
            "assert matplotlib.rcParams.copy() == before"
        )
        run = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr


ERRORS = r"""
mask(causal(4097)) -> ValueError: mask draws at most 4096 tokens per side, .*restrict
mask(BY_SAMPLE) -> ValueError: mask\(\) draws one slice, .*batch 3.*select\(batch, head\)
mask(duo_attention(6, 65, [0], 2)) -> ValueError: at most 64 heads, got 65; .*select\(0, head\)
mask(torch.ones(3, 3)) -> TypeError: mask\(\) draws a TokenGraph, got Tensor
mask(ONE_WAY, labels="abc") -> ValueError: labels must hold 4 names, one for each of the receivers .*got 3
draw.graph(ONE_WAY, src_labels="abc") -> ValueError: src_labels must hold 4 names, .*senders .*got 3
arcs(cross(2, 3)) -> ValueError: arcs\(\) needs the same senders and receivers, .*graph\(\)
arcs(ONE_WAY, weights=torch.ones(3)) -> ValueError: weights must be 4 finite numbers, one .* got 3 numbers
arcs(ONE_WAY, weights=torch.tensor([1, 1, 1, torch.nan])) -> ValueError: got 4 numbers, 3 of them finite
draw.graph(causal(150)) -> ValueError: at most 10000 edges fit, got 11325: use algebra.restrict or mask\(\)
arcs(ONE_WAY, lit=[(0, 1)]) -> ValueError: lit must hold edges .* got \(0, 1\)
layers(ONE_WAY, 2, token=4) -> IndexError: token must be a position in 0 \.\. 3, got 4
layers(ONE_WAY, 65) -> ValueError: layers must be at most 64 in a picture, got 65
hops(3) -> TypeError: graphs must be a TokenGraph or a list of them, got 3
hops(causal(0)) -> ValueError: needs a graph with at least one token
over_time([]) -> ValueError: over_time\(\) draws 1 to 64 graphs
weights("x") -> TypeError: must be a tensor, an array of numbers, an
weights((causal(4).edge_index, TABLES)) -> TypeError: with graph=
weights((causal(4).edge_index, TABLES[0]), graph=causal(4)) -> ValueError: \[10, heads\]
weights(TABLES, graph=causal(5)) -> ValueError: must fit TokenGraph
weights(TABLES[None].repeat(2, 1, 1, 1)) -> ValueError: one sample, as weights\[b\]
weights(TABLES / 0) -> ValueError: below \+inf, got \+inf in a table
weights(TABLES, heads=[]) -> ValueError: draws 1 to 64 heads, got 0
weights(TABLES, ax=mask(causal(4)).axes[0]) -> ValueError: one head into ax, .*heads=
"""
TABLES = torch.rand(3, 4, 4)


def test_wrong_arguments():
    assert_errors(ERRORS, {**vars(patterns), **vars(draw), **globals()})


def test_a_selection_over_time_shows_what_changed():
    """Cells are 0 for no edge, 1 for kept, 3 for new, 2 for dropped ones; titles have the Jaccard index."""
    steps = [patterns.window(3, 1), patterns.window(3, 2), patterns.sinks(3, 1)]
    figure = draw.over_time(steps, titles=["a", "b", "c"])
    images = [axes.images[0].get_array().tolist() for axes in figure.axes if axes.images]
    assert images[0] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert images[1] == [[1, 0, 0], [3, 1, 0], [0, 3, 1]]
    assert images[2] == [[1, 0, 0], [1, 2, 0], [3, 2, 2]]
    assert [axes.get_title(loc="left").strip() for axes in figure.axes[:3]] == ["a", "b: 0.60", "c: 0.33"]


class TestWeights:
    """In a heat map of weights, rows are receivers and columns are senders."""

    words = ("the", "cat", "sat", "on", "it")

    def info(self, graph, heads=3, **options):
        torch.manual_seed(0)
        q = torch.randn(1, heads, graph.num_dst, 4)
        k, v = torch.randn(2, 1, heads, graph.num_src, 4).unbind()
        return attend(q, k, v, graph, return_info=True, **options)[1]

    def test_cells_are_the_weights_and_non_edges_have_no_number(self):
        graph = TokenGraph.from_edges(torch.tensor([[0, 3, 1, 2], [2, 1, 1, 0]]), 4, 5, name="one_way")
        info = self.info(graph, heads=1)
        image = draw.weights(info, labels=self.words[:4], src_labels=self.words).axes[0].images[0]
        table = image.get_array()
        assert torch.equal(torch.as_tensor(~table.mask), graph.mask())
        assert_exact(torch.as_tensor(table.filled(0.0)), info.weight_matrix()[0, 0].nan_to_num().double())
        colours = image.cmap(image.norm(table))
        assert to_hex(colours[0, 0]) == "#cfcfcf"
        assert to_hex(image.cmap(image.norm(0.0))) == "#ffffff"

    @pytest.mark.parametrize("heads", [1, 5])
    @pytest.mark.parametrize(
        "words", [["the", "then"] * 6, ["infrastructure", "of"] * 16], ids=["few", "many"]
    )
    def test_names_leave_room_for_the_tables_and_each_other(self, words, heads):
        """Each of up to 32 tokens has a name, no names overlap, and the tables keep their width."""
        figure = draw.weights(torch.rand(heads, len(words), len(words)), labels=words)
        figure.draw_without_rendering()
        for axes in figure.axes[:heads]:
            assert axes.get_window_extent().width >= (2.0 if heads > 1 else 4.0) * figure.dpi
            for axis in (axes.xaxis, axes.yaxis):
                assert_no_overlap(axis)
        assert tick_names(figure.axes[0].yaxis) == tick_names(figure.axes[heads - 1].xaxis) == words

    @pytest.mark.parametrize(("words", "angle"), [(["to", "be"], 0), (["infrastructure"] * 30, 90)])
    def test_few_letters_lie_flat_and_long_names_do_not(self, words, angle):
        axes = draw.weights(torch.rand(len(words), len(words)), labels=words).axes[0]
        assert {label.get_rotation() for label in axes.get_xticklabels()} == {angle}

    def test_scores_of_a_trace_have_no_number_where_there_is_no_edge(self):
        graph = TokenGraph.from_rule(lambda b, h, dst, src: dst - src <= h, 5, heads=2) & patterns.causal(5)
        run = trace.record(MessagePassingAttention(StandardHeads(8, 2)), torch.randn(5, 8), graph)
        mask = torch.stack([graph.select(head=head).mask() for head in range(2)])
        scores = run.layers[0]["attn.hook_attn_scores"]
        figure = draw.weights(scores)
        for head, axes in enumerate(figure.axes[:2]):
            table = axes.images[0].get_array()
            assert torch.equal(torch.as_tensor(~table.mask), mask[head])
            assert table.compressed().tolist() == scores[0, head][mask[head]].tolist()
            assert axes.images[0].get_clim()[1] == scores[0][mask].abs().max().double()
        assert legend(figure) == ["no edge"]
        weights = draw.weights(run.layers[0]).axes[1].images[0].get_array()
        assert weights.compressed().tolist() == run.layers[0]["attn.hook_pattern"][0, 1][mask[1]].tolist()

    def test_arrays(self):
        for table in (torch.eye(3).bool().numpy(), torch.rand(4, 3).numpy()[::-1]):
            assert draw.weights(table).axes[0].images[0].get_array().tolist() == table.tolist()

    def test_heads_are_drawn_in_one_scale_and_can_be_chosen(self):
        tables = torch.arange(24.0).view(1, 6, 2, 2)
        figure = draw.weights(tables)
        images = [axes.images[0] for axes in figure.axes[:6]]
        assert [title(axes) for axes in figure.axes[:6]] == [f"head {head}" for head in range(6)]
        assert [image.get_array().tolist() for image in images] == tables[0].tolist()
        assert {image.get_clim() for image in images} == {(0.0, 23.0)}
        selection = draw.weights(tables, heads=[4, 1])
        assert [title(axes) for axes in selection.axes[:2]] == ["head 4", "head 1"]
        assert selection.axes[0].images[0].get_array().tolist() == tables[0, 4].tolist()
        assert draw.weights(-tables, heads=1).axes[0].images[0].get_clim() == (-7.0, 7.0)

    def test_a_graph_says_which_cells_are_edges(self):
        graph, table = patterns.window(5, 2), torch.rand(5, 5)
        (axes, _) = draw.weights(table, graph=graph, labels=self.words).axes
        assert torch.equal(torch.as_tensor(~axes.images[0].get_array().mask), graph.mask())
        info = self.info(BY_HEAD, heads=3)
        assert draw.weights(info).axes[2].images[0].get_array().mask.sum() == 36 - 4

    def test_what_the_layer_returns_is_drawn_along_the_graph(self):
        graph = patterns.window(5, 2)
        layer = MessagePassingAttention(StandardHeads(8, 2))
        _, (edges, weights) = layer(torch.randn(5, 8), graph, return_attention_weights=True)
        figure = draw.weights((edges, weights), graph=graph, labels=self.words)
        for head in range(2):
            table = figure.axes[head].images[0].get_array()
            assert table[edges[1], edges[0]].tolist() == weights[:, head].double().tolist()
            assert table.mask.sum() == 25 - graph.num_edges
