"""Tiles: which blocks of receivers and senders hold no edge, all pairs, or some, for block-sparse kernels.

Structured graphs are tiled by boxes (``regions.quadtree``), without visiting their pairs, listed ones from
their edges. Nothing of size tokens x tokens is made.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch

from gnn_attention._support import checks
from gnn_attention._support.memo import memoized
from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph.regions import counting, quadtree
from gnn_attention.graph.regions.quadtree import Boxes, Piece, decompose, profile, ragged, root
from gnn_attention.graph.rules import Rule
from gnn_attention.graph.token_graph import TokenGraph

__all__ = ["EMPTY", "FULL_TILE", "PARTIAL", "Tiles", "tiles"]

# kinds of a tile, as in Tiles.table()
EMPTY, PARTIAL, FULL_TILE = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of a graph, ``block x block`` pairs each, as runs of equal tiles along each row of tiles.

    Run i covers the columns ``first[i] .. stop[i] - 1`` of the row ``row[i]``, all full if ``full[i]``, else
    all partial; tiles in no run are empty. Rows count through ``[batch or 1, heads or 1, rows]``. Runs are
    sorted and maximal. A tile that the border cuts is full if all pairs inside the graph are edges.
    """

    graph: TokenGraph
    block: int
    row: Int[Tensor, " runs"]
    first: Int[Tensor, " runs"]
    stop: Int[Tensor, " runs"]
    full: Bool[Tensor, " runs"]

    @property
    def rows(self) -> int:
        """Rows of tiles of one sample and head."""
        return -(-self.graph.num_dst // self.block)

    @property
    def columns(self) -> int:
        """Columns of tiles."""
        return -(-self.graph.num_src // self.block)

    @property
    def num_tiles(self) -> int:
        """All tiles, over samples and heads where the graph differs by them."""
        return (self.graph.batch or 1) * (self.graph.heads or 1) * self.rows * self.columns

    @property
    def num_full(self) -> int:
        """Tiles all of whose pairs are edges."""
        return int((self.stop - self.first)[self.full].sum())

    @property
    def num_partial(self) -> int:
        """Tiles with edges and non-edges."""
        return int((self.stop - self.first)[~self.full].sum())

    @property
    def num_empty(self) -> int:
        """Tiles without an edge, which a kernel skips."""
        return self.num_tiles - self.num_full - self.num_partial

    def table(self) -> Tensor:
        """uint8 ``[batch or 1, heads or 1, rows, columns]``: EMPTY = 0, PARTIAL = 1, FULL_TILE = 2.

        >>> from gnn_attention import patterns
        >>> tiles(patterns.window(8, 4), 2).table()[0, 0].tolist()
        [[1, 0, 0, 0], [2, 1, 0, 0], [1, 2, 1, 0], [0, 1, 2, 1]]
        """
        kinds = torch.zeros(self.num_tiles, dtype=torch.uint8, device="cpu")
        run, number = ragged(self.stop - self.first)
        kinds[self.row[run] * self.columns + self.first[run] + number] = (1 + self.full.to(torch.uint8))[run]
        return kinds.view(self.graph.batch or 1, self.graph.heads or 1, self.rows, self.columns)

    def __repr__(self) -> str:
        counts = f"{self.num_empty} empty, {self.num_full} full, {self.num_partial} partial"
        size = f"{self.rows} x {self.columns}"
        return f"Tiles({self.graph.name}, {self.block}: {size}, {counts}, in {len(self.row)} runs)"


def tiles(graph: TokenGraph, block: int = 128) -> Tiles:
    """The empty, full and partial tiles of a graph, exactly.

    Time is in proportion to the tiles of a structured graph, ``O(E log E)`` for a list of edges; a rule that
    cannot be evaluated on ranges is visited pair by pair in bounded memory. Cached with the graph for each
    block. Raises TypeError or ValueError for a ``block`` that is no positive integer.

    >>> from gnn_attention import patterns
    >>> tiles(patterns.causal(1_000_000))
    Tiles(causal(1000000), 128: 7813 x 7813, 30517578 empty, 30517578 full, 7813 partial, in 15625 runs)
    """
    checks.instance("graph", graph, TokenGraph)
    block = checks.size("block", block, 1)
    # cached without the graph, which would then refer to itself
    return Tiles(graph, block, *memoized(_runs, graph, block))


# row, first, stop, full
Runs = tuple[Tensor, Tensor, Tensor, Tensor]


def _runs(graph: TokenGraph, block: int) -> Runs:
    parts = _listed_runs(graph, block) if graph.listed_edges is not None else _rule_runs(graph, block)
    nothing = torch.zeros(0, dtype=torch.int64, device="cpu")
    columns = zip((nothing, nothing, nothing, nothing.bool()), *parts, strict=True)
    return _merge(*(torch.cat(column) for column in columns))


def _merge(row: Tensor, first: Tensor, stop: Tensor, full: Tensor) -> Runs:
    width = int(stop.max()) + 1 if len(stop) else 1
    order = (row * width + first).argsort()
    row, first, stop, full = row[order], first[order], stop[order], full[order]
    starts = torch.ones_like(full)
    starts[1:] = (row[1:] != row[:-1]) | (first[1:] != stop[:-1]) | (full[1:] != full[:-1])
    ends = torch.cat([starts[1:], torch.ones_like(starts[:1])])
    return row[starts], first[starts], stop[ends], full[starts]


def _single_tiles(row: Tensor, column: Tensor, edges: Tensor, area: Tensor) -> Runs:
    some = edges > 0
    return row[some], column[some], column[some] + 1, (edges == area)[some]


def _listed_runs(graph: TokenGraph, block: int) -> Iterator[Runs]:
    src, dst = graph.edge_index
    columns = max(-(-graph.num_src // block), 1)
    tile, edges = torch.unique(dst // block * columns + src // block, return_counts=True)
    row, column = tile // columns, tile % columns
    height = (graph.num_dst - row * block).clamp(max=block)
    width = (graph.num_src - column * block).clamp(max=block)
    yield _single_tiles(row, column, edges, height * width)


def _rule_runs(graph: TokenGraph, block: int) -> Iterator[Runs]:
    rows = -(-graph.num_dst // block)
    for piece in decompose(graph.rule, root(graph.shape4), leaf=block):
        boxes = piece.boxes
        corner = boxes.owner * rows + boxes.dst // block, boxes.src // block
        if piece.kind in (quadtree.FULL, quadtree.DST):
            yield from _whole_width(graph.rule, piece, corner, block)
        elif piece.kind == quadtree.SRC:
            yield from _equal_rows(graph.rule, piece, corner, block)
        elif piece.kind == quadtree.DIFFERENCE:
            yield from _diagonals(graph.rule, piece, corner, block)
            yield _visit_tiles(graph.rule, _border(boxes, block), rows, block)
        else:
            yield _visit_tiles(graph.rule, boxes, rows, block)


def _visit_tiles(rule: Rule, boxes: Boxes, rows: int, block: int) -> Runs:
    number = torch.arange(len(boxes), device="cpu")
    edges = counting.edges_of_each(rule, replace(boxes, owner=number), len(boxes))
    row, column = boxes.owner * rows + boxes.dst // block, boxes.src // block
    return _single_tiles(row, column, edges, boxes.height * boxes.width)


def _whole_width(rule: Rule, piece: Piece, corner: tuple[Tensor, Tensor], block: int) -> Iterator[Runs]:
    """Rows of tiles that are of one kind from the left to the right end of their box."""
    boxes = piece.boxes
    down, across = -(-boxes.height // block), -(-boxes.width // block)
    box, row = ragged(down)
    some = every = torch.ones_like(box, dtype=torch.bool)
    if piece.kind == quadtree.DST:
        edge, owner, number = profile(rule, piece)
        some, every = _some_and_every(edge, (down.cumsum(0) - down)[owner] + number // block, len(box))
    left = corner[1][box]
    yield tuple(column[some] for column in (corner[0][box] + row, left, left + across[box], every))  # type: ignore[misc]


def _equal_rows(rule: Rule, piece: Piece, corner: tuple[Tensor, Tensor], block: int) -> Iterator[Runs]:
    boxes = piece.boxes
    down, across = -(-boxes.height // block), -(-boxes.width // block)
    edge, owner, number = profile(rule, piece)
    box, column = ragged(across)
    some, every = _some_and_every(edge, (across.cumsum(0) - across)[owner] + number // block, len(box))
    first = corner[1][box] + column
    top, first, stop, full = _merge(box[some], first[some], first[some] + 1, every[some])
    run, row = ragged(down[top])
    yield corner[0][top][run] + row, first[run], stop[run], full[run]


def _some_and_every(edge: Tensor, tile: Tensor, number: int) -> tuple[Tensor, Tensor]:
    edges = torch.zeros(number, dtype=torch.int64, device="cpu")
    size = edges.index_add(0, tile, torch.ones_like(tile))
    edges = edges.index_add(0, tile, edge.to(torch.int64))
    return edges > 0, edges == size


def _diagonals(rule: Rule, piece: Piece, corner: tuple[Tensor, Tensor], block: int) -> Iterator[Runs]:
    """The uncut tiles of boxes in which a tile's kind depends on its diagonal: row minus column."""
    boxes = piece.boxes
    edge, _, _ = profile(rule, piece)
    before = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), edge.cumsum(0)])
    length = boxes.height + boxes.width - 1
    down, across = boxes.height // block, boxes.width // block
    box, number = ragged((down + across - 1) * (down > 0) * (across > 0))
    diagonal = number - across[box] + 1
    first = (length.cumsum(0) - length + boxes.width)[box] + (diagonal - 1) * block
    edges = before[first + 2 * block - 1] - before[first]
    some, every = edges > 0, edges == 2 * block - 1
    owner, start, stop, full = _merge(box[some], diagonal[some], diagonal[some] + 1, every[some])
    top = start.clamp(min=0)
    run, row = ragged((torch.minimum(stop - 1 + across[owner], down[owner]) - top).clamp(min=0))
    row = row + top[run]
    left = (row - stop[run] + 1).clamp(min=0)
    right = torch.minimum(row - start[run] + 1, across[owner][run])
    yield corner[0][owner][run] + row, corner[1][owner][run] + left, corner[1][owner][run] + right, full[run]


def _border(boxes: Boxes, block: int) -> Boxes:
    cut = boxes.at(((boxes.height % block) > 0) | ((boxes.width % block) > 0))
    inner_height, inner_width = cut.height // block * block, cut.width // block * block
    lower = replace(cut, dst=cut.dst + inner_height, height=cut.height - inner_height)
    right = replace(cut, src=cut.src + inner_width, width=cut.width - inner_width, height=inner_height)
    strips = Boxes(*(torch.cat([getattr(lower, f.name), getattr(right, f.name)]) for f in fields(Boxes)))
    return quadtree.split_evenly(strips.at((strips.height > 0) & (strips.width > 0)), block)
