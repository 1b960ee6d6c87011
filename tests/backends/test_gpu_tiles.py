"""Tiles read back: their edges are the graph's, each once and in order, with its transpose; equal masks are
kept once.
"""

import pytest
import torch
from support.plans import PLAIN

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends.gpu import tiles
from gnn_attention.backends.gpu.tiles import SIDE, SIZES, tiles_of, unsupported_reason

CPU = torch.device("cpu")
LISTS = {
    "no edges": ga.convert.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 20, 30),
    "nobody": ga.convert.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 0, 0),
    "last bits": ga.convert.from_edge_index(torch.tensor([[63, 64, 129, 0], [63, 127, 128, 64]]), 130, 130),
    "full": patterns.full(128),
    "full, cut": patterns.full(130),
}
SOME = (
    "causal",
    "window and sinks",
    "documents",
    "global tokens",
    "cross",
    "rows of a window",
    "steps down",
    "no ranges",
)
SOME += (
    "no receivers",
    "no senders",
    "listed window",
    "listed documents",
    "random 0.1",
    "random 0.95",
    "random, in no order",
)
GRAPHS = {name: PLAIN[name] for name in SOME} | LISTS


def mask_of(ptr, other, slots, words, size, num_own, num_other):
    """Bool ``[own, other]`` and how often each tile is visited; nothing may lie outside."""
    bits = (words.unsqueeze(-1) >> torch.arange(SIDE)) & 1 != 0
    blocks, across = len(ptr) - 1, -(-num_other // SIDE)
    mask = torch.zeros(blocks * size, across * SIDE, dtype=torch.bool)
    seen = torch.zeros(blocks, across, dtype=torch.int64)
    for block in range(blocks):
        for entry in range(int(ptr[block]), int(ptr[block + 1])):
            column = int(other[entry])
            mask[block * size : block * size + size, column * SIDE : column * SIDE + SIDE] = bits[
                slots[entry]
            ]
            seen[block, column] += 1
    assert not mask[num_own:].any()
    assert not mask[:, num_other:].any()
    return mask[:num_own, :num_other], seen


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", GRAPHS)
def test_tiles_hold_the_edges(name, size):
    """In both directions; no tile without an edge is visited, and none twice."""
    graph = GRAPHS[name]
    form = tiles_of(graph, CPU, size)
    ahead = form.ptr, form.column, form.slots, form.words, form.size, graph.num_dst, graph.num_src
    back = form.out_ptr, form.row, form.out_slots, form.out_words, form.out_size, graph.num_src, graph.num_dst
    for side, want in ((ahead, graph.mask()), (back, graph.mask().T)):
        mask, seen = mask_of(*side)
        assert torch.equal(mask, want)
        if not want.numel():  # which torch before 2.11 does not pad
            assert not seen.any()
            continue
        edges = torch.nn.functional.pad(want, (0, -want.shape[1] % SIDE, 0, -want.shape[0] % size))
        assert torch.equal(seen, edges.view(len(seen), size, -1, SIDE).any(3).any(1).long())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", GRAPHS)
def test_tiles_are_in_order_and_slot_0_is_full(name, size):
    """Ascending, so that edges can be counted along a row; only tiles that no border cuts are full."""
    graph = GRAPHS[name]
    form = tiles_of(graph, CPU, size)
    assert (form.words[0] == -1).all()
    assert (form.out_words[0] == -1).all()
    for block, (start, stop) in enumerate(zip(form.ptr[:-1].tolist(), form.ptr[1:].tolist(), strict=True)):
        assert (form.column[start:stop].diff() > 0).all()
        for column, slot in zip(
            form.column[start:stop].tolist(), form.slots[start:stop].tolist(), strict=True
        ):
            tile = graph.mask()[block * size : block * size + size, column * SIDE : column * SIDE + SIDE]
            assert (slot == 0) == (tile.numel() == size * SIDE and bool(tile.all()))


def test_equal_masks_are_kept_once():
    """A window over 131072 tokens costs a list of tiles and a few masks."""
    form = tiles_of(patterns.window(2**17, 4096), CPU)
    assert form.size == form.out_size == 128
    assert len(form.words) <= 8
    assert len(form.column) <= 2**10 * 67
    assert form.column.element_size() + form.slots.element_size() == 8


@pytest.mark.parametrize(
    ("graph", "size"),
    [(patterns.window(8192, 1024), 128), (patterns.documents([64] * 8), 64), (patterns.window(4096, 2), 64)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_size_of_blocks(graph, size):
    """128 where the tiles of one row are those of the next."""
    assert tiles_of(graph, CPU).size == size


def test_a_list_and_its_rule_agree():
    """The words of a list are made from its edges, those of a rule from masks."""
    rule = patterns.window(200, 30) | patterns.sinks(200, 3)
    listed = ga.convert.from_edge_index(rule.edge_index, 200, 200)
    for size in SIZES:
        by_rule, by_list = tiles_of(rule, CPU, size), tiles_of(listed, CPU, size)
        assert torch.equal(by_rule.column, by_list.column)
        assert torch.equal(by_rule.words[by_rule.slots.long()], by_list.words[by_list.slots.long()])
        assert torch.equal(
            by_rule.out_words[by_rule.out_slots.long()], by_list.out_words[by_list.out_slots.long()]
        )


def test_numbers_are_there_only_where_they_are_asked_for():
    graph = patterns.window(70, 5)
    plain, asked = (tiles_of(graph, CPU, 64, with_numbers) for with_numbers in (False, True))
    assert plain.first.numel() == plain.out_first.numel() == plain.position.numel() == 0
    assert len(asked.position) == graph.num_edges
    assert asked.column is plain.column


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("MOST", "it has 31 partial tiles of 64, at most 20 are held; use the form rows"),
        ("MOST_TILES", "it has 31 tiles of 64, at most 20 are held; use SDPA or flex"),
    ],
)
def test_too_many_tiles_are_refused(limit, message, monkeypatch):
    """By name, before any is made."""
    graph = patterns.window(1000, 10)
    assert unsupported_reason(graph) is None
    monkeypatch.setattr(tiles, limit, 20)
    assert unsupported_reason(graph) == message
    with pytest.raises(NotImplementedError, match=rf"window\(1000, 10\).*{message}"):
        tiles_of(graph, CPU, 64)


@pytest.mark.parametrize(
    ("size", "error"), [(16, ValueError), (0, ValueError), (64.0, TypeError), (True, TypeError)]
)
def test_other_sizes_are_refused(size, error):
    with pytest.raises(error, match="size must be"):
        tiles_of(patterns.window(40, 5), CPU, size)
