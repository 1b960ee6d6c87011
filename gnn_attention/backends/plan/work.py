"""The work of each backend on a graph, by which ``backend="auto"`` chooses before it makes a plan.

Work is counted for lists of edges and for graphs of up to 2^18 pairs. Otherwise it is estimated
from a sample, which is the same in every process. Masks of about ``MASK_LIMIT`` bytes are counted.

The sample consists of strips, which are rows of tiles, one from each part of the graph, drawn with
a fixed seed. Interval arithmetic cuts a strip into tiles without visiting pairs. Tiles whose pairs
must be visited are also sampled, so that an estimate visits a bounded number of pairs. A sample is
likely to miss an individual receiver with many edges, unless it is in the first or the last strip.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.backends.cost_model import Work
from gnn_attention.backends.plan import planner
from gnn_attention.backends.plan.dense_blocks import split_into_pieces
from gnn_attention.backends.plan.tile_masks import count_cells, split_tiles, tile_boxes
from gnn_attention.edge_ops.edge_lists import select_slice
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.edges.edge_set import EdgeSet
from gnn_attention.graph.regions import enumerate_pairs
from gnn_attention.graph.regions.counting import SplitEdges, count_edges, split_edge_lists
from gnn_attention.graph.regions.quadtree import CELLS, EMPTY, FULL, Boxes, Piece, classify, decompose
from gnn_attention.graph.tiling import tiles

# Masks within a factor MASK_MARGIN of this many bytes are counted, as the estimate may be wrong.
MASK_LIMIT, MASK_MARGIN = 2**32, 8
MIN_LISTED_ROWS = 32  # The edges of a long list are counted in 32 to 63 rows of tiles.
MAX_SAMPLED_PAIRS = 2**18  # A sample visits about this many pairs at most.
NUM_STRIPS = 16


class Sample(NamedTuple):
    """Boxes of tiles, each in a strip; a box that is neither full nor empty is a single tile.

    A box represents ``weight`` boxes of the graph; strip s represents ``strip_weight[s]`` rows of
    tiles. ``num_tiles`` counts tiles with an edge. If a graph combines a rule with lists, each tile
    with listed pairs has an extra box for the edges in the lists. This box counts as a tile
    if the rule has no edge in it.
    """

    strip: Int[Tensor, " boxes"]
    num_tiles: Int[Tensor, " boxes"]
    num_pairs: Int[Tensor, " boxes"]
    num_edges: Int[Tensor, " boxes"]
    weight: Float[Tensor, " boxes"]
    strip_weight: Float[Tensor, " strips"]

    @property
    def is_full(self) -> Bool[Tensor, " boxes"]:
        return self.num_edges == self.num_pairs

    def estimate_total(self, count: Tensor) -> float:
        """Estimate the sum over the whole graph, given a count for each box."""
        return float((self.weight * count).sum())

    def estimate_rows(self, is_counted: Bool[Tensor, " boxes"]) -> float:
        """Estimate how many rows of tiles have a box that ``is_counted``."""
        return float(self.strip_weight[torch.unique(self.strip[is_counted])].sum())


class Estimate(NamedTuple):
    """Estimated counts; rows are rows of tiles, and sparse edges lie outside well-filled tiles."""

    num_edges: int
    num_tiles: float
    num_rows: float
    num_partial_tiles: float
    num_filled_tiles: float
    num_filled_rows: float
    num_sparse_edges: int


def is_estimated(graph: TokenGraph) -> bool:
    """Return whether the work is estimated, which needs a rule on many pairs without batch or heads."""
    if graph.edges.count() is not None or graph.edges.has_slices:
        return False
    return not enumerate_pairs.has_few_pairs((1, 1, graph.num_dst, graph.num_src))


def num_edges(graph: TokenGraph) -> int:
    """Count or estimate the edges of a graph, in all slices if it varies by sample or head."""
    first_graph = select_slice(graph, 0, 0)
    if not is_estimated(first_graph):
        return graph.num_edges
    return (graph.batch or 1) * (graph.heads or 1) * memoized(estimate, first_graph).num_edges


def mask_bytes(graph: TokenGraph) -> int:
    """Estimate how many bytes masks take while tiles are planned; near ``MASK_LIMIT``, count them."""
    if is_estimated(graph):
        num_bytes = round(memoized(estimate, graph).num_partial_tiles) * planner.TILE_SIZE**2
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


def fill(graph: TokenGraph, block: int) -> float:
    """Return the fraction of edges among the pairs in nonempty tiles; large graphs are sampled."""
    edge_index = graph.edges.listed()
    if is_estimated(graph):
        sample = sample_tiles(graph, block)
        edges, num_tiles = sample.estimate_total(sample.num_edges), sample.estimate_total(sample.num_tiles)
    elif edge_index is None:
        runs = tiles(graph, block)
        edges, num_tiles = graph.num_edges, int((runs.stop - runs.first).sum())
    else:
        step = max(1, -(-graph.num_dst // block) // MIN_LISTED_ROWS)
        src, dst = edge_index[:, edge_index[1] // block % step == 0] // block
        edges, num_tiles = len(src), len(torch.unique(dst * -(-graph.num_src // block) + src))
    num_pairs = min(num_tiles * block**2, graph.num_dst * graph.num_src)
    return min(1.0, edges / num_pairs) if num_pairs else 0.0


def estimate(graph: TokenGraph) -> Estimate:
    """Estimate the counts of a graph without batch or heads, visiting a bounded number of pairs."""
    sample = sample_tiles(graph, planner.TILE_SIZE)
    is_filled = sample.num_edges >= planner.MIN_FILL * sample.num_pairs
    return Estimate(
        num_edges=round(sample.estimate_total(sample.num_edges)),
        num_tiles=sample.estimate_total(sample.num_tiles),
        num_rows=sample.estimate_rows(sample.num_edges > 0),
        num_partial_tiles=sample.estimate_total(sample.num_tiles * ~sample.is_full),
        num_filled_tiles=sample.estimate_total(sample.num_tiles * is_filled),
        num_filled_rows=sample.estimate_rows(is_filled),
        num_sparse_edges=round(sample.estimate_total(sample.num_edges * ~is_filled)),
    )


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
    counts = memoized(estimate, graph)
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
        counts = memoized(estimate, graph)
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


def sample_tiles(graph: TokenGraph, block: int) -> Sample:
    """Draw a sample of the tiles of a graph without batch or heads."""
    edges, num_dst, num_src = graph.edges, graph.num_dst, graph.num_src
    row, strip_weight = _draw_strips(-(-num_dst // block))
    zero = torch.zeros_like(row)
    dst = row * block
    index = torch.arange(len(row), device="cpu")
    boxes = Boxes(index, zero, zero, dst, zero, (num_dst - dst).clamp(max=block), zero + num_src)
    split = split_edge_lists(edges, num_dst, num_src)
    counts = _count_boxes(edges if split is None else split.edges, boxes, block)
    if split is not None:
        strip = torch.searchsorted(row, split.dst // block).clamp(max=len(row) - 1)
        is_inside = row[strip] == split.dst // block
        split = SplitEdges(split.edges, split.src[is_inside], split.dst[is_inside])
        counts.append(_count_listed(edges, split, strip[is_inside], block, num_src))
    strip, num_tiles, pairs, count, weight = (torch.cat(x) for x in zip(*counts, strict=True))
    return Sample(strip, num_tiles, pairs, count, weight * strip_weight[strip], strip_weight)


# The strip, tiles, pairs, edges and weight of each box; it represents that many boxes of its strip.
BoxCounts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _count_boxes(edges: EdgeSet, strips: Boxes, block: int) -> list[BoxCounts]:
    """Cut strips into boxes of tiles, and count the tiles, pairs and edges of some of the boxes."""
    empty = torch.zeros(0, dtype=torch.int64, device="cpu")
    counts = [(empty, empty, empty, empty, empty.double())]
    pieces = list(decompose(edges, strips, block, grid=True))
    num_visited = sum(len(piece.boxes) for piece in pieces if piece.kind == CELLS)
    fraction = min(1.0, MAX_SAMPLED_PAIRS / block**2 / max(num_visited, 1))
    for kind, all_boxes in pieces:
        index = torch.arange(len(all_boxes), device="cpu")
        if kind == CELLS and fraction < 1:
            generator = torch.Generator(device="cpu").manual_seed(0)
            order = torch.randperm(len(index), generator=generator, device="cpu")
            index = order[: max(1, round(fraction * len(index)))]
        boxes = all_boxes.at(index)
        pairs = boxes.height * boxes.width
        count = pairs if kind == FULL else count_edges(edges, Piece(kind, boxes))
        weight = torch.full_like(count, len(all_boxes) / len(index), dtype=torch.float64)
        counts.append((boxes.owner, -(-boxes.width // block) * (count > 0), pairs, count, weight))
    return counts


def _count_listed(edges: EdgeSet, split: SplitEdges, strip: Tensor, block: int, num_src: int) -> BoxCounts:
    """Count the edges that lists add to each tile with listed pairs; pair n is in strip ``strip[n]``."""
    num_columns = -(-num_src // block)
    zero = torch.zeros_like(split.dst)
    is_edge, is_rule_edge = (
        enumerate_pairs.evaluate(x.contains, "this graph", zero, zero, split.dst, split.src).long()
        for x in (edges, split.edges)
    )
    tile, index = torch.unique(split.dst // block * num_columns + split.src // block, return_inverse=True)
    change = torch.zeros_like(tile).index_add_(0, index, is_edge - is_rule_edge)
    dst, src = tile // num_columns * block, tile % num_columns * block
    zero = torch.zeros_like(tile)
    boxes = Boxes(zero, zero, zero, dst, src, zero + block, zero + block)
    is_new = classify(split.edges, boxes) == EMPTY
    tile_strip = torch.empty_like(tile).scatter_(0, index, strip)
    weight = torch.ones_like(tile, dtype=torch.float64)
    return tile_strip, is_new.long() * (change > 0), zero + block**2, change, weight


def _draw_strips(num_rows: int) -> tuple[Int[Tensor, " strips"], Float[Tensor, " strips"]]:
    """Draw the first, the last and some other rows of tiles; also return how many rows each represents."""
    if num_rows <= NUM_STRIPS:
        row = torch.arange(num_rows, device="cpu")
        return row, torch.ones_like(row, dtype=torch.float64)
    bounds = torch.linspace(1, num_rows - 1, NUM_STRIPS - 1, dtype=torch.float64, device="cpu").round()
    bounds = torch.cat([bounds.new_zeros(1), bounds, bounds.new_tensor([num_rows])])
    generator = torch.Generator(device="cpu").manual_seed(0)
    position = torch.rand(NUM_STRIPS, generator=generator, dtype=torch.float64, device="cpu")
    return (bounds[:-1] + position * bounds.diff()).long(), bounds.diff()
