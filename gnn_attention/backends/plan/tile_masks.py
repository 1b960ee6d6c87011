"""Build the masks of partial tiles.

A structured graph repeats a few masks over thousands of tiles, so a plan has a table of distinct
masks. If the edges in a tile depend only on the receiver, the sender or their difference, only one
value for each receiver, sender or diagonal is evaluated.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional

from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.regions import counting, quadtree
from gnn_attention.graph.regions.quadtree import CELLS, DIFFERENCE, DST, FULL, Boxes, Piece, decompose
from gnn_attention.graph.tiling import Tiles


def tile_boxes(graph: TokenGraph, block: int, row: Tensor, column: Tensor) -> Boxes:
    """Return some tiles as boxes of pairs; the owner of a box is the index of its tile."""
    zero = torch.zeros_like(row)
    index = torch.arange(len(row), device="cpu")
    dst, src = row * block, column * block
    height, width = (graph.num_dst - dst).clamp(max=block), (graph.num_src - src).clamp(max=block)
    return Boxes(index, zero, zero, dst, src, height, width)


def build_tile_masks(
    graph: TokenGraph, block: int, row: Int[Tensor, " tiles"], column: Int[Tensor, " tiles"]
) -> tuple[Int[Tensor, " tiles"], Bool[Tensor, "masks block block"]]:
    """Return ``(index, table)``: the mask of tile t is ``table[index[t]]``, False outside the graph."""
    if graph.edges.listed() is not None:
        tile, (src, dst) = _find_edges(graph, block, row, column)
        masks = torch.zeros(len(row), block, block, dtype=torch.bool, device="cpu")
        masks.view(-1)[(tile * block + dst % block) * block + src % block] = True
        mask_class, example = group_equal_rows(_pack_bits(masks.flatten(1)))
        return mask_class, masks[example]
    num_masks = 0
    mask_index = torch.zeros_like(row)
    tables = [torch.zeros(0, block, block, dtype=torch.bool, device="cpu")]
    for piece in decompose(graph.edges, tile_boxes(graph, block, row, column), min_side=block):
        for tile, index, masks in _build_piece_masks(graph, block, piece):
            mask_index[tile] = index + num_masks
            tables.append(masks)
            num_masks += len(masks)
    # Two pieces may have the same mask.
    table = torch.cat(tables)
    mask_class, example = group_equal_rows(_pack_bits(table.flatten(1)))
    return mask_class[mask_index], table[example]


def _find_edges(graph: TokenGraph, block: int, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """Return the listed edges in sorted tiles as ``(tile, edges)``; edge e is in tile ``tile[e]``."""
    num_columns = max(-(-graph.num_src // block), 1)
    tile_key = row * num_columns + column
    src, dst = graph.edge_index
    edge_key = dst // block * num_columns + src // block
    index = torch.searchsorted(tile_key, edge_key).clamp(max=max(len(tile_key) - 1, 0))
    is_inside = tile_key[index] == edge_key if len(tile_key) else torch.zeros_like(edge_key).bool()
    return index[is_inside], torch.stack([src[is_inside], dst[is_inside]])


def group_equal_rows(rows: Tensor) -> tuple[Int[Tensor, " rows"], Int[Tensor, " classes"]]:
    """Return the class of each row, which equal rows share, and the index of one row of each class."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    factors = torch.randint(2**62, rows.shape[1:], generator=generator, device="cpu")
    # Equal rows have equal sums. Comparing sums takes a tenth of the time of torch.unique along rows.
    _, row_class = torch.unique(rows @ (2 * factors + 1), return_inverse=True)
    example = _find_examples(row_class)
    if torch.equal(rows[example][row_class], rows):
        return row_class, example
    _, row_class = torch.unique(rows, dim=0, return_inverse=True)
    return row_class, _find_examples(row_class)


def _find_examples(row_class: Int[Tensor, " rows"]) -> Int[Tensor, " classes"]:
    num_classes = int(row_class.max()) + 1 if len(row_class) else 0
    row = torch.arange(len(row_class), device="cpu")
    return row.new_zeros(num_classes).scatter_(0, row_class, row)


def _pack_bits(bits: Bool[Tensor, "rows bits"]) -> Int[Tensor, "rows words"]:
    """Pack 64 bits into each integer. The bits are packed into bytes first, to save memory."""
    padded_bits = functional.pad(bits, (0, -bits.shape[1] % 64)).view(torch.uint8)
    shift = torch.arange(8, dtype=torch.uint8, device="cpu")
    shifted_bits = padded_bits.view(len(bits), -(-bits.shape[1] // 64) * 8, 8) << shift
    return shifted_bits.sum(-1, dtype=torch.uint8).view(torch.int64)


def _build_piece_masks(graph: TokenGraph, block: int, piece: Piece) -> Iterator[tuple[Tensor, ...]]:
    """Yield triples: the indices of tiles, the index of each tile's mask, and the masks."""
    size_key = piece.boxes.height * (block + 1) + piece.boxes.width
    for key in torch.unique(size_key).tolist():
        boxes = piece.boxes.at(size_key == key)
        if piece.kind == CELLS:
            for cell_boxes, is_edge in quadtree.cells(graph.edges, boxes):
                mask_class, example = group_equal_rows(_pack_bits(is_edge.flatten(1)))
                yield cell_boxes.owner, mask_class, _pad_masks(is_edge[example], block)
            continue
        height, width = int(boxes.height[0]), int(boxes.width[0])
        row = torch.arange(height, device="cpu").unsqueeze(1)
        column = torch.arange(width, device="cpu")
        edge = torch.ones(len(boxes), 1, dtype=torch.bool, device="cpu")
        value_index = 0 * row + 0 * column
        if piece.kind != FULL:
            edge = quadtree.evaluate_lines(graph.edges, Piece(piece.kind, boxes))[0].view(len(boxes), -1)
            indices = {DST: row + 0 * column, DIFFERENCE: row - column + width - 1}
            value_index = indices.get(piece.kind, column + 0 * row)
        mask_class, example = group_equal_rows(_pack_bits(edge))
        yield boxes.owner, mask_class, _pad_masks(edge[example][:, value_index], block)


def _pad_masks(masks: Tensor, block: int) -> Tensor:
    return functional.pad(masks, (0, block - masks.shape[2], 0, block - masks.shape[1]))


def list_edges_in(graph: TokenGraph, runs: Tiles) -> Int[Tensor, "2 edges"]:
    """List the edges in some partial tiles, sorted by receiver, then sender."""
    if graph.edges.listed() is None:
        boxes = tile_boxes(graph, runs.block, runs.row, runs.first)
        return counting.edges_in(graph.edges, boxes, graph.num_src)
    _, (src, dst) = _find_edges(graph, runs.block, runs.row, runs.first)
    order = (dst * graph.num_src + src).argsort()
    return torch.stack([src[order], dst[order]])
