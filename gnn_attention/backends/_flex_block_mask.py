"""A graph as tensors that one FlexAttention kernel reads: lists of tiles, and a table of edges in bits.

Every graph has the same ``mask_mod`` (:func:`is_edge`), which looks a pair up in a table of integers. It has,
in turn: five numbers (:data:`HEADER`), for every tile where its words begin, and the words, one bit for each
pair of a tile. Tiles with the same edges share their words, as all empty and all full ones do.
"""

import itertools

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.backends.call import one_of
from gnn_attention.backends.plan.tile_masks import masks_of_tiles
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.tiling import FULL_TILE, Tiles, tile_list, tiles

STRIDE_BATCH, STRIDE_HEAD, STRIDE_ROW, DST_OFFSET, SRC_OFFSET, HEADER = range(6)
WORD = 32  # pairs in an integer of the table
TILES_AT_ONCE = 2**14  # whose masks are made together: 256 MiB of tiles for CUDA
# tokens on the side of a tile: measured on a CPU; as kernels for CUDA are tuned
BLOCKS = {"cpu": 64, "cuda": 128}
# The kernels are compiled for a length of the table: few lengths, so that there are few kernels.
CAPACITIES = tuple(4**power for power in range(8, 16))


Plan = tuple[Tensor, tuple[Tensor, ...]]


def block_of(device: torch.device) -> int:
    return BLOCKS.get(device.type, 128)


def is_edge(table: Tensor, block: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """FlexAttention's ``mask_mod`` of every graph: the bit of the pair. ``block`` is a power of 2."""
    # no division: of signed integers one costs more than all the rest of a pair
    side, words = block.bit_length() - 1, block // WORD
    slice_ = b * table[STRIDE_BATCH] + h * table[STRIDE_HEAD]
    tile = slice_ + (dst >> side) * table[STRIDE_ROW] + (src >> side)
    word = table[table[HEADER + tile] + (dst & (block - 1)) * words + ((src & (block - 1)) >> 5)]
    return ((word >> (src & (WORD - 1))) & 1) != 0


def plan(graph: TokenGraph, device: torch.device) -> Plan:
    """The graph on a device: ``table [capacity]``, and four or eight lists as in a ``BlockMask``.

    Lists come in pairs, how many tiles in each row ``[batch or 1, heads or 1, rows]`` and which ones
    ``[..., rows, columns]``: the partial ones, the full ones, and on CUDA, for the backward pass, the same
    for columns. All are int32, on a CPU as wide as the table of tiles, on CUDA as the longest row.
    """
    block = block_of(device)
    full, some = _kinds(tiles(graph, block))
    lists = _lists(full, some, device.type == "cpu")
    return _table(graph, block, full, some).to(device), tuple(part.to(device) for part in lists)


def plan_bytes(graph: TokenGraph, device: torch.device) -> int:
    """Of :func:`plan` at most, without making it."""
    parts, lists = tiles(graph, block_of(device)), 3 if device.type == "cpu" else 5
    each = (graph.batch or 1) * (graph.heads or 1)
    cut = min(parts.num_full, each * (parts.rows + parts.columns))  # at most so many are cut by the border
    return 4 * (_length(parts, parts.num_partial + cut) + lists * _slots(parts))


def _kinds(parts: Tiles) -> tuple[Tensor, Tensor]:
    """Which tiles ``[batch, heads, rows, columns]`` are full, and which partial, as at the border."""
    # a compiler makes a kernel of its own for an axis of size 1: there are two rows and columns at least
    kinds = parts.table()
    kinds = torch.nn.functional.pad(kinds, (0, max(0, 2 - kinds.shape[3]), 0, max(0, 2 - kinds.shape[2])))
    full = kinds == FULL_TILE
    full[:, :, parts.graph.num_dst // parts.block :] = False
    full[..., parts.graph.num_src // parts.block :] = False
    return full, (kinds != 0) & ~full


def _lists(full: Tensor, some: Tensor, on_cpu: bool) -> list[Tensor]:
    """The partial and the full ones of each row; on CUDA, for a backward pass, those of each column too."""
    found: list[Tensor] = []
    for kinds in [(some, full)] if on_cpu else [(some, full), (some.mT, full.mT)]:
        (some_number, some_places), (full_number, full_places) = map(tile_list, kinds)
        width = some_places.shape[-1]
        if not on_cpu:
            # older kernels step through both kinds as one; one column would be a kernel of its own
            width = max(2, int(some_number.max()), int(full_number.max()))
        found += [some_number, some_places[..., :width].contiguous()]
        found += [full_number, full_places[..., :width].contiguous()]
    return found


def _slots(parts: Tiles) -> int:
    return (parts.graph.batch or 1) * (parts.graph.heads or 1) * max(parts.rows, 2) * max(parts.columns, 2)


def _length(parts: Tiles, partial: int) -> int:
    """The capacity of the table with so many partial tiles."""
    needed = HEADER + _slots(parts) + (partial + 2) * parts.block * parts.block // WORD
    return next((capacity for capacity in CAPACITIES if capacity >= needed), needed)


def _table(graph: TokenGraph, block: int, full: Tensor, some: Tensor) -> Int[Tensor, " capacity"]:
    each = block * block // WORD
    empty_tile = HEADER + some.numel()
    full_tile, first = empty_tile + each, empty_tile + 2 * each
    begins = torch.full(some.shape, empty_tile, dtype=torch.int64, device="cpu").masked_fill(full, full_tile)
    words, count, lane = [], 0, torch.arange(WORD, dtype=torch.int32, device="cpu")
    for b, h in itertools.product(range(graph.batch or 1), range(graph.heads or 1)):
        for row, column in zip(*(x.split(TILES_AT_ONCE) for x in some[b, h].nonzero().T), strict=True):
            which, masks = masks_of_tiles(one_of(graph, b, h), block, row, column)
            begins[b, h, row, column] = first + each * (which + count)
            words.append((masks.view(-1, WORD).to(torch.int32) << lane).sum(-1, dtype=torch.int32))
            count += len(masks)
    table = torch.zeros(_length(tiles(graph, block), count), dtype=torch.int32, device="cpu")
    # strides of the axes of the tiles, 0 where the graph does not differ, and the first positions
    _, heads, rows, columns = some.shape
    strides = heads * rows * columns if graph.batch else 0, rows * columns if graph.heads else 0, columns
    table[:HEADER] = torch.tensor([*strides, graph.dst_offset, graph.src_offset], device="cpu")
    table[HEADER:empty_tile] = begins.flatten()
    table[full_tile:first] = -1
    table[first : first + each * count] = torch.cat(words)
    return table
