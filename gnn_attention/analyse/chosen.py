"""What was chosen: who by many, from how far, and how alike the choices of heads, layers and steps are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.derived import slices

EXAMPLES = 5  # tokens that a sentence names


@dataclass(frozen=True, eq=False)
class Choice:
    """A selection in numbers, over all heads and samples; ``str()`` says it in words.

    ``chosen[src]``: by how many receivers, ``possible[src]``: by how many it could have been,
    ``distance[d]``: how many edges have ``|dst - src| = d``.
    """

    name: str
    chosen: Int[Tensor, " src"]
    possible: Int[Tensor, " src"]
    distance: Int[Tensor, " distances"]

    def sinks(self, share: float = 0.5) -> Int[Tensor, " found"]:
        """The senders that ``share`` of the receivers chose, where at least half as many as for any could."""
        many = self.possible >= int(self.possible.max()) / 2
        return ((self.chosen >= share * self.possible) & many).nonzero().flatten()

    def within(self, share: float) -> int:
        """The distance within which this share of the edges lies, the smallest."""
        sums = self.distance.cumsum(0).double()
        return int((sums < share * sums[-1]).sum())

    def __str__(self) -> str:
        edges, possible = int(self.chosen.sum()), int(self.possible.sum())
        found = self.sinks().tolist()
        named = ", ".join(map(str, found[:EXAMPLES])) + (", ..." if len(found) > EXAMPLES else "")
        share = f"{edges} of {possible} edges ({edges / max(1, possible):.3g})"
        far = f"half within {self.within(0.5)} tokens, 90 % within {self.within(0.9)}"
        sinks = f"chosen by at least half: {named or 'none'}"
        return "\n  ".join([f"{self.name}: {share}", far, sinks])


def choice(graph: TokenGraph, among: TokenGraph) -> Choice:
    """What ``graph`` chose from the edges of ``among``: how far back, and which senders are sinks.

    ValueError for graphs of other tokens, or a graph without edges.

    >>> from gnn_attention import patterns
    >>> print(choice(patterns.window(64, 3) | patterns.sinks(64, 1), patterns.causal(64)))
    window(64, 3) | sinks(64, 1): 250 of 2080 edges (0.12)
      half within 1 tokens, 90 % within 38
      chosen by at least half: 0
    """
    for name, one in (("graph", graph), ("among", among)):
        checks.instance(name, one, TokenGraph)
    if graph.frame[:2] != among.frame[:2] or not graph.num_edges:
        raise ValueError(f"graph must have edges, and the tokens of {among!r}, got {graph!r}")
    src, dst = torch.cat(lists := _lists(graph), 1)
    distance = (dst + graph.dst_offset - src - graph.src_offset).abs()
    of_all = among.T.in_degree().view(-1, among.num_src)
    possible = of_all.sum(0) * max(1, len(lists) // len(of_all))
    return Choice(graph.name, src.bincount(minlength=graph.num_src), possible, distance.bincount())


def overlap(graphs: TokenGraph | Sequence[TokenGraph]) -> Float[Tensor, "graphs graphs"]:
    """Jaccard's index ``|A & B| / |A | B|`` of the edges of any two graphs; 1 for two without edges.

    ``graphs``: those of layers or steps, means over heads and samples where they differ by them; or one
    graph, whose heads are compared. :func:`diff` says of two what differs. ValueError for other tokens,
    heads or samples.

    >>> from gnn_attention import patterns
    >>> overlap([patterns.window(4, 1), patterns.window(4, 2)])[0, 1].item()  # 4 of 7
    0.5714285714285714
    """
    checks.check_order("graphs", graphs)
    listed = [graphs] if isinstance(graphs, TokenGraph) else list(graphs)
    for graph in listed:
        checks.instance("each of graphs", graph, TokenGraph)
    if not listed or len({graph.frame for graph in listed}) > 1:
        raise ValueError(f"graphs must have the same tokens, heads and samples, got {listed}")
    keys = [[e[1] * g.num_src + e[0] for e in _lists(g)] for g in listed]
    if isinstance(graphs, TokenGraph):
        heads = listed[0].heads or 1
        keys = [keys[0][head::heads] for head in range(heads)]
    table = torch.eye(len(keys), dtype=torch.float64)
    for i, j in combinations(range(len(keys)), 2):
        pairs = [_jaccard(a, b) for a, b in zip(keys[i], keys[j], strict=True)]
        table[i, j] = table[j, i] = sum(pairs) / len(pairs)
    return table


def _lists(graph: TokenGraph) -> list[Tensor]:
    return [graph.select(*at).edge_index for at in slices(graph)]


def _jaccard(first: Tensor, second: Tensor) -> float:
    common = int(torch.isin(first, second).sum())
    both = len(first) + len(second) - common
    return common / both if both else 1.0
