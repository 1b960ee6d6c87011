"""The empty, full and partial tiles of a mask, for block-sparse kernels.

A structured graph is cut into boxes (``regions.quadtree``), and only partial tiles are searched.
The tiles of a list are found from its edges. No tensor has tokens x tokens elements.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gnn_attention._support import checks
from gnn_attention._support.memo import memoized
from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph.edges.edge_set import EdgeSet
from gnn_attention.graph.regions import counting, enumerate_pairs, quadtree
from gnn_attention.graph.regions.quadtree import decompose, enumerate_groups, root
from gnn_attention.graph.token_graph import TokenGraph

__all__ = ["EMPTY", "FULL_TILE", "PARTIAL", "Tiles", "tiles"]

# The kinds of tiles in Tiles.table()
EMPTY, PARTIAL, FULL_TILE = 0, 1, 2
# The columns row, first, stop, full and edges of Tiles
Columns = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of a graph, each of ``block x block`` pairs, as runs along the rows of tiles.

    Run i covers columns ``first[i] .. stop[i] - 1`` of row ``row[i]``. If ``full[i]``, all its
    tiles are full, and ``edges[i]`` is 0. Otherwise it is one partial tile with ``edges[i]`` edges.
    Tiles in no run are empty. ``row`` holds flat indices in ``[batch or 1, heads or 1, rows]``, and
    runs are sorted. A tile at the border is full if all its pairs inside the graph are edges.
    """

    graph: TokenGraph
    block: int
    row: Int[Tensor, " runs"]
    first: Int[Tensor, " runs"]
    stop: Int[Tensor, " runs"]
    full: Bool[Tensor, " runs"]
    edges: Int[Tensor, " runs"]

    def at(self, index: Tensor) -> "Tiles":
        """Return the tiles of selected runs; ``index`` may be a bool mask."""
        columns = (self.row, self.first, self.stop, self.full, self.edges)
        return Tiles(self.graph, self.block, *(column[index] for column in columns))

    @property
    def rows(self) -> int:
        """Number of rows of tiles of one sample and head."""
        return -(-self.graph.num_dst // self.block)

    @property
    def columns(self) -> int:
        """Number of columns of tiles."""
        return -(-self.graph.num_src // self.block)

    @property
    def num_tiles(self) -> int:
        """Number of tiles, over all samples and heads by which the graph differs."""
        return (self.graph.batch or 1) * (self.graph.heads or 1) * self.rows * self.columns

    @property
    def num_full(self) -> int:
        """Number of tiles whose pairs are all edges."""
        return int((self.stop - self.first)[self.full].sum())

    @property
    def num_partial(self) -> int:
        """Number of tiles in which some but not all pairs are edges."""
        return int((self.stop - self.first)[~self.full].sum())

    @property
    def num_empty(self) -> int:
        """Number of tiles without an edge, which a kernel skips."""
        return self.num_tiles - self.num_full - self.num_partial

    def table(self) -> Tensor:
        """Return the kind of each tile, uint8 ``[batch or 1, heads or 1, rows, columns]``.

        The kinds are EMPTY = 0, PARTIAL = 1 and FULL_TILE = 2.

        >>> from gnn_attention import patterns
        >>> tiles(patterns.window(8, 4), 2).table()[0, 0].tolist()
        [[1, 0, 0, 0], [2, 1, 0, 0], [1, 2, 1, 0], [0, 1, 2, 1]]
        """
        kinds = torch.zeros(self.num_tiles, dtype=torch.uint8, device="cpu")
        run, offset = enumerate_groups(self.stop - self.first)
        kinds[self.row[run] * self.columns + self.first[run] + offset] = (1 + self.full.to(torch.uint8))[run]
        return kinds.view(self.graph.batch or 1, self.graph.heads or 1, self.rows, self.columns)

    def __repr__(self) -> str:
        counts = f"{self.num_empty} empty, {self.num_full} full, {self.num_partial} partial"
        size = f"{self.rows} x {self.columns}"
        return f"Tiles({self.graph.name}, {self.block}: {size}, {counts}, in {len(self.row)} runs)"


def tiles(graph: TokenGraph, block: int = 128) -> Tiles:
    """Return the empty, full and partial tiles of a graph.

    Takes time proportional to the number of partial tiles for a structured graph, and O(E log E)
    for a list. A rule that cannot be evaluated on ranges is evaluated on every pair, in bounded
    memory. The runs are cached for each ``block``. TypeError or ValueError unless ``block`` is a
    positive integer.

    >>> from gnn_attention import patterns
    >>> tiles(patterns.causal(1_000_000))
    Tiles(causal(1000000), 128: 7813 x 7813, 30517578 empty, 30517578 full, 7813 partial, in 15625 runs)
    """
    checks.instance("graph", graph, TokenGraph)
    # The graph caches only the runs, because Tiles would refer back to the graph.
    return Tiles(graph, block, *memoized(_find_runs, graph, checks.size("block", block, 1)))


def _find_runs(graph: TokenGraph, block: int) -> Columns:
    if graph.edges.listed() is not None or enumerate_pairs.has_few_pairs(graph.shape4):
        columns = _runs_from_pairs(graph, block)
    else:
        pieces = decompose(graph.edges, root(graph.shape4), block, grid=True)
        columns = runs_from_pieces(graph.edges, pieces, block, -(-graph.num_dst // block))
    # Sort the runs, and merge adjacent full runs.
    row, first, stop, _, _ = columns
    order = (row * (int(stop.max()) + 1 if len(stop) else 1) + first).argsort()
    row, first, stop, full, edges = (column[order] for column in columns)
    is_start = torch.ones_like(full)
    is_start[1:] = (row[1:] != row[:-1]) | (first[1:] != stop[:-1]) | ~(full[1:] & full[:-1])
    is_end = torch.cat([is_start[1:], torch.ones_like(is_start[:1])])
    return row[is_start], first[is_start], stop[is_end], full[is_start], edges[is_start]


def _runs_from_pairs(graph: TokenGraph, block: int) -> Columns:
    """Return one run for each nonempty tile of a list or of a small mask."""
    num_rows, num_cols = (max(-(-n // block), 1) for n in (graph.num_dst, graph.num_src))
    if graph.edges.listed() is not None:
        src, dst = graph.coalesce().edge_index
        tile, num_edges = torch.unique(dst // block * num_cols + src // block, return_counts=True)
        row, column = tile // num_cols, tile % num_cols
    else:
        padding = 0, -graph.num_src % block, 0, -graph.num_dst % block
        mask = torch.nn.functional.pad(graph.mask().view(graph.shape4), padding)
        # [rows of tiles, block, columns of tiles, block]
        shape = mask.shape[:3].numel() // block, block, mask.shape[3] // block, block
        edge_counts = mask.view(shape).sum((1, 3))
        row, column = edge_counts.nonzero(as_tuple=True)
        num_edges = edge_counts[row, column]
    height = (graph.num_dst - row % num_rows * block).clamp(max=block)
    width = (graph.num_src - column * block).clamp(max=block)
    return _single_tiles(row, column, num_edges, height * width)


def _single_tiles(row: Tensor, column: Tensor, num_edges: Tensor, num_pairs: Tensor) -> Columns:
    is_full = num_edges == num_pairs
    columns = row, column, column + 1, is_full, num_edges.masked_fill(is_full, 0)
    return tuple(values[num_edges > 0] for values in columns)  # type: ignore[return-value]


def runs_from_pieces(edges: EdgeSet, pieces: Iterable[quadtree.Piece], block: int, num_rows: int) -> Columns:
    """Return the runs of pieces whose boxes consist of tiles, ``num_rows`` rows of them per owner."""
    empty = torch.zeros(0, dtype=torch.int64, device="cpu")
    runs: list[Columns] = [(empty, empty, empty, empty.bool(), empty)]
    for piece in pieces:
        boxes = piece.boxes
        row, column = boxes.owner * num_rows + boxes.dst // block, boxes.src // block
        if piece.kind == quadtree.FULL:
            box, offset = enumerate_groups(-(-boxes.height // block))
            stop = column - (-boxes.width // block)
            is_full = torch.ones_like(box, dtype=torch.bool)
            runs.append((row[box] + offset, column[box], stop[box], is_full, torch.zeros_like(box)))
        else:
            num_edges = counting.count_edges(edges, piece)
            runs.append(_single_tiles(row, column, num_edges, boxes.height * boxes.width))
    return tuple(torch.cat(column) for column in zip(*runs, strict=True))  # type: ignore[return-value]


def tile_list(is_selected: Bool[Tensor, "batch heads rows columns"]) -> tuple[Tensor, Tensor]:
    """For each row, return the number of selected tiles and all columns, selected ones first."""
    num_selected = is_selected.sum(-1).to(torch.int32)
    columns = torch.argsort(is_selected.to(torch.uint8), dim=-1, descending=True, stable=True).to(torch.int32)
    return num_selected, columns
