"""Subgraphs between some receivers and some senders, as ordinary graphs over the rows that a rank has.

A range of tokens keeps the structure of the rule (its first position is an offset), other tokens are looked
up in a table. The subgraph of an edge list is an edge list.
"""

from dataclasses import dataclass, replace
from functools import partial

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import TokenGraph, edge_list, text
from gnn_attention.graph.rules import Rule, of_tokens


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
        edges = edge_list.between(graph.edge_index, dst, src, graph.num_dst, graph.num_src)
        part = TokenGraph.from_distinct_edges(edges, len(dst), len(src), name)
    else:
        rule: Rule = partial(of_tokens, graph.rule, row_of_dst, row_of_src)
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
