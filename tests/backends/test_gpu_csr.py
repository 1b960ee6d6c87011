"""A graph as rows for a GPU: every edge once and in order, with its transpose, slice after slice."""

import pytest
import torch
from support.inputs import scattered

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends.gpu import csr
from gnn_attention.backends.gpu.csr import rows_of, sides_of
from gnn_attention.graph.neighbours import Neighbours

CPU = torch.device("cpu")


def pairs_of(side):
    """``(own, other)`` of every entry, row by row."""
    rows = torch.arange(len(side.ptr) - 1).repeat_interleave(side.ptr.diff())
    return list(zip(rows.tolist(), side.others.tolist(), strict=True))


def sides(graph, group=1):
    return sides_of(*rows_of(graph, CPU, group))


def assert_rows(graph, pairs, group=1):
    """The sides list these ``(receiver, sender)``: each ascending, with the place by receiver of each."""
    pairs = sorted(pairs)
    receivers, senders = sides(graph, group)
    assert pairs_of(receivers) == pairs
    assert pairs_of(senders) == sorted((src, dst) for dst, src in pairs)
    assert [pairs[e][::-1] for e in senders.position.tolist()] == pairs_of(senders)


BATCH, HEADS, DST, SRC = 2, 4, 5, 6


def differing(b, h, dst, src):
    return (dst - src - h - 2 * b) % 3 == 0


def chosen(*sizes):
    index = torch.randint(-1, SRC, (*sizes, DST, 3), generator=torch.Generator().manual_seed(0))
    return ga.TokenGraph.from_indices(index, SRC, coalesce=True)


VARYING = {
    "chosen": chosen(),
    "chosen by head": chosen(HEADS),
    "chosen by sample": chosen(BATCH, 1),
    "chosen by both": chosen(BATCH, HEADS),
    "rule by head": ga.TokenGraph.from_rule(differing, DST, SRC, heads=HEADS),
    "rule by sample": ga.TokenGraph.from_rule(differing, DST, SRC, batch=BATCH),
    "rule by both": ga.TokenGraph.from_rule(differing, DST, SRC, heads=HEADS, batch=BATCH),
}


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("name", VARYING)
def test_the_tokens_of_all_slices_stand_one_after_the_other(name, group):
    """By sample, head and token; query heads of a group have the senders of one key/value head."""
    graph = VARYING[name]
    batch, heads = graph.batch or 1, graph.heads or 1
    kv_group = group if graph.heads else 1
    mask, pairs = graph.mask().view(batch, heads, DST, SRC), []
    for b in range(batch):
        for h in range(heads):
            first_dst = (b * heads + h) * DST
            first_src = (b * (heads // kv_group) + h // kv_group) * SRC
            pairs += [(first_dst + dst, first_src + src) for dst, src in mask[b, h].nonzero().tolist()]
    assert_rows(graph, pairs, group)
    receivers, senders = sides(graph, group)
    assert len(receivers.ptr) == batch * heads * DST + 1
    assert len(senders.ptr) == batch * heads // kv_group * SRC + 1


@pytest.mark.parametrize("sizes", [(), (HEADS,), (BATCH, HEADS)], ids=str)
def test_no_list_of_a_chosen_graph_is_made_on_the_host(sizes, monkeypatch):
    """Its rows are sorted where they are."""
    monkeypatch.setattr(Neighbours, "edges", None)
    monkeypatch.setattr(Neighbours, "at", None)
    monkeypatch.setattr(ga.TokenGraph, "edge_index", None)
    graph = ga.TokenGraph.from_indices(torch.tensor([[1, 0], [2, -1]]).expand(*sizes, 2, 2), 3)
    assert pairs_of(sides(graph)[0])[:3] == [(0, 0), (0, 1), (1, 2)]


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_long_rows_are_cut_into_chunks(limit, monkeypatch):
    """The chunks of a long row, one after another, are its entries; shorter rows have none."""
    monkeypatch.setattr(csr, "CHUNK", limit)
    for side in sides(scattered(8, 9, 40)):
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
    receivers, _ = sides(scattered(20, 30, 500))
    assert (receivers.limit, receivers.chunk_row.numel()) == (32, 0)
    _, senders = sides(patterns.global_tokens(40, 1))
    assert (senders.limit, senders.chunk_row.tolist()) == (4, [0] * 10)


def test_numbers_are_wide_where_they_must_be(monkeypatch):
    """int64 from 2^31 edges on, less what a program's last step may run over."""
    assert csr._narrowed(torch.zeros(1), 2**31).dtype == torch.int32
    assert csr._narrowed(torch.zeros(1), 2**31 + 1).dtype == torch.int64
    monkeypatch.setattr(csr, "STEP", 2**31)
    receivers, senders = sides(scattered(4, 5, 9))
    wide = receivers.ptr, senders.ptr, receivers.chunk_start, senders.position
    assert {x.dtype for x in wide} == {torch.int64}
    assert {side.others.dtype for side in (receivers, senders)} == {torch.int32}
