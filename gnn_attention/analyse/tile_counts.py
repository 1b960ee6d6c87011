"""Counts of the tiles and edges of a graph; those of a large rule come from a sample of its rows.

The sample is the same in every process. It consists of strips, which are rows of tiles, one from each
part of the graph, drawn with a fixed seed. Interval arithmetic cuts a strip into tiles without visiting
pairs. Tiles whose pairs must be visited are also sampled, so that an estimate visits a bounded number of
pairs. A sample is likely to miss a single receiver with many edges, except in the first and last strips.
"""

from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.edges.edge_set import EdgeSet
from gnn_attention.graph.regions import enumerate_pairs
from gnn_attention.graph.regions.counting import SplitEdges, count_edges, split_edge_lists
from gnn_attention.graph.regions.quadtree import CELLS, EMPTY, FULL, Boxes, Piece, classify, decompose
from gnn_attention.graph.tiling import Tiles, tiles

MAX_SAMPLED_PAIRS = 2**18  # A sample visits about this many pairs at most.
NUM_STRIPS = 16
MIN_LISTED_ROWS = 32  # The edges of a long list are counted in 32 to 63 rows of tiles.


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
    """Return whether counts are estimated, which needs a rule on many pairs without batch or heads."""
    if graph.edges.count() is not None or graph.edges.has_slices:
        return False
    return not enumerate_pairs.has_few_pairs((1, 1, graph.num_dst, graph.num_src))


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


def estimate(graph: TokenGraph, block: int, min_fill: float) -> Estimate:
    """Estimate the counts of a graph without batch or heads, visiting a bounded number of pairs."""
    sample = sample_tiles(graph, block)
    is_filled = sample.num_edges >= min_fill * sample.num_pairs
    return Estimate(
        num_edges=round(sample.estimate_total(sample.num_edges)),
        num_tiles=sample.estimate_total(sample.num_tiles),
        num_rows=sample.estimate_rows(sample.num_edges > 0),
        num_partial_tiles=sample.estimate_total(sample.num_tiles * ~sample.is_full),
        num_filled_tiles=sample.estimate_total(sample.num_tiles * is_filled),
        num_filled_rows=sample.estimate_rows(is_filled),
        num_sparse_edges=round(sample.estimate_total(sample.num_edges * ~is_filled)),
    )


def split_tiles(graph: TokenGraph, block: int, min_fill: float) -> tuple[Tiles, Tiles]:
    """Return the runs in which at least ``min_fill`` of the pairs are edges, and the others."""
    runs = tiles(graph, block)
    if not min_fill:
        return runs, runs.at(torch.zeros_like(runs.full))
    height = (graph.num_dst - runs.row * block).clamp(max=block)
    width = (graph.num_src - runs.first * block).clamp(max=block)
    is_dense = runs.full | (runs.edges >= min_fill * height * width)
    return runs.at(is_dense), runs.at(~is_dense)


def count_cells(runs: Tiles, height: int) -> int:
    """Count the pairs of rectangles that join ``height`` rows of tiles each, with all columns."""
    if not len(runs.row):
        return 0
    row = runs.row // height
    # The rows are laid end to end along one axis.
    row_start = row * (int(runs.stop.max()) + 1)
    first, order = (runs.first + row_start).sort()
    stop = (runs.stop + row_start)[order]
    end_before = torch.cat([stop.new_full((1,), -1), stop.cummax(0).values[:-1]])
    num_columns = (stop - torch.maximum(first, end_before)).clamp(min=0)
    return int(num_columns.sum()) * height * runs.block**2


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
