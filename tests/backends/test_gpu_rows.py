"""A graph as rows for a GPU: every edge once on each side, long rows in chunks, and no more bytes than
promised.
"""

import pytest
import torch

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends.gpu import csr
from gnn_attention.backends.gpu.csr import Rows, bytes_of, order_of, packed_rows, receivers, rows_of, senders
from gnn_attention.backends.gpu.formats import ROWS, unpacked

CPU = torch.device("cpu")


def listed(num_src, num_dst, count, seed=0):
    """``count`` different edges in no particular order."""
    cells = torch.randperm(num_src * num_dst, generator=torch.Generator().manual_seed(seed))[:count]
    return ga.TokenGraph.from_edges(torch.stack([cells % num_src, cells // num_src]), num_dst, num_src)


GRAPHS = {
    "irregular": lambda: listed(7, 5, 17),
    "wide": lambda: listed(40, 3, 60),
    "tall": lambda: listed(2, 30, 31),
    "no edges": lambda: listed(4, 3, 0),
    "nobody": lambda: listed(0, 0, 0),
    "a rule": lambda: patterns.window(9, 3) | patterns.sinks(9, 2),
    "some receivers": lambda: patterns.causal(9).rows(4, 7),
}


@pytest.mark.parametrize("make", GRAPHS.values(), ids=GRAPHS)
def test_both_sides_hold_every_edge_once(make):
    """Read back by loops: receivers in order, their senders ascending; the transpose likewise, with the place
    of each edge.
    """
    graph = make()
    rows = rows_of(graph, CPU, for_edges=True)
    pairs = sorted((dst, src) for src, dst in graph.edge_index.T.tolist())
    ptr, out_ptr = rows.ptr.tolist(), rows.out_ptr.tolist()
    found = [(i, j) for i in range(graph.num_dst) for j in rows.src[ptr[i] : ptr[i + 1]].tolist()]
    back = [(i, j) for j in range(graph.num_src) for i in rows.out_dst[out_ptr[j] : out_ptr[j + 1]].tolist()]
    assert found == pairs
    assert back == sorted(pairs, key=lambda pair: pair[::-1])
    assert [found[e] for e in rows.out_edge.tolist()] == back


@pytest.mark.parametrize("make", GRAPHS.values(), ids=GRAPHS)
def test_the_order_is_that_of_edge_index(make):
    """None only where edges stand by receiver, then sender, already."""
    graph = make()
    order, pairs = order_of(graph, CPU), graph.edge_index.flip(0).T.tolist()
    assert (order is None) == (pairs == sorted(pairs))
    assert order is None or [pairs[e] for e in order.tolist()] == sorted(pairs)


@pytest.mark.parametrize("for_edges", [False, True])
def test_bytes_are_those_promised(for_edges):
    """8 bytes an edge, 12 where something is given for each, and 8 a token; as estimated without building
    anything.
    """
    graph = listed(60, 50, 900)
    form = rows_of(graph, CPU, for_edges)
    held = sum(x.numel() * x.element_size() for x in form[:-2])
    chunks = sum(
        x.numel() * x.element_size() for side in (receivers(form), senders(form)) for x in side[2:-1]
    )
    assert held - chunks == bytes_of(graph, for_edges) == 900 * (12 if for_edges else 8) + 4 * (61 + 51)
    assert chunks == 8  # two lists of nothing


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_long_rows_are_cut_into_chunks(limit, monkeypatch):
    """The chunks of a long row, one after another, are its entries; shorter rows have none."""
    monkeypatch.setattr(csr, "CHUNK", limit)
    for side in (receivers(rows_of(listed(9, 8, 40), CPU)), senders(rows_of(listed(9, 8, 40), CPU))):
        assert side.limit == {1: 1, 2: 2, 5: 5}[limit]
        degree, first = side.ptr.diff().tolist(), side.first.tolist()
        assert side.long.tolist() == [row for row, count in enumerate(degree) if count > limit]
        for n, row in enumerate(side.long.tolist()):
            entries = []
            for c in range(first[n], first[n + 1]):
                start = int(side.chunk_start[c])
                entries += range(start, min(start + limit, int(side.ptr[row + 1])))
                assert int(side.chunk_row[c]) == row
            assert entries == list(range(int(side.ptr[row]), int(side.ptr[row + 1])))
        assert first[-1] == len(side.chunk_row) == len(side.chunk_start)


def test_chunks_stay_few(monkeypatch):
    """Where all rows are long, the limit grows until the workspace is small."""
    monkeypatch.setattr(csr, "CHUNK", 2)
    monkeypatch.setattr(csr, "MOST_CHUNKS", 12)
    form = rows_of(listed(30, 20, 500), CPU)
    assert form.limit == 32
    assert form.chunk_row.numel() == 0
    heard_by_all = rows_of(patterns.global_tokens(40, 1), CPU)
    assert heard_by_all.out_limit == 4
    assert heard_by_all.out_chunk_row.tolist() == [0] * 10


def test_numbers_are_wide_where_they_must_be(monkeypatch):
    """int64 from 2^31 edges on, less what a program's last step may run over."""
    assert csr._narrowed(torch.zeros(1), 2**31).dtype == torch.int32
    assert csr._narrowed(torch.zeros(1), 2**31 + 1).dtype == torch.int64
    monkeypatch.setattr(csr, "STEP", 2**31)
    form = rows_of(listed(5, 4, 9), CPU, for_edges=True)
    assert {form.ptr.dtype, form.out_ptr.dtype, form.chunk_start.dtype, form.out_edge.dtype} == {torch.int64}
    assert {form.src.dtype, form.out_dst.dtype} == {torch.int32}


def test_across_an_operator_and_back():
    """Tensors first, integers last; worked out once."""
    graph = listed(7, 5, 17)
    tensors, numbers = packed_rows(graph, CPU, for_edges=True)
    back, form = unpacked(Rows, tensors, numbers), rows_of(graph, CPU, for_edges=True)
    assert numbers == [ROWS, form.limit, form.out_limit]
    assert all(x is y for x, y in zip(back[:-2], form[:-2], strict=True))
    assert packed_rows(graph, CPU, for_edges=True)[0] is tensors
    assert packed_rows(graph, CPU)[0][-1].numel() == 0


def test_a_graph_that_differs_by_head_is_refused():
    """It has no single list of edges."""
    graph = ga.TokenGraph.from_rule(lambda b, h, dst, src: src <= dst + h, 4, heads=2)
    with pytest.raises(ValueError, match="differs by head has no single edge list"):
        rows_of(graph, CPU)
