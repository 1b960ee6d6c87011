"""Represent one rank's part of a graph, and extract the subgraph between some tokens."""

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
    """The edges between tokens of ``rank``, with the ``whole`` graph and its ``partition``.

    :func:`gnn_attention.distributed.local` returns it. Pass it to layers and models instead of the
    whole graph, with the states of the rank's tokens, whose absolute positions are ``dst_at`` and
    ``src_at``. Attention fetches the senders of other ranks.
    """

    whole: Any = None
    partition: Any = None
    rank: int = 0
    group: Any = None
    dst_at: Any = None
    src_at: Any = None
    # run(call, backend=...) -> (out, lse) computes attention of these tokens on the whole graph.
    run: Any = None

    def positions(self, side: str, count: int, device: torch.device) -> Int[Tensor, " tokens"]:
        """Return the absolute positions of the rank's receivers (side "dst") or senders ("src")."""
        return {"dst": self.dst_at, "src": self.src_at}[side].to(device)  # type: ignore[no-any-return]

    def runner(self, backend: Any) -> Callable[[Any], Any]:
        """Return a function that computes attention on the whole graph."""
        return partial(self.run, backend=backend)

    def edges_on(self, device: torch.device) -> Int[Tensor, "2 edges"]:
        """Raise NotImplementedError, because edges from senders of other ranks are missing."""
        raise NotImplementedError(
            f"{self!r} lacks edges from other ranks: a per-edge bias, weights of edges and the "
            "message-passing path need one process, but a score_mod may add a scalar for each pair"
        )

    def _refuse_change(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise NotImplementedError, because only the whole graph can be changed."""
        raise NotImplementedError(f"{self!r} is fixed: change the whole graph and call distributed.local")

    __or__ = __and__ = __sub__ = __xor__ = __invert__ = __matmul__ = __pow__ = rows = select = _refuse_change
    T = property(_refuse_change)

    def __repr__(self) -> str:
        sizes = f"{self.num_src} local src -> {self.num_dst} local dst"
        return f"RankGraph({self.whole.name}: rank {self.rank} of {self.partition.world_size}, {sizes})"


def subgraph(
    graph: TokenGraph, dst: Int[Tensor, " dst"], src: Int[Tensor, " src"]
) -> tuple[TokenGraph, tuple[Tensor | None, Tensor | None]]:
    """Return the edges between receivers ``dst`` and senders ``src`` as a graph over their rows.

    Also return the absolute positions of receivers and senders, each None if an offset suffices. A
    rule is shifted for a range of tokens; otherwise it looks tokens up in a table. Edge lists stay
    lists.
    """
    dst_tokens, src_tokens = _start_or_tokens(dst), _start_or_tokens(src)
    name = f"{text.parenthesize(graph.name)} between ranks"
    if graph.edges.listed() is not None:
        edges = edge_list.edges_between(graph.edge_index, dst, src, graph.num_dst, graph.num_src)
        result = TokenGraph.from_edges(edges, len(dst), len(src), name=name, parallel="keep")
    else:
        rule = partial(map_tokens, graph.edges.contains, dst_tokens, src_tokens)
        result = TokenGraph(RuleEdges(rule), len(dst), len(src), graph.heads, graph.batch, name)
    dst_offset, dst_at = _offset_or_positions(graph.dst_offset, dst_tokens)
    src_offset, src_at = _offset_or_positions(graph.src_offset, src_tokens)
    return replace(result, dst_offset=dst_offset, src_offset=src_offset), (dst_at, src_at)


def _start_or_tokens(tokens: Tensor) -> int | Tensor:
    """Return the first token if the tokens are a range, or else the tokens."""
    if not len(tokens):
        return 0
    start = int(tokens[0])
    return start if int(tokens[-1]) - start + 1 == len(tokens) else tokens


def _offset_or_positions(offset: int, tokens: int | Tensor) -> tuple[int, Tensor | None]:
    return (offset + tokens, None) if isinstance(tokens, int) else (0, offset + tokens)
