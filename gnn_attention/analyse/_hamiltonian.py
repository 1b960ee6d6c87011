"""A path through all tokens, each visited once: quick answers first, then a search within a budget."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.analyse._walks import edges_of
from gnn_attention.analyse.structure import components
from gnn_attention.graph import TokenGraph

MOST_SEARCHED = 2**20  # edges up to which a path is searched for


@dataclass(frozen=True)
class Answer:
    """``exists`` is None if the search ended without a result; ``why`` says why there is no ``path``."""

    exists: bool | None
    path: tuple[int, ...] | None = None
    why: str = ""


def present(graph: TokenGraph, src: Tensor, dst: Tensor) -> Tensor:
    return graph.rule(0 * dst, 0 * dst, dst, src).expand(dst.shape)


def hamiltonian_path(graph: TokenGraph, budget: int) -> Answer:
    """A path along edges ``src -> dst`` through all tokens, the reason why there is none, or neither."""
    order = torch.arange(graph.num_dst, device="cpu")
    if bool((forwards := present(graph, order[:-1], order[1:])).all()):
        return Answer(True, tuple(order.tolist()))
    if bool((backwards := present(graph, order[1:], order[:-1])).all()):
        return Answer(True, tuple(order.flip(0).tolist()))
    src, dst = edges_of(graph)
    if bool((src <= dst).all()):
        token = int((~forwards).nonzero()[0])
        obstacle = f"{token + 1} does not attend to {token}, and a causal graph allows no other order"
    elif bool((src >= dst).all()):
        token = int((~backwards).nonzero()[0])
        obstacle = f"{token} does not attend to {token + 1}, and an anti-causal graph allows no other order"
    else:
        obstacle = _obstacle(graph, src, dst)
    if obstacle:
        return Answer(False, why=obstacle)
    return _search(graph, src[src != dst], dst[src != dst], budget)


def _obstacle(graph: TokenGraph, src: Tensor, dst: Tensor) -> str:
    parts = int(components(graph).max()) + 1
    if parts > 1:
        return f"the graph falls apart into {parts} components"
    others = src != dst
    alone = ((dst, "{} and {} both attend to no other token"), (src, "no other token attends to {} or {}"))
    for ends, words in alone:
        lonely = (torch.bincount(ends[others], minlength=graph.num_dst) == 0).nonzero().flatten()
        if len(lonely) > 1:
            return words.format(*lonely[:2].tolist())
    return _branching(components(graph, strong=True), src, dst)


def _branching(part: Tensor, src: Tensor, dst: Tensor) -> str:
    """The strong components must follow one another in one line: no path returns to one that it left."""
    import networkx as nx

    count = int(part.max()) + 1
    pairs = torch.unique(part[src] * count + part[dst])
    pairs = pairs[pairs // count != pairs % count]
    if len(pairs) > MOST_SEARCHED:
        return ""
    line = nx.DiGraph()
    line.add_nodes_from(range(count))
    line.add_edges_from(zip((pairs // count).tolist(), (pairs % count).tolist(), strict=True))
    if nx.dag_longest_path_length(line) + 1 == count:
        return ""
    return f"no path passes all {count} strong components, and none can return to one that it has left"


def _search(graph: TokenGraph, src: Tensor, dst: Tensor, budget: int) -> Answer:
    if len(src) > MOST_SEARCHED:
        return Answer(None, why=f"not searched, there are more than {MOST_SEARCHED} edges")
    search = _Search(src.tolist(), dst.tolist(), graph.num_dst, budget)
    if path := search.run():
        return Answer(True, tuple(path))
    if search.budget > 0:
        return Answer(False, why="none of all possible orders is one")
    return Answer(None, why=f"the search ended after looking at {budget} edges, there may be one")


class _Search:
    """Depth first, to the token with the fewest ways on (Warnsdorff's rule), back where there is none."""

    def __init__(self, src: list[int], dst: list[int], tokens: int, budget: int) -> None:
        self.receivers: list[list[int]] = [[] for _ in range(tokens)]
        self.senders: list[list[int]] = [[] for _ in range(tokens)]
        for sender, receiver in zip(src, dst, strict=True):
            self.receivers[sender].append(receiver)
            self.senders[receiver].append(sender)
        self.ways = [len(some) for some in self.receivers]
        self.budget, self.visited, self.path = budget, [False] * tokens, list[int]()

    def run(self) -> list[int] | None:
        """The path; None if there is none, or if the budget ran out (it is then 0 or less)."""
        choices = [self._starts()]
        while choices and self.budget > 0:
            token = next(choices[-1], None)
            if token is not None:
                self.path.append(token)
                self._mark(token, True)
                if len(self.path) == len(self.visited):
                    return self.path
                choices.append(self._onwards(token))
            else:
                choices.pop()
                if self.path:
                    self._mark(self.path.pop(), False)
        return None

    def _starts(self) -> Iterator[int]:
        order = sorted(range(len(self.senders)), key=lambda token: len(self.senders[token]))
        return iter(order[:1] if not self.senders[order[0]] else order)

    def _onwards(self, token: int) -> Iterator[int]:
        self.budget -= len(self.receivers[token])
        others = (other for other in self.receivers[token] if not self.visited[other])
        return iter(sorted(others, key=self.ways.__getitem__))

    def _mark(self, token: int, visited: bool) -> None:
        self.visited[token] = visited
        self.budget -= len(self.senders[token]) + 1
        for sender in self.senders[token]:
            self.ways[sender] += -1 if visited else 1
