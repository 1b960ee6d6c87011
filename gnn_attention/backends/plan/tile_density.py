"""A graph divided into well filled tiles, for dense kernels, and the edges of all others, for sparse ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.backends.plan.tile_masks import edges_in_tiles, tile_boxes
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.regions import counting, enumerate_pairs
from gnn_attention.graph.regions.quadtree import ragged
from gnn_attention.graph.tiling import tiles


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of tiles, sorted: columns ``first .. stop - 1`` of ``row``; a partial tile is a run."""

    block: int
    row: Int[Tensor, " runs"]
    first: Int[Tensor, " runs"]
    stop: Int[Tensor, " runs"]
    full: Bool[Tensor, " runs"]
    edges: Int[Tensor, " runs"]

    def at(self, chosen: Tensor) -> Runs:
        parts = self.row, self.first, self.stop, self.full, self.edges
        return Runs(self.block, *(part[chosen] for part in parts))


def divided(graph: TokenGraph, block: int, least: float) -> tuple[Runs, Runs]:
    """The tiles at least ``least`` of whose pairs are edges, and the others (which are partial)."""
    runs = memoized(counted_runs, graph, block)
    if not least:
        return runs, runs.at(torch.zeros_like(runs.full))
    height = (graph.num_dst - runs.row * block).clamp(max=block)
    width = (graph.num_src - runs.first * block).clamp(max=block)
    dense = runs.full | (runs.edges >= least * height * width)
    return runs.at(dense), runs.at(~dense)


def counted_runs(graph: TokenGraph, block: int) -> Runs:
    if graph.listed_edges is None and enumerate_pairs.few(graph.shape4):
        return _runs_of_all_pairs(graph, block)
    found = tiles(graph, block)
    run, number = ragged(torch.where(found.full, 1, found.stop - found.first))
    first, full = found.first[run] + number, found.full[run]
    row, stop = found.row[run], torch.where(full, found.stop[run], first + 1)
    edges = torch.zeros_like(row)
    if graph._listed is None:
        boxes = tile_boxes(graph, block, row[~full], first[~full])
        edges[~full] = counting.edges_of_each(graph.rule, boxes, len(boxes))
    else:
        tile, _ = edges_in_tiles(graph, block, row[~full], first[~full])
        edges[~full] = torch.bincount(tile, minlength=int((~full).sum()))
    return Runs(block, row, first, stop, full, edges)


def _runs_of_all_pairs(graph: TokenGraph, block: int) -> Runs:
    """The runs of a few pairs, each of which is visited."""
    down, across = -(-graph.num_dst // block), -(-graph.num_src // block)
    if not down or not across:
        nothing = torch.zeros(0, dtype=torch.int64, device="cpu")
        return Runs(block, nothing, nothing, nothing, nothing.bool(), nothing)
    (mask,) = enumerate_pairs.row_blocks(graph.rule, repr(graph), graph.shape4)
    border = 0, across * block - graph.num_src, 0, down * block - graph.num_dst
    blocks = torch.nn.functional.pad(mask[0, 0], border).view(down, block, across, block)
    edges = blocks.sum((1, 3))
    height = (graph.num_dst - torch.arange(down, device="cpu") * block).clamp(max=block)
    width = (graph.num_src - torch.arange(across, device="cpu") * block).clamp(max=block)
    row, column = edges.nonzero(as_tuple=True)
    full = (edges == height.unsqueeze(1) * width)[row, column]
    # neighbouring full tiles are one run
    starts = torch.ones_like(full)
    starts[1:] = ~(full[1:] & full[:-1] & (row[1:] == row[:-1]) & (column[1:] == column[:-1] + 1))
    ends = torch.cat([starts[1:], torch.ones_like(starts[:1])])
    count = edges[row, column].masked_fill(full, 0)
    return Runs(block, row[starts], column[starts], column[ends] + 1, full[starts], count[starts])


def cells_at(runs: Runs, times: int) -> int:
    """Pairs visited by rows of tiles ``times`` as high, over all columns that one of their rows needs."""
    if not len(runs.row):
        return 0
    row = runs.row // times
    line = row * (int(runs.stop.max()) + 1)  # one after the other on a single axis
    first, order = (runs.first + line).sort()
    stop = (runs.stop + line)[order]
    reached = torch.cat([stop.new_full((1,), -1), stop.cummax(0).values[:-1]])
    return int((stop - torch.maximum(first, reached)).clamp(min=0).sum()) * times * runs.block**2


def left_over(graph: TokenGraph, sparse: Runs) -> Int[Tensor, "2 edges"]:
    if graph._listed is None:
        boxes = tile_boxes(graph, sparse.block, sparse.row, sparse.first)
        return counting.edges_in(graph.rule, boxes, graph.num_src)
    _, (src, dst) = edges_in_tiles(graph, sparse.block, sparse.row, sparse.first)
    order = (dst * graph.num_src + src).argsort()
    return torch.stack([src[order], dst[order]])
