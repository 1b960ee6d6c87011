"""The last receiver of each sender, and the last sender of each receiver.

In decoding, a sender may be evicted after its last receiver, and a receiver needs all tokens up to
its last sender. Structured graphs are searched box by box (``regions.quadtree``), not pair by pair.
"""

from collections.abc import Iterator

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph.edges.edge_set import EdgeSet
from gnn_attention.graph.regions import quadtree
from gnn_attention.graph.regions.quadtree import Bands, Boxes, Piece, enumerate_groups
from gnn_attention.graph.token_graph import TokenGraph


def last_receivers(graph: TokenGraph) -> Int[Tensor, " src"]:
    """For each sender, return its last receiver over all samples and heads, or -1 if it has none.

    >>> from gnn_attention import patterns
    >>> last_receivers(patterns.window(6, 3) | patterns.sinks(6, 1)).tolist()
    [5, 3, 4, 5, 5, 5]
    """
    last_dst = torch.full((graph.num_src,), -1, dtype=torch.int64, device="cpu")
    edge_index = None if graph.edges.listed() is None else graph.edge_index
    edges = last_edges(graph.edges, quadtree.root(graph.shape4)) if edge_index is None else [edge_index]
    for src, dst in edges:
        last_dst.scatter_reduce_(0, src, dst, "amax")
    return last_dst


def last_senders(graph: TokenGraph) -> Int[Tensor, " dst"]:
    """For each receiver, return its last sender over all samples and heads, or -1 if it has none."""
    return last_receivers(graph.T)


def last_edges(edges: EdgeSet, boxes: Boxes) -> Iterator[tuple[Int[Tensor, " edges"], Int[Tensor, " edges"]]]:
    """Yield ``(src, dst)`` of edges inside ``boxes``, including each sender's last edge."""
    for piece in quadtree.decompose(edges, boxes):
        if piece.kind == quadtree.DIFFERENCE:
            yield _find_last_edges_in_diagonals(edges, piece)
        else:
            yield from map(_find_last_edges_in_bands, quadtree.bands_from_piece(edges, piece))


def _find_last_edges_in_bands(bands: Bands) -> tuple[Tensor, Tensor]:
    src, width, last_dst = bands.src, bands.width, bands.dst + bands.num_rows - 1
    # A band is skipped if the next one has the same senders and the same or a later last receiver.
    keep = torch.ones_like(src, dtype=torch.bool)
    keep[:-1] = (src[1:] != src[:-1]) | (width[1:] != width[:-1]) | (last_dst[1:] < last_dst[:-1])
    band, column = enumerate_groups(width[keep])
    return src[keep][band] + column, last_dst[keep][band]


def _find_last_edges_in_diagonals(edges: EdgeSet, piece: Piece) -> tuple[Tensor, Tensor]:
    """Find the last edge of each column. Column c meets diagonal ``width - 1 - c + r`` in row r."""
    is_edge, _, _ = quadtree.evaluate_lines(edges, piece)
    boxes = piece.boxes
    # For each diagonal, find the nearest diagonal with edges at or before it, even in an earlier box.
    last_diagonal = torch.where(is_edge, torch.arange(len(is_edge), device="cpu"), -1).cummax(0).values
    num_diagonals = boxes.height + boxes.width - 1
    box, column = enumerate_groups(boxes.width)
    top_diagonal = (num_diagonals.cumsum(0) - num_diagonals + boxes.width - 1)[box] - column
    row = last_diagonal[top_diagonal + boxes.height[box] - 1] - top_diagonal
    has_edge = row >= 0
    return (boxes.src[box] + column)[has_edge], (boxes.dst[box] + row)[has_edge]
