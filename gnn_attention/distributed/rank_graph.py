"""One rank's part of a graph whose tokens are spread over several: its own receivers and its own senders."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import TokenGraph


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.whole is not None and (self.heads, self.batch) != (self.whole.heads, self.whole.batch):
            self._cannot_change()

    @property
    def share(self) -> tuple[TokenGraph, Any, int]:
        """The whole graph, its partition and this rank."""
        return self.whole, self.partition, self.rank

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
