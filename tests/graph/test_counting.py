"""Counts, degrees, lists and equality from boxes, against visiting every pair."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.zoo import ROWS

from gnn_attention import TokenGraph, patterns
from gnn_attention.graph.intervals.values import DIFFERENCE, DST, SRC
from gnn_attention.graph.regions import counting, enumerate_pairs, quadtree

FORMS = {
    "itself": lambda g: g,
    "complement": lambda g: ~g,
    "transpose": lambda g: g.T,
    "rows": lambda g: g.rows(g.num_dst // 3, g.num_dst),
    "with a list": lambda g: (
        g
        ^ TokenGraph.from_edges(
            torch.zeros(2, min(1, g.num_dst, g.num_src), dtype=torch.int64), g.num_dst, g.num_src
        )
    ),
}


@pytest.fixture(autouse=True)
def by_boxes(monkeypatch):
    """Small graphs too."""
    monkeypatch.setattr(enumerate_pairs, "FEW", -1)
    monkeypatch.setattr(counting, "MANY", -1)


def odd(b, h, dst, src):
    """A rule that cannot be asked about ranges."""
    return (torch.sin((7 * dst + 3 * src + h + b).double()) > 0.3) | (src == h)


class TestZoo:
    @pytest.mark.slow
    @pytest.mark.parametrize("first", [0, 2])
    def test_degrees_and_lists(self, first):
        """Two of the forms of each row, other ones of the next."""
        forms = list(FORMS)
        for number, row in enumerate(ROWS):
            self.check(row, forms[(number + first) % len(forms)])

    @pytest.mark.nightly
    @pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
    def test_every_form(self, row):
        for form in FORMS:
            self.check(row, form)

    def check(self, row, form):
        graph = FORMS[form](row.build(row.sizes[-1]))
        name, shape = graph.name, graph.shape4
        degree, edges = (
            way(graph.rule, name, shape) for way in (enumerate_pairs.in_degree, enumerate_pairs.edge_list)
        )
        assert torch.equal(counting.in_degree(graph.rule, name, shape), degree), (row.name, form)
        assert torch.equal(counting.edge_list(graph.rule, name, shape), edges), (row.name, form)

    @pytest.mark.slow
    def test_a_missing_edge_is_seen(self):
        """A graph is equal to itself made otherwise, and not to itself without its last edge."""
        for row in ROWS:
            graph = row.build(row.sizes[-1])
            edges = graph.edge_index
            assert graph == TokenGraph.from_edges(edges, graph.num_dst, graph.num_src), row.name
            if edges.shape[1]:
                assert graph != TokenGraph.from_edges(edges[:, :-1], graph.num_dst, graph.num_src), row.name


GRAPHS = [
    patterns.causal(300),
    patterns.window(300, 37) | patterns.sinks(300, 5),
    patterns.documents([1, 7, 130, 0, 62, 100]) & patterns.window(300, 20),
    patterns.dilated(300, 5, 16) ^ patterns.prefix(300, 70),
    patterns.global_tokens(300, [3, 77, 250], causal=False) - patterns.window(300, 9, causal=False),
    TokenGraph.from_rule(odd, 70, 45),
    TokenGraph.from_rule(odd, 70, 45) & patterns.cross(70, 45),
    TokenGraph.from_edges(
        torch.randint(0, 300, (2, 900), generator=torch.Generator().manual_seed(0)), 300, coalesce=True
    )
    | patterns.window(300, 4),
    patterns.causal(300).rows(111, 300),
    TokenGraph.from_rule(lambda b, h, dst, src: src * 3 <= dst, 90, 270),
]


class TestLarger:
    """Sizes at which boxes of every kind and several levels take part."""

    @pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
    def test_degrees_and_lists(self, graph):
        expected = graph.mask()
        assert graph.in_degree().tolist() == expected.sum(1).tolist()
        assert torch.equal(graph.edge_index, expected.nonzero().t().flip(0))
        assert graph.num_edges == int(expected.sum())

    def test_by_head_and_sample(self):
        graph = TokenGraph.from_rule(
            lambda b, h, dst, src: (src <= dst) & ((dst - src < 5 * h + 3) | (src < b)), 60, heads=3, batch=2
        )
        assert torch.equal(graph.in_degree(), graph.mask().sum(-1))
        table = torch.tensor([2, 9, 30])
        by_table = TokenGraph.from_rule(lambda b, h, dst, src: (dst - src).abs() < table[h], 60, heads=3)
        assert torch.equal(by_table.in_degree(), by_table.mask().sum(-1))
        assert torch.equal(
            TokenGraph.from_rule(odd, 20, 30, heads=2, batch=2).in_degree(),
            TokenGraph.from_rule(odd, 20, 30, heads=2, batch=2).mask().sum(-1),
        )

    def test_equality_looks_at_every_head(self):
        left = TokenGraph.from_rule(lambda b, h, dst, src: src <= dst + 0 * h, 80, heads=2)
        right = TokenGraph.from_rule(
            lambda b, h, dst, src: (src <= dst) & ((h == 0) | (dst != 77) | (src != 3)), 80, heads=2
        )
        assert left != right
        assert left == TokenGraph.from_rule(lambda b, h, dst, src: ~(src > dst), 80, heads=2)

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.integers(0, 40), max_size=8), st.integers(0, 50), st.integers(0, 6), st.integers(1, 9))
    def test_random_mixtures(self, lengths, w, s, step):
        n = sum(lengths)
        graph = (
            (patterns.documents(lengths) & patterns.window(n, w))
            | patterns.sinks(n, s)
            | (patterns.dilated(n, 3, step) - patterns.documents(lengths))
        )
        assert graph.in_degree().tolist() == graph.mask().sum(1).tolist()

    def test_nobody(self):
        for graph in (patterns.cross(0, 4), patterns.cross(4, 0), patterns.full(0)):
            assert graph.num_edges == 0
            assert graph.edge_index.shape == (2, 0)
            assert graph.in_degree().tolist() == [0] * graph.num_dst

    @pytest.mark.parametrize("shift", [-2, 1, 3])
    @pytest.mark.parametrize(("num_dst", "num_src"), [(97, 33), (300, 1)])
    def test_a_list_asked_beyond_its_tokens(self, num_dst, num_src, shift):
        """Its keys are those of other pairs there; the answer is as when every pair is visited."""
        pairs = torch.randperm(num_dst * num_src, generator=torch.Generator().manual_seed(0))[
            : num_dst * num_src // 2
        ]
        listed = TokenGraph.from_edges(torch.stack([pairs % num_src, pairs // num_src]), num_dst, num_src)
        graph = TokenGraph.from_rule(
            lambda b, h, dst, src: listed.rule(b, h, dst, src + shift), num_dst, num_src
        )
        assert graph.in_degree().tolist() == graph.mask().sum(1).tolist()


class TestEdgesInBoxes:
    """The edges of chosen boxes alone, by receiver, then sender."""

    @pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
    def test_every_other_tile(self, graph):
        block, inside = 32, torch.zeros_like(graph.mask())
        corners = [(i, j) for i in range(0, graph.num_dst, block) for j in range(0, graph.num_src, block)][
            ::2
        ]
        dst, src = torch.tensor(corners).t()
        height, width = (graph.num_dst - dst).clamp(max=block), (graph.num_src - src).clamp(max=block)
        nothing = torch.zeros_like(dst)
        for i, j in corners:
            inside[i : i + block, j : j + block] = True
        boxes = quadtree.Boxes(torch.arange(len(dst)), nothing, nothing, dst, src, height, width)
        expected = (graph.mask() & inside).nonzero().t().flip(0)
        assert torch.equal(counting.edges_in(graph.rule, boxes, graph.num_src), expected)
        assert counting.edges_in(graph.rule, boxes.at(slice(0)), graph.num_src).shape == (2, 0)


class TestCover:
    def test_many_heads_come_a_few_at_a_time(self):
        """No piece has more rows and columns than one graph of a million tokens."""
        shape = (1, 8, 10**6, 10**6)
        pieces = list(
            quadtree.decompose(
                lambda b, h, dst, src: (src <= dst) & (dst - src < 100 * h + 100), quadtree.root(shape)
            )
        )
        assert sum(len(piece.boxes) for piece in pieces) == 8
        assert all(
            int((piece.boxes.height + piece.boxes.width).sum()) < 2 * quadtree.LONGEST for piece in pieces
        )

    def test_few_boxes_wait(self, monkeypatch):
        """The smallest boxes are done before more of the larger ones are cut."""
        monkeypatch.setattr(quadtree, "AT_ONCE", 64)
        asked, kinds = [], quadtree._kinds
        monkeypatch.setattr(
            quadtree, "_kinds", lambda rule, boxes: asked.append(len(boxes)) or kinds(rule, boxes)
        )
        next(quadtree.decompose(odd, quadtree.root((1, 1, 2048, 2048))))
        assert sum(asked) <= 64 * len(asked) <= 64 * 6

    @pytest.mark.parametrize(
        ("graph", "kinds"),
        [
            (patterns.full(10**6), [quadtree.FULL]),
            (patterns.causal(10**6), [DIFFERENCE]),
            (patterns.dilated(10**6, 256, 16), [DIFFERENCE]),
            (patterns.sinks(10**6, 4, causal=False), [SRC]),
            (patterns.sinks(10**6, 4, causal=False).T, [DST]),
            (patterns.window(10**6, 0), [DIFFERENCE]),
        ],
        ids=lambda value: getattr(value, "name", ""),
    )
    def test_a_simple_graph_is_one_box(self, graph, kinds):
        """A million tokens and no pair visited."""
        pieces = list(quadtree.decompose(graph.rule, quadtree.root(graph.shape4)))
        assert [piece.kind for piece in pieces] == kinds
        assert all(len(piece.boxes) == 1 for piece in pieces)

    @pytest.mark.parametrize("leaf", [1, 3, 8, 100])
    def test_boxes_are_disjoint_and_hold_all_edges(self, leaf):
        graph = patterns.documents([30, 1, 69]) & (patterns.window(100, 13) | patterns.sinks(100, 40))
        seen = torch.zeros(100, 100, dtype=torch.int64)
        for piece in quadtree.decompose(graph.rule, quadtree.root(graph.shape4), leaf):
            for i in range(len(piece.boxes)):
                box = piece.boxes.at(torch.tensor([i]))
                assert piece.kind != quadtree.CELLS or max(int(box.height), int(box.width)) <= leaf
                seen[int(box.dst) : int(box.dst + box.height), int(box.src) : int(box.src + box.width)] += 1
        assert int(seen.max()) == 1
        assert bool((seen[graph.mask()] == 1).all())
