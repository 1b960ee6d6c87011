"""Sparse graphs without loss of expressive power: the conditions of Yun et al. 2020, and Hamiltonian paths.

>>> from examples.expressive import yun_conditions
>>> from gnn_attention import patterns
>>> print(yun_conditions(patterns.window(6, 2, causal=False)))
conditions of Yun et al. 2020: all three hold
  1 self loops        yes: every token attends to itself in every layer
  2 Hamiltonian path  yes: 0 -> 1 -> 2 -> 3 -> 4 -> 5
  3 full reach        yes: after 5 layers
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch

from gnn_attention import analyse
from gnn_attention._support import checks
from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.analyse._walks import stack
from gnn_attention.graph import TokenGraph

MOST_TOKENS = 8192  # up to which the number of layers is worked out
SHOWN = 8  # tokens of a path that a sentence names


@dataclass(frozen=True)
class Path:
    """A Hamiltonian path: ``tokens`` in order, or ``obstacle``, which says why there is none.

    ``exists`` is None if the search ended without an answer; ``obstacle`` says then what was tried.
    """

    exists: bool | None
    tokens: tuple[int, ...] | None = None
    obstacle: str | None = None


@dataclass(frozen=True)
class YunConditions:
    """Which of the three conditions hold, and what shows it; ``str()`` says it in words.

    ``no_self_loop`` is the first (layer, token) whose token does not attend to itself. ``path`` runs along
    edges of any layer. ``missing_pair`` is a (src, dst) such that dst never receives from src. Each of the
    two is None where its condition holds. ``layers`` is the least number of layers until every token has
    received from every other, None if that never happens or for more than 8192 tokens.
    """

    no_self_loop: tuple[int, int] | None
    path: Path
    missing_pair: tuple[int, int] | None
    layers: int | None

    @property
    def hold(self) -> bool | None:
        """True if all three hold, False if one does not, None if the path was not found within the budget."""
        answers = (self.no_self_loop is None, self.path.exists, self.missing_pair is None)
        return False if False in answers else None if None in answers else True

    def __str__(self) -> str:
        verdict = {True: "all three hold", False: "not all hold", None: "undecided"}[self.hold]
        return (
            f"conditions of Yun et al. 2020: {verdict}\n  1 self loops        {self._about_loops()}\n"
            f"  2 Hamiltonian path  {self._about_path()}\n  3 full reach        {self._about_reach()}"
        )

    def _about_loops(self) -> str:
        if self.no_self_loop is None:
            return "yes: every token attends to itself in every layer"
        layer, token = self.no_self_loop
        return f"no: in layer {layer} token {token} does not attend to itself"

    def _about_path(self) -> str:
        if self.path.tokens is None:
            return f"{'no' if self.path.exists is False else 'not found'}: {self.path.obstacle}"
        shown = " -> ".join(map(str, self.path.tokens[:SHOWN]))
        return f"yes: {shown or 'of no token'}{' -> ...' if len(self.path.tokens) > SHOWN else ''}"

    def _about_reach(self) -> str:
        if self.missing_pair is not None:
            src, dst = self.missing_pair
            return f"no: {dst} never receives from {src}"
        return f"yes: after {'some number of' if self.layers is None else self.layers} layers"


def yun_conditions(graphs: TokenGraph | Sequence[TokenGraph], budget: int = 1_000_000) -> YunConditions:
    """Whether sparse attention on these graphs meets conditions for universal approximation.

    With one graph for each layer, cycled: (1) every token attends to itself in every layer; (2) there is an
    order of all tokens in which each attends to the one before it, in some layer (a Hamiltonian path of the
    union of the graphs); (3) after finitely many layers every token has received from every token, which a
    causal graph of two tokens or more never meets.

    Yun et al. 2020, "O(n) Connections are Expressive Enough" (arXiv 2006.04862): after the abstract and a
    restatement of (1) and (2) by others, not the paper's wording of the conditions.

    (1) and (3) are decided. (2) is NP-hard in general; see :func:`hamiltonian_path`. Raises TypeError or
    ValueError as the functions of ``gnn_attention.analyse`` do.
    """
    layers = stack(graphs)
    union = reduce(or_, layers)
    missing_pair = _missing_pair(union)
    depth = analyse.diameter(layers) if missing_pair is None and union.num_dst <= MOST_TOKENS else None
    return YunConditions(_missing_self_loop(layers), hamiltonian_path(union, budget), missing_pair, depth)


def _missing_self_loop(layers: list[TokenGraph]) -> tuple[int, int] | None:
    tokens = torch.arange(layers[0].num_dst)
    for layer, graph in enumerate(layers, 1):
        without = (~_has_edges(graph, tokens, tokens)).nonzero()
        if len(without):
            return layer, int(without[0])
    return None


def _missing_pair(union: TokenGraph) -> tuple[int, int] | None:
    # With the residual stream a cycle of the layers uses an edge of any layer, so that the union decides.
    apart = analyse.components(union, strong=True).nonzero()
    if not len(apart):
        return None
    other = int(apart[0])
    return (0, other) if analyse.layers_between(union, 0, other) is None else (other, 0)


def _has_edges(graph: TokenGraph, src: Tensor, dst: Tensor) -> Bool[Tensor, " pairs"]:
    return graph.rule(0 * dst, 0 * dst, dst, src).expand(dst.shape)


def hamiltonian_path(graph: TokenGraph, budget: int = 1_000_000) -> Path:
    """A path along edges ``src -> dst`` through all tokens, each visited once.

    The order of the positions and its reverse are tried first, then what forbids a path (a causal graph or
    separate components), then a search that looks at about ``budget`` edges at most and is exact if it ends.

    >>> from gnn_attention import patterns
    >>> hamiltonian_path(patterns.documents([2, 2], causal=False)).obstacle
    'the graph falls apart into 2 components'
    """
    budget, order = checks.size("budget", budget), torch.arange(graph.num_dst)
    forwards, backwards = (
        _has_edges(graph, *ends) for ends in ((order[:-1], order[1:]), (order[1:], order[:-1]))
    )
    if bool(forwards.all()):
        return Path(True, tuple(order.tolist()))
    if bool(backwards.all()):
        return Path(True, tuple(order.flip(0).tolist()))
    src, dst = graph.edge_index
    if bool((src <= dst).all()):
        token = int((~forwards).nonzero()[0])
        why = f"{token + 1} does not attend to {token}, and a causal graph allows no other order"
        return Path(False, obstacle=why)
    if bool((src >= dst).all()):
        token = int((~backwards).nonzero()[0])
        why = f"{token} does not attend to {token + 1}, and an anti-causal graph allows no other order"
        return Path(False, obstacle=why)
    src, dst = src[src != dst], dst[src != dst]
    if (parts := int(analyse.components(graph).max()) + 1) > 1:
        return Path(False, obstacle=f"the graph falls apart into {parts} components")
    search = _Search(src.tolist(), dst.tolist(), graph.num_dst, budget)
    if path := search.run():
        return Path(True, tuple(path))
    if search.budget > 0:
        return Path(False, obstacle="none of all possible orders is one")
    return Path(None, obstacle=f"the search ended after looking at {budget} edges, there may be one")


class _Search:
    """Depth first, to the token with the fewest ways on (Warnsdorff's rule), back where there is none."""

    def __init__(self, src: list[int], dst: list[int], tokens: int, budget: int) -> None:
        self.receivers: list[list[int]] = [[] for _ in range(tokens)]
        self.senders: list[list[int]] = [[] for _ in range(tokens)]
        for sender, receiver in zip(src, dst, strict=True):
            self.receivers[sender].append(receiver)
            self.senders[receiver].append(sender)
        self.ways = [len(others) for others in self.receivers]
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
