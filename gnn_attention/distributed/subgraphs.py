"""Subgraphs between some receivers and some senders, as ordinary graphs over the rows that a rank has.

A range of tokens keeps the structure of the rule (its first position is an offset), other tokens are looked
up in a table. The subgraph of an edge list is an edge list.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import TokenGraph, text
from gnn_attention.graph.rules import Rule


@dataclass(frozen=True, eq=False)
class Subgraph:
    """The edges between some receivers and some senders, as a graph over their rows.

    ``dst_at`` and ``src_at`` are absolute positions where the graph's offsets do not give them, else None.
    """

    graph: TokenGraph
    dst_at: Int[Tensor, " dst"] | None
    src_at: Int[Tensor, " src"] | None

    @property
    def has_gaps(self) -> bool:
        """True if the positions of its rows must be looked up."""
        return self.dst_at is not None or self.src_at is not None


def subgraph(graph: TokenGraph, dst: Int[Tensor, " dst"], src: Int[Tensor, " src"]) -> Subgraph:
    """The subgraph between the receivers ``dst`` and the senders ``src``, tokens of the graph in order."""
    row_of_dst, row_of_src = _range_or_table(dst), _range_or_table(src)
    name = f"{text.bracketed(graph.name)} between ranks"
    if graph.listed_edges is not None:
        part = TokenGraph.from_distinct_edges(_edges_between(graph, dst, src), len(dst), len(src), name)
    else:
        rule: Rule = partial(_rule_of_rows, graph.rule, row_of_dst, row_of_src)
        part = TokenGraph(rule, len(dst), len(src), graph.heads, graph.batch, name)
    dst_offset, dst_at = _offset_or_positions(graph.dst_offset, row_of_dst)
    src_offset, src_at = _offset_or_positions(graph.src_offset, row_of_src)
    return Subgraph(replace(part, dst_offset=dst_offset, src_offset=src_offset), dst_at, src_at)


def _range_or_table(tokens: Tensor) -> int | Tensor:
    if not len(tokens):
        return 0
    first = int(tokens[0])
    return first if int(tokens[-1]) - first + 1 == len(tokens) else tokens


def _offset_or_positions(offset: int, tokens: int | Tensor) -> tuple[int, Tensor | None]:
    return (offset + tokens, None) if isinstance(tokens, int) else (0, offset + tokens)


def _edges_between(graph: TokenGraph, dst: Tensor, src: Tensor) -> Tensor:
    # numbered by rows, in the order of the list; a token without a row is -1
    listed_src, listed_dst = graph.edge_index
    edges = torch.stack([_row_of(graph.num_src, src)[listed_src], _row_of(graph.num_dst, dst)[listed_dst]])
    return edges[:, (edges >= 0).all(0)]


def _row_of(count: int, tokens: Tensor) -> Tensor:
    rows = torch.full((count,), -1, dtype=torch.int64, device="cpu")
    return rows.index_copy_(0, tokens, torch.arange(len(tokens), device="cpu"))


def _rule_of_rows(rule: Rule, of_dst: Any, of_src: Any, b: Tensor, h: Tensor, dst: Any, src: Any) -> Tensor:
    return rule(b, h, _token(of_dst, dst), _token(of_src, src))


def _token(tokens: int | Tensor, row: Tensor) -> Tensor:
    return row + tokens if isinstance(tokens, int) else tokens.to(row.device)[row]
