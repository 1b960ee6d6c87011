"""One rank's part of a graph whose tokens are spread over several, and the graph between some tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import TokenGraph, edge_list, text
from gnn_attention.graph.edges import RuleEdges
from gnn_attention.graph.rules import map_tokens


@dataclass(eq=False, repr=False)
class RankGraph(TokenGraph):
    """The own tokens of ``rank``, with the ``whole`` graph and its ``partition``.

    Made by :func:`gnn_attention.distributed.local`. Layers and models take it in the place of the whole
    graph, with the states of the own tokens, whose absolute positions are ``dst_at`` and ``src_at``. As a
    graph it has the edges between own tokens; attention fetches the senders of other ranks.
    """

    whole: Any = None
    partition: Any = None
    rank: int = 0
    group: Any = None
    dst_at: Any = None
    src_at: Any = None
    # (call, backend=...) -> (out, lse): attention of these tokens along the whole graph
    run: Any = None

    def positions(self, side: str, count: int, device: torch.device) -> Int[Tensor, " tokens"]:
        """The absolute positions of the own receivers (side "dst") or senders ("src")."""
        return {"dst": self.dst_at, "src": self.src_at}[side].to(device)  # type: ignore[no-any-return]

    def runner(self, backend: Any) -> Callable[[Any], Any]:
        """Attention over the whole graph, which fetches the senders of other ranks."""
        return partial(self.run, backend=backend)

    def edges_on(self, device: torch.device) -> Int[Tensor, "2 edges"]:
        """NotImplementedError: own receivers have in-edges from senders of other ranks too."""
        reason = f"edges of {self!r} come from other ranks too"
        advice = "a per-edge bias, weights of edges and the message-passing path need one process"
        raise NotImplementedError(f"{reason}: {advice}, but a score_mod may add a number for each pair")

    def _cannot_change(self, *arguments: Any, **options: Any) -> NoReturn:
        """NotImplementedError: only the whole graph can be changed."""
        advice = "change the whole graph, then take gnn_attention.distributed.local of it"
        raise NotImplementedError(f"{self!r} is rank {self.rank}'s part of a graph: {advice}")

    __or__ = __and__ = __sub__ = __xor__ = __invert__ = __matmul__ = __pow__ = rows = select = _cannot_change
    T = property(_cannot_change)

    def __repr__(self) -> str:
        own = f"{self.num_src} own src -> {self.num_dst} own dst"
        return f"RankGraph({self.whole.name}: rank {self.rank} of {self.partition.world_size}, {own})"


def subgraph(
    graph: TokenGraph, dst: Int[Tensor, " dst"], src: Int[Tensor, " src"]
) -> tuple[TokenGraph, tuple[Tensor | None, Tensor | None]]:
    """The edges between the receivers ``dst`` and the senders ``src``, as a graph over their rows.

    Then the absolute positions of both, where the graph's offsets do not give them. A range of tokens keeps
    the structure of the rule; other tokens are looked up in a table. That of an edge list is an edge list.
    """
    row_of_dst, row_of_src = _range_or_table(dst), _range_or_table(src)
    name = f"{text.parenthesize(graph.name)} between ranks"
    if graph.edges.listed() is not None:
        edges = edge_list.edges_between(graph.edge_index, dst, src, graph.num_dst, graph.num_src)
        part = TokenGraph.from_edges(edges, len(dst), len(src), name=name, parallel="keep")
    else:
        rule = partial(map_tokens, graph.edges.contains, row_of_dst, row_of_src)
        part = TokenGraph(RuleEdges(rule), len(dst), len(src), graph.heads, graph.batch, name)
    dst_offset, dst_at = _offset_or_positions(graph.dst_offset, row_of_dst)
    src_offset, src_at = _offset_or_positions(graph.src_offset, row_of_src)
    return replace(part, dst_offset=dst_offset, src_offset=src_offset), (dst_at, src_at)


def _range_or_table(tokens: Tensor) -> int | Tensor:
    if not len(tokens):
        return 0
    first = int(tokens[0])
    return first if int(tokens[-1]) - first + 1 == len(tokens) else tokens


def _offset_or_positions(offset: int, tokens: int | Tensor) -> tuple[int, Tensor | None]:
    return (offset + tokens, None) if isinstance(tokens, int) else (0, offset + tokens)
