"""The last receiver of each sender, and the last sender of each receiver.

In decoding the first says when a sender may be evicted, the second how many tokens a receiver needs. Both are
read off the boxes of ``regions.quadtree``: no pairs of a structured graph are visited.
"""

from collections.abc import Iterator

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph.edges.edge_set import EdgeSet
from gnn_attention.graph.regions import quadtree
from gnn_attention.graph.regions.quadtree import (
    Bands,
    Boxes,
    bands_of,
    decompose,
    enumerate_groups,
    profile,
    root,
)
from gnn_attention.graph.token_graph import TokenGraph


def last_receivers(graph: TokenGraph) -> Int[Tensor, " src"]:
    """The last receiver of each sender over all samples and heads, from the graph's first; -1 for none.

    >>> from gnn_attention import patterns
    >>> last_receivers(patterns.window(6, 3) | patterns.sinks(6, 1)).tolist()
    [5, 3, 4, 5, 5, 5]
    """
    last = torch.full((graph.num_src,), -1, dtype=torch.int64, device="cpu")
    listed = None if graph.edges.listed() is None else graph.edge_index
    for src, dst in ends(graph.edges, root(graph.shape4)) if listed is None else [listed]:
        last.scatter_reduce_(0, src, dst, "amax")
    return last


def last_senders(graph: TokenGraph) -> Int[Tensor, " dst"]:
    """The last sender of each receiver over all samples and heads; -1 for none."""
    return last_receivers(graph.T)


def ends(edges: EdgeSet, boxes: Boxes) -> Iterator[tuple[Int[Tensor, " edges"], Int[Tensor, " edges"]]]:
    """Senders and receivers of edges in some boxes, among them for every sender its last receiver there."""
    for piece in decompose(edges, boxes):
        if piece.kind == quadtree.DIFFERENCE:
            yield _ends_of_diagonals(edges, piece)
        else:
            yield from map(_ends_of_rows, bands_of(edges, piece))


def _ends_of_rows(band: Bands) -> tuple[Tensor, Tensor]:
    """The senders of each band with its last receiver, unless the next band holds the same further down."""
    src, width, last = band.src, band.width, band.dst + band.rows - 1
    needed = torch.ones_like(src, dtype=torch.bool)
    needed[:-1] = (src[1:] != src[:-1]) | (width[1:] != width[:-1]) | (last[1:] < last[:-1])
    part, column = enumerate_groups(width[needed])
    return src[needed][part] + column, last[needed][part]


def _ends_of_diagonals(edges: EdgeSet, piece: quadtree.Piece) -> tuple[Tensor, Tensor]:
    """Column c crosses diagonal ``width - 1 - c`` of its box on row 0, and the ``height - 1`` that follow."""
    edge, _, _ = profile(edges, piece)
    boxes, place = piece.boxes, torch.arange(len(edge), device="cpu")
    # the last diagonal with edges up to each, in boxes before it too
    latest = torch.where(edge, place, -1).cummax(0).values
    length = boxes.height + boxes.width - 1
    box, column = enumerate_groups(boxes.width)
    top = (length.cumsum(0) - length + boxes.width - 1)[box] - column
    row = latest[top + boxes.height[box] - 1] - top
    attended = row >= 0
    return (boxes.src[box] + column)[attended], (boxes.dst[box] + row)[attended]
