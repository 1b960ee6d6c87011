"""Walks along edges, many tokens at once: compressed neighbour lists, and what spreads along them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.edges import RuleEdges
from gnn_attention.graph.rules import Rule

Layers = TokenGraph | Sequence[TokenGraph]
MOST_EDGES = 2**26  # edges that are listed: 1 GB
FEW_STEPS = 64  # for so few a rule is evaluated rather than its edges listed


@dataclass(frozen=True)
class Neighbours:
    """``others[first[t] : first[t + 1]]`` are the neighbours of token t."""

    first: Int[Tensor, " tokens_and_one"]
    others: Int[Tensor, " edges"]

    def of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """All neighbours of the tokens in turn: for each the place of its token in the list, and itself."""
        begin, count = self.first[tokens], self.first[tokens + 1] - self.first[tokens]
        place = torch.arange(len(tokens), device="cpu").repeat_interleave(count)
        skipped = (begin - count.cumsum(0) + count)[place]
        return place, self.others[torch.arange(len(place), device="cpu") + skipped]

    def of_any(self, tokens: Tensor) -> Tensor:
        neighbours: Tensor = torch.unique(self.of(tokens)[1])
        return neighbours

    def step(self, tokens: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """The neighbours that were not seen before, each with the first of the tokens that leads there."""
        place, others = self.of(tokens)
        unseen = ~seen[others]
        new, number = torch.unique(others[unseen], return_inverse=True)
        before = torch.zeros_like(new)
        return new, before.scatter_reduce(0, number, tokens[place[unseen]], "amin", include_self=False)


@dataclass(frozen=True)
class RuleSenders:
    """The senders of a graph whose edges are not listed: its rule is evaluated for all tokens together."""

    graph: TokenGraph

    def of_any(self, tokens: Tensor) -> Tensor:
        rule = partial(_of_these, self.graph.edges.contains, tokens.sort().values)
        return TokenGraph(RuleEdges(rule), len(tokens), self.graph.num_src).T.in_degree().nonzero().flatten()

    def step(self, tokens: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """The senders that were not seen before, and -1 for each: a rule does not say who leads there."""
        senders = self.of_any(tokens)
        new = senders[~seen[senders]]
        return new, torch.full_like(new, -1)


Walks = Neighbours | RuleSenders


def stack(graphs: Layers) -> list[TokenGraph]:
    """The layers' graphs as a list; TypeError or ValueError unless plain, square and of the same tokens."""
    wanted = "graphs must be a TokenGraph or a list of them, layer 1 first"
    checks.check_order("graphs", graphs)
    # graphs of other libraries are iterable, too
    if not isinstance(graphs, (TokenGraph, Sequence, Iterator)):
        raise TypeError(f"{wanted}; got {checks.quoted(graphs)}")
    layers = [graphs] if isinstance(graphs, TokenGraph) else list(graphs)
    for number, graph in enumerate(layers):
        if not isinstance(graph, TokenGraph):
            raise TypeError(f"{wanted}; got {type(graph).__name__} as number {number}")
        if graph.varying_axes:
            hint = "take one with select(batch, head), or join several by |"
            raise ValueError(f"graphs must be plain, but {graph!r} differs by {graph.varying_axes}: {hint}")
        if not is_square(graph):
            expected = "graphs of layers, whose senders and receivers are the same tokens"
            raise ValueError(f"graphs must be {expected}, got {graph!r}; compose others by @ first")
        if graph.frame != layers[0].frame:
            raise ValueError(f"graphs must have the same tokens, got {layers[0]!r} and {graph!r}")
    if not layers:
        raise ValueError("graphs must hold at least one layer's graph, got an empty list")
    return layers


def is_square(graph: TokenGraph) -> bool:
    return (graph.num_dst, graph.dst_offset) == (graph.num_src, graph.src_offset)


def token(name: str, value: int, count: int) -> int:
    if not 0 <= checks.position(name, value) < count:
        raise IndexError(f"{name} must be a position in 0 .. {count - 1}, got {value}")
    return value


def edges_of(graph: TokenGraph) -> Tensor:
    """``graph.edge_index``; ValueError where the list would be too long."""
    if graph.num_edges > MOST_EDGES:
        listed = f"at most {MOST_EDGES} are listed to walk along them"
        raise ValueError(f"{graph!r} has {graph.num_edges} edges, {listed}: take a shorter or sparser graph")
    return graph.edge_index


def receivers_of(graph: TokenGraph) -> Neighbours:
    return _neighbours(edges_of(graph), graph.num_src)


def senders_of(graph: TokenGraph) -> Neighbours:
    return _neighbours(edges_of(graph).flip(0), graph.num_dst)


def senders_for(graph: TokenGraph, steps: int | None = None) -> Walks:
    """The senders of each receiver, as lists where many (or unknown, None) ``steps`` are to be walked."""
    few = steps is not None and steps <= FEW_STEPS
    if graph.edges.listed() is None and (few or graph.num_edges > MOST_EDGES):
        return RuleSenders(graph)
    return senders_of(graph)


def _of_these(inner: Rule, receivers: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return inner(b, h, receivers.to(dst.device)[dst], src)


def _neighbours(edges: Tensor, count: int) -> Neighbours:
    owner, other = edges
    first = torch.zeros(count + 1, dtype=torch.int64, device="cpu")
    first[1:] = torch.bincount(owner, minlength=count).cumsum(0)
    return Neighbours(first, other[owner.argsort(stable=True)])


def spread(layers: Sequence[Walks], start: int, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The tokens reached for the first time in layer 1, 2, ..., and where from.

    Own states stay (the residual stream). Where from is -1 in a layer whose rule is evaluated. The layers are
    cycled until none can reach anything; each token is passed on once by each of them.
    """
    seen = torch.zeros(tokens, dtype=torch.bool, device="cpu")
    seen[start] = True
    waiting, quiet = [[torch.tensor([start], device="cpu")] for _ in layers], 0
    for walks, queue in cycle(zip(layers, waiting, strict=True)):
        new, origin = walks.step(torch.cat(queue), seen)
        seen[new] = True
        queue.clear()
        for other in waiting:
            other.append(new)
        quiet = 0 if len(new) else quiet + 1
        yield new, origin
        if quiet == len(layers):
            return
