"""Graphs as lists of edges: every edge once, receiver by receiver, with its transpose and its place in
edge_index.
"""

import pytest
import torch

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends.plan.csr import edges_of, order_of, sorted_edges

CPU = torch.device("cpu")


def random_edges(num_src, num_dst, count, seed=0):
    """``count`` different pairs in no particular order."""
    rng = torch.Generator().manual_seed(seed)
    cells = torch.randperm(num_src * num_dst, generator=rng)[:count]
    return cells % num_src, cells // num_src


SIZES = {
    "irregular": (7, 5, 17),
    "wide": (40, 3, 60),
    "tall": (2, 30, 31),
    "one": (1, 1, 1),
    "no edges": (4, 3, 0),
    "nobody": (0, 0, 0),
}


@pytest.mark.parametrize(("num_src", "num_dst", "count"), SIZES.values(), ids=SIZES)
def test_rows_columns_and_places_agree_with_the_pairs(num_src, num_dst, count):
    """Read back by loops: in-edges of each receiver, out-edges of each sender, and the order of the
    caller.
    """
    src, dst = random_edges(num_src, num_dst, count)
    found, order = sorted_edges(src, dst, num_src, num_dst)
    pairs = list(zip(src.tolist(), dst.tolist(), strict=True))
    ptr, out_ptr = found.ptr.tolist(), found.out_ptr.tolist()
    assert len(ptr) == num_dst + 1
    assert len(out_ptr) == num_src + 1
    for i in range(num_dst):
        assert found.src[ptr[i] : ptr[i + 1]].tolist() == sorted(s for s, d in pairs if d == i)
        assert found.dst[ptr[i] : ptr[i + 1]].tolist() == [i] * (ptr[i + 1] - ptr[i])
    for j in range(num_src):
        assert found.out_dst[out_ptr[j] : out_ptr[j + 1]].tolist() == sorted(d for s, d in pairs if s == j)
    places = found.out_position.long()
    assert found.dst[places].tolist() == found.out_dst.tolist()
    assert found.src[places].tolist() == sorted(src.tolist())
    assert [pairs[place] for place in order.tolist()] == list(
        zip(found.src.tolist(), found.dst.tolist(), strict=True)
    )


def test_the_order_is_that_of_edge_index():
    """Of a listed graph the caller's; of a rule the sorted one."""
    pairs = torch.stack(random_edges(9, 8, 30))
    graph = ga.convert.from_edge_index(pairs, 8, 9)
    assert not torch.equal(order_of(graph, CPU), torch.arange(30))
    found = edges_of(graph, CPU)
    assert torch.equal(graph.edge_index[:, order_of(graph, CPU)], torch.stack([found.src, found.dst]).long())
    assert torch.equal(order_of(patterns.window(9, 3), CPU), torch.arange(patterns.window(9, 3).num_edges))


def test_worked_out_once():
    """The tensors are kept with the graph: a compiled program may hold them."""
    graph = patterns.window(9, 3)
    assert edges_of(graph, CPU).src is edges_of(graph, CPU).src
    assert edges_of(graph, CPU).src.dtype == torch.int32


def test_a_graph_that_differs_by_head_has_no_list():
    """It is taken head by head."""
    graph = ga.TokenGraph.from_rule(lambda b, h, dst, src: src <= dst + h, 5, heads=2)
    with pytest.raises(ValueError, match="differs by head"):
        edges_of(graph, CPU)
