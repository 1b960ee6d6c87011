"""The work of each backend on a graph, by which ``backend="auto"`` chooses before it makes a plan.

Work is counted for lists of edges and for graphs of up to 2^18 pairs. Otherwise it is estimated
from a sample (:mod:`gnn_attention.analyse.tile_counts`). Masks of about ``MASK_LIMIT`` bytes are counted.
"""

from collections.abc import Iterable

import torch

from gnn_attention.analyse.tile_counts import Estimate, count_cells, estimate, is_estimated, split_tiles
from gnn_attention.backends.cost_model import Work
from gnn_attention.backends.plan import planner
from gnn_attention.backends.plan.dense_blocks import split_into_pieces
from gnn_attention.backends.plan.tile_masks import tile_boxes
from gnn_attention.edge_ops.edge_lists import select_slice
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.regions.quadtree import CELLS, decompose

# Masks within a factor MASK_MARGIN of this many bytes are counted, as the estimate may be wrong.
MASK_LIMIT, MASK_MARGIN = 2**32, 8


def num_edges(graph: TokenGraph) -> int:
    """Count or estimate the edges of a graph, in all slices if it varies by sample or head."""
    first_graph = select_slice(graph, 0, 0)
    if not is_estimated(first_graph):
        return graph.num_edges
    return (graph.batch or 1) * (graph.heads or 1) * _estimate(first_graph).num_edges


def _estimate(graph: TokenGraph) -> Estimate:
    counts: Estimate = memoized(estimate, graph, planner.TILE_SIZE, planner.MIN_FILL)
    return counts


def mask_bytes(graph: TokenGraph) -> int:
    """Estimate how many bytes masks take while tiles are planned; near ``MASK_LIMIT``, count them."""
    if is_estimated(graph):
        num_bytes = round(_estimate(graph).num_partial_tiles) * planner.TILE_SIZE**2
        if not 1 / MASK_MARGIN < num_bytes / MASK_LIMIT < MASK_MARGIN:
            return num_bytes
    runs, _ = split_tiles(graph, planner.TILE_SIZE, 0.0)
    partial_runs = runs.at(~runs.full)
    if graph.edges.listed() is not None:
        return len(partial_runs.row) * planner.TILE_SIZE**2
    # If a rule's tiles are not visited pair by pair, they share a few masks.
    boxes = tile_boxes(graph, planner.TILE_SIZE, partial_runs.row, partial_runs.first)
    pieces = decompose(graph.edges, boxes, min_side=planner.TILE_SIZE)
    return sum(len(piece.boxes) for piece in pieces if piece.kind == CELLS) * planner.TILE_SIZE**2


def dense_work(graph: TokenGraph) -> Work:
    num_pairs = graph.num_dst * graph.num_src
    if graph.is_full() or graph.is_causal():
        return Work(plain_pairs=num_pairs if graph.is_full() else num_pairs // 2)
    return Work(masked_pairs=num_pairs)


def tiles_work(graph: TokenGraph) -> Work:
    if not graph.num_dst or not graph.num_src:
        return Work()
    if graph.is_full() or graph.is_causal():
        return dense_work(graph) + Work(calls=1, rectangles=1)
    if not is_estimated(graph):
        return planner.count_work(graph)
    counts = _estimate(graph)
    max_tiles = -(-graph.num_dst // planner.TILE_SIZE) * -(-graph.num_src // planner.TILE_SIZE)
    return _rectangles_work(counts.num_tiles, counts.num_rows, planner.CELL_COSTS, max_tiles)


def _rectangles_work(num_tiles: float, num_rows: float, heights: Iterable[int], max_tiles: float) -> Work:
    """Estimate the work on tiles, if each row of tiles begins one column after the row above it."""
    num_joined = {h: min(num_tiles + (h - 1) * num_rows, max_tiles) for h in heights}
    height = min(num_joined, key=lambda h: num_joined[h] * planner.CELL_COSTS[h])
    num_cells = num_joined[height] * planner.TILE_SIZE**2
    cost = num_cells * planner.CELL_COSTS[height]
    return Work(1, -(-round(num_rows) // height), int(num_cells), cost) if num_tiles else Work()


def mixed_work(graph: TokenGraph) -> Work:
    if is_estimated(graph):
        counts = _estimate(graph)
        dense = _rectangles_work(counts.num_filled_tiles, counts.num_filled_rows, [1], counts.num_tiles)
        edges = counts.num_sparse_edges
    else:
        runs, sparse = split_tiles(graph, planner.TILE_SIZE, planner.MIN_FILL)
        cells = count_cells(runs, 1)
        dense = Work(len(split_into_pieces(graph, runs)), len(torch.unique(runs.row)), cells, float(cells))
        edges = int(sparse.edges.sum())
    return dense + (Work(calls=4, edges=edges, nodes=graph.num_dst) if edges else Work())


def rows_work(graph: TokenGraph) -> Work:
    # If the graph varies by sample or head, this is the mean over its slices.
    num_slices = (graph.batch or 1) * (graph.heads or 1)
    return Work(calls=4, edges=num_edges(graph) // num_slices, nodes=graph.num_dst)


WORK = {"tiles": tiles_work, "mixed": mixed_work, "rows": rows_work}
