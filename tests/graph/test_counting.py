"""Counts, degrees, lists and equality from boxes, against visiting every pair."""

import pytest
import torch
from support.covering import thinned
from support.plans import PLAIN

from gnn_attention import TokenGraph, patterns
from gnn_attention.graph.intervals.values import DIFFERENCE, DST, SRC
from gnn_attention.graph.regions import counting, enumerate_pairs, quadtree


@pytest.fixture(autouse=True)
def by_boxes(monkeypatch):
    """Small graphs too."""
    monkeypatch.setattr(enumerate_pairs, "FEW", -1)
    monkeypatch.setattr(counting, "MANY", -1)


def odd(b, h, dst, src):
    """A rule that cannot be evaluated on ranges."""
    return (torch.sin((7 * dst + 3 * src + h + b).double()) > 0.3) | (src == h)


@pytest.mark.parametrize("name", thinned(PLAIN, 2))
def test_degrees_and_lists(name):
    """Of a graph, its complement and its transpose."""
    for graph in (PLAIN[name], ~PLAIN[name], PLAIN[name].T):
        expected = graph.mask()
        assert graph.in_degree().tolist() == expected.sum(1).tolist()
        assert graph.num_edges == int(expected.sum())
        if graph.listed_edges is None:
            assert torch.equal(graph.edge_index, expected.nonzero().t().flip(0))


class TestLarger:
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
