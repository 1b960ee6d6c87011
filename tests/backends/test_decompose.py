"""Parts of a graph: disjoint, together the graph, over the whole zoo; and those of structured graphs."""

import operator
from functools import reduce

import pytest
import torch
from support.covering import thinned
from support.inputs import scattered

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends.plan import decompose
from gnn_attention.backends.plan.decompose import packing, parts, positions
from gnn_attention.convert import catalogue, expressions
from gnn_attention.verify.cases import GRAPHS


def clusters(n, size, strays):
    """Full blocks on the diagonal and some edges between them, as a list."""
    inside = (torch.arange(n).unsqueeze(1) // size == torch.arange(n) // size).nonzero().T
    edges = torch.cat([inside, scattered(n, n, strays).edge_index], 1)
    return ga.convert.from_edge_index(edges[:, torch.randperm(edges.shape[1])], n, n, coalesce=True)


SHAPES = {
    "window and sinks": patterns.window(150, 20) | patterns.sinks(150, 4),
    "longformer": patterns.longformer(150, 8, 3, causal=False),
    "scattered hubs": patterns.longformer(150, 8, [0, 40, 90], causal=False),
    "prefix": patterns.prefix(150, 15),
    "bigbird": patterns.bigbird(256, 16),
    "documents and sinks": patterns.documents([30, 20, 100]) | patterns.sinks(150, 2),
    "window and list": patterns.window(150, 10) | scattered(150, 150, 700),
    "dilated union": patterns.window(200, 10) | patterns.dilated(200, 20, 8),
    "decoding rows": (patterns.window(150, 20) | patterns.sinks(150, 4)).rows(120, 150),
    "rows of rows": (patterns.window(150, 20) | patterns.dilated(150, 8, 12)).rows(20, 140).rows(10, 100),
    "transposed": (patterns.window(150, 20) | patterns.dilated(150, 8, 12)).T,
    "intersection": (patterns.window(150, 20) | patterns.dilated(150, 8, 12)) & patterns.documents([75, 75]),
    "complement": ~patterns.window(150, 20),
    "clusters": clusters(256, 64, 900),
    "list": scattered(120, 70, 900),
    "cross": patterns.cross(20, 50),
    "no edges": patterns.causal(9) - patterns.causal(9),
    "no receivers": patterns.cross(0, 7),
    "everything twice": patterns.causal(40) | patterns.window(40, 4),
    "many terms": reduce(operator.or_, (patterns.dilated(90, 3, step) for step in range(1, 20, 2))),
}
EXAMPLES = {name: expressions.evaluate(example) for name, example in catalogue.EXAMPLES.items()}
ZOO = {f"zoo: {name}": made for name, made in EXAMPLES.items() if isinstance(made, ga.TokenGraph)}
CASES = {name: case.graph for name, case in GRAPHS.items()}


def counted(graph):
    times = torch.zeros(graph.num_dst, graph.num_src, dtype=torch.int64)
    for part in parts(graph):
        assert part.graph.num_edges
        sizes = part.dst[1] - part.dst[0], part.src[1] - part.src[0]
        assert (part.graph.num_dst, part.graph.num_src) == sizes
        assert part.graph.dst_offset == graph.dst_offset + part.dst[0]
        assert part.graph.src_offset == graph.src_offset + part.src[0]
        times[slice(*part.dst), slice(*part.src)] += part.graph.mask()
    return times


@pytest.mark.parametrize(
    "graph",
    thinned([*SHAPES.values(), *ZOO.values(), *CASES.values()]),
    ids=[*SHAPES, *ZOO, *CASES],
)
def test_parts_are_disjoint_and_together_the_graph(graph):
    graph = graph.select(0, 0)
    assert torch.equal(counted(graph), graph.mask().long())


def test_a_window_with_sinks_or_global_tokens_is_a_plain_window_again():
    windows = {"window and sinks": (19, 0), "longformer": (7, 7), "documents and sinks": (-1, 0)}
    for name, window in windows.items():
        found = parts(SHAPES[name])
        assert packing(found[-1].graph).window == window
        for graph, *_ in found[:-1]:
            assert 2 * graph.num_edges >= graph.num_dst * graph.num_src
        assert len(found) == (3 if name == "longformer" else 2)


def test_after_its_prefix_a_prefix_graph_is_causal():
    box, rest = parts(SHAPES["prefix"])
    assert (box.src, box.graph.is_full()) == ((0, 15), True)
    assert (rest.dst, rest.src, rest.graph.is_causal()) == ((15, 150), (15, 150), True)


def test_of_a_union_the_kernels_term_is_whole_and_the_list_stays_a_list():
    listed = scattered(150, 150, 700)
    for graph in (patterns.window(150, 10) | listed, listed | patterns.window(150, 10)):
        first, second = parts(graph)
        assert packing(first.graph).window == (9, 0)
        assert second.graph._listed is not None
        assert second.graph.num_edges == (listed - patterns.window(150, 10)).num_edges


def test_a_list_is_divided_by_the_fill_of_its_tiles():
    dense, sparse = parts(SHAPES["clusters"])
    assert (dense.what, sparse.what) == ("well filled tiles", "edges between them")
    assert sparse.graph.num_edges == SHAPES["clusters"].num_edges - 4 * 64**2
    assert len(parts(SHAPES["list"])) == 1


@pytest.mark.parametrize(
    "graph", [patterns.causal(50), patterns.full(50), patterns.window(50, 5), patterns.documents([20, 30])]
)
def test_what_one_kernel_does_is_one_part(graph):
    (part,) = parts(graph)
    assert part.graph is graph


def test_there_are_few_parts_and_none_without_edges():
    assert parts(SHAPES["no edges"]) == parts(SHAPES["no receivers"]) == ()
    assert len(parts(SHAPES["many terms"])) <= 2 * decompose.MOST_PARTS


@pytest.mark.parametrize("name", ["window and list", "clusters", "decoding rows", "bigbird", "list"])
def test_positions_of_the_edges_of_a_part(name):
    graph = SHAPES[name]
    seen = []
    for part in parts(graph):
        where = positions(part, graph, torch.device("cpu"))
        moved = part.graph.edge_index + torch.tensor([[part.src[0]], [part.dst[0]]])
        assert torch.equal(graph.edge_index[:, where], moved)
        seen.append(where)
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(graph.num_edges))


def test_a_long_graph_is_not_visited_pair_by_pair():
    n, w, s = 32_768, 1024, 4
    box, rest = parts(patterns.window(n, w) | patterns.sinks(n, s))
    assert box.graph.num_edges == n * s - s * (s - 1) // 2
    assert rest.graph.num_edges == (n - s) * w - w * (w - 1) // 2
    assert packing(rest.graph).window == (w - 1, 0)
