"""From a graph to a plan of pieces: what the backends ``tiles``, ``rows`` and ``mixed`` run.

A full or causal graph is one rectangle; packed documents are one causal (or full) rectangle each, those of
one length together; any other graph is cut along its tiles, as high as is cheapest, or into well filled tiles
and the edges of all others.
"""

from dataclasses import replace

import torch

from gnn_attention.backends import cost_model
from gnn_attention.backends.cost_model import Work
from gnn_attention.backends.plan.csr import edges_of, sorted_edges
from gnn_attention.backends.plan.dense_blocks import by_piece, rectangles
from gnn_attention.backends.plan.plan import (
    EdgeRows,
    Gathered,
    Packed,
    Piece,
    Plan,
    Rectangles,
    Strided,
    pack_plan,
    unpack_plan,
)
from gnn_attention.backends.plan.tile_masks import cells_at, left_over, split_tiles
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.kernel_formats import Varlen, to_varlen
from gnn_attention.graph.regions import enumerate_pairs
from gnn_attention.graph.tiling import Tiles

BLOCK = 64  # tokens on the side of a tile
# rows of tiles taken together: what a cell costs then, measured
HEIGHTS = {1: 1.0, 2: 0.95, 4: 0.74, 8: 0.65}
LONG = 512  # tokens of full tiles in a row from which they are a rectangle, merged with the rest of the row
LEAST_FILL = 0.25  # of a tile that a dense kernel takes at the price of its edges


def tiles_plan(graph: TokenGraph) -> Plan:
    """All edges of a plain graph in rectangles."""
    if not graph.num_dst or not graph.num_src:
        return Plan((), complete=False)
    if graph.is_full() or graph.is_causal():
        whole = Strided(0, 1, 1, graph.num_dst), Strided(0, 1, 1, graph.num_src)
        return _plan([Rectangles(*whole, causal=not graph.is_full())], graph)
    documents = memoized(_documents, graph)
    if documents is None or _seconds(documents_work(documents)) > _seconds(runs_work(graph)):
        return _plan(_with_long_runs(graph, _cheapest(graph)[0]), graph)
    pieces: list[Piece] = []
    bounds = documents.cu_seqlens.long()
    for size in torch.unique(bounds.diff()).tolist():
        start = bounds[:-1][bounds.diff() == size]
        steps = start.diff()
        groups: Strided | Gathered = Gathered(start.unsqueeze(1) + torch.arange(size, device="cpu"))
        if len(start) == 1 or bool((steps == steps[0]).all()):
            groups = Strided(int(start[0]), int(steps[0]) if len(start) > 1 else size, len(start), size)
        pieces.append(Rectangles(groups, groups, causal=documents.window == (-1, 0) and size > 1))
    return _plan(pieces, graph)


def whole_rows_plan(graph: TokenGraph) -> Plan:
    """As :func:`tiles_plan`, with all in-edges of a receiver in one rectangle: all its logits at once."""
    if not graph.num_dst or not graph.num_src or graph.is_full() or graph.is_causal():
        return tiles_plan(graph)
    return _plan(list(rectangles(graph, _cheapest(graph)[0])), graph)


def mixed_plan(graph: TokenGraph) -> Plan:
    """The well filled tiles of a plain graph in rectangles, the edges of all others as a list."""
    if not graph.num_dst or not graph.num_src:
        return Plan((), complete=False)
    dense, sparse = split_tiles(graph, BLOCK, LEAST_FILL)
    pieces = _with_long_runs(graph, dense)
    rest = left_over(graph, sparse)
    if rest.shape[1]:
        listed = sorted_edges(rest[0], rest[1], graph.num_src, graph.num_dst)
        pieces.append(replace(listed, fresh=not pieces))
    return _plan(pieces, graph)


def rows_plan(graph: TokenGraph) -> Plan:
    return Plan((edges_of(graph, torch.device("cpu")),), complete=True)


PLANS = {"tiles": tiles_plan, "whole rows": whole_rows_plan, "mixed": mixed_plan, "rows": rows_plan}


def packed_plan(graph: TokenGraph, kind: str, device: torch.device) -> Packed:
    """The plan of this kind, on a device."""
    tensors, numbers = pack_plan(PLANS[kind](graph))
    return [x.to(device) for x in tensors], numbers


def plan_on(graph: TokenGraph, kind: str, device: torch.device) -> Plan:
    return unpack_plan(*memoized(packed_plan, graph, kind, device))


def _plan(pieces: list[Piece], graph: TokenGraph) -> Plan:
    fresh = [piece for piece in pieces if piece.fresh]
    covered = sum(piece.dst.count * piece.dst.size for piece in fresh if isinstance(piece, Rectangles))
    has_list = any(isinstance(piece, EdgeRows) for piece in fresh)
    return Plan(tuple(pieces), complete=covered == graph.num_dst or has_list)


def _with_long_runs(graph: TokenGraph, runs: Tiles) -> list[Piece]:
    """Rectangles, with long full runs in one of their own where a row also has partial tiles."""
    # so no mask is as long as a row: those of a nearly causal graph would be half of tokens x tokens
    of_masks = torch.isin(runs.row, runs.row[~runs.full])
    long = runs.full & ((runs.stop - runs.first) * runs.block >= LONG) & of_masks
    same_rows = torch.isin(runs.row, runs.row[long])
    pieces: list[Piece] = [*rectangles(graph, runs.at(~same_rows)), *rectangles(graph, runs.at(long))]
    others = rectangles(graph, runs.at(same_rows & ~long))
    return [*pieces, *(replace(piece, fresh=False) for piece in others)]


def packing(graph: TokenGraph) -> Varlen | None:
    """The graph as packed documents with one window for all of them, or None.

    >>> from gnn_attention import patterns
    >>> packing(patterns.documents([2, 3])).cu_seqlens.tolist()
    [0, 2, 5]
    """
    square = graph.num_dst == graph.num_src > 0
    if graph.edges.stored_list() is not None or not square or graph.has_empty_rows:
        return None
    try:
        return to_varlen(graph)
    except ValueError:
        return None


def _documents(graph: TokenGraph) -> Varlen | None:
    """Packed documents, causal or full inside; None for a list of edges, whose tiles are as good.

    Other graphs are told apart cheaply: first by a few receivers, each of which attends to successive
    senders, itself among these; then by degrees, which count 1, 2, 3, ... through each document, or are its
    length for all of its tokens.
    """
    if graph.edges.stored_list() is not None or graph.num_dst != graph.num_src:
        return None
    number = min(64, max(1, 2**18 // graph.num_src), graph.num_dst)
    dst = torch.linspace(0, graph.num_dst - 1, number, device="cpu").round().long().unsqueeze(1)
    zero, src = torch.zeros(1, dtype=torch.int64, device="cpu"), torch.arange(graph.num_src, device="cpu")
    edge = enumerate_pairs.evaluate(graph.edges.contains, repr(graph), zero, zero, dst, src).expand(
        number, len(src)
    )
    starts = edge[:, :1].sum(1) + (edge[:, 1:] & ~edge[:, :-1]).sum(1)
    if not bool((starts == 1).all() & edge.gather(1, dst).all()):
        return None
    degree = graph.in_degree()
    value, times = torch.unique_consecutive(degree, return_counts=True)
    causal = bool(((degree[1:] == 1) | (degree[1:] == degree[:-1] + 1)).all())
    full = bool((value > 0).all() & (times % value.clamp(min=1) == 0).all())
    found = memoized(packing, graph) if causal or full else None
    return found if found is not None and found.window in ((-1, 0), (-1, -1)) else None


def counted_work(graph: TokenGraph) -> Work:
    """What :func:`tiles_plan` visits on a plain graph that is neither full nor causal."""
    documents = memoized(_documents, graph)
    by_tiles = runs_work(graph)
    return by_tiles if documents is None else min(by_tiles, documents_work(documents), key=_seconds)


def runs_work(graph: TokenGraph) -> Work:
    runs, times, cells = _cheapest(graph)
    rows, calls = len(torch.unique(runs.row)), len(by_piece(graph, runs))
    return Work(calls, rows, cells, cells * HEIGHTS[times])


def documents_work(documents: Varlen) -> Work:
    length = documents.cu_seqlens.long().diff()
    # the kernel takes receivers 32 at a time, and of a long causal document about half of the pairs
    high = -(-length // 32) * 32
    cells = (high * length).double()
    if documents.window == (-1, 0):
        cells *= torch.where(length >= 512, 0.6, 1.0)
    weight = torch.where(length >= 512, HEIGHTS[8], 1.0)
    calls = len(torch.unique(length))
    return Work(calls, len(length), int(cells.sum()), float((cells * weight).sum()))


def _cheapest(graph: TokenGraph) -> tuple[Tiles, int, int]:
    """The runs of tiles at the cheapest height, that height in tiles, and the pairs that they visit."""
    runs, _ = split_tiles(graph, BLOCK, 0.0)
    cells = {times: cells_at(runs, times) for times in HEIGHTS}
    times = min(HEIGHTS, key=lambda times: cells[times] * HEIGHTS[times])
    return (runs if times == 1 else split_tiles(graph, BLOCK * times, 0.0)[0]), times, cells[times]


def _seconds(work: Work) -> float:
    return cost_model.costs().seconds(work, heads=8)
