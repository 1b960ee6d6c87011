"""What must travel: the senders that the receivers of a rank hear from each other rank, exactly.

A structured graph is asked about whole boxes of receivers and senders (``_cover``), a listed one is read off its edges; nothing
of the size tokens x tokens is made, nor a list of the edges of a structured graph. Of a graph that differs by head or by sample a
sender is heard if any head of any sample hears it, for all heads of a token travel together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.distributed.partition import Partition, Shares, check_partition
from gnn_attention.graph import TokenGraph, kept
from gnn_attention.graph.diagonals import LARGEST, diagonals
from gnn_attention.graph.regions import counting
from gnn_attention.graph.regions.quadtree import CELLS, DIFFERENCE, DST, FULL, SRC, Boxes, Piece, cells, cover, profile, ragged
from gnn_attention.graph.rules import Rule

__all__ = ["edges_between", "halo", "halo_sizes"]

MOST_BOXES = 2**18  # of a run of receivers and a run of senders, that are asked about one by one
GRID = 64  # tokens: where blocks of rules begin and end
AT_ONCE = 2**21  # columns that are looked at together
UNMERGED = 2**22  # stretches of senders that wait to be joined

Stretches = tuple[Tensor, Tensor, Tensor]  # receiving rank, first sender, the one after the last


def halo(graph: TokenGraph, partition: Partition, rank: int) -> tuple[Int[Tensor, " senders"], ...]:
    """For each rank, in order, the senders that it owns and that receivers of ``rank`` hear: sorted; nothing from itself.

    ``torch.cat`` of them is what arrives, in the order of an all-to-all. ValueError for a partition of other tokens, IndexError
    for a rank that is none.

    >>> from gnn_attention import patterns
    >>> from gnn_attention.distributed.partition import contiguous
    >>> graph = patterns.window(9, 3)
    >>> [senders.tolist() for senders in halo(graph, contiguous(graph, 3), 1)]
    [[1, 2], [], []]
    """
    check_partition(partition, graph)
    own = partition.dst.ranges(rank)
    if graph._listed is not None:
        mine = partition.dst.owner(graph._listed[1]) == rank
        heard = torch.unique(graph._listed[0].cpu()[mine])
    else:
        first, stop = (
            torch.tensor(ends, dtype=torch.int64, device="cpu") for ends in (zip(*own, strict=True) if own else ((), ()))
        )
        _, start, end = _heard(graph, Shares(graph.num_dst, rank + 1, torch.full_like(first, rank), first, stop), partition.src)
        stretch, number = ragged(end - start)
        heard = start[stretch] + number
    owner = partition.src.owner(heard)
    heard, owner = heard[owner != rank], owner[owner != rank]
    counts = torch.bincount(owner, minlength=partition.world_size).tolist()
    arriving: tuple[Tensor, ...] = heard[owner.argsort(stable=True)].split(counts)
    return arriving


def halo_sizes(graph: TokenGraph, partition: Partition) -> Int[Tensor, "ranks ranks"]:
    """How many senders each rank (row) hears of each rank (column), 0 on the diagonal. Kept with the graph: do not write into it.

    >>> from gnn_attention import patterns
    >>> from gnn_attention.distributed.partition import contiguous
    >>> graph = patterns.window(1_000_000, 4096)
    >>> halo_sizes(graph, contiguous(graph, 64)).sum(1).tolist()[:3]
    [0, 4095, 4095]
    """
    sizes: Tensor = kept(_halo_sizes, graph, check_partition(partition, graph))
    return sizes


def edges_between(graph: TokenGraph, partition: Partition) -> Int[Tensor, "ranks ranks"]:
    """How many edges lead to receivers of each rank (row) from senders of each rank (column), over all heads and samples.

    Kept with the graph: do not write into it.

    >>> from gnn_attention import patterns
    >>> from gnn_attention.distributed.partition import contiguous
    >>> edges_between(patterns.causal(8), contiguous(patterns.causal(8), 2)).tolist()
    [[10, 0], [16, 10]]
    """
    edges: Tensor = kept(_edges_between, graph, check_partition(partition, graph))
    return edges


# -- counting ---------------------------------------------------------------------------------------------------------


def _halo_sizes(graph: TokenGraph, partition: Partition) -> Tensor:
    world = partition.world_size
    if graph._listed is not None:
        src, dst = graph._listed.cpu()
        key = torch.unique(partition.dst.owner(dst) * graph.num_src + src)
        rank, src = key // max(graph.num_src, 1), key % max(graph.num_src, 1)
        counted = torch.ones_like(src)
    else:
        rank, start, stop = _cut(*_heard(graph, partition.dst, partition.src), partition.src)
        src, counted = start, stop - start
    found = _matrix(rank, partition.src.owner(src), counted, world)
    return found.fill_diagonal_(0)


def _edges_between(graph: TokenGraph, partition: Partition) -> Tensor:
    world = partition.world_size
    if graph._listed is not None:
        src, dst = graph._listed.cpu()
        return _matrix(partition.dst.owner(dst), partition.src.owner(src), torch.ones_like(src), world)
    total = torch.zeros(world * world, dtype=torch.int64, device="cpu")
    table = diagonals(graph)
    for boxes in _single_runs(graph, partition):
        if table is not None:
            total.index_add_(0, boxes.owner, table.edges(boxes))
            continue
        for _, part in _aligned(graph.rule, boxes):
            total += counting.edges_of_each(graph.rule, part, world * world)
    return total.view(world, world)


def _matrix(row: Tensor, column: Tensor, counted: Tensor, world: int) -> Tensor:
    total = torch.zeros(world * world, dtype=torch.int64, device="cpu")
    return total.index_add_(0, row * world + column, counted).view(world, world)


# -- of a rule --------------------------------------------------------------------------------------------------------


def _heard(graph: TokenGraph, dst: Shares, src: Shares) -> Stretches:
    """The senders that each rank hears, as stretches that do not touch, sorted by rank and position."""
    boxes, width = _boxes(graph, dst, src), graph.num_src + 1
    waiting = [(boxes.owner[:0], boxes.src[:0], boxes.src[:0])]
    for stretches in _unsorted(graph, boxes):
        waiting.append(stretches)
        if sum(len(part[0]) for part in waiting) > UNMERGED:
            waiting = [_joined(waiting, width)]
    return _joined(waiting, width)


def _unsorted(graph: TokenGraph, boxes: Boxes) -> Iterator[Stretches]:
    table = diagonals(graph)
    if table is not None:
        edges = table.edges(boxes)
        full = edges == boxes.height * boxes.width
        yield boxes.owner[full], boxes.src[full], (boxes.src + boxes.width)[full]
        for part in _few_at_once(boxes.at((edges > 0) & ~full)):
            yield _runs_of(part, *table.columns(part))
        return
    for kind, part in _aligned(graph.rule, boxes):
        for piece in cover(graph.rule, part) if kind == CELLS else (Piece(kind, part),):
            yield from _stretches(graph.rule, piece)


def _few_at_once(boxes: Boxes) -> Iterator[Boxes]:
    """The boxes in parts of about AT_ONCE columns, or one box."""
    group = boxes.width.cumsum(0) // AT_ONCE
    bounds = [0, *(group.diff().nonzero().flatten() + 1).tolist(), len(boxes)]
    return (boxes.at(slice(start, stop)) for start, stop in pairwise(bounds) if start < stop)


def _aligned(rule: Rule, boxes: Boxes) -> Iterator[Piece]:
    """The boxes that hold edges, those that remain to be cut with their corners on the grid where rules of blocks are simple."""
    for kind, part in cover(rule, boxes, leaf=LARGEST) if len(boxes) else ():
        yield Piece(kind, _on_grid(part) if kind == CELLS else part)


def _on_grid(boxes: Boxes) -> Boxes:
    """Boxes cut at the first and the last multiple of GRID inside them, along both sides."""
    for place, size in (("dst", "height"), ("src", "width")):
        start, length = getattr(boxes, place), getattr(boxes, size)
        first = torch.minimum(-(-start // GRID) * GRID, start + length)
        last = torch.maximum((start + length) // GRID * GRID, first)
        bounds = torch.stack([start, first, last, start + length])
        sizes = bounds.diff(dim=0)
        part, box = (sizes > 0).nonzero(as_tuple=True)
        boxes = replace(boxes.at(box), **{place: bounds[part, box], size: sizes[part, box]})
    return boxes


def _single_runs(graph: TokenGraph, partition: Partition) -> Iterator[Boxes]:
    """Boxes that hold all edges, of one run of receivers and of senders each, owned by receiving rank * ranks + sending rank."""
    boxes, world = _boxes(graph, partition.dst, partition.src), partition.world_size
    whole = len(_first_runs(graph, partition.dst, partition.src)) == len(partition.src.rank)
    parts = (boxes,) if whole or not len(boxes) else (piece.boxes for piece in cover(graph.rule, boxes))
    for part in parts:
        box, start, stop = _cut(torch.arange(len(part), device="cpu"), part.src, part.src + part.width, partition.src)
        cut = part.at(box)
        yield replace(cut, owner=cut.owner * world + partition.src.owner(start), src=start, width=stop - start)


def _boxes(graph: TokenGraph, dst: Shares, src: Shares) -> Boxes:
    """For each sample and head, every run of receivers against groups of runs of senders; owned by the receiving rank."""
    first = _first_runs(graph, dst, src)
    stop = torch.cat([first[1:], torch.full_like(first[:1], graph.num_src)])
    sizes = (graph.batch or 1, graph.heads or 1, len(dst.rank), len(first))
    b, h, i, j = (axis.flatten() for axis in torch.meshgrid(*(torch.arange(n, device="cpu") for n in sizes), indexing="ij"))
    return Boxes(dst.rank[i], b, h, dst.start[i], first[j], (dst.stop - dst.start)[i], (stop - first)[j])


def _first_runs(graph: TokenGraph, dst: Shares, src: Shares) -> Tensor:
    """Where the groups of runs of senders start: each run its own, unless that makes too many boxes."""
    begins = src.start.sort().values
    rows = max(len(dst.rank) * (graph.batch or 1) * (graph.heads or 1), 1)
    return begins[:: -(-len(begins) // max(MOST_BOXES // rows, 1)) or 1]


def _stretches(rule: Rule, piece: Piece) -> Iterator[Stretches]:
    """The senders of each box that any of its receivers hears, as stretches: (owner of the box, start, stop)."""
    boxes = piece.boxes
    if piece.kind == FULL:
        yield boxes.owner, boxes.src, boxes.src + boxes.width
    elif piece.kind == DST:
        edge, box, _ = profile(rule, piece)
        some = torch.zeros_like(boxes.dst).index_add_(0, box, edge.to(torch.int64)) > 0
        yield boxes.owner[some], boxes.src[some], (boxes.src + boxes.width)[some]
    elif piece.kind == SRC:
        edge, box, column = profile(rule, piece)
        yield _runs_of(boxes, edge, box, column)
    elif piece.kind == DIFFERENCE:
        yield _runs_of(boxes, *_columns(rule, piece))
    elif piece.kind == CELLS:
        for part, edge in cells(rule, boxes):
            box, column = ragged(part.width)
            yield _runs_of(part, edge.any(1)[box, column], box, column)


def _columns(rule: Rule, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
    """(heard, box, column): column c of a box crosses its diagonals ``width - 1 - c`` and the ``height - 1`` that follow."""
    edge, _, _ = profile(rule, piece)
    boxes = piece.boxes
    before = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), edge.cumsum(0)])
    length = boxes.height + boxes.width - 1
    box, column = ragged(boxes.width)
    top = (length.cumsum(0) - length + boxes.width - 1)[box] - column
    return before[top + boxes.height[box]] > before[top], box, column


def _runs_of(boxes: Boxes, heard: Tensor, box: Tensor, column: Tensor) -> Stretches:
    """Neighbours among the heard columns of a box, joined. Columns are in order, box by box."""
    box, column = box[heard], column[heard]
    fresh = torch.ones_like(box, dtype=torch.bool)
    fresh[1:] = (box.diff() != 0) | (column.diff() != 1)
    last = torch.cat([fresh[1:], fresh[:1]])
    return boxes.owner[box[fresh]], (boxes.src[box] + column)[fresh], (boxes.src[box] + column)[last] + 1


def _joined(parts: list[Stretches], width: int) -> Stretches:
    """Stretches of a rank that touch or overlap, as one."""
    rank, start, stop = (torch.cat(column) for column in zip(*parts, strict=True))
    order = (rank * width + start).argsort()
    rank, start = rank[order], start[order]
    end = (rank * width + stop[order]).cummax(0).values
    fresh = torch.ones_like(rank, dtype=torch.bool)
    fresh[1:] = (rank * width + start)[1:] > end[:-1]
    last = torch.cat([fresh[1:], fresh[:1]])
    return rank[fresh], start[fresh], end[last] - rank[last] * width


def _cut(rank: Tensor, start: Tensor, stop: Tensor, shares: Shares) -> Stretches:
    """Stretches cut where the owner of the senders changes."""
    begins = shares.start.sort().values
    first = torch.searchsorted(begins, start, right=True) - 1
    runs = torch.searchsorted(begins, stop) - first
    stretch, number = ragged(runs)
    edge = torch.cat([begins, torch.tensor([shares.num_tokens], device="cpu")])
    run = first[stretch] + number
    return rank[stretch], torch.maximum(start[stretch], edge[run]), torch.minimum(stop[stretch], edge[run + 1])
