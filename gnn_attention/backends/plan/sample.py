"""The tiles of some strips of a graph, by which its edges and tiles are estimated.

Strips of one tile's height are drawn with a fixed seed, one from each part of the graph, and cut into tiles
by ranges of tokens. Tiles whose pairs have to be visited are drawn, too, so that an estimate visits a bounded
number of pairs, however large the graph is.

Single receivers with many edges in the middle of the graph are likely to be missed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.graph.edges.edge_set import EdgeSet
from gnn_attention.graph.regions import enumerate_pairs
from gnn_attention.graph.regions.counting import SplitEdges, count_edges, split_edge_lists
from gnn_attention.graph.regions.quadtree import CELLS, EMPTY, FULL, Boxes, Piece, decompose, kinds

# pairs of a graph that are visited
PAIRS = 2**18
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


def sample_tiles(edges: EdgeSet, num_dst: int, num_src: int, block: int) -> Sample:
    """The sample of the edges of one sample and head."""
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
    is_new = kinds(split.edges, boxes) == EMPTY
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
