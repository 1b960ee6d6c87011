"""Counts, degrees, lists and equality from boxes, against visiting every pair."""

import pytest
import torch
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
    """A rule that cannot be evaluated on ranges."""
    return (torch.sin((7 * dst + 3 * src + h + b).double()) > 0.3) | (src == h)


class TestZoo:
    @pytest.mark.slow
    @pytest.mark.parametrize("first", [0, 2])
    def test_degrees_and_lists(self, first):
        """Two of the forms of each row, other ones of the next."""
        forms = list(FORMS)
        for number, row in enumerate(ROWS):
            self.check(row, forms[(number + first) % len(forms)])

    def check(self, row, form):
        graph = FORMS[form](row.build(row.sizes[-1]))
        name, shape = graph.name, graph.shape4
        degree, edges = (
            way(graph.rule, name, shape) for way in (enumerate_pairs.in_degree, enumerate_pairs.edge_list)
        )
        assert torch.equal(counting.in_degree(graph.rule, name, shape), degree), (row.name, form)
        assert torch.equal(counting.edge_list(graph.rule, name, shape), edges), (row.name, form)


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

    @pytest.mark.parametrize("shift", [-2, 1, 3])
    @pytest.mark.parametrize(("num_dst", "num_src"), [(97, 33), (300, 1)])
    def test_a_list_beyond_its_tokens(self, num_dst, num_src, shift):
        """Its keys are those of other pairs there; the answer is as when every pair is visited."""
        pairs = torch.randperm(num_dst * num_src, generator=torch.Generator().manual_seed(0))[
            : num_dst * num_src // 2
        ]
        listed = TokenGraph.from_edges(torch.stack([pairs % num_src, pairs // num_src]), num_dst, num_src)
        graph = TokenGraph.from_rule(
            lambda b, h, dst, src: listed.rule(b, h, dst, src + shift), num_dst, num_src
        )
        assert graph.in_degree().tolist() == graph.mask().sum(1).tolist()


class TestCover:
    def test_few_boxes_wait(self, monkeypatch):
        """The smallest boxes are done before more of the larger ones are cut."""
        monkeypatch.setattr(quadtree, "AT_ONCE", 64)
        evaluated, kinds = [], quadtree._kinds
        monkeypatch.setattr(
            quadtree, "_kinds", lambda rule, boxes: evaluated.append(len(boxes)) or kinds(rule, boxes)
        )
        next(quadtree.decompose(odd, quadtree.root((1, 1, 2048, 2048))))
        assert sum(evaluated) <= 64 * len(evaluated) <= 64 * 6

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
