"""Tiles for a GPU: which tiles of 64 senders a block of receivers visits, and in bits which pairs are edges.

A full tile is visited without a look at its pairs. Of a partial one there is a word of 64 bits for each
receiver, stored once for all tiles with the same mask: structured graphs repeat a few masks over thousands of
tiles, so that a million tokens in a window cost a list of tiles and two masks. The transpose has blocks of
senders in the same way, for the gradients of k and v.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.backends.gpu import chunks
from gnn_attention.backends.gpu.formats import SIDE, Blocks
from gnn_attention.backends.plan.csr import pointers
from gnn_attention.backends.plan.tile_masks import classes, edges_in_tiles, masks_of_tiles, packed_bits
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.regions.quadtree import ragged
from gnn_attention.graph.tiling import tiles

MASK_BYTES, TILE_BYTES = SIDE * 8, 8  # of a partial tile, and of any; as many again of the transpose
MOST = 2**20  # partial tiles
MOST_TILES = 2**26  # of both kinds
SMALL, MOST_OF_AN_EDGE = 2**28, 64  # bytes of all tiles, and of an edge where they are more
WORTH = 1.15  # blocks of 128 may visit so many times the pairs: they read the others half as often
EVERY, SOME = 1, 2  # kinds of tiles: all pairs; from here on the masks. 0 is no pair


def tiles_of(
    graph: TokenGraph, device: torch.device, size: int | None = None, with_numbers: bool = False
) -> tuple[Blocks, Blocks]:
    """The tiles of a plain graph on a device, and of its transpose; memoized, at the cost of its tiles.

    ``size`` is 64 or 128 own tokens of a block; None takes 128 where it visits hardly more pairs.
    ``with_numbers`` is as in windows. NotImplementedError for a graph of too many tiles.

    >>> from gnn_attention import patterns
    >>> found, _ = tiles_of(patterns.causal(192), torch.device("cpu"), 64)
    >>> found.items[:, :3].tolist()  # blocks of most tiles first, those of one octave together
    [[2, 3, 6], [0, 0, 1], [1, 1, 3]]
    >>> found.other.tolist(), found.slots.tolist(), found.words[1, :3].tolist()
    ([0, 0, 1, 0, 1, 2], [1, 0, 1, 0, 0, 1], [1, 3, 7])
    """
    form: tuple[Blocks, Blocks] = memoized(_lowered, graph, device, size)
    return chunks.with_edge_numbers(form, graph, device, _lowered, size) if with_numbers else form


def bytes_of(graph: TokenGraph) -> int:
    """About the storage of the tiles, without building them: less where masks repeat, which are stored once.

    >>> from gnn_attention import patterns
    >>> bytes_of(patterns.causal(192))
    3168
    """
    found = tiles(graph, SIDE)
    return 2 * (found.num_partial * MASK_BYTES + (found.num_partial + found.num_full) * TILE_BYTES)


def unsupported_reason(graph: TokenGraph) -> str | None:
    """Why a plain graph has too many tiles, or too few edges in each, or None."""
    found, edges = tiles(graph, SIDE), graph.num_edges
    partial, every = found.num_partial, found.num_partial + found.num_full
    if partial > MOST:
        return f"it has {partial} partial tiles of {SIDE}, at most {MOST} fit; use the form rows"
    if every > MOST_TILES:
        return f"it has {every} tiles of {SIDE}, at most {MOST_TILES} fit; use SDPA or flex"
    # the masks of a list are all different
    size = bytes_of(graph) if graph._listed is not None else 0
    if size > max(SMALL, MOST_OF_AN_EDGE * edges):
        found_size = f"{size / 2**20:.0f} MiB for {edges} edges, {size // edges} bytes each"
        return f"its {partial} partial tiles of {SIDE} need {found_size}, at most {MOST_OF_AN_EDGE}; use rows"
    return None


class _Found(NamedTuple):
    """Tiles by row, then column, the kind of each, and the words of every mask, by row and by column."""

    row: Int[Tensor, " tiles"]
    column: Int[Tensor, " tiles"]
    kind: Int[Tensor, " tiles"]
    words: Int[Tensor, "masks side"]
    out_words: Int[Tensor, "masks side"]


def _lowered(graph: TokenGraph, device: torch.device, size: int | None) -> tuple[Blocks, Blocks]:
    reason = unsupported_reason(graph)
    if reason:
        raise NotImplementedError(f"{graph!r}: {reason}")
    found = _found(graph)
    sides = (
        (found.row, found.column, found.kind, found.words, graph.num_dst),
        (found.column, found.row, found.kind, found.out_words, graph.num_src),
    )
    made = (_side(*side, size or _size(*side[:2])) for side in sides)
    moved = ([x.to(device) if isinstance(x, Tensor) else x for x in side] for side in made)
    receivers, senders = map(Blocks._make, moved)
    return receivers, senders


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
    """The mask of each tile, and the words of all masks, by row and by column."""
    if graph._listed is None:
        which, table = masks_of_tiles(graph, SIDE, row, column)
        words = [packed_bits(x.reshape(-1, SIDE)).view(-1, SIDE) for x in (table, table.transpose(1, 2))]
        return which, words[0], words[1]
    tile, (src, dst) = edges_in_tiles(graph, SIDE, row, column)
    words = [
        torch.zeros(len(row) * SIDE, dtype=torch.int64, device="cpu").index_add_(
            0, tile * SIDE + own % SIDE, torch.ones_like(own) << (other % SIDE)
        )
        for own, other in ((dst, src), (src, dst))
    ]
    return torch.arange(len(row), device="cpu"), words[0].view(-1, SIDE), words[1].view(-1, SIDE)


def _size(own: Tensor, other: Tensor) -> int:
    columns = int(other.max()) + 1 if len(other) else 1
    large = 2 * len(torch.unique(own // 2 * columns + other))
    return 128 if large <= WORTH * len(own) else 64


def _side(own: Tensor, other: Tensor, kind: Tensor, words: Tensor, tokens: int, size: int) -> Blocks:
    """Tiles ``own, other`` of 64 as blocks of ``size`` tokens."""
    times, columns = size // SIDE, int(other.max()) + 1 if len(other) else 1
    entry, which = torch.unique(own // times * columns + other, return_inverse=True)
    kinds = torch.zeros(len(entry), times, dtype=torch.int64, device="cpu")
    kinds[which, own % times] = kind
    slots, table = _slots(kinds, words)
    ptr = pointers(entry // columns, -(-tokens // size)).int()
    return chunks.blocks(ptr, (entry % columns).int(), table, tokens, size, SIDE, slots.int())


def _slots(kinds: Int[Tensor, "tiles times"], words: Tensor) -> tuple[Tensor, Int[Tensor, "masks size"]]:
    """The slot of each tile and the words in each slot; slot 0: all pairs are edges."""
    whole = (kinds == EVERY).all(1)
    number, some = classes(kinds[~whole])
    slots = torch.zeros(len(kinds), dtype=torch.int64, device="cpu")
    slots[~whole] = number + 1
    of_slots = torch.cat([torch.full((1, kinds.shape[1]), EVERY, device="cpu"), kinds[~whole][some]])
    return slots, words[of_slots].flatten(1)
