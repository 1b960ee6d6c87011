"""Describe a selection by its senders, its distances, and its overlap with other selections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.derived import slices

# The text of a choice lists at most this many tokens.
MAX_EXAMPLES = 5


@dataclass(frozen=True, eq=False)
class Choice:
    """A selection in numbers, summed over all heads and samples; ``str()`` describes it in words.

    ``chosen[src]`` counts the receivers that chose ``src``, ``possible[src]`` the receivers that
    could have chosen ``src``, and ``distance[d]`` the edges with ``|dst - src| = d``.
    """

    name: str
    chosen: Int[Tensor, " src"]
    possible: Int[Tensor, " src"]
    distance: Int[Tensor, " distances"]

    def sinks(self, share: float = 0.5) -> Int[Tensor, " sinks"]:
        """Return the senders, except rare ones, that at least this share of possible receivers chose."""
        # A sender is rare if its entry of ``possible`` is less than half of the largest entry.
        is_common = self.possible >= int(self.possible.max()) / 2
        return ((self.chosen >= share * self.possible) & is_common).nonzero().flatten()

    def within(self, share: float) -> int:
        """Return the smallest d such that at least this share of edges has a distance of d or less."""
        num_within = self.distance.cumsum(0).double()
        return int((num_within < share * num_within[-1]).sum())

    def __str__(self) -> str:
        num_edges, num_possible = int(self.chosen.sum()), int(self.possible.sum())
        sinks = self.sinks().tolist()
        examples = ", ".join(map(str, sinks[:MAX_EXAMPLES])) + (", ..." if len(sinks) > MAX_EXAMPLES else "")
        edges = f"{num_edges} of {num_possible} edges ({num_edges / max(1, num_possible):.3g})"
        distances = f"half within {self.within(0.5)} tokens, 90 % within {self.within(0.9)}"
        return f"{self.name}: {edges}\n  {distances}\n  chosen by at least half: {examples or 'none'}"


def choice(graph: TokenGraph, among: TokenGraph) -> Choice:
    """Describe the edges that ``graph`` chose from ``among``: their number, distances and sinks.

    ValueError if the graphs have different tokens, or if ``graph`` has no edges.

    >>> from gnn_attention import patterns
    >>> print(choice(patterns.window(64, 3) | patterns.sinks(64, 1), patterns.causal(64)))
    window(64, 3) | sinks(64, 1): 250 of 2080 edges (0.12)
      half within 1 tokens, 90 % within 38
      chosen by at least half: 0
    """
    checks.instance("graph", graph, TokenGraph)
    checks.instance("among", among, TokenGraph)
    if graph.frame[:2] != among.frame[:2] or not graph.num_edges:
        raise ValueError(f"graph must have edges, and the same tokens as {among!r}, got {graph!r}")
    edge_lists = _slice_edges(graph)
    src, dst = torch.cat(edge_lists, 1)
    distance = (dst + graph.dst_offset - src - graph.src_offset).abs()
    # If the graph has more heads or samples than among, each slice of among counts several times.
    out_degree = among.T.in_degree().view(-1, among.num_src)
    possible = out_degree.sum(0) * max(1, len(edge_lists) // len(out_degree))
    return Choice(graph.name, src.bincount(minlength=graph.num_src), possible, distance.bincount())


def overlap(graphs: TokenGraph | Sequence[TokenGraph]) -> Float[Tensor, "graphs graphs"]:
    """Compute the Jaccard index ``len(A & B) / len(A | B)`` of each pair of graphs, or 1 if both are empty.

    In a list of ``graphs`` (of layers, steps, ...), each pair is compared. If the graphs vary by head
    or sample, the index is the mean over heads and samples. In a single graph, each pair of heads is
    compared. :func:`diff` describes a difference. ValueError unless tokens, heads and samples agree.

    >>> from gnn_attention import patterns
    >>> overlap([patterns.window(4, 1), patterns.window(4, 2)])[0, 1].item()  # 4 of 7
    0.5714285714285714
    """
    checks.check_order("graphs", graphs)
    graph_list = [graphs] if isinstance(graphs, TokenGraph) else list(graphs)
    for graph in graph_list:
        checks.instance("each entry of graphs", graph, TokenGraph)
    if not graph_list or len({graph.frame for graph in graph_list}) > 1:
        raise ValueError(f"graphs must have the same tokens, heads and samples, got {graph_list}")
    edge_keys = [[dst * graph.num_src + src for src, dst in _slice_edges(graph)] for graph in graph_list]
    if isinstance(graphs, TokenGraph):
        num_heads = graphs.heads or 1
        edge_keys = [edge_keys[0][head::num_heads] for head in range(num_heads)]
    similarity = torch.eye(len(edge_keys), dtype=torch.float64)
    for i, j in combinations(range(len(edge_keys)), 2):
        values = [_jaccard(a, b) for a, b in zip(edge_keys[i], edge_keys[j], strict=True)]
        similarity[i, j] = similarity[j, i] = sum(values) / len(values)
    return similarity


def _slice_edges(graph: TokenGraph) -> list[Tensor]:
    return [graph.select(batch, head).edge_index for batch, head in slices(graph)]


def _jaccard(first: Tensor, second: Tensor) -> float:
    common = int(torch.isin(first, second).sum())
    union = len(first) + len(second) - common
    return common / union if union else 1.0
