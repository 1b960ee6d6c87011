"""The storage forms of a graph for GPUs, read back: every edge once and in order, with its transpose."""

import dataclasses
import itertools
from bisect import bisect_left

import pytest
import torch
from support.covering import thinned
from support.inputs import scattered
from support.kernel_cases import edgeless
from support.plans import PLAIN

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends.gpu import chunks, csr, row_windows, tiles
from gnn_attention.backends.gpu.csr import bytes_of, edge_numbers, order_of, rows_of
from gnn_attention.backends.gpu.formats import SIDE
from gnn_attention.backends.gpu.row_windows import windows_of
from gnn_attention.backends.gpu.tiles import tiles_of, unsupported_reason

CPU = torch.device("cpu")


LISTS = {
    "no edges": edgeless(20, 30),
    "no tokens": edgeless(0, 0),
    "last bits": ga.convert.from_edge_index(torch.tensor([[63, 64, 129, 0], [63, 127, 128, 64]]), 130, 130),
    "full": patterns.full(128),
    "full, cut": patterns.full(130),
    "wide": scattered(3, 40, 60),
    "tall": scattered(30, 2, 31),
}
NAMES = ("causal", "window and sinks", "cross", "no receivers", "no senders", "rows of a window", "no ranges")
GRAPHS = {name: PLAIN[name] for name in (*NAMES, "random 0.1", "random, in no order")} | LISTS
FORMS = {f"windows of {size}": (windows_of, size) for size in row_windows.WORDS}
FORMS |= {f"tiles of {size}": (tiles_of, size) for size in (64, 128)}


def pairs_of_rows(side):
    """``(own, other)`` of every entry, row by row."""
    rows = torch.arange(len(side.ptr) - 1).repeat_interleave(side.ptr.diff())
    return list(zip(rows.tolist(), side.others.tolist(), strict=True))


def ranges_of(side):
    """``(block, first entry, end)`` of every item, block by block."""
    return sorted(map(tuple, side.items[:, :3].tolist()))


def pairs_of_blocks(side):
    """``(own, other)`` of every bit, own token by own token, others as they are listed."""
    found = []
    for block, start, stop in ranges_of(side):
        for entry in range(start, stop):
            other = int(side.other[entry])
            if side.across == 1:
                rows = (side.words[entry].long() >> torch.arange(side.size)) & 1
                found += [(block * side.size + row, other) for row in rows.nonzero().flatten().tolist()]
            else:
                bits = (side.words[side.slots[entry]].unsqueeze(-1) >> torch.arange(SIDE)) & 1
                found += [(block * side.size + r, other * SIDE + c) for r, c in bits.nonzero().tolist()]
    return sorted(found, key=lambda pair: pair[0])


@pytest.mark.parametrize("form", ["rows", *FORMS])
@pytest.mark.parametrize("name", thinned(GRAPHS, 2))
def test_every_form_has_every_edge_once_in_order(name, form):
    """Receiver by receiver, senders ascending, and the transpose sender by sender."""
    graph = GRAPHS[name]
    pairs = sorted((dst, src) for src, dst in graph.edge_index.T.tolist())
    back = sorted((src, dst) for dst, src in pairs)
    if form == "rows":
        sides = rows_of(graph, CPU, for_edges=True)
        assert [pairs[e][::-1] for e in sides[1].position.tolist()] == back
        assert [pairs_of_rows(side) for side in sides] == [pairs, back]
        return
    make, size = FORMS[form]
    sides = make(graph, CPU, size)
    assert [pairs_of_blocks(side) for side in sides] == [pairs, back]
    for side, own in zip(sides, (graph.num_dst, graph.num_src), strict=True):
        assert side.size == size
        ranges = ranges_of(side)
        assert [block for block, *_ in ranges] == list(range(-(-own // size)))
        assert [start for _, start, _ in ranges] == [0, *(stop for *_, stop in ranges)][: len(ranges)]
        assert (side.items[:, 3] == -1).all()


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("name", thinned(GRAPHS, 0))
def test_only_tiles_with_edges_are_visited_and_full_ones_have_slot_0(name, size):
    """Each once; a tile that a border cuts is not full."""
    mask = GRAPHS[name].mask()
    for side, want in zip(tiles_of(GRAPHS[name], CPU, size), (mask, mask.T), strict=True):
        assert (side.words[0] == -1).all()
        found = {}
        for block, start, stop in ranges_of(side):
            found |= {(block, int(side.other[e])): int(side.slots[e]) == 0 for e in range(start, stop)}
        assert len(found) == len(side.other)
        places = itertools.product(range(0, want.shape[0], size), range(0, want.shape[1], SIDE))
        parts = {(i // size, j // SIDE): want[i : i + size, j : j + SIDE] for i, j in places}
        parts = {at: part for at, part in parts.items() if part.any()}
        assert found == {at: part.numel() == size * SIDE and bool(part.all()) for at, part in parts.items()}


@pytest.mark.parametrize("name", thinned(GRAPHS, 1))
def test_numbers_of_edges(name):
    """Where the edges of each token begin, and the place by receiver of every edge by sender."""
    graph = GRAPHS[name]
    receivers, senders = rows_of(graph, CPU, for_edges=True)
    want = receivers.ptr, senders.ptr, senders.position
    assert all(torch.equal(x, y) for x, y in zip(edge_numbers(graph, CPU), want, strict=True))
    for make, size in FORMS.values():
        plain, (ahead, back) = make(graph, CPU, size), make(graph, CPU, size, True)
        assert all(x.numel() == 0 for side in plain for x in (side.first, side.position))
        for side, ptr in ((ahead, want[0]), (back, want[1])):
            own = side.items[:, :1] * size + torch.arange(size)
            assert torch.equal(side.first[own < len(ptr)], ptr[own[own < len(ptr)].long()])
        assert torch.equal(back.position, want[2])
        assert ahead.other is plain[0].other  # memoized


@pytest.mark.parametrize("name", thinned(GRAPHS, 2))
def test_the_order_is_that_of_edge_index(name):
    """None only where edges stand by receiver, then sender, already."""
    order, pairs = order_of(GRAPHS[name], CPU), GRAPHS[name].edge_index.flip(0).T.tolist()
    assert (order is None) == (pairs == sorted(pairs))
    assert order is None or [pairs[e] for e in order.tolist()] == sorted(pairs)


def size_of(tensors):
    return sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.parametrize("for_edges", [False, True])
def test_bytes_of_rows_are_those_promised(for_edges):
    """8 bytes an edge, 12 with numbers for each, and 8 a token; estimated without building anything."""
    graph = scattered(50, 60, 900)
    sides = rows_of(graph, CPU, for_edges)
    found = size_of(x for side in sides for x in (side.ptr, side.others, side.position))
    assert found == bytes_of(graph, for_edges) == 900 * (12 if for_edges else 8) + 4 * (61 + 51)
    assert size_of(x for side in sides for x in side[2:6]) == 8  # two lists of no chunks


def test_equal_masks_are_stored_once():
    """A window over 131072 tokens costs a list of tiles and a few masks."""
    side, _ = tiles_of(patterns.window(2**17, 4096), CPU)
    assert len(side.words) <= 8
    assert len(side.other) <= 2**10 * 67
    assert side.other.element_size() + side.slots.element_size() == 8


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_long_rows_are_cut_into_chunks(limit, monkeypatch):
    """The chunks of a long row, one after another, are its entries; shorter rows have none."""
    monkeypatch.setattr(csr, "CHUNK", limit)
    for side in rows_of(scattered(8, 9, 40), CPU):
        ptr, degree, first = side.ptr.tolist(), side.ptr.diff().tolist(), side.first.tolist()
        assert side.long.tolist() == [row for row, count in enumerate(degree) if count > side.limit == limit]
        for n, row in enumerate(side.long.tolist()):
            chunks = range(first[n], first[n + 1])
            starts = [int(side.chunk_start[c]) for c in chunks]
            assert starts == list(range(ptr[row], ptr[row + 1], limit))
            assert [int(side.chunk_row[c]) for c in chunks] == [row] * len(chunks)
        assert first[-1] == len(side.chunk_row) == len(side.chunk_start)


def test_chunks_stay_few(monkeypatch):
    """Where all rows are long, the limit grows until the workspace is small."""
    monkeypatch.setattr(csr, "CHUNK", 2)
    monkeypatch.setattr(csr, "MOST_CHUNKS", 12)
    receivers, _ = rows_of(scattered(20, 30, 500), CPU)
    assert (receivers.limit, receivers.chunk_row.numel()) == (32, 0)
    _, senders = rows_of(patterns.global_tokens(40, 1), CPU)
    assert (senders.limit, senders.chunk_row.tolist()) == (4, [0] * 10)


def test_numbers_are_wide_where_they_must_be(monkeypatch):
    """int64 from 2^31 edges on, less what a program's last step may run over."""
    assert csr._narrowed(torch.zeros(1), 2**31).dtype == torch.int32
    assert csr._narrowed(torch.zeros(1), 2**31 + 1).dtype == torch.int64
    monkeypatch.setattr(csr, "STEP", 2**31)
    receivers, senders = rows_of(scattered(4, 5, 9), CPU, for_edges=True)
    wide = receivers.ptr, senders.ptr, receivers.chunk_start, senders.position
    assert {x.dtype for x in wide} == {torch.int64}
    assert {side.others.dtype for side in (receivers, senders)} == {torch.int32}


@pytest.mark.parametrize("form", FORMS)
def test_long_blocks_are_cut_into_chunks(form, monkeypatch):
    """Each entry is in one item; every result of a chunk has a place of its own, in order along its token."""
    monkeypatch.setattr(chunks, "CHUNK", 64)
    graph = patterns.window(600, 9, causal=False) | patterns.global_tokens(600, [70, 599], causal=False)
    make, size = FORMS[form]
    pairs = sorted((dst, src) for src, dst in graph.edge_index.T.tolist())
    for side in make(graph, CPU, size, True):
        assert (side.items[:, 1] < side.items[:, 2]).all()
        assert pairs_of_blocks(side) == pairs  # symmetric
        places = {}
        for item, (block, start, _, place, step) in enumerate(side.items.tolist()):
            rows = range(size if place >= 0 else 0)
            places |= {place + step * r: (block * size + r, start, item) for r in rows}
        assert sorted(places) == list(range(side.chunks * size))
        for n, own in enumerate(side.long.tolist()):
            parts = [places[at] for at in range(side.long_first[n], side.long_first[n + 1])]
            assert len(parts) > 1
            assert {token for token, *_ in parts} == {own}
            assert parts == sorted(parts, key=lambda part: part[1])
            for _, start, item in parts:
                first = int(side.other[start]) * side.across if start < len(side.other) else 600
                earlier = bisect_left(pairs, (own, first))
                assert side.first[item, own % size] == earlier
        assert {70, 599} <= set(side.long.tolist())


def test_chunks_of_blocks_stay_few(monkeypatch):
    """None where all blocks are alike, and no more than a workspace has room for."""
    assert all(side.chunks == 0 for side in tiles_of(patterns.causal(2**14), CPU, 64))
    hub = patterns.window(2**15, 1) | patterns.global_tokens(2**15, 1, causal=False)
    assert [side.chunks for side in tiles_of(hub, CPU, 64)] == [8, 8]
    assert [side.chunks for side in windows_of(hub, CPU, 64)] == [8, 8]
    monkeypatch.setattr(chunks, "MOST_ROWS", 4 * 64)
    assert [side.chunks for side in tiles_of(dataclasses.replace(hub), CPU, 64)] == [4, 4]


TOO_MANY = {
    "MOST": "it has 31 partial tiles of 64, at most 20 fit; use the form rows",
    "MOST_TILES": "it has 31 tiles of 64, at most 20 fit; use SDPA or flex",
}


@pytest.mark.parametrize(("limit", "message"), TOO_MANY.items(), ids=TOO_MANY)
def test_too_many_tiles(limit, message, monkeypatch):
    """An error before any is made."""
    graph = patterns.window(1000, 10)
    assert unsupported_reason(graph) is None
    monkeypatch.setattr(tiles, limit, 20)
    assert unsupported_reason(graph) == message
    with pytest.raises(NotImplementedError, match=rf"window\(1000, 10\).*{message}"):
        tiles_of(graph, CPU, 64)


@pytest.mark.parametrize("make", [rows_of, windows_of])
def test_a_graph_that_differs_by_head_has_no_form(make):
    graph = ga.TokenGraph.from_rule(lambda b, h, dst, src: src <= dst + h, 4, heads=2)
    with pytest.raises(ValueError, match="differs by head has no single edge list"):
        make(graph, CPU)
