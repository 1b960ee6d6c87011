"""Describe a graph: its degrees, its components, and whether it is symmetric, causal or acyclic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.analyse._walks import check_graphs, is_square, list_edges
from gnn_attention.graph import TokenGraph, rules, symbols
from gnn_attention.graph.edges import RuleEdges

# A summary lists at most this many isolated receivers, and as many isolated senders.
MAX_EXAMPLES = 5
SELF_LOOP_RULE = symbols.dst == symbols.src
# Graphs with more edges are not searched for cycles, because networkx needs a list of the edges.
MAX_CYCLE_EDGES = 2**20


@dataclass(frozen=True)
class Degrees:
    """The minimum, mean and maximum degree of some tokens; all 0 if there are no tokens."""

    least: int
    mean: float
    most: int

    def __str__(self) -> str:
        return f"{self.least} .. {self.most}, mean {self.mean:.4g}"


@dataclass(frozen=True)
class Summary:
    """The numbers that describe a graph; ``str()`` returns them as a small table.

    ``isolated_dst`` lists receivers without in-edges (their output is exactly 0) and ``isolated_src``
    senders without out-edges, at most five of each. ``causal`` is True if no edge has ``src > dst``, and
    ``acyclic`` if all directed cycles are self loops (None if this would need a search of more than 2^20
    edges). The last four fields are None if receivers and senders are different tokens.
    """

    name: str
    num_dst: int
    num_src: int
    edges: int
    density: float
    in_degree: Degrees
    out_degree: Degrees
    isolated_dst: tuple[int, ...]
    num_isolated_dst: int
    isolated_src: tuple[int, ...]
    num_isolated_src: int
    self_loops: int | None = None
    symmetric: bool | None = None
    causal: bool | None = None
    acyclic: bool | None = None

    def __str__(self) -> str:
        rows = [
            ("tokens", f"{self.num_src} senders -> {self.num_dst} receivers"),
            ("edges", f"{self.edges} ({self.density:.4g} of all pairs)"),
            ("in-degree", str(self.in_degree)),
            ("out-degree", str(self.out_degree)),
            ("no in-edges", _format_examples(self.num_isolated_dst, self.isolated_dst)),
            ("no out-edges", _format_examples(self.num_isolated_src, self.isolated_src)),
        ]
        if self.self_loops is not None:
            rows += [("self loops", f"{self.self_loops} of {self.num_dst}")]
            answers = {True: "yes", False: "no", None: "unknown"}
            rows += [(name, answers[getattr(self, name)]) for name in ("symmetric", "causal", "acyclic")]
        return "\n".join([self.name, *(f"  {name:<16}{text}" for name, text in rows)])


def summary(graph: TokenGraph) -> Summary:
    """Summarise a graph: edges, density, degrees, isolated tokens, and whether it is causal or acyclic.

    ValueError for a graph that varies by head or sample: use ``graph.select(batch, head)``.

    >>> from gnn_attention import patterns
    >>> print(summary(patterns.window(100, 4)))
    window(100, 4)
      tokens          100 senders -> 100 receivers
      edges           394 (0.0394 of all pairs)
      in-degree       1 .. 4, mean 3.94
      out-degree      1 .. 4, mean 3.94
      no in-edges     none
      no out-edges    none
      self loops      100 of 100
      symmetric       no
      causal          yes
      acyclic         yes
    """
    checks.instance("graph", graph, TokenGraph)
    if graph.varying_axes:
        raise ValueError(f"{graph!r} varies by {graph.varying_axes}: use select(batch, head)")
    in_degree, out_degree = graph.in_degree(), graph.T.in_degree()
    isolated_dst = (in_degree == 0).nonzero().flatten().tolist()
    isolated_src = (out_degree == 0).nonzero().flatten().tolist()
    return Summary(
        name=graph.name,
        num_dst=graph.num_dst,
        num_src=graph.num_src,
        edges=graph.num_edges,
        density=graph.num_edges / max(1, graph.num_dst * graph.num_src),
        in_degree=_summarise_degrees(in_degree),
        out_degree=_summarise_degrees(out_degree),
        isolated_dst=tuple(isolated_dst[:MAX_EXAMPLES]),
        num_isolated_dst=len(isolated_dst),
        isolated_src=tuple(isolated_src[:MAX_EXAMPLES]),
        num_isolated_src=len(isolated_src),
        **_square_properties(graph) if is_square(graph) else {},
    )


def components(graph: TokenGraph, strong: bool = False) -> Int[Tensor, " tokens"]:
    """Return the component index of each token; components are sorted by their first tokens.

    Two tokens are in one component if a path of undirected edges connects them. With
    ``strong=True``, a directed path must lead from each of them to the other. ValueError unless the
    graph is square and the same for all heads and samples.

    >>> from gnn_attention import patterns
    >>> graph = patterns.documents([2, 3])
    >>> components(graph).tolist(), components(graph, strong=True).tolist()
    ([0, 0, 1, 1, 1], [0, 1, 2, 3, 4])
    """
    import networkx

    check_graphs(graph)
    digraph = networkx.DiGraph()
    digraph.add_nodes_from(range(graph.num_dst))
    digraph.add_edges_from(list_edges(graph).T.tolist())
    find = networkx.strongly_connected_components if strong else networkx.weakly_connected_components
    labels = torch.zeros(graph.num_dst, dtype=torch.int64, device="cpu")
    for index, component in enumerate(sorted(find(digraph), key=min)):
        labels[list(component)] = index
    return labels


def _summarise_degrees(degree: Tensor) -> Degrees:
    if not len(degree):
        return Degrees(0, 0.0, 0)
    return Degrees(int(degree.min()), float(degree.double().mean()), int(degree.max()))


def _format_examples(num_tokens: int, examples: tuple[int, ...]) -> str:
    ellipsis = ", ..." if num_tokens > len(examples) else ""
    return f"{num_tokens}: {', '.join(map(str, examples))}{ellipsis}" if num_tokens else "none"


def _square_properties(graph: TokenGraph) -> dict[str, Any]:
    # num_edges counts the edges of a combined graph without listing them.
    num_loops = (graph & replace_rule(graph, SELF_LOOP_RULE)).num_edges
    num_causal = (graph & replace_rule(graph, rules.causal)).num_edges
    num_mutual = (graph & graph.T).num_edges
    causal = num_causal == graph.num_edges
    # If self loops are the only edges with src <= dst, all other edges lead to earlier tokens.
    acyclic: bool | None = causal or num_causal == num_loops
    if not acyclic and num_mutual == num_loops:
        acyclic = None
        if graph.num_edges <= MAX_CYCLE_EDGES:
            acyclic = bool((components(graph, strong=True).diff() > 0).all())
    symmetric = num_mutual == graph.num_edges
    return {"self_loops": num_loops, "symmetric": symmetric, "causal": causal, "acyclic": acyclic}


def replace_rule(graph: TokenGraph, rule: rules.Rule) -> TokenGraph:
    return replace(graph, edges=RuleEdges(rule))
