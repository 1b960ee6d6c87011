"""What one rank sees of a graph whose tokens are spread over several: its own receivers and its own senders.

It is given to layers and models in the place of the whole graph, beside the states of the rank's own tokens. Attention over it
hears the whole: ``attend`` hands the call to ``run``, which fetches the senders of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import TokenGraph

__all__ = ["RankGraph"]


@dataclass(eq=False, repr=False)
class RankGraph(TokenGraph):
    """The own tokens of ``rank``, and behind them the ``whole`` graph with its ``partition``.

    As a graph it holds the edges between own tokens. ``dst_at`` and ``src_at`` are the absolute positions of the own tokens.
    Made by :func:`gnn_attention.distributed.local`.
    """

    whole: Any = None
    partition: Any = None
    rank: int = 0
    group: Any = None
    exchange: str = "auto"
    dst_at: Any = None
    src_at: Any = None
    run: Any = None  # (call, backend=...) -> (out, lse): how these tokens attend to the whole graph
    again: Callable[[TokenGraph], RankGraph] | None = None  # the same tokens' view of another graph

    def __post_init__(self) -> None:
        """Refuse a view whose graph was changed, and the whole not."""
        super().__post_init__()
        if self.whole is not None and (self.heads, self.batch) != (self.whole.heads, self.whole.batch):
            self._refused()

    def positions(self, side: str, count: int, device: torch.device) -> Int[Tensor, " tokens"]:
        """The absolute positions of the own receivers (side "dst") or senders ("src")."""
        at: Tensor = self.dst_at if side == "dst" else self.src_at
        return at.to(device)

    def runner(self, backend: Any) -> Callable[[Any], Any]:
        """Attention over the whole graph, which fetches the senders of other ranks."""
        return partial(self.run, backend=backend)

    def edges_on(self, device: torch.device) -> Int[Tensor, "2 edges"]:
        """Refused: the in-edges of own receivers come from senders of other ranks too."""
        raise NotImplementedError(
            f"edges of {self!r}: rank {self.rank} hears senders of other ranks, whose rows it does not hold. A per-edge bias "
            "goes through gnn_attention.distributed.attend; weights of edges and the walk (backend=None) need one process"
        )

    def _refused(self, *arguments: Any, **options: Any) -> NoReturn:
        """Refused: only the whole graph can be changed."""
        raise NotImplementedError(
            f"{self!r} is what rank {self.rank} sees of a graph: change the whole graph, then take "
            "gnn_attention.distributed.local of it"
        )

    __or__ = __and__ = __sub__ = __xor__ = __invert__ = __matmul__ = __pow__ = rows = select = _refused
    T = property(_refused)

    def __repr__(self) -> str:
        """The whole graph, and whose part of it."""
        own = f"{self.num_src} own src -> {self.num_dst} own dst"
        return f"RankGraph({self.whole.name}: rank {self.rank} of {self.partition.world_size}, {own})"
