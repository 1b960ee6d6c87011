"""What travels between ranks, and the graphs that are left to attend along: pieces between some receivers and some senders.

A piece is an ordinary :class:`TokenGraph` on rows that a rank holds: its own receivers, and senders that are its own or arrived.
Rows in a row keep the rule's structure (their first position is an offset); others are looked up in a table. A piece of a list is
a list.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.distributed.halo_sets import halo
from gnn_attention.distributed.partition import Partition
from gnn_attention.graph import TokenGraph, kept, text
from gnn_attention.graph.rules import Rule

__all__ = ["Piece", "Travel", "arriving", "handing_on", "in_edges", "own_and", "piece", "places", "rows_of", "to_everyone"]


@dataclass(frozen=True, eq=False)
class Travel:
    """Rows that one rank gives to and takes from every rank.

    ``give`` are places among the rows that it holds, those for rank 0 first, ``give_counts`` of them for each rank; None: all
    rows, to every rank that gets any. ``take_counts`` rows arrive from each. Nothing goes to the rank itself.
    """

    give: Int[Tensor, " given"] | None
    give_counts: tuple[int, ...]
    take_counts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Piece:
    """The edges between some receivers and some senders, as a graph on their rows.

    ``dst_at`` and ``src_at`` are their absolute positions where they are not what the graph's offsets say, else None.
    """

    graph: TokenGraph
    dst: Int[Tensor, " dst"]
    src: Int[Tensor, " src"]
    dst_at: Int[Tensor, " dst"] | None
    src_at: Int[Tensor, " src"] | None

    @property
    def is_placed(self) -> bool:
        """True if the positions of its rows must be looked up."""
        return self.dst_at is not None or self.src_at is not None


def piece(graph: TokenGraph, dst: Int[Tensor, " dst"], src: Int[Tensor, " src"]) -> Piece:
    """The piece of ``graph`` between the receivers ``dst`` and the senders ``src`` (tokens of the graph, each once).

    >>> from gnn_attention import patterns
    >>> piece(patterns.causal(6), torch.tensor([2, 4]), torch.tensor([4, 1, 2])).graph.mask().int().tolist()
    [[0, 1, 1], [1, 1, 1]]
    """
    of_dst, of_src = _first(dst), _first(src)
    name = f"{text.bracketed(graph.name)} between ranks"
    if graph._listed is not None:
        part = TokenGraph._of_distinct(_listed_between(graph, dst, src), len(dst), len(src), name)
    else:
        rule: Rule = partial(_at, graph.rule, of_dst, of_src)
        part = TokenGraph(rule, len(dst), len(src), graph.heads, graph.batch, name)
    offsets = [start + of if isinstance(of, int) else 0 for start, of in _sides(graph, of_dst, of_src)]
    at = [None if isinstance(of, int) else start + of for start, of in _sides(graph, of_dst, of_src)]
    return Piece(replace(part, dst_offset=offsets[0], src_offset=offsets[1]), dst, src, at[0], at[1])


def arriving(graph: TokenGraph, partition: Partition, rank: int) -> tuple[Tensor, ...]:
    """For each rank the senders that arrive from it in a halo exchange; worked out once."""
    found: tuple[Tensor, ...] = kept(halo, graph, partition, rank)
    return found


def to_everyone(sizes: tuple[int, ...], rank: int) -> Travel:
    """All own rows go to every other rank."""
    give = tuple(0 if r == rank else sizes[rank] for r in range(len(sizes)))
    take = tuple(0 if r == rank else size for r, size in enumerate(sizes))
    return Travel(None, give, take)


def handing_on(sizes: tuple[int, ...], rank: int, step: int) -> Travel:
    """Step ``step`` of a ring: the rows of ``rank - step``, which are held, go to the next rank, others come in their place."""
    world = len(sizes)
    held, coming = sizes[(rank - step) % world], sizes[(rank - step - 1) % world]
    give = tuple(held if r == (rank + 1) % world else 0 for r in range(world))
    take = tuple(coming if r == (rank - 1) % world else 0 for r in range(world))
    return Travel(None, give, take)


def own_and(graph: TokenGraph, partition: Partition, rank: int, exchange: str) -> tuple[Piece, ...]:
    """The pieces of a rank's receivers, in the order in which their senders are there; worked out once.

    "halo" and "gather": its own senders, then all that arrived; "ring": the senders of each rank, from its own backwards.
    """
    pieces: tuple[Piece, ...] = kept(_own_and, graph, partition, rank, exchange)
    return pieces


def rows_of(graph: TokenGraph, partition: Partition, rank: int) -> TokenGraph:
    """The receivers of a rank over all senders; worked out once."""
    rows: TokenGraph = kept(_rows_of, graph, partition, rank)
    return rows


def in_edges(graph: TokenGraph, partition: Partition, rank: int) -> Int[Tensor, "2 edges"]:
    """The edges whose receivers the rank owns, in the order of the graph's ``edge_index`` and with its numbers."""
    src, dst = rows_of(graph, partition, rank).edge_index
    return torch.stack([src, partition.dst.tokens(rank)[dst]])


def places(found: Piece, graph: TokenGraph, partition: Partition, rank: int) -> Int[Tensor, " edges"]:
    """Where the edges of a piece stand among the :func:`in_edges` of the rank."""
    rows = rows_of(graph, partition, rank)
    src, dst = found.graph.edge_index
    return rows.positions_of(torch.stack([found.src[src], dst]))


# -- helpers ----------------------------------------------------------------------------------------------------------


def _own_and(graph: TokenGraph, partition: Partition, rank: int, exchange: str) -> tuple[Piece, ...]:
    own, senders, world = partition.dst.tokens(rank), partition.src, partition.world_size
    if exchange == "ring":
        return tuple(piece(graph, own, senders.tokens((rank - step) % world)) for step in range(world))
    if exchange == "gather":
        others = [senders.tokens(r) for r in range(world) if r != rank] or [senders.tokens(rank)[:0]]
    else:
        others = list(arriving(graph, partition, rank))
    return piece(graph, own, senders.tokens(rank)), piece(graph, own, torch.cat(others))


def _rows_of(graph: TokenGraph, partition: Partition, rank: int) -> TokenGraph:
    return piece(graph, partition.dst.tokens(rank), torch.arange(graph.num_src, device="cpu")).graph


def _first(tokens: Tensor) -> int | Tensor:
    """The first of neighbours in ascending order, or the table of any others."""
    if not len(tokens):
        return 0
    first = int(tokens[0])
    in_a_row = int(tokens[-1]) - first + 1 == len(tokens) and bool((tokens.diff() == 1).all())
    return first if in_a_row else tokens


def _sides(graph: TokenGraph, of_dst: int | Tensor, of_src: int | Tensor) -> tuple[tuple[int, int | Tensor], ...]:
    return (graph.dst_offset, of_dst), (graph.src_offset, of_src)


def _listed_between(graph: TokenGraph, dst: Tensor, src: Tensor) -> Tensor:
    """The edges of a list between chosen ends, in their numbers, in the order of the list."""
    row = torch.full((graph.num_dst,), -1, dtype=torch.int64, device="cpu").index_copy_(0, dst, torch.arange(len(dst)))
    column = torch.full((graph.num_src,), -1, dtype=torch.int64, device="cpu").index_copy_(0, src, torch.arange(len(src)))
    edges = torch.stack([column[graph.edge_index[0]], row[graph.edge_index[1]]])
    return edges[:, (edges >= 0).all(0)]


def _at(inner: Rule, of_dst: int | Tensor, of_src: int | Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return inner(b, h, _number(of_dst, dst), _number(of_src, src))


def _number(of: int | Tensor, row: Tensor) -> Tensor:
    return row + of if isinstance(of, int) else of.to(row.device)[row]
