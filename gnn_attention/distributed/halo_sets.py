"""The halo: for each rank, the remote senders that its receivers attend to, exactly.

A rule is evaluated on whole boxes of receivers and senders (``quadtree.decompose``), never pair by pair. In a
graph that differs by head or sample a sender counts if any head of any sample attends to it, for all heads of
a token travel together.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.distributed.partition import Partition, Shares, check_partition
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.regions import counting, quadtree
from gnn_attention.graph.regions.quadtree import Boxes, Piece, decompose, profile, ragged
from gnn_attention.graph.rules import Rule

MAX_BOXES = 2**18  # of a run of receivers and a run of senders
GRID = 64  # tokens: where blocks of rules begin and end
LARGEST = 2**40  # longer than any side: boxes are evaluated and none is cut
MAX_UNMERGED = 2**22  # ranges of senders before they are merged

Ranges = tuple[Tensor, Tensor, Tensor]  # receiving rank, first sender, the one after the last


def halo(graph: TokenGraph, partition: Partition, rank: int) -> tuple[Int[Tensor, " senders"], ...]:
    """For each other rank, its senders that the receivers of ``rank`` attend to, sorted; none of ``rank``.

    ``torch.cat`` of them is what arrives, in the order of an all-to-all. ValueError for a partition of other
    tokens, IndexError for a rank out of range.

    >>> from gnn_attention import patterns
    >>> from gnn_attention.distributed.partition import contiguous
    >>> graph = patterns.window(9, 3)
    >>> [senders.tolist() for senders in halo(graph, contiguous(graph, 3), 1)]
    [[1, 2], [], []]
    """
    ranges = memoized(_halo_ranges, graph, check_partition(partition, graph))
    partition.dst.ranges(rank)  # IndexError for a rank out of range
    _, start, stop = (column[ranges[0] == rank] for column in ranges)
    part, number = ragged(stop - start)
    senders = start[part] + number
    owner = partition.src.owner(senders)
    counts = torch.bincount(owner, minlength=partition.world_size).tolist()
    return torch.split(senders[owner.argsort(stable=True)], counts)


def halo_sizes(graph: TokenGraph, partition: Partition) -> Int[Tensor, "ranks ranks"]:
    """How many senders of each rank (column) the receivers of each rank (row) attend to; cached."""
    return memoized(_halo_sizes, graph, check_partition(partition, graph))


def edges_between(graph: TokenGraph, partition: Partition) -> Int[Tensor, "ranks ranks"]:
    """The edges to each rank (row) from each rank (column), over heads and samples; cached."""
    return memoized(_edges_between, graph, check_partition(partition, graph))


def _halo_sizes(graph: TokenGraph, partition: Partition) -> Tensor:
    rank, start, stop = memoized(_halo_ranges, graph, partition)
    return _matrix(rank, partition.src.owner(start), stop - start, partition.world_size)


def _halo_ranges(graph: TokenGraph, partition: Partition) -> Ranges:
    # each of one sending rank, another than the receiving one; sorted by receiving rank and position
    if graph._listed is not None:
        src, dst = graph._listed.cpu()
        key = torch.unique(partition.dst.owner(dst) * graph.num_src + src)
        rank, start = key // max(graph.num_src, 1), key % max(graph.num_src, 1)
        stop = start + 1
    else:
        ranges = _senders(graph, partition.dst, partition.src)
        rank, start, stop = _split_by_owner(*ranges, partition.src)
    other = partition.src.owner(start) != rank
    return rank[other], start[other], stop[other]


def _edges_between(graph: TokenGraph, partition: Partition) -> Tensor:
    world = partition.world_size
    if graph._listed is not None:
        src, dst = graph._listed.cpu()
        return _matrix(partition.dst.owner(dst), partition.src.owner(src), torch.ones_like(src), world)
    total = torch.zeros(world * world, dtype=torch.int64, device="cpu")
    for boxes in _single_runs(graph, partition):
        for _, part in _aligned(graph.rule, boxes):
            total += counting.edges_of_each(graph.rule, part, world * world)
    return total.view(world, world)


def _matrix(row: Tensor, column: Tensor, counted: Tensor, world: int) -> Tensor:
    total = torch.zeros(world * world, dtype=torch.int64, device="cpu")
    return total.index_add_(0, row * world + column, counted).view(world, world)


def _senders(graph: TokenGraph, dst: Shares, src: Shares) -> Ranges:
    # ranges that do not touch, sorted by rank and position
    boxes, width = _boxes(graph, dst, src), graph.num_src + 1
    found = [(boxes.owner[:0], boxes.src[:0], boxes.src[:0])]
    for kind, part in _aligned(graph.rule, boxes):
        for piece in decompose(graph.rule, part) if kind == quadtree.CELLS else (Piece(kind, part),):
            found += _senders_of_piece(graph.rule, piece)
            if sum(len(ranges[0]) for ranges in found) > MAX_UNMERGED:
                found = [_union(found, width)]
    return _union(found, width)


def _aligned(rule: Rule, boxes: Boxes) -> Iterator[Piece]:
    """The boxes with edges; corners of those partly filled are on the grid, where block rules are simple."""
    for kind, part in decompose(rule, boxes, leaf=LARGEST) if len(boxes) else ():
        yield Piece(kind, _on_grid(part) if kind == quadtree.CELLS else part)


def _on_grid(boxes: Boxes) -> Boxes:
    """Boxes cut at the first and the last multiple of GRID inside them, along both sides."""
    for axis, size in (("dst", "height"), ("src", "width")):
        start, length = getattr(boxes, axis), getattr(boxes, size)
        first = torch.minimum(-(-start // GRID) * GRID, start + length)
        last = torch.maximum((start + length) // GRID * GRID, first)
        bounds = torch.stack([start, first, last, start + length])
        sizes = bounds.diff(dim=0)
        part, box = (sizes > 0).nonzero(as_tuple=True)
        boxes = replace(boxes.at(box), **{axis: bounds[part, box], size: sizes[part, box]})
    return boxes


def _single_runs(graph: TokenGraph, partition: Partition) -> Iterator[Boxes]:
    """Boxes of one run of receivers and one of senders; owner: receiving * ranks + sending rank."""
    boxes, world = _boxes(graph, partition.dst, partition.src), partition.world_size
    whole = len(_first_runs(graph, partition.dst, partition.src)) == len(partition.src.rank)
    parts = (boxes,) if whole or not len(boxes) else (piece.boxes for piece in decompose(graph.rule, boxes))
    for part in parts:
        number = torch.arange(len(part), device="cpu")
        box, start, stop = _split_by_owner(number, part.src, part.src + part.width, partition.src)
        cut = part.at(box)
        owner = cut.owner * world + partition.src.owner(start)
        yield replace(cut, owner=owner, src=start, width=stop - start)


def _boxes(graph: TokenGraph, dst: Shares, src: Shares) -> Boxes:
    """For each sample and head, every run of receivers (owner: its rank) by groups of runs of senders."""
    first = _first_runs(graph, dst, src)
    stop = torch.cat([first[1:], torch.full_like(first[:1], graph.num_src)])
    sizes = (graph.batch or 1, graph.heads or 1, len(dst.rank), len(first))
    axes = torch.meshgrid(*(torch.arange(n, device="cpu") for n in sizes), indexing="ij")
    b, h, i, j = (axis.flatten() for axis in axes)
    return Boxes(dst.rank[i], b, h, dst.start[i], first[j], (dst.stop - dst.start)[i], (stop - first)[j])


def _first_runs(graph: TokenGraph, dst: Shares, src: Shares) -> Tensor:
    """Where the groups of runs of senders start: each run is a group, unless that makes too many boxes."""
    begins = src.start.sort().values
    rows = max(len(dst.rank) * (graph.batch or 1) * (graph.heads or 1), 1)
    return begins[:: -(-len(begins) // max(MAX_BOXES // rows, 1)) or 1]


def _senders_of_piece(rule: Rule, piece: Piece) -> Iterator[Ranges]:
    boxes = piece.boxes
    if piece.kind == quadtree.FULL:
        yield boxes.owner, boxes.src, boxes.src + boxes.width
    elif piece.kind == quadtree.DST:
        edge, box, _ = profile(rule, piece)
        some = torch.zeros_like(boxes.dst).index_add_(0, box, edge.to(torch.int64)) > 0
        yield boxes.owner[some], boxes.src[some], (boxes.src + boxes.width)[some]
    elif piece.kind == quadtree.SRC:
        yield _runs(boxes, *profile(rule, piece))
    elif piece.kind == quadtree.DIFFERENCE:
        yield _runs(boxes, *_columns(rule, piece))
    elif piece.kind == quadtree.CELLS:
        for part, edge in quadtree.cells(rule, boxes):
            box, column = ragged(part.width)
            yield _runs(part, edge.any(1)[box, column], box, column)


def _columns(rule: Rule, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
    """(has edge, box, column): column c crosses ``height`` diagonals of its box from ``width - 1 - c`` on."""
    edge, _, _ = profile(rule, piece)
    boxes = piece.boxes
    before = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), edge.cumsum(0)])
    length = boxes.height + boxes.width - 1
    box, column = ragged(boxes.width)
    top = (length.cumsum(0) - length + boxes.width - 1)[box] - column
    return before[top + boxes.height[box]] > before[top], box, column


def _runs(boxes: Boxes, has_edge: Tensor, box: Tensor, column: Tensor) -> Ranges:
    """Neighbouring columns with edges as one range. Columns are in order, box by box."""
    box, column = box[has_edge], column[has_edge]
    fresh = torch.ones_like(box, dtype=torch.bool)
    fresh[1:] = (box.diff() != 0) | (column.diff() != 1)
    last = torch.cat([fresh[1:], fresh[:1]])
    return boxes.owner[box[fresh]], (boxes.src[box] + column)[fresh], (boxes.src[box] + column)[last] + 1


def _union(parts: list[Ranges], width: int) -> Ranges:
    # ranges of a rank that touch or overlap become one
    rank, start, stop = (torch.cat(column) for column in zip(*parts, strict=True))
    order = (rank * width + start).argsort()
    rank, start = rank[order], start[order]
    end = (rank * width + stop[order]).cummax(0).values
    fresh = torch.ones_like(rank, dtype=torch.bool)
    fresh[1:] = (rank * width + start)[1:] > end[:-1]
    last = torch.cat([fresh[1:], fresh[:1]])
    return rank[fresh], start[fresh], end[last] - rank[last] * width


def _split_by_owner(rank: Tensor, start: Tensor, stop: Tensor, shares: Shares) -> Ranges:
    begins = shares.start.sort().values
    first = torch.searchsorted(begins, start, right=True) - 1
    part, number = ragged(torch.searchsorted(begins, stop) - first)
    edge, run = torch.cat([begins, begins.new_tensor([shares.num_tokens])]), first[part] + number
    return rank[part], torch.maximum(start[part], edge[run]), torch.minimum(stop[part], edge[run + 1])
