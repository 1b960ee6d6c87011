"""A graph as tensors that one FlexAttention kernel reads: lists of tiles, and a bit table of edges.

All graphs share one ``mask_mod`` (:func:`is_edge`), which looks up pairs in a table of integers.
The table has a header of strides and token offsets, then the offset of each tile's bits, then the
bits, one for each pair. All empty tiles share their bits, and so do all full tiles.
"""

import itertools

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.backends.plan.tile_masks import build_tile_masks
from gnn_attention.edge_ops.edge_lists import select_slice
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.tiling import FULL_TILE, Tiles, tile_list, tiles

STRIDE_BATCH, STRIDE_HEAD, STRIDE_ROW, DST_OFFSET, SRC_OFFSET, HEADER_SIZE = range(6)
BITS = 32  # Each integer of the table holds the bits of 32 pairs.
TILES_PER_CHUNK = 2**14  # At most this many masks are computed at once; for CUDA they take 256 MiB.
BLOCK_SIZES = {"cpu": 64, "cuda": 128}  # The fastest side of a tile on each device, in tokens.
# A kernel is compiled for each length of the table, so tables are padded to one of a few lengths.
TABLE_SIZES = tuple(4**power for power in range(8, 16))

Tables = tuple[Tensor, tuple[Tensor, ...]]


def block_size(device: torch.device) -> int:
    return BLOCK_SIZES.get(device.type, 128)


def is_edge(table: Tensor, block: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """The ``mask_mod`` of every graph, which reads the bit of a pair. ``block`` is a power of 2."""
    # Shifts replace divisions: dividing signed integers would cost more than all other operators.
    shift = block.bit_length() - 1
    first_tile = b * table[STRIDE_BATCH] + h * table[STRIDE_HEAD]
    tile = first_tile + (dst >> shift) * table[STRIDE_ROW] + (src >> shift)
    offset = (dst & (block - 1)) * (block // BITS) + ((src & (block - 1)) >> 5)
    bits = table[table[HEADER_SIZE + tile] + offset]
    return ((bits >> (src & (BITS - 1))) & 1) != 0


def make_tables(graph: TokenGraph, device: torch.device) -> Tables:
    """Return the table ``[capacity]`` of a graph, and four or eight lists as in a ``BlockMask``.

    Lists come in pairs: the number of tiles in each row, ``[batch or 1, heads or 1, rows]``, and the columns
    of these tiles, ``[..., rows, columns]``. The first pair is for partial tiles, the second for full tiles.
    On CUDA two more pairs list the tiles by column, and lists are only as wide as needed. All are int32.
    """
    block = block_size(device)
    full, partial = _split_tiles(tiles(graph, block))
    lists = _list_tiles(full, partial, device.type == "cpu")
    return _make_table(graph, block, full, partial).to(device), tuple(x.to(device) for x in lists)


def table_bytes(graph: TokenGraph, device: torch.device) -> int:
    """Estimate the bytes of :func:`make_tables` without calling it; on CUDA it may take a few more."""
    tiling = tiles(graph, block_size(device))
    num_lists = 3 if device.type == "cpu" else 5
    num_slices = (graph.batch or 1) * (graph.heads or 1)
    # Full tiles that cross the border of the mask become partial.
    num_cut = min(tiling.num_full, num_slices * (tiling.rows + tiling.columns))
    return 4 * (_table_length(tiling, tiling.num_partial + num_cut) + num_lists * _count_tiles(tiling))


def _split_tiles(tiling: Tiles) -> tuple[Tensor, Tensor]:
    """Return masks ``[batch, heads, rows, columns]`` of full and of partial tiles."""
    # There are at least two rows and columns: an axis of size 1 would be compiled separately.
    kinds = tiling.table()
    kinds = torch.nn.functional.pad(kinds, (0, max(0, 2 - kinds.shape[3]), 0, max(0, 2 - kinds.shape[2])))
    full = kinds == FULL_TILE
    # Tiles that cross the border are partial.
    full[:, :, tiling.graph.num_dst // tiling.block :] = False
    full[..., tiling.graph.num_src // tiling.block :] = False
    return full, (kinds != 0) & ~full


def _list_tiles(full: Tensor, partial: Tensor, on_cpu: bool) -> list[Tensor]:
    lists: list[Tensor] = []
    for masks in [(partial, full)] if on_cpu else [(partial, full), (partial.mT, full.mT)]:
        (num_partial, partial_columns), (num_full, full_columns) = map(tile_list, masks)
        width = partial_columns.shape[-1]
        if not on_cpu:
            # Older kernels need lists of equal width; a width of 1 would be compiled separately.
            width = max(2, int(num_partial.max()), int(num_full.max()))
        lists += [num_partial, partial_columns[..., :width].contiguous()]
        lists += [num_full, full_columns[..., :width].contiguous()]
    return lists


def _count_tiles(tiling: Tiles) -> int:
    num_slices = (tiling.graph.batch or 1) * (tiling.graph.heads or 1)
    return num_slices * max(tiling.rows, 2) * max(tiling.columns, 2)


def _table_length(tiling: Tiles, num_partial: int) -> int:
    length = HEADER_SIZE + _count_tiles(tiling) + (num_partial + 2) * tiling.block**2 // BITS
    return next((size for size in TABLE_SIZES if size >= length), length)


def _make_table(graph: TokenGraph, block: int, full: Tensor, partial: Tensor) -> Int[Tensor, " capacity"]:
    ints_per_tile = block * block // BITS
    empty_offset = HEADER_SIZE + partial.numel()
    full_offset, partial_offset = empty_offset + ints_per_tile, empty_offset + 2 * ints_per_tile
    offsets = torch.full(partial.shape, empty_offset, device="cpu").masked_fill(full, full_offset)
    packed_masks: list[Tensor] = []
    num_masks = 0
    shifts = torch.arange(BITS, dtype=torch.int32, device="cpu")
    for b, h in itertools.product(range(graph.batch or 1), range(graph.heads or 1)):
        for row, column in zip(*(x.split(TILES_PER_CHUNK) for x in partial[b, h].nonzero().T), strict=True):
            index, masks = build_tile_masks(select_slice(graph, b, h), block, row, column)
            offsets[b, h, row, column] = partial_offset + ints_per_tile * (index + num_masks)
            packed_masks.append((masks.view(-1, BITS).to(torch.int32) << shifts).sum(-1, dtype=torch.int32))
            num_masks += len(masks)
    table = torch.zeros(_table_length(tiles(graph, block), num_masks), dtype=torch.int32, device="cpu")
    # The stride of an axis is 0 if the graph does not differ along it.
    _, heads, rows, columns = partial.shape
    strides = heads * rows * columns if graph.batch else 0, rows * columns if graph.heads else 0, columns
    table[:HEADER_SIZE] = torch.tensor([*strides, graph.dst_offset, graph.src_offset], device="cpu")
    table[HEADER_SIZE:empty_offset] = offsets.flatten()
    table[full_offset:partial_offset] = -1
    table[partial_offset : partial_offset + ints_per_tile * num_masks] = torch.cat(packed_masks)
    return table
