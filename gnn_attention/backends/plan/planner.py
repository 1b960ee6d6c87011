"""Plan a graph: cut it into pieces, which the backends ``tiles``, ``rows`` and ``mixed`` run.

A full or causal graph is one rectangle, and so is each packed document; documents of equal length
are one piece. Any other graph is cut along tiles: into rows of tiles of the cheapest height, or
into well-filled tiles and a list of the edges in all other tiles.
"""

from dataclasses import replace

import torch

from gnn_attention.analyse.tile_counts import count_cells, split_tiles
from gnn_attention.backends import cost_model
from gnn_attention.backends.cost_model import Work
from gnn_attention.backends.plan.dense_blocks import build_rectangles, split_into_pieces
from gnn_attention.backends.plan.plan import Gathered, Packed, Piece, Plan, Rectangles, Strided, pack_plan
from gnn_attention.backends.plan.tile_masks import list_edges_in
from gnn_attention.edge_ops.edge_lists import edge_rows, sort_edges
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.kernel_formats import Varlen, to_varlen
from gnn_attention.graph.regions import enumerate_pairs
from gnn_attention.graph.tiling import Tiles

TILE_SIZE = 64  # A tile has this many tokens on each side.
# The measured cost of a cell if a rectangle joins this many rows of tiles, relative to one row.
CELL_COSTS = {1: 1.0, 2: 0.95, 4: 0.74, 8: 0.65}
MIN_LONG_RUN = 512  # A run of full tiles for at least this many senders may be its own rectangle.
MIN_FILL = 0.25  # A dense kernel is as fast as a list if this fraction of a tile's pairs are edges.


def tiles_plan(graph: TokenGraph) -> Plan:
    """Plan all edges of a graph without batch or heads as rectangles."""
    if not graph.num_dst or not graph.num_src:
        return Plan((), is_complete=False)
    if graph.is_full() or graph.is_causal():
        dst, src = Strided(0, 1, 1, graph.num_dst), Strided(0, 1, 1, graph.num_src)
        return _make_plan([Rectangles(dst, src, causal=not graph.is_full())], graph)
    documents = memoized(_find_documents, graph)
    if documents is None or _seconds(documents_work(documents)) > _seconds(runs_work(graph)):
        return _make_plan(_split_off_long_runs(graph, _choose_height(graph)[0]), graph)
    pieces: list[Piece] = []
    bounds = documents.cu_seqlens.long()
    for size in torch.unique(bounds.diff()).tolist():
        start = bounds[:-1][bounds.diff() == size]
        steps = start.diff()
        groups: Strided | Gathered = Gathered(start.unsqueeze(1) + torch.arange(size, device="cpu"))
        if len(start) == 1 or bool((steps == steps[0]).all()):
            groups = Strided(int(start[0]), int(steps[0]) if len(start) > 1 else size, len(start), size)
        pieces.append(Rectangles(groups, groups, causal=documents.window == (-1, 0) and size > 1))
    return _make_plan(pieces, graph)


def whole_rows_plan(graph: TokenGraph) -> Plan:
    """Plan all edges as rectangles, each of which has all in-edges of its receivers."""
    if not graph.num_dst or not graph.num_src or graph.is_full() or graph.is_causal():
        return tiles_plan(graph)
    return _make_plan(list(build_rectangles(graph, _choose_height(graph)[0])), graph)


def mixed_plan(graph: TokenGraph) -> Plan:
    """Plan the well-filled tiles as rectangles, and the edges of all other tiles as edge rows."""
    if not graph.num_dst or not graph.num_src:
        return Plan((), is_complete=False)
    dense, sparse = split_tiles(graph, TILE_SIZE, MIN_FILL)
    pieces = _split_off_long_runs(graph, dense)
    src, dst = list_edges_in(graph, sparse)
    if len(src):
        rows = sort_edges(src, dst, graph.num_src, graph.num_dst)
        pieces.append(replace(rows, is_first=not pieces))
    return _make_plan(pieces, graph)


def rows_plan(graph: TokenGraph) -> Plan:
    return Plan((edge_rows(graph, torch.device("cpu")),), is_complete=True)


PLANS = {"tiles": tiles_plan, "whole rows": whole_rows_plan, "mixed": mixed_plan, "rows": rows_plan}


def packed_plan(graph: TokenGraph, kind: str, device: torch.device) -> Packed:
    """Return the plan of this kind, packed, with its tensors on a device."""
    tensors, metadata = pack_plan(PLANS[kind](graph))
    return [x.to(device) for x in tensors], metadata


def _make_plan(pieces: list[Piece], graph: TokenGraph) -> Plan:
    first_pieces = [piece for piece in pieces if piece.is_first]
    rectangles = [piece for piece in first_pieces if isinstance(piece, Rectangles)]
    # Edge rows cover all receivers.
    has_edge_rows = len(first_pieces) > len(rectangles)
    num_receivers = sum(piece.dst.count * piece.dst.size for piece in rectangles)
    return Plan(tuple(pieces), is_complete=has_edge_rows or num_receivers == graph.num_dst)


def _split_off_long_runs(graph: TokenGraph, runs: Tiles) -> list[Piece]:
    """Build rectangles, and separate long full runs from the partial tiles of the same row.

    Otherwise masks would be as long as rows: in a nearly causal graph they would cover half of all pairs.
    """
    in_partial_row = torch.isin(runs.row, runs.row[~runs.full])
    is_long = runs.full & ((runs.stop - runs.first) * runs.block >= MIN_LONG_RUN) & in_partial_row
    in_long_row = torch.isin(runs.row, runs.row[is_long])
    pieces = build_rectangles(graph, runs.at(~in_long_row)) + build_rectangles(graph, runs.at(is_long))
    remaining_pieces = build_rectangles(graph, runs.at(in_long_row & ~is_long))
    return [*pieces, *(replace(piece, is_first=False) for piece in remaining_pieces)]


def packing(graph: TokenGraph) -> Varlen | None:
    """Return the packed documents of a graph, which share one window, or None for any other graph.

    >>> from gnn_attention import patterns
    >>> packing(patterns.documents([2, 3])).cu_seqlens.tolist()
    [0, 2, 5]
    """
    is_square = graph.num_dst == graph.num_src > 0
    if graph.edges.listed() is not None or not is_square or graph.has_empty_rows:
        return None
    try:
        return to_varlen(graph)
    except ValueError:
        return None


def _find_documents(graph: TokenGraph) -> Varlen | None:
    """Return packed documents that are all causal or all full, or None for a list or other graph.

    Two cheap tests exclude most other graphs. Sampled receivers must attend to themselves and to
    consecutive senders. In-degrees must count up from 1 in each document, or all equal its length.
    """
    if graph.edges.listed() is not None or graph.num_dst != graph.num_src:
        return None
    num_rows = min(64, max(1, 2**18 // graph.num_src), graph.num_dst)
    dst = torch.linspace(0, graph.num_dst - 1, num_rows, device="cpu").round().long().unsqueeze(1)
    src = torch.arange(graph.num_src, device="cpu")
    zero = torch.zeros(1, dtype=torch.int64, device="cpu")
    is_edge = enumerate_pairs.evaluate(graph.edges.contains, repr(graph), zero, zero, dst, src)
    is_edge = is_edge.expand(num_rows, len(src))
    num_intervals = is_edge[:, :1].sum(1) + (is_edge[:, 1:] & ~is_edge[:, :-1]).sum(1)
    if not bool((num_intervals == 1).all() & is_edge.gather(1, dst).all()):
        return None
    degree = graph.in_degree()
    run_degree, count = torch.unique_consecutive(degree, return_counts=True)
    may_be_causal = bool(((degree[1:] == 1) | (degree[1:] == degree[:-1] + 1)).all())
    may_be_full = bool((run_degree > 0).all() & (count % run_degree.clamp(min=1) == 0).all())
    documents = memoized(packing, graph) if may_be_causal or may_be_full else None
    return documents if documents is not None and documents.window in ((-1, 0), (-1, -1)) else None


def count_work(graph: TokenGraph) -> Work:
    """Count what :func:`tiles_plan` visits on a graph that is neither full nor causal."""
    documents = memoized(_find_documents, graph)
    work = runs_work(graph)
    return work if documents is None else min(work, documents_work(documents), key=_seconds)


def runs_work(graph: TokenGraph) -> Work:
    runs, height, num_cells = _choose_height(graph)
    num_calls, num_rectangles = len(split_into_pieces(graph, runs)), len(torch.unique(runs.row))
    return Work(num_calls, num_rectangles, num_cells, num_cells * CELL_COSTS[height])


def documents_work(documents: Varlen) -> Work:
    length = documents.cu_seqlens.long().diff()
    # The kernel computes 32 receivers at a time, and visits about half of a long causal document.
    height = -(-length // 32) * 32
    num_cells = (height * length).double()
    if documents.window == (-1, 0):
        num_cells *= torch.where(length >= 512, 0.6, 1.0)
    cost = torch.where(length >= 512, CELL_COSTS[8], 1.0)
    return Work(len(torch.unique(length)), len(length), int(num_cells.sum()), float((num_cells * cost).sum()))


def _choose_height(graph: TokenGraph) -> tuple[Tiles, int, int]:
    """Return the runs of tiles at the cheapest height, this height in tiles, and the number of cells."""
    runs, _ = split_tiles(graph, TILE_SIZE, 0.0)
    num_cells = {height: count_cells(runs, height) for height in CELL_COSTS}
    height = min(CELL_COSTS, key=lambda height: num_cells[height] * CELL_COSTS[height])
    joined_runs = runs if height == 1 else split_tiles(graph, TILE_SIZE * height, 0.0)[0]
    return joined_runs, height, num_cells[height]


def _seconds(work: Work) -> float:
    return cost_model.costs().seconds(work, heads=8)
