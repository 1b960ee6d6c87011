"""Tiles for a GPU: which tiles of 64 senders each block of receivers visits, and in bits which pairs of a
partial tile are edges.

A full tile is visited without a look at its pairs. Of a partial one there is a word of 64 bits for each
receiver, kept once for all tiles with the same mask: structured graphs repeat a few masks over thousands of
tiles, so that a million tokens in a window cost a list of tiles and two masks. The transpose has blocks of
senders in the same way, for the gradients of k and v. The number of an edge is not stored: it is where the
row begins and the count of the row's bits before it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.backends.gpu.row_windows import heaviest_first, numbers_of
from gnn_attention.backends.plan.tile_masks import classes, edges_in_tiles, masks_of_tiles, packed_bits
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.regions.quadtree import ragged
from gnn_attention.graph.tiling import tiles

SIDE = 64  # tokens on the side of a tile: bits of a word
SIZES = (64, 128)  # own tokens of a block
MOST = 2**20  # partial tiles: 512 bytes each, and as many again of the transpose
MOST_TILES = 2**26  # of both kinds: 8 bytes each, and as many again of the transpose
WORTH = 1.15  # times the pairs that blocks of 128 may visit, compared with those of 64, for reading the others half as often
EVERY, SOME = 1, 2  # kinds of tiles: all pairs; from here on the masks. 0 is no pair


class Tiles(NamedTuple):
    """Block r visits the tiles ``column[ptr[r] .. ptr[r + 1] - 1]``, ascending; ``order`` is by work.

    ``words[slot]`` has a word for each receiver of a block, bit c for the c-th sender of a tile; ``slots``
    tells which are those of a tile, slot 0 that all pairs are edges. ``out_ptr``, ``out_slots``,
    ``out_words`` and ``out_order`` are those of the transpose, whose blocks of senders visit the tiles
    ``row``. ``first``, ``out_first`` and ``position`` are those of
    :class:`gnn_attention.backends.gpu.row_windows.Windows`, empty unless edges are numbered. Blocks have
    ``size`` tokens.
    """

    ptr: Int[Tensor, " blocks_and_one"]
    column: Int[Tensor, " tiles"]
    slots: Int[Tensor, " tiles"]
    words: Int[Tensor, "masks size"]
    order: Int[Tensor, " blocks"]
    out_ptr: Int[Tensor, " out_blocks_and_one"]
    row: Int[Tensor, " out_tiles"]
    out_slots: Int[Tensor, " out_tiles"]
    out_words: Int[Tensor, "out_masks out_size"]
    out_order: Int[Tensor, " out_blocks"]
    first: Int[Tensor, "..."]
    out_first: Int[Tensor, "..."]
    position: Int[Tensor, "..."]
    size: int
    out_size: int


def tiles_of(
    graph: TokenGraph, device: torch.device, size: int | None = None, with_numbers: bool = False
) -> Tiles:
    """The tiles of a plain graph on a device, worked out once: a structured graph costs what its tiles cost.

    ``size=None`` takes blocks of 128 where they visit hardly more pairs than those of 64. ``with_numbers``
    adds what numbers the edges, where a call has a tensor with an entry for each. Raises TypeError or
    ValueError for a ``size`` that is neither 64 nor 128, NotImplementedError for a graph of too many tiles.

    >>> from gnn_attention import patterns
    >>> found = tiles_of(patterns.causal(192), torch.device("cpu"), 64)
    >>> found.ptr.tolist(), found.column.tolist(), found.slots.tolist(), found.words[1, :3].tolist()
    ([0, 1, 3, 6], [0, 0, 1, 0, 1, 2], [1, 0, 1, 0, 0, 1], [1, 3, 7])
    """
    if size is not None and checks.size("size", size) not in SIZES:
        raise ValueError(f"size must be one of {', '.join(map(str, SIZES))} tokens, got {size}")
    form: Tiles = memoized(_lowered, graph, device, size)
    if not with_numbers:
        return form
    numbers = numbers_of(graph, device)
    return form._replace(first=numbers.first, out_first=numbers.out_first, position=numbers.position)


def unsupported_reason(graph: TokenGraph) -> str | None:
    """Why the tiles of a plain graph cannot be held, or None."""
    found = tiles(graph, SIDE)
    partial, every = found.num_partial, found.num_partial + found.num_full
    if partial > MOST:
        return f"it has {partial} partial tiles of {SIDE}, at most {MOST} are held; use the form rows"
    return (
        None
        if every <= MOST_TILES
        else f"it has {every} tiles of {SIDE}, at most {MOST_TILES} are held; use SDPA or flex"
    )


class _Found(NamedTuple):
    """Tiles sorted by row, then column, the kind of each, and the words of every mask, by row and by
    column.
    """

    row: Int[Tensor, " tiles"]
    column: Int[Tensor, " tiles"]
    kind: Int[Tensor, " tiles"]
    words: Int[Tensor, "masks side"]
    out_words: Int[Tensor, "masks side"]


def _lowered(graph: TokenGraph, device: torch.device, size: int | None) -> Tiles:
    refused = unsupported_reason(graph)
    if refused:
        raise NotImplementedError(f"{graph!r}: {refused}")
    found = _found(graph)
    rows, columns = (-(-count // SIDE) for count in (graph.num_dst, graph.num_src))
    size, out_size = (
        size or _chosen(*pair) for pair in ((found.row, found.column), (found.column, found.row))
    )
    ahead = _side(found.row, found.column, found.kind, found.words, rows, size // SIDE)
    back = _side(found.column, found.row, found.kind, found.out_words, columns, out_size // SIDE)
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    tensors = [x.to(device) for x in (*ahead, *back)] + [nothing] * 3
    return Tiles._make([*tensors, size, out_size])


def _found(graph: TokenGraph) -> _Found:
    runs = tiles(graph, SIDE)
    run, number = ragged(runs.stop - runs.first)
    row, column = runs.row[run], runs.first[run] + number
    whole = runs.full[run] & ((row + 1) * SIDE <= graph.num_dst) & ((column + 1) * SIDE <= graph.num_src)
    kind = torch.full_like(row, EVERY)
    which, words, out_words = _masks(graph, row[~whole], column[~whole])
    kind[~whole] = which + SOME
    ends = torch.tensor([[0], [-1]], device="cpu").expand(2, SIDE)  # no pair, all pairs
    return _Found(row, column, kind, torch.cat([ends, words]), torch.cat([ends, out_words]))


def _masks(graph: TokenGraph, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which mask each tile has, and the words of all masks, by row and by column. Those of a list are not
    compared.
    """
    if graph._listed is None:
        which, table = masks_of_tiles(graph, SIDE, row, column)
        return which, _words(table), _words(table.transpose(1, 2))
    tile, (src, dst) = edges_in_tiles(graph, SIDE, row, column)
    words = [
        torch.zeros(len(row) * SIDE, dtype=torch.int64, device="cpu").index_add_(
            0, tile * SIDE + own % SIDE, torch.ones_like(own) << (other % SIDE)
        )
        for own, other in ((dst, src), (src, dst))
    ]
    return torch.arange(len(row), device="cpu"), words[0].view(-1, SIDE), words[1].view(-1, SIDE)


def _words(masks: Bool[Tensor, "masks own other"]) -> Int[Tensor, "masks own"]:
    return packed_bits(masks.reshape(-1, SIDE)).view(-1, SIDE)


def _chosen(own: Tensor, other: Tensor) -> int:
    """Own tokens of a block."""
    columns = int(other.max()) + 1 if len(other) else 1
    large = 2 * len(torch.unique(own // 2 * columns + other))
    return 128 if large <= WORTH * len(own) else 64


def _side(
    own: Tensor, other: Tensor, kind: Tensor, words: Tensor, blocks: int, times: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Blocks of ``times`` tiles: where the entries of each begin, the other tile, its slot, the words, the
    order of blocks.
    """
    columns = int(other.max()) + 1 if len(other) else 1
    entry, which = torch.unique(own // times * columns + other, return_inverse=True)
    kinds = torch.zeros(len(entry), times, dtype=torch.int64, device="cpu")
    kinds[which, own % times] = kind
    slots, table = _slots(kinds, words)
    count = torch.bincount(entry // columns, minlength=-(-blocks // times))
    ptr = torch.cat([count.new_zeros(1), count.cumsum(0)])
    return ptr.int(), (entry % columns).int(), slots.int(), table, heaviest_first(count)


def _slots(kinds: Int[Tensor, "tiles times"], words: Tensor) -> tuple[Tensor, Int[Tensor, "masks size"]]:
    """The slot of each tile and the words in each slot; slot 0 is that of tiles all of whose pairs are
    edges.
    """
    whole = (kinds == EVERY).all(1)
    number, some = classes(kinds[~whole])
    slots = torch.zeros(len(kinds), dtype=torch.int64, device="cpu")
    slots[~whole] = number + 1
    of_slots = torch.cat([torch.full((1, kinds.shape[1]), EVERY, device="cpu"), kinds[~whole][some]])
    return slots, words[of_slots].flatten(1)
