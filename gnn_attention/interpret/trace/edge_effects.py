"""Effects of edges beside the edges, and the graphs of those that matter, for ``use_graph``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.edges import ChosenEdges

KINDS = ("cut", "mute", "slope")


class Effect(NamedTuple):
    """What the metric changes by without one edge of one head."""

    layer: int
    head: int
    src: int
    dst: int
    change: float


@dataclass(frozen=True, eq=False)
class PrunedGraphs:
    """The graph of each layer, one for each of its heads: what ``use_graph(model, pruned)`` takes.

    ``share`` is that of pairs of head and edge which are left.
    """

    graphs: Mapping[int, TokenGraph]
    count: int
    share: float

    def __repr__(self) -> str:
        counts = f"layers: {len(self.graphs)}, pairs of head and edge: {self.count:,}"
        return f"PrunedGraphs({counts}, {self.share:.1%})"

    def __call__(self, layer: int, head: int, length: int) -> TokenGraph | None:
        """The graph of all heads of a layer, the same for each ``head``; None: the model's own."""
        return self.graphs.get(layer)


@dataclass(frozen=True, eq=False)
class Attribution:
    """By layer: its edges, and the change of the metric if one is cut or muted, and its slope."""

    graphs: Mapping[int, TokenGraph]
    effects: Mapping[str, Mapping[int, Float[Tensor, "heads edges"]]]

    def __repr__(self) -> str:
        pairs = sum(scores.numel() for scores in next(iter(self.effects.values())).values())
        counts = f"layers: {len(self.graphs)}, pairs of head and edge: {pairs:,}"
        return f"Attribution({counts}, effects: {', '.join(self.effects)})"

    @property
    def layers(self) -> list[int]:
        return list(self.graphs)

    def edge_index(self, layer: int) -> Int[Tensor, "2 edges"]:
        """The edges of a layer, by receiver, then sender; row 0 senders."""
        return self.graphs[self._known(layer)].edge_index

    def scores(self, layer: int, without: str = "cut") -> Float[Tensor, "heads edges"]:
        """The change of the metric without an edge, beside :meth:`edge_index`: "cut", "mute" or "slope"."""
        return self.effects[checks.choice("without", without, KINDS)][self._known(layer)]

    def top(self, k: int, without: str = "cut") -> list[Effect]:
        """The ``k`` effects of the largest size, over all layers and heads, the largest first."""
        effects: list[Effect] = []
        for layer in self.layers:
            scores, pairs = self.scores(layer, without), self.edge_index(layer)
            best = scores.abs().flatten().topk(min(checks.size("k", k), scores.numel())).indices
            for place in best.tolist():
                head, edge = divmod(place, scores.shape[1])
                src, dst = pairs[:, edge].tolist()
                effects.append(Effect(layer, head, src, dst, float(scores[head, edge])))
        return sorted(effects, key=lambda effect: -abs(effect.change))[:k]

    def keep(self, amount: float, at_least: int = 1, sinks: int = 1) -> PrunedGraphs:
        """The graphs of the edges whose slopes are largest in size, for ``use_graph``.

        The slope holds for many cuts at once.

        Args:
            amount: a share of all pairs of head and edge (a float up to 1.0), or their count (an int). Equal
                effects that would exceed it are left out together.
            at_least: edges that each receiver has in each head, sinks among them: its own largest effects.
            sinks: first tokens that all receivers keep. These and at_least count towards the amount, and stay
                where they alone exceed it (short texts).

        >>> from gnn_attention import patterns
        >>> a = Attribution({0: patterns.causal(3)}, {"slope": {0: torch.tensor([[0, 1, 9, 1, 5, -2.0]])}})
        >>> pruned = a.keep(4, at_least=0)
        >>> a
        Attribution(layers: 1, pairs of head and edge: 6, effects: slope)
        >>> pruned
        PrunedGraphs(layers: 1, pairs of head and edge: 4, 66.7%)
        >>> pruned(0, 0, 3).mask().int().tolist()
        [[[1, 0, 0], [1, 1, 0], [1, 0, 0]]]
        """
        pairs = sum(self.scores(layer, "slope").numel() for layer in self.layers)
        is_share = isinstance(amount, float) and 0 <= amount <= 1
        is_count = isinstance(amount, int) and not isinstance(amount, bool) and 0 <= amount <= pairs
        if not (is_share or is_count):
            raise ValueError(
                f"amount must be a share of all pairs (0.0 .. 1.0) or their count (an int up to {pairs:,}), "
                f"got {checks.described(amount)}"
            )
        checks.size("at_least", at_least)
        checks.size("sinks", sinks)
        sizes = {n: self._sizes(n, at_least, sinks) for n in self.layers}
        every = torch.cat([size.flatten() for size in sizes.values()])
        left_out = pairs - (round(amount * pairs) if is_share else int(amount))
        largest_left_out = float(every.kthvalue(left_out).values) if left_out else -1.0
        kept = {n: (size > largest_left_out) | size.isinf() for n, size in sizes.items()}
        count = sum(int(chosen.count_nonzero()) for chosen in kept.values())
        graphs = {n: self._graph(n, chosen) for n, chosen in kept.items()}
        return PrunedGraphs(graphs, count, count / pairs)

    def _sizes(self, layer: int, at_least: int, sinks: int) -> Float[Tensor, "heads edges"]:
        """The sizes of effects; infinite where an edge must stay."""
        graph = self.graphs[layer]
        src, dst = graph.edge_index
        sizes = self.scores(layer, "slope").float().abs()
        sizes[:, src < sinks] = torch.inf
        for size in sizes if at_least else ():
            table = size.new_full((graph.num_dst, graph.num_src), -1.0)
            table[dst, src] = size
            best = table.topk(min(at_least, graph.num_src), dim=1).indices
            table.scatter_(1, best, torch.inf)
            size.copy_(table[dst, src])
        return sizes

    def _graph(self, layer: int, chosen: Bool[Tensor, "heads edges"]) -> TokenGraph:
        graph = self.graphs[layer]
        (src, dst), (head, edge) = graph.edge_index, chosen.nonzero().unbind(1)
        # Rows of senders, which no backend has to look for in a table.
        row, shape = head * graph.num_dst + dst[edge], (1, len(chosen), graph.num_dst, graph.num_src)
        edges = ChosenEdges.of_rows(row, src[edge], shape)
        return TokenGraph(edges, *shape[2:], heads=len(chosen), name="pruned")

    def _known(self, layer: int) -> int:
        if layer not in self.graphs:
            raise ValueError(f"layer must be one of {self.layers}, got {checks.quoted(layer)}")
        return layer
