"""What the backends visit on a graph, by which ``backend="auto"`` chooses before anything is planned.

Lists of edges and graphs of up to 2^18 pairs are counted. Of any other rule the edges, the tiles and their
fill are estimated from a sample (:mod:`gnn_attention.backends.plan.sample`), the same in every process: no
choice counts a whole rule, and what the chosen backend needs is counted when it is planned.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from gnn_attention.backends.call import one_of
from gnn_attention.backends.cost_model import Work
from gnn_attention.backends.plan import planner
from gnn_attention.backends.plan.dense_blocks import by_piece
from gnn_attention.backends.plan.sample import Sample, sample_tiles
from gnn_attention.backends.plan.tile_masks import cells_at, split_tiles, tile_boxes
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.regions.enumerate_pairs import few
from gnn_attention.graph.regions.quadtree import CELLS, decompose
from gnn_attention.graph.tiling import tiles

# bytes of masks about which they are counted, by what factor: they may repeat, and the estimate be wrong
MASKS, MARGIN = 2**32, 8
LISTED_ROWS = 32  # rows of tiles in which the edges of a list are counted


class Estimate(NamedTuple):
    """What a plain graph has: edges, tiles with an edge, rows of such tiles, those with a non-edge too.

    Of the tiles some are well filled; ``edges_left`` are in the others.
    """

    edges: int
    tiles: float
    rows: float
    partial_tiles: float
    filled_tiles: float
    filled_rows: float
    edges_left: int


def is_estimated(graph: TokenGraph) -> bool:
    """Whether the work on a graph is estimated: not that of a list, of chosen rows, or of few pairs."""
    if graph.edges.count() is not None or graph.edges.has_slices:
        return False
    return not few((1, 1, graph.num_dst, graph.num_src))


def num_edges(graph: TokenGraph) -> int:
    """About how many edges a graph has, over the heads and samples by which it differs."""
    first = one_of(graph, 0, 0)
    if not is_estimated(first):
        return graph.num_edges
    return (graph.batch or 1) * (graph.heads or 1) * memoized(estimate, first).edges


def mask_bytes(graph: TokenGraph) -> int:
    """What the masks of a plan of tiles take at most while they are made: counted where it is some GiB."""
    if is_estimated(graph):
        about = round(memoized(estimate, graph).partial_tiles) * planner.BLOCK**2
        if not 1 / MARGIN < about / MASKS < MARGIN:
            return about
    runs, _ = split_tiles(graph, planner.BLOCK, 0.0)
    partial_runs = runs.at(~runs.full)
    if graph.edges.listed() is not None:
        return len(partial_runs.row) * planner.BLOCK**2
    # those of a rule that need not be visited pair by pair repeat a few
    boxes = tile_boxes(graph, planner.BLOCK, partial_runs.row, partial_runs.first)
    pieces = decompose(graph.edges, boxes, leaf=planner.BLOCK)
    return sum(len(piece.boxes) for piece in pieces if piece.kind == CELLS) * planner.BLOCK**2


def _sample(graph: TokenGraph, block: int) -> Sample:
    return sample_tiles(graph.edges, graph.num_dst, graph.num_src, block)


def fill(graph: TokenGraph, block: int) -> float:
    """The share of the pairs in its tiles that are edges; of lists and large rules, in some rows of tiles."""
    listed = graph.edges.listed()
    if is_estimated(graph):
        sample = _sample(graph, block)
        edges, visited = sample.total(sample.edges), sample.total(sample.tiles)
    elif listed is None:
        runs = tiles(graph, block)
        edges, visited = graph.num_edges, int((runs.stop - runs.first).sum())
    else:
        every = max(1, -(-graph.num_dst // block) // LISTED_ROWS)
        src, dst = listed[:, listed[1] // block % every == 0] // block
        edges, visited = len(src), len(torch.unique(dst * -(-graph.num_src // block) + src))
    pairs = min(visited * block**2, graph.num_dst * graph.num_src)
    return min(1.0, edges / pairs) if pairs else 0.0


def estimate(graph: TokenGraph) -> Estimate:
    """The estimate for a plain graph, from a bounded number of pairs."""
    sample = _sample(graph, planner.BLOCK)
    filled = sample.edges >= planner.LEAST_FILL * sample.pairs
    return Estimate(
        edges=round(sample.total(sample.edges)),
        tiles=sample.total(sample.tiles),
        rows=sample.rows(sample.edges > 0),
        partial_tiles=sample.total(sample.tiles * ~sample.full),
        filled_tiles=sample.total(sample.tiles * filled),
        filled_rows=sample.rows(filled),
        edges_left=round(sample.total(sample.edges * ~filled)),
    )


def dense_work(graph: TokenGraph) -> Work:
    pairs = graph.num_dst * graph.num_src
    if graph.is_full() or graph.is_causal():
        return Work(plain_pairs=pairs if graph.is_full() else pairs // 2)
    return Work(masked_pairs=pairs)


def tiles_work(graph: TokenGraph) -> Work:
    if not graph.num_dst or not graph.num_src:
        return Work()
    if graph.is_full() or graph.is_causal():
        return dense_work(graph) + Work(calls=1, rectangles=1)
    if not is_estimated(graph):
        return planner.counted_work(graph)
    found = memoized(estimate, graph)
    most = -(-graph.num_dst // planner.BLOCK) * -(-graph.num_src // planner.BLOCK)
    return _rectangles(found.tiles, found.rows, planner.HEIGHTS, most)


def _rectangles(tiles: float, rows: float, heights: Iterable[int], most: float) -> Work:
    """The work on so many tiles (of ``most``) in so many rows, each taken to be one tile on from the last."""
    cells = {times: min(tiles + (times - 1) * rows, most) * planner.BLOCK**2 for times in heights}
    times = min(cells, key=lambda times: cells[times] * planner.HEIGHTS[times])
    weighted = cells[times] * planner.HEIGHTS[times]
    return Work(1, -(-round(rows) // times), int(cells[times]), weighted) if tiles else Work()


def mixed_work(graph: TokenGraph) -> Work:
    if is_estimated(graph):
        found = memoized(estimate, graph)
        dense, edges = _rectangles(found.filled_tiles, found.filled_rows, [1], found.tiles), found.edges_left
    else:
        runs, sparse = split_tiles(graph, planner.BLOCK, planner.LEAST_FILL)
        rows, cells = len(torch.unique(runs.row)), cells_at(runs, 1)
        dense = Work(len(by_piece(graph, runs)), rows, cells, float(cells))
        edges = int(sparse.edges.sum())
    return dense + (Work(calls=4, edges=edges, nodes=graph.num_dst) if edges else Work())


def rows_work(graph: TokenGraph) -> Work:
    # of a chosen graph, which is not counted head by head, the mean
    slices = (graph.batch or 1) * (graph.heads or 1)
    return Work(calls=4, edges=num_edges(graph) // slices, nodes=graph.num_dst)


WORK = {"tiles": tiles_work, "mixed": mixed_work, "rows": rows_work}
