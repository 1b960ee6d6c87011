"""What the backends visit on a graph, by which ``backend="auto"`` chooses before anything is planned.

Lists of edges and graphs of up to 2^18 pairs are counted. Of any other rule the edges, the tiles and their
fill are estimated from a sample (:mod:`gnn_attention.graph.regions.sample`), the same in every process: no
choice counts a whole rule, and what the chosen backend needs is counted when it is planned.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.backends.call import one_of
from gnn_attention.backends.cost_model import Work, costs
from gnn_attention.backends.plan import planner
from gnn_attention.backends.plan.dense_blocks import LARGE, number_of_rectangles
from gnn_attention.backends.plan.tile_masks import cells_at, divided, tile_boxes
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.neighbours import has_neighbours
from gnn_attention.graph.regions.enumerate_pairs import few
from gnn_attention.graph.regions.quadtree import CELLS, decompose
from gnn_attention.graph.regions.sample import Sample, sample_tiles

# bytes of masks about which they are counted, by what factor: they may repeat, and the estimate be wrong
MASKS, MARGIN = 2**32, 8


class Tiling(NamedTuple):
    """Estimates for the tiles of one kind: how many, and rows of tiles with one; which share of its columns a
    row does not have in common with that 1, 2 and 4 rows on; the share of rows with another number of tiles
    than the next one, and how many such numbers there are.
    """

    tiles: float
    rows: float
    apart: tuple[float, float, float]
    breaks: float
    kinds: int

    def cells(self, times: int, most: float) -> int:
        """Pairs in rows of tiles ``times`` as high, over all columns that one of their rows needs."""
        wider = math.prod(1.0 + share for share in self.apart[: times.bit_length() - 1])
        return int(min(self.tiles * wider, most) * planner.BLOCK**2)

    def calls(self, times: int) -> int:
        """Rectangles alike and in equal steps take one call, as do small ones of one size."""
        if not self.rows:
            return 0
        unlike = self.breaks * self.rows / times
        wide = self.tiles / self.rows * planner.BLOCK**2 * times >= LARGE
        return 1 + round(unlike if wide else min(unlike, self.kinds))


class Estimate(NamedTuple):
    """What a plain graph has: edges; tiles with an edge, those with a non-edge too; well filled ones."""

    edges: int
    edges_left: int
    partial_tiles: float
    every: Tiling
    filled: Tiling


def is_estimated(graph: TokenGraph) -> bool:
    """Whether the work on a graph is estimated: not that of a list, of chosen rows, or of few pairs."""
    if graph.listed_edges is not None or has_neighbours(graph.rule):
        return False
    return not few((1, 1, graph.num_dst, graph.num_src))


def estimate(graph: TokenGraph) -> Estimate:
    """The estimate for a plain graph, from at most about 2^19 pairs; cached."""
    return memoized(_estimate, graph)


def num_edges(graph: TokenGraph) -> int:
    """About how many edges a graph has, over the heads and samples by which it differs."""
    first = one_of(graph, 0, 0)
    if not is_estimated(first):
        return graph.num_edges
    return (graph.batch or 1) * (graph.heads or 1) * estimate(first).edges


def mask_bytes(graph: TokenGraph) -> int:
    """What the masks of a plan of tiles take at most while they are made: counted where it is some GiB."""
    if is_estimated(graph):
        about = round(estimate(graph).partial_tiles) * planner.BLOCK**2
        if not 1 / MARGIN < about / MASKS < MARGIN:
            return about
    runs, _ = divided(graph, planner.BLOCK, 0.0)
    partial_runs = runs.at(~runs.full)
    if graph._listed is not None:
        return len(partial_runs.row) * planner.BLOCK**2
    # those of a rule that need not be visited pair by pair repeat a few
    boxes = tile_boxes(graph, planner.BLOCK, partial_runs.row, partial_runs.first)
    pieces = decompose(graph.rule, boxes, leaf=planner.BLOCK)
    return sum(len(piece.boxes) for piece in pieces if piece.kind == CELLS) * planner.BLOCK**2


def _sample(graph: TokenGraph, block: int) -> Sample:
    shift = graph.dst_offset - graph.src_offset
    return sample_tiles(graph.rule, graph.num_dst, graph.num_src, block, shift)


def fill(graph: TokenGraph, block: int) -> float:
    """About which share of the pairs in its tiles are edges."""
    sample = _sample(graph, block)
    each = sample.stands_for[sample.row] * sample.weight
    pairs = (float(each.sum()) + float((sample.stands_for * sample.unseen()).sum())) * block**2
    return min(1.0, float((each * sample.edges).sum()) / pairs) if pairs else 0.0


def _estimate(graph: TokenGraph) -> Estimate:
    sample = _sample(graph, planner.BLOCK)
    each = sample.stands_for[sample.row] * sample.weight
    height = (graph.num_dst - sample.rows[sample.row] * sample.block).clamp(max=sample.block)
    width = (graph.num_src - sample.column * sample.block).clamp(max=sample.block)
    filled = sample.full | (sample.edges >= planner.LEAST_FILL * height * width)
    unseen = float((sample.stands_for * sample.unseen()).sum())
    every = _tiling(sample, torch.ones_like(filled))
    return Estimate(
        edges=round(float((each * sample.edges).sum())),
        edges_left=round(float((each * sample.edges)[~filled].sum())),
        partial_tiles=float(each[~sample.full].sum()) + unseen,
        every=every._replace(tiles=every.tiles + unseen),
        filled=_tiling(sample, filled),
    )


def _tiling(sample: Sample, chosen: Bool[Tensor, " tiles"]) -> Tiling:
    row, column, weight = sample.row[chosen], sample.column[chosen], sample.weight[chosen]
    tiles = torch.zeros(len(sample.rows), dtype=torch.float64, device="cpu").index_add_(0, row, weight)
    # a column that both rows of a pair need counts once
    key = row // 2 * (int(column.max()) + 1 if len(column) else 1) + column
    one = torch.unique(key, return_inverse=True)[1]
    pair = torch.zeros_like(one).index_copy_(0, one, row // 2)
    each = torch.zeros_like(weight).index_copy_(0, one, weight)
    pairs = len(sample.rows) // 2
    union = torch.zeros(pairs + 1, dtype=torch.float64, device="cpu").index_add_(0, pair, each)[:pairs]
    above, below, share = tiles[0 : 2 * pairs : 2], tiles[1::2], sample.stands_for[1::2]
    distance = sample.rows[1::2] - sample.rows[0 : 2 * pairs : 2]
    # a hub is as far from the rows that are further on
    hub = sample.hub[0 : 2 * pairs : 2] | sample.hub[1::2]
    apart: list[float] = []
    for d in (1, 2, 4):
        at = (distance == d) | hub
        mean = float(((above + below) * share)[at].sum()) / 2
        twice = min(1.0, 2 * apart[-1]) if apart else 0.0
        apart.append(float((union * share)[at].sum()) / mean - 1 if mean else twice)
    near, some = distance == 1, tiles > 0
    # columns that stand for others differ by chance
    sure = torch.zeros_like(tiles).index_add_(0, row, (weight == 1).double())
    differ = sure[0 : 2 * pairs : 2] != sure[1::2]
    unlike = float((share * differ)[near].sum()) / max(float(share[near].sum()), 1.0)
    return Tiling(
        tiles=float((sample.stands_for * tiles).sum()),
        rows=float(sample.stands_for[some].sum()),
        apart=(apart[0], apart[1], apart[2]),
        breaks=unlike,
        kinds=len(torch.unique(sure[some])),
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
    every = estimate(graph).every
    most = -(-graph.num_dst // planner.BLOCK) * -(-graph.num_src // planner.BLOCK)
    works = (_rectangles(every, times, every.cells(times, most)) for times in planner.HEIGHTS)
    return min(works, key=partial(costs().seconds, heads=8))


def _rectangles(of: Tiling, times: int, cells: int) -> Work:
    return Work(of.calls(times), -(-round(of.rows) // times), cells, cells * planner.HEIGHTS[times])


def mixed_work(graph: TokenGraph) -> Work:
    if is_estimated(graph):
        found = estimate(graph)
        dense, edges = _rectangles(found.filled, 1, found.filled.cells(1, float("inf"))), found.edges_left
    else:
        runs, sparse = divided(graph, planner.BLOCK, planner.LEAST_FILL)
        rows, cells = len(torch.unique(runs.row)), cells_at(runs, 1)
        dense = Work(number_of_rectangles(graph, runs), rows, cells, float(cells))
        edges = int(sparse.edges.sum())
    return dense + (Work(calls=4, edges=edges, nodes=graph.num_dst) if edges else Work())


def rows_work(graph: TokenGraph) -> Work:
    # of a chosen graph, which is not counted head by head, the mean
    slices = (graph.batch or 1) * (graph.heads or 1)
    return Work(calls=4, edges=num_edges(graph) // slices, nodes=graph.num_dst)


WORK = {"tiles": tiles_work, "mixed": mixed_work, "rows": rows_work}
