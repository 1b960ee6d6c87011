"""What the backends visit on a graph, by which ``backend="auto"`` chooses before anything is planned.

Lists of edges and graphs of up to 2^18 pairs are counted. Of any other rule the edges, the tiles and their
fill are estimated from a sample, the same in every process: no choice counts a whole rule, and what the
chosen backend needs is counted when it is planned.

Strips of one tile's height are drawn for the sample with a fixed seed, one from each part of the graph, and
cut into tiles by ranges of tokens. Tiles whose pairs have to be visited are drawn, too, so that an estimate
visits a bounded number of pairs, however large the graph is. Single receivers with many edges in the middle
of the graph are likely to be missed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.backends.call import one_of
from gnn_attention.backends.cost_model import Work
from gnn_attention.backends.plan import planner
from gnn_attention.backends.plan.dense_blocks import by_piece
from gnn_attention.backends.plan.tile_masks import cells_at, split_tiles, tile_boxes
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.edges.edge_set import EdgeSet
from gnn_attention.graph.regions import enumerate_pairs
from gnn_attention.graph.regions.counting import SplitEdges, count_edges, split_edge_lists
from gnn_attention.graph.regions.quadtree import CELLS, EMPTY, FULL, Boxes, Piece, classify, decompose
from gnn_attention.graph.tiling import tiles

# bytes of masks about which they are counted, by what factor: they may repeat, and the estimate be wrong
MASKS, MARGIN = 2**32, 8
LISTED_ROWS = 32  # rows of tiles in which the edges of a list are counted
PAIRS = 2**18  # pairs of a graph that a sample visits
STRIPS = 16


class Sample(NamedTuple):
    """Boxes of tiles: full ones hold several ``tiles`` with an edge, others one or none.

    A box lies in a ``strip`` and stands for ``weight`` boxes of the graph, a strip for ``strips`` rows of
    tiles. ``pairs`` and ``edges`` are those of one box; for a tile with listed pairs they are the edges that
    lists add, and ``tiles`` counts it unless it holds other edges.
    """

    strip: Int[Tensor, " boxes"]
    tiles: Int[Tensor, " boxes"]
    pairs: Int[Tensor, " boxes"]
    edges: Int[Tensor, " boxes"]
    weight: Float[Tensor, " boxes"]
    strips: Float[Tensor, " strips"]

    @property
    def full(self) -> Bool[Tensor, " boxes"]:
        return self.edges == self.pairs

    def total(self, number: Tensor) -> float:
        """The sum of a number of each box over the whole graph."""
        return float((self.weight * number).sum())

    def rows(self, boxes: Bool[Tensor, " boxes"]) -> float:
        """How many rows of tiles hold one of these boxes."""
        return float(self.strips[torch.unique(self.strip[boxes])].sum())


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
    return not enumerate_pairs.has_few_pairs((1, 1, graph.num_dst, graph.num_src))


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
    if graph.edges.stored_list() is not None:
        return len(partial_runs.row) * planner.BLOCK**2
    # those of a rule that need not be visited pair by pair repeat a few
    boxes = tile_boxes(graph, planner.BLOCK, partial_runs.row, partial_runs.first)
    pieces = decompose(graph.edges, boxes, leaf=planner.BLOCK)
    return sum(len(piece.boxes) for piece in pieces if piece.kind == CELLS) * planner.BLOCK**2


def fill(graph: TokenGraph, block: int) -> float:
    """The share of the pairs in its tiles that are edges; of lists and large rules, in some rows of tiles."""
    listed = graph.edges.stored_list()
    if is_estimated(graph):
        sample = sample_tiles(graph, block)
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
    sample = sample_tiles(graph, planner.BLOCK)
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


def sample_tiles(graph: TokenGraph, block: int) -> Sample:
    """A sample of the tiles of a plain graph."""
    edges, num_dst, num_src = graph.edges, graph.num_dst, graph.num_src
    row, strips = _draw_strips(-(-num_dst // block))
    number, zero, dst = torch.arange(len(row), device="cpu"), torch.zeros_like(row), row * block
    boxes = Boxes(number, zero, zero, dst, zero, (num_dst - dst).clamp(max=block), zero + num_src)
    split = split_edge_lists(edges, num_dst, num_src)
    parts = _count_boxes(edges if split is None else split.edges, boxes, block)
    if split is not None:
        strip = torch.searchsorted(row, split.dst // block).clamp(max=len(row) - 1)
        inside = row[strip] == split.dst // block
        split = SplitEdges(split.edges, split.src[inside], split.dst[inside])
        parts.append(_count_listed(edges, split, strip[inside], block, num_src))
    owner, tiles, pairs, count, weight = (torch.cat(column) for column in zip(*parts, strict=True))
    return Sample(owner, tiles, pairs, count, weight * strips[owner], strips)


Columns = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _count_boxes(edges: EdgeSet, boxes: Boxes, block: int) -> list[Columns]:
    """Strip, tiles, pairs and edges of the boxes, and for how many boxes of its strip each stands."""
    nothing = torch.zeros(0, dtype=torch.int64, device="cpu")
    pieces, parts = list(decompose(edges, boxes, block, grid=True)), [(nothing,) * 4 + (nothing.double(),)]
    visited = sum(len(piece.boxes) for piece in pieces if piece.kind == CELLS)
    share = min(1.0, PAIRS / block**2 / max(visited, 1))
    for kind, all_boxes in pieces:
        number = torch.arange(len(all_boxes), device="cpu")
        if kind == CELLS and share < 1:
            generator = torch.Generator(device="cpu").manual_seed(0)
            order = torch.randperm(len(number), generator=generator, device="cpu")
            number = order[: max(1, round(share * len(number)))]
        part = all_boxes.at(number)
        pairs = part.height * part.width
        count = pairs if kind == FULL else count_edges(edges, Piece(kind, part))
        weight = torch.full_like(count, len(all_boxes) / len(number), dtype=torch.float64)
        parts.append((part.owner, -(-part.width // block) * (count > 0), pairs, count, weight))
    return parts


def _count_listed(edges: EdgeSet, split: SplitEdges, strip: Tensor, block: int, num_src: int) -> Columns:
    """As :func:`_count_boxes`, the difference that lists make: of each tile with listed pairs."""
    zero, across = torch.zeros_like(split.dst), -(-num_src // block)
    with_lists, without = (
        enumerate_pairs.evaluate(x.contains, "this graph", zero, zero, split.dst, split.src).long()
        for x in (edges, split.edges)
    )
    tile, place = torch.unique(split.dst // block * across + split.src // block, return_inverse=True)
    change = torch.zeros_like(tile).index_add_(0, place, with_lists - without)
    dst, src, zero = tile // across * block, tile % across * block, torch.zeros_like(tile)
    boxes = Boxes(zero, zero, zero, dst, src, zero + block, zero + block)
    is_new = classify(split.edges, boxes) == EMPTY
    owner = torch.empty_like(tile).scatter_(0, place, strip)
    tiles, weight = is_new.long() * (change > 0), torch.ones_like(tile, dtype=torch.float64)
    return owner, tiles, zero + block**2, change, weight


def _draw_strips(count: int) -> tuple[Int[Tensor, " strips"], Float[Tensor, " strips"]]:
    """Rows of tiles, and how many each stands for: the first, the last, and one from each part between."""
    if count <= STRIPS:
        return torch.arange(count, device="cpu"), torch.ones(count, dtype=torch.float64, device="cpu")
    bounds = torch.linspace(1, count - 1, STRIPS - 1, dtype=torch.float64, device="cpu").round()
    bounds = torch.cat([bounds.new_zeros(1), bounds, bounds.new_tensor([count])])
    generator = torch.Generator(device="cpu").manual_seed(0)
    chance = torch.rand(STRIPS, generator=generator, dtype=torch.float64, device="cpu")
    return (bounds[:-1] + chance * bounds.diff()).long(), bounds.diff()
