"""Subgraphs between some receivers and some senders, and the rows that travel between ranks for them.

A subgraph is an ordinary :class:`TokenGraph` over rows that a rank has: its own receivers, and senders that
are its own or arrived. A range of tokens keeps the structure of the rule (its first position is an offset),
other tokens are looked up in a table. The subgraph of an edge list is an edge list.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.distributed.halo_sets import halo
from gnn_attention.distributed.partition import Partition
from gnn_attention.graph import TokenGraph, memoized, text
from gnn_attention.graph.rules import Rule


@dataclass(frozen=True, eq=False)
class RowTransfer:
    """Rows that one rank sends to and receives from every rank, none to itself.

    ``rows``: indices among its own rows, those for rank 0 first; None: all rows, to one rank.
    """

    rows: Int[Tensor, " sent"] | None
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Subgraph:
    """The edges between the receivers ``dst`` and the senders ``src``, as a graph over their rows.

    ``dst_at`` and ``src_at`` are absolute positions where the graph's offsets do not give them, else None.
    """

    graph: TokenGraph
    dst: Int[Tensor, " dst"]
    src: Int[Tensor, " src"]
    dst_at: Int[Tensor, " dst"] | None
    src_at: Int[Tensor, " src"] | None

    @property
    def has_gaps(self) -> bool:
        """True if the positions of its rows must be looked up."""
        return self.dst_at is not None or self.src_at is not None


def subgraph(graph: TokenGraph, dst: Int[Tensor, " dst"], src: Int[Tensor, " src"]) -> Subgraph:
    """The subgraph between the receivers ``dst`` and the senders ``src`` (tokens of the graph, each once)."""
    row_of_dst, row_of_src = _range_or_table(dst), _range_or_table(src)
    name = f"{text.bracketed(graph.name)} between ranks"
    if graph._listed is not None:
        part = TokenGraph.from_distinct_edges(_edges_between(graph, dst, src), len(dst), len(src), name)
    else:
        rule: Rule = partial(_rule_of_rows, graph.rule, row_of_dst, row_of_src)
        part = TokenGraph(rule, len(dst), len(src), graph.heads, graph.batch, name)
    dst_offset, dst_at = _offset_or_positions(graph.dst_offset, row_of_dst)
    src_offset, src_at = _offset_or_positions(graph.src_offset, row_of_src)
    return Subgraph(replace(part, dst_offset=dst_offset, src_offset=src_offset), dst, src, dst_at, src_at)


def to_all_ranks(sizes: tuple[int, ...], rank: int, device: torch.device) -> RowTransfer:
    """The transfer of all own rows to every other rank."""
    send = tuple(0 if r == rank else sizes[rank] for r in range(len(sizes)))
    receive = tuple(0 if r == rank else size for r, size in enumerate(sizes))
    return RowTransfer(torch.arange(sizes[rank], device=device).repeat(len(sizes) - 1), send, receive)


def ring_step(sizes: tuple[int, ...], rank: int, step: int) -> RowTransfer:
    """A step of a ring: the block of ``rank - step`` goes to the next rank, the one before it arrives."""
    world = len(sizes)
    leaving, arriving = sizes[(rank - step) % world], sizes[(rank - step - 1) % world]
    send = tuple(leaving if r == (rank + 1) % world else 0 for r in range(world))
    receive = tuple(arriving if r == (rank - 1) % world else 0 for r in range(world))
    return RowTransfer(None, send, receive)


def rank_subgraphs(graph: TokenGraph, partition: Partition, rank: int, exchange: str) -> tuple[Subgraph, ...]:
    """The subgraphs of a rank's receivers, its own senders first, then those that arrive; cached.

    "halo" and "gather": all that arrive as one; "ring": those of each rank.
    """
    return memoized(_rank_subgraphs, graph, partition, rank, exchange)


def rank_rows(graph: TokenGraph, partition: Partition, rank: int) -> TokenGraph:
    """The receivers of a rank over all senders; cached."""
    return memoized(_rank_rows, graph, partition, rank)


def in_edges(graph: TokenGraph, partition: Partition, rank: int) -> Int[Tensor, "2 edges"]:
    """The edges whose receivers the rank owns, in the order and the numbers of the graph's ``edge_index``."""
    src, dst = rank_rows(graph, partition, rank).edge_index
    return torch.stack([src, partition.dst.tokens(rank)[dst]])


def edge_positions(graph: TokenGraph, partition: Partition, rank: int, part: Subgraph) -> Tensor:
    """Where the edges of a subgraph stand among the :func:`in_edges` of the rank."""
    src, dst = part.graph.edge_index
    return rank_rows(graph, partition, rank).positions_of(torch.stack([part.src[src], dst]))


def _rank_subgraphs(
    graph: TokenGraph, partition: Partition, rank: int, exchange: str
) -> tuple[Subgraph, ...]:
    own, senders, world = partition.dst.tokens(rank), partition.src, partition.world_size
    if exchange == "ring":
        return tuple(subgraph(graph, own, senders.tokens((rank - step) % world)) for step in range(world))
    if exchange == "gather":
        others = [senders.tokens(r) for r in range(world) if r != rank] or [senders.tokens(rank)[:0]]
    else:
        others = list(memoized(halo, graph, partition, rank))
    return subgraph(graph, own, senders.tokens(rank)), subgraph(graph, own, torch.cat(others))


def _rank_rows(graph: TokenGraph, partition: Partition, rank: int) -> TokenGraph:
    return subgraph(graph, partition.dst.tokens(rank), torch.arange(graph.num_src, device="cpu")).graph


def _range_or_table(tokens: Tensor) -> int | Tensor:
    if not len(tokens):
        return 0
    first = int(tokens[0])
    is_range = int(tokens[-1]) - first + 1 == len(tokens) and bool((tokens.diff() == 1).all())
    return first if is_range else tokens


def _offset_or_positions(offset: int, tokens: int | Tensor) -> tuple[int, Tensor | None]:
    return (offset + tokens, None) if isinstance(tokens, int) else (0, offset + tokens)


def _edges_between(graph: TokenGraph, dst: Tensor, src: Tensor) -> Tensor:
    # numbered by rows, in the order of the list; a token without a row is -1
    listed_src, listed_dst = graph.edge_index
    edges = torch.stack([_row_of(graph.num_src, src)[listed_src], _row_of(graph.num_dst, dst)[listed_dst]])
    return edges[:, (edges >= 0).all(0)]


def _row_of(count: int, tokens: Tensor) -> Tensor:
    rows = torch.full((count,), -1, dtype=torch.int64, device="cpu")
    return rows.index_copy_(0, tokens, torch.arange(len(tokens)))


def _rule_of_rows(rule: Rule, of_dst: Any, of_src: Any, b: Tensor, h: Tensor, dst: Any, src: Any) -> Tensor:
    return rule(b, h, _token(of_dst, dst), _token(of_src, src))


def _token(tokens: int | Tensor, row: Tensor) -> Tensor:
    return row + tokens if isinstance(tokens, int) else tokens.to(row.device)[row]
