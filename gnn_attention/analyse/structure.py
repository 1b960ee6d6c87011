"""What a graph is made of: its degrees, its components, and the words that describe it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.analyse._walks import edges_of, is_square, stack
from gnn_attention.graph import TokenGraph, rules, symbols
from gnn_attention.graph.edges import RuleEdges

EXAMPLES = 5  # tokens that a sentence names
SAME_TOKEN = symbols.dst == symbols.src
MOST_EDGES = 2**20  # up to which networkx looks for cycles


@dataclass(frozen=True)
class Degrees:
    """The least, the mean and the largest of some degrees; all 0 where there is no token."""

    least: int
    mean: float
    most: int

    def __str__(self) -> str:
        return f"{self.least} .. {self.most}, mean {self.mean:.4g}"


@dataclass(frozen=True)
class Summary:
    """The numbers that describe a graph; ``str()`` is a small table.

    ``isolated_dst``: receivers without in-edges (which receive exactly 0), ``isolated_src``: senders without
    out-edges, at most five of each. ``causal``: no edge with ``src > dst``. ``acyclic``: no directed cycle
    but self loops, None if that would take a list of more than 2^20 edges. The last four are None where
    receivers and senders are not the same tokens.
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
    self_loops: int | None
    symmetric: bool | None
    causal: bool | None
    acyclic: bool | None

    def __str__(self) -> str:
        rows = [
            ("tokens", f"{self.num_src} senders -> {self.num_dst} receivers"),
            ("edges", f"{self.edges} ({self.density:.4g} of all pairs)"),
            ("in-degree", str(self.in_degree)),
            ("out-degree", str(self.out_degree)),
            ("no in-edges", _examples(self.num_isolated_dst, self.isolated_dst)),
            ("no out-edges", _examples(self.num_isolated_src, self.isolated_src)),
        ]
        if self.self_loops is not None:
            rows += [("self loops", f"{self.self_loops} of {self.num_dst}")]
            answers = {True: "yes", False: "no", None: "not worked out"}
            rows += [(word, answers[getattr(self, word)]) for word in ("symmetric", "causal", "acyclic")]
        return "\n".join([self.name, *(f"  {word:<16}{text}" for word, text in rows)])


def summary(graph: TokenGraph) -> Summary:
    """The graph in numbers: edges, density, degrees, isolated rows, symmetric, causal, acyclic.

    ValueError for a graph that differs by head or sample: take one with ``select(batch, head)``.

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
        hint = "summarise one of them, select(batch, head)"
        raise ValueError(f"{graph!r} differs by {graph.varying_axes}: {hint}")
    in_degree, out_degree = graph.in_degree(), graph.T.in_degree()
    alone = [(degree == 0).nonzero().flatten().tolist() for degree in (in_degree, out_degree)]
    isolated: Any = [part for tokens in alone for part in (tuple(tokens[:EXAMPLES]), len(tokens))]
    density = graph.num_edges / max(1, graph.num_dst * graph.num_src)
    sizes = (graph.num_dst, graph.num_src, graph.num_edges, density)
    facts = _square_facts(graph) if is_square(graph) else (None, None, None, None)
    return Summary(graph.name, *sizes, _degrees(in_degree), _degrees(out_degree), *isolated, *facts)


def components(graph: TokenGraph, strong: bool = False) -> Int[Tensor, " tokens"]:
    """The number of the component of each token; components are numbered 0, 1, ... by their first tokens.

    Two tokens are in one component if a way leads from one to the other, taking edges in either direction;
    with ``strong=True`` if directed ways lead both there and back. ValueError unless the graph is square and
    the same for all heads and samples.

    >>> from gnn_attention import patterns
    >>> graph = patterns.documents([2, 3])
    >>> components(graph).tolist(), components(graph, strong=True).tolist()
    ([0, 0, 1, 1, 1], [0, 1, 2, 3, 4])
    """
    import networkx

    stack(graph)
    digraph = networkx.DiGraph()
    digraph.add_nodes_from(range(graph.num_dst))
    digraph.add_edges_from(edges_of(graph).T.tolist())
    find = networkx.strongly_connected_components if strong else networkx.weakly_connected_components
    number = torch.zeros(graph.num_dst, dtype=torch.int64, device="cpu")
    for position, part in enumerate(sorted(find(digraph), key=min)):
        number[list(part)] = position
    return number


def _degrees(degree: Tensor) -> Degrees:
    if not len(degree):
        return Degrees(0, 0.0, 0)
    return Degrees(int(degree.min()), float(degree.double().mean()), int(degree.max()))


def _examples(count: int, examples: tuple[int, ...]) -> str:
    dots = ", ..." if count > len(examples) else ""
    return f"{count}: {', '.join(map(str, examples))}{dots}" if count else "none"


def _square_facts(graph: TokenGraph) -> tuple[int, bool, bool, bool | None]:
    """Self loops, symmetric, causal, acyclic: by counts of combined graphs, without a list."""
    loops, past = (graph_like(graph, rule) for rule in (SAME_TOKEN, rules.causal))
    in_past, num_loops = (graph & past).num_edges, (graph & loops).num_edges
    causal = in_past == graph.num_edges
    both_ways = (graph & graph.T).num_edges
    acyclic: bool | None = causal or in_past == num_loops
    if not acyclic and both_ways == num_loops:
        few = graph.num_edges <= MOST_EDGES
        acyclic = bool((components(graph, strong=True).diff() > 0).all()) if few else None
    return num_loops, both_ways == graph.num_edges, causal, acyclic


def graph_like(graph: TokenGraph, rule: rules.Rule) -> TokenGraph:
    return replace(graph, edges=RuleEdges(rule))
