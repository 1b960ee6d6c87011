"""The tiles of a graph: well filled ones, for dense kernels, and the edges of all others, for sparse ones.

Of partial tiles a plan has a table of distinct masks, and which of them each tile has.

A structured graph repeats a few masks over thousands of tiles. Where a tile depends on the receiver, the
sender or their difference alone, tiles are compared by the rule on one row or diagonal profile.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.regions import counting, quadtree
from gnn_attention.graph.regions.quadtree import CELLS, DIFFERENCE, DST, FULL, Boxes, Piece, decompose
from gnn_attention.graph.tiling import Tiles, tiles

Masks = tuple[Tensor, Tensor, Tensor]  # numbers of tiles, which mask each has, the masks


def tile_boxes(graph: TokenGraph, block: int, row: Tensor, column: Tensor) -> Boxes:
    """The pairs of the given tiles, each owned by its number in the list."""
    number, nothing = torch.arange(len(row), device="cpu"), torch.zeros_like(row)
    dst, src = row * block, column * block
    height, width = (graph.num_dst - dst).clamp(max=block), (graph.num_src - src).clamp(max=block)
    return Boxes(number, nothing, nothing, dst, src, height, width)


def masks_of_tiles(
    graph: TokenGraph, block: int, row: Int[Tensor, " tiles"], column: Int[Tensor, " tiles"]
) -> tuple[Int[Tensor, " tiles"], Bool[Tensor, "masks block block"]]:
    """``(which, table)``: the mask of tile t is ``table[which[t]]``, False beyond the border of the graph."""
    if graph.edges.stored_list() is not None:
        tile, (src, dst) = edges_in_tiles(graph, block, row, column)
        masks = torch.zeros(len(row), block, block, dtype=torch.bool, device="cpu")
        masks.view(-1)[(tile * block + dst % block) * block + src % block] = True
        kinds, some = classes(packed_bits(masks.flatten(1)))
        return kinds, masks[some]
    which, seen = torch.zeros_like(row), 0
    tables = [torch.zeros(0, block, block, dtype=torch.bool, device="cpu")]
    for piece in decompose(graph.edges, tile_boxes(graph, block, row, column), leaf=block):
        for number, kind, masks in _piece_masks(graph, block, piece):
            which[number] = kind + seen
            tables.append(masks)
            seen += len(masks)
    table = torch.cat(tables)
    number, some = classes(packed_bits(table.flatten(1)))
    return number[which], table[some]


def edges_in_tiles(
    graph: TokenGraph, block: int, row: Tensor, column: Tensor
) -> tuple[Int[Tensor, " edges"], Int[Tensor, "2 edges"]]:
    """The listed edges inside the given tiles (sorted by row, then column): the tile and the ends of each."""
    across = max(-(-graph.num_src // block), 1)
    wanted = row * across + column
    src, dst = graph.edge_index
    tile = dst // block * across + src // block
    place = torch.searchsorted(wanted, tile).clamp(max=max(len(wanted) - 1, 0))
    inside = wanted[place] == tile if len(wanted) else torch.zeros_like(tile, dtype=torch.bool)
    return place[inside], torch.stack([src[inside], dst[inside]])


def classes(rows: Int[Tensor, "rows words"]) -> tuple[Int[Tensor, " rows"], Int[Tensor, " classes"]]:
    """Which rows are equal: the class of each, and a row of every class."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    factors = torch.randint(2**62, rows.shape[1:], generator=generator, device="cpu")
    # Equal rows have equal sums. This takes a tenth of the time of torch.unique along rows.
    _, number = torch.unique(rows @ (2 * factors + 1), return_inverse=True)
    some = _one_of_each(number)
    if torch.equal(rows[some][number], rows):
        return number, some
    _, number = torch.unique(rows, dim=0, return_inverse=True)
    return number, _one_of_each(number)


def _one_of_each(number: Int[Tensor, " rows"]) -> Int[Tensor, " classes"]:
    some = torch.zeros(int(number.max()) + 1 if len(number) else 0, dtype=torch.int64, device="cpu")
    return some.scatter_(0, number, torch.arange(len(number), device="cpu"))


def packed_bits(bits: Bool[Tensor, "rows bits"]) -> Int[Tensor, "rows words"]:
    """Bits packed 64 to a word, byte by byte: there may be many."""
    padded = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 64)).view(torch.uint8)
    place = torch.arange(8, dtype=torch.uint8, device="cpu")
    in_bytes = padded.view(len(bits), -(-bits.shape[1] // 64) * 8, 8) << place
    return in_bytes.sum(-1, dtype=torch.uint8).view(torch.int64)


def _piece_masks(graph: TokenGraph, block: int, piece: Piece) -> Iterator[Masks]:
    boxes = piece.boxes
    size = boxes.height * (block + 1) + boxes.width
    for one in torch.unique(size).tolist():
        part = Piece(piece.kind, boxes.at(size == one))
        if piece.kind == CELLS:
            for boxes_of, edge in quadtree.cells(graph.edges, part.boxes):
                which, some = classes(packed_bits(edge.flatten(1)))
                yield boxes_of.owner, which, _pad_masks(edge[some], block)
            continue
        count, height, width = len(part.boxes), int(part.boxes.height[0]), int(part.boxes.width[0])
        row, column = torch.arange(height, device="cpu").unsqueeze(1), torch.arange(width, device="cpu")
        edge = torch.ones(count, 1, dtype=torch.bool, device="cpu")
        place = 0 * row + 0 * column
        if piece.kind != FULL:
            edge = quadtree.profile(graph.edges, part)[0].view(count, -1)
            places = {DST: row + 0 * column, DIFFERENCE: row - column + width - 1}
            place = places.get(piece.kind, column + 0 * row)
        which, some = classes(packed_bits(edge))
        yield part.boxes.owner, which, _pad_masks(edge[some][:, place], block)


def _pad_masks(masks: Tensor, block: int) -> Tensor:
    return torch.nn.functional.pad(masks, (0, block - masks.shape[2], 0, block - masks.shape[1]))


def split_tiles(graph: TokenGraph, block: int, least: float) -> tuple[Tiles, Tiles]:
    """The tiles at least ``least`` of whose pairs are edges, and the others (which are partial)."""
    runs = tiles(graph, block)
    if not least:
        return runs, runs.at(torch.zeros_like(runs.full))
    height = (graph.num_dst - runs.row * block).clamp(max=block)
    width = (graph.num_src - runs.first * block).clamp(max=block)
    dense = runs.full | (runs.edges >= least * height * width)
    return runs.at(dense), runs.at(~dense)


def cells_at(runs: Tiles, times: int) -> int:
    """Pairs visited by rows of tiles ``times`` as high, over all columns that one of their rows needs."""
    if not len(runs.row):
        return 0
    row = runs.row // times
    line = row * (int(runs.stop.max()) + 1)  # one after the other on a single axis
    first, order = (runs.first + line).sort()
    stop = (runs.stop + line)[order]
    reached = torch.cat([stop.new_full((1,), -1), stop.cummax(0).values[:-1]])
    return int((stop - torch.maximum(first, reached)).clamp(min=0).sum()) * times * runs.block**2


def left_over(graph: TokenGraph, sparse: Tiles) -> Int[Tensor, "2 edges"]:
    if graph.edges.stored_list() is None:
        boxes = tile_boxes(graph, sparse.block, sparse.row, sparse.first)
        return counting.edges_in(graph.edges, boxes, graph.num_src)
    _, (src, dst) = edges_in_tiles(graph, sparse.block, sparse.row, sparse.first)
    order = (dst * graph.num_src + src).argsort()
    return torch.stack([src[order], dst[order]])
