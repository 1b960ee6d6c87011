"""What a kernel of a GPU would visit in a graph, counted without building a form: edges, windows, tiles.

Three numbers decide which form of an edge set is read fastest: the edges (rows gather a sender for each), the
different senders of each window (windows gather each of those once), and the tiles with an edge (all of their
pairs are computed). Long lists and graphs of many partial tiles are sampled, so that it takes less than a
second for a million tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.backends.plan import decompose
from gnn_attention.backends.plan.tile_masks import masks_of_tiles
from gnn_attention.graph import TokenGraph, memoized, rules
from gnn_attention.graph.kernel_formats import Varlen
from gnn_attention.graph.neighbours import keys_of
from gnn_attention.graph.regions.quadtree import ragged
from gnn_attention.graph.tiling import Tiles, tiles

HEIGHTS = (16, 32, 64)  # receivers of a window
MOST_EDGES = 2**19  # of a list that are looked at
MOST_TILES = 1024  # partial tiles of a rule that are looked into
LEAST = 64  # edges of a tile of 64 x 64 that is computed whole in less time than its edges are gathered in
GROUP = 128  # receivers that are sampled together


class Counts(NamedTuple):
    """Of one head of a plain graph.

    ``unique[h]``: pairs of a window of ``HEIGHTS[h]`` receivers and a sender of it. ``small_tiles``,
    ``tall_tiles`` and ``large_tiles``: tiles of 64 x 64, of 128 receivers x 64 senders and of 128 x 128
    with an edge; ``cut_tiles``: the large ones with non-edges, too. ``filled_tiles``: the small ones that
    are worth computing whole; ``strays``: the edges of all others. ``whole``: every pair is an edge, or every
    pair that a causal graph allows; ``causal``: the edges are exactly ``src <= dst``, and not all pairs.
    """

    receivers: int
    senders: int
    edges: int
    unique: tuple[float, ...] = (0.0, 0.0, 0.0)
    small_tiles: float = 0.0
    tall_tiles: float = 0.0
    large_tiles: float = 0.0
    cut_tiles: float = 0.0
    filled_tiles: float = 0.0
    strays: float = 0.0
    whole: bool = False
    causal: bool = False

    def shared(self, height: int) -> float:
        """Edges for each sender that a window of so many receivers gathers: 1 where none is shared."""
        unique = self.unique[HEIGHTS.index(height)]
        return self.edges / unique if unique else 0.0

    def filled(self) -> float:
        """The share of edges among the pairs of the tiles of 64 with any."""
        return self.edges / (64**2 * self.small_tiles) if self.small_tiles else 0.0


def counted(graph: TokenGraph) -> Counts:
    """The counts of a plain graph, memoized.

    >>> from gnn_attention import patterns
    >>> counted(patterns.causal(256))[:6]
    (256, 256, 32896, (2176.0, 1152.0, 640.0), 10, 6)
    """
    found: Counts = memoized(_counted, graph)
    return found


def packing(graph: TokenGraph) -> Varlen | None:
    """A plain graph as packed documents with one window, for varlen kernels; None for other graphs."""
    return decompose.packing(graph) if memoized(_could_be_packed, graph) else None


def _counted(graph: TokenGraph) -> Counts:
    if not graph.num_dst or not graph.num_src:
        return Counts(graph.num_dst, graph.num_src, 0)
    if graph._listed is not None:
        return _of_list(graph)
    terms = members(graph)
    if any(term._listed is not None for term in terms):
        return _of_union([counted(term) for term in terms])
    found = tiles(graph, 64)
    masks = _some_masks(graph, found)
    weight = found.num_partial / max(len(masks), 1)
    edges, unique = _edges_and_unique(graph, found, masks, weight)
    filled = masks.sum((1, 2))
    worth = found.num_full + weight * int((filled >= LEAST).sum())
    strays = weight * int(filled[filled < LEAST].sum())
    every_tile = found.num_full + found.num_partial, *_of_double_size(found)
    return _counts(graph, edges, unique, *every_tile, worth, strays)


def _counts(graph: TokenGraph, edges: int, *counted: Any) -> Counts:
    """With ``whole`` and ``causal``, looked at only where the (perhaps estimated) ``edges`` leave it open."""
    counted += _wholeness(graph, edges)
    return Counts(graph.num_dst, graph.num_src, edges, *counted)


def _wholeness(graph: TokenGraph, edges: int) -> tuple[bool, bool]:
    pairs = graph.num_dst * graph.num_src
    if edges >= 0.95 * pairs and graph.is_full():
        return True, False
    causal = abs(edges - pairs / 2) <= 0.05 * pairs + graph.num_dst and graph.is_causal()
    return causal, causal


def _could_be_packed(graph: TokenGraph) -> bool:
    """Whether the tiles of each row are consecutive, as they are in packed documents: a cheap first test."""
    if graph._listed is not None or graph.num_dst != graph.num_src or len(members(graph)) > 1:
        return False
    found = tiles(graph, 64)
    same = found.row[1:] == found.row[:-1]
    return bool((found.first[1:] == found.stop[:-1])[same].all())


def members(graph: TokenGraph) -> list[TokenGraph]:
    """The graphs whose union this one is, as ``|`` made it; itself alone if it is none."""
    rule = graph.rule
    if isinstance(rule, partial) and rule.func is rules.or_:
        return [member for part in rule.args for member in members(replace(graph, rule=part))]
    if graph._listed is None and (listed := keys_of(rule)) is not None:
        keys, width = listed
        return [replace(graph, _listed=torch.stack([keys % width, keys // width]))]
    return [graph]


def _of_union(members: list[Counts]) -> Counts:
    """At most their sums: a union with a list has no ranges, and visiting all pairs would take minutes."""
    receivers, senders, *_ = members[0]
    edges = min(receivers * senders, sum(member.edges for member in members))
    unique = tuple(map(sum, zip(*(member.unique for member in members), strict=True)))
    totals: list[Any] = [sum(counts) for counts in zip(*(member[4:10] for member in members), strict=True)]
    return Counts(receivers, senders, edges, unique, *totals)


def _of_list(graph: TokenGraph) -> Counts:
    """By counting in all of its edges, or in those of some groups of neighbouring receivers."""
    src, dst = _sampled_edges(graph)
    edges = graph.num_edges
    weight = edges / len(dst) if len(dst) else 0.0
    unique = tuple(weight * _different(dst // height, src, graph.num_src) for height in HEIGHTS)
    large, of_large = torch.unique(dst // 128 * graph.num_src + src // 128, return_counts=True)
    small, of_small = torch.unique(dst // 64 * graph.num_src + src // 64, return_counts=True)
    tall = _different(dst // 128, src // 64, graph.num_src)
    cut, worth = int((of_large < 128**2).sum()), int((of_small >= LEAST).sum())
    found = len(small), tall, len(large), cut, worth, int(of_small[of_small < LEAST].sum())
    return _counts(graph, edges, unique, *(weight * count for count in found))


def _sampled_edges(graph: TokenGraph) -> tuple[Tensor, Tensor]:
    src, dst = graph.edge_index
    if len(dst) <= MOST_EDGES:
        return src, dst
    groups = -(-graph.num_dst // GROUP)
    wanted = max(1, groups * MOST_EDGES // len(dst))
    chosen = torch.zeros(groups, dtype=torch.bool, device="cpu")
    chosen[torch.randperm(groups, generator=torch.Generator().manual_seed(0))[:wanted]] = True
    sampled = chosen[dst // GROUP]
    return src[sampled], dst[sampled]


def _different(row: Tensor, column: Tensor, columns: int) -> int:
    return len(torch.unique(row * columns + column))


def _edges_and_unique(
    graph: TokenGraph, found: Tiles, masks: Tensor, weight: float
) -> tuple[int, tuple[float, ...]]:
    """A full tile has all senders in each window; ``masks`` are partial tiles, one for ``weight`` of them."""
    run = found.full
    height = (graph.num_dst - found.row[run] * found.block).clamp(max=found.block)
    width = (found.stop[run] * found.block).clamp(max=graph.num_src) - found.first[run] * found.block
    unique = []
    for size in HEIGHTS:
        # of each window of a tile
        senders = masks.view(len(masks), found.block // size, size, found.block).any(2)
        unique.append(int((width * -(-height // size)).sum()) + weight * int(senders.sum()))
    return round(int((height * width).sum()) + weight * int(masks.sum())), tuple(unique)


def _of_double_size(found: Tiles) -> tuple[int, int, int]:
    """How many tiles twice as high have an edge, twice as large, and how many of these a non-edge, too."""
    run, number = ragged(found.stop - found.first)
    row, column = found.row[run], found.first[run] + number
    large, which = torch.unique(row // 2 * found.columns + column // 2, return_inverse=True)
    full = torch.zeros(len(large), dtype=torch.int64, device="cpu")
    full = full.index_add(0, which, found.full[run].long())
    lines = (found.rows, large // found.columns), (found.columns, large % found.columns)
    down, across = ((count - line * 2).clamp(max=2) for count, line in lines)
    tall = len(torch.unique(row // 2 * found.columns + column))
    return tall, len(large), int((full < down * across).sum())


def _some_masks(graph: TokenGraph, found: Tiles) -> Bool[Tensor, "tiles block block"]:
    """The masks of partial tiles, of a random choice where there are many, False beyond the border."""
    row, first, stop = (runs[~found.full] for runs in (found.row, found.first, found.stop))
    ends = (stop - first).cumsum(0)
    number = torch.arange(found.num_partial, device="cpu")
    if len(number) > MOST_TILES:
        number = torch.randint(len(number), (MOST_TILES,), generator=torch.Generator().manual_seed(0))
    run = torch.searchsorted(ends, number, right=True)
    which, table = masks_of_tiles(graph, found.block, row[run], stop[run] - (ends[run] - number))
    return table[which]
