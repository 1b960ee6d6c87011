"""Check the conditions of Yun et al. 2020 for the expressive power of sparse attention.

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
from gnn_attention.analyse._walks import check_graphs
from gnn_attention.graph import TokenGraph

# The number of layers until full reach is not computed for larger graphs.
MAX_TOKENS = 8192
PRINTED_TOKENS = 8


@dataclass(frozen=True)
class Path:
    """The ``tokens`` of a Hamiltonian path in order, or the ``obstacle`` that explains why there is none.

    ``exists`` is None if the search ended without an answer.
    """

    exists: bool | None
    tokens: tuple[int, ...] | None = None
    obstacle: str | None = None


@dataclass(frozen=True)
class YunConditions:
    """The three conditions with counterexamples; ``str()`` describes them in words.

    ``no_self_loop`` is the first (layer, token) whose token does not attend to itself, and ``missing_pair`` a
    pair (src, dst) such that dst never receives from src; they are None if there is none. ``path`` may use
    edges of any layer. ``layers`` is the number of layers after which every token has received from every
    other, or None if this never happens or for more than 8192 tokens.
    """

    no_self_loop: tuple[int, int] | None
    path: Path
    missing_pair: tuple[int, int] | None
    layers: int | None

    @property
    def hold(self) -> bool | None:
        """True if all three conditions hold, False if one does not, None if the search had no answer."""
        answers = (self.no_self_loop is None, self.path.exists, self.missing_pair is None)
        return False if False in answers else None if None in answers else True

    def __str__(self) -> str:
        verdict = {True: "all three hold", False: "not all hold", None: "undecided"}[self.hold]
        loops = "yes: every token attends to itself in every layer"
        if self.no_self_loop is not None:
            layer, token = self.no_self_loop
            loops = f"no: in layer {layer} token {token} does not attend to itself"
        if self.path.tokens is None:
            path = f"{'no' if self.path.exists is False else 'not found'}: {self.path.obstacle}"
        else:
            tokens = [str(token) for token in self.path.tokens[:PRINTED_TOKENS]]
            tokens += ["..."] if len(self.path.tokens) > PRINTED_TOKENS else []
            path = f"yes: {' -> '.join(tokens) or 'of no token'}"
        reach = f"yes: after {'some number of' if self.layers is None else self.layers} layers"
        if self.missing_pair is not None:
            src, dst = self.missing_pair
            reach = f"no: {dst} never receives from {src}"
        return (
            f"conditions of Yun et al. 2020: {verdict}\n  1 self loops        {loops}\n"
            f"  2 Hamiltonian path  {path}\n  3 full reach        {reach}"
        )


def yun_conditions(graphs: TokenGraph | Sequence[TokenGraph], budget: int = 1_000_000) -> YunConditions:
    """Check the conditions for universal approximation by sparse attention along these graphs.

    Each layer has one graph; after the last graph the first follows again. The conditions are: (1) every
    token attends to itself in every layer; (2) the union of the graphs has a Hamiltonian path, an order of
    all tokens in which each attends to the one before; (3) after finitely many layers every token has
    received from every token, which is impossible for a causal graph of two or more tokens.

    Yun et al. 2020, "O(n) Connections are Expressive Enough" (arXiv 2006.04862). The wording here follows its
    abstract and a restatement of (1) and (2) by others.

    The answers to (1) and (3) are exact. (2) is NP-hard in general; see :func:`hamiltonian_path`. Raises
    TypeError or ValueError like the functions of ``gnn_attention.analyse``.
    """
    layers = check_graphs(graphs)
    union = reduce(or_, layers)
    tokens = torch.arange(union.num_dst)
    loops = torch.stack([_has_edges(graph, tokens, tokens) for graph in layers])
    without_loop = (~loops).nonzero().tolist()
    no_self_loop = (without_loop[0][0] + 1, without_loop[0][1]) if without_loop else None
    missing_pair, depth = None, None
    # States stay in the residual stream, so a walk may wait for the layer of its next edge.
    if len(outside := analyse.components(union, strong=True).nonzero()):
        token = int(outside[0])
        missing_pair = (0, token) if analyse.layers_between(union, 0, token) is None else (token, 0)
    elif union.num_dst <= MAX_TOKENS:
        depth = analyse.diameter(layers)
    return YunConditions(no_self_loop, hamiltonian_path(union, budget), missing_pair, depth)


def _has_edges(graph: TokenGraph, src: Tensor, dst: Tensor) -> Bool[Tensor, " pairs"]:
    return graph.rule(0 * dst, 0 * dst, dst, src).expand(dst.shape)


def hamiltonian_path(graph: TokenGraph, budget: int = 1_000_000) -> Path:
    """Find a path along edges ``src -> dst`` that visits every token once.

    The order of positions and its reverse are tried first. A causal graph has no other path, and a graph with
    several components has none. Otherwise a search visits at most about ``budget`` edges; its answer is exact
    if it ends earlier.

    >>> from gnn_attention import patterns
    >>> hamiltonian_path(patterns.documents([2, 2], causal=False)).obstacle
    'the graph has 2 components'
    """
    budget = checks.size("budget", budget)
    order = torch.arange(graph.num_dst)
    forward = _has_edges(graph, order[:-1], order[1:])
    backward = _has_edges(graph, order[1:], order[:-1])
    if bool(forward.all()):
        return Path(True, tuple(order.tolist()))
    if bool(backward.all()):
        return Path(True, tuple(order.flip(0).tolist()))
    src, dst = graph.edge_index
    if bool((src <= dst).all()):
        i = int((~forward).nonzero()[0])
        reason = f"{i + 1} does not attend to {i}, and a causal graph allows no other order"
        return Path(False, obstacle=reason)
    if bool((src >= dst).all()):
        i = int((~backward).nonzero()[0])
        reason = f"{i} does not attend to {i + 1}, and an anti-causal graph allows no other order"
        return Path(False, obstacle=reason)
    src, dst = src[src != dst], dst[src != dst]
    if (count := int(analyse.components(graph).max()) + 1) > 1:
        return Path(False, obstacle=f"the graph has {count} components")
    search = _Search(src.tolist(), dst.tolist(), graph.num_dst, budget)
    if path := search.run():
        return Path(True, tuple(path))
    if search.budget > 0:
        return Path(False, obstacle="no order of the tokens is a path")
    return Path(None, obstacle=f"the search ended after {budget} edges, and a path may exist")


class _Search:
    """Depth-first search that goes to the token with the fewest continuations (Warnsdorff's rule)."""

    def __init__(self, src: list[int], dst: list[int], tokens: int, budget: int) -> None:
        self.receivers: list[list[int]] = [[] for _ in range(tokens)]
        self.senders: list[list[int]] = [[] for _ in range(tokens)]
        for sender, receiver in zip(src, dst, strict=True):
            self.receivers[sender].append(receiver)
            self.senders[receiver].append(sender)
        # The number of receivers of each token that are not yet on the path.
        self.continuations = [len(receivers) for receivers in self.receivers]
        self.visited = [False] * tokens
        self.path: list[int] = []
        self.budget = budget

    def run(self) -> list[int] | None:
        """Return a path, or None if there is none or the budget is used up."""
        order = sorted(range(len(self.senders)), key=lambda token: len(self.senders[token]))
        # A token without in-edges can only be the first.
        choices = [iter(order if self.senders[order[0]] else order[:1])]
        while choices and self.budget > 0:
            token = next(choices[-1], None)
            if token is not None:
                self.path.append(token)
                self._mark(token, True)
                if len(self.path) == len(self.visited):
                    return self.path
                choices.append(self._next_tokens(token))
            else:
                choices.pop()
                if self.path:
                    self._mark(self.path.pop(), False)
        return None

    def _next_tokens(self, token: int) -> Iterator[int]:
        self.budget -= len(self.receivers[token])
        receivers = (receiver for receiver in self.receivers[token] if not self.visited[receiver])
        return iter(sorted(receivers, key=self.continuations.__getitem__))

    def _mark(self, token: int, visited: bool) -> None:
        self.visited[token] = visited
        self.budget -= len(self.senders[token]) + 1
        for sender in self.senders[token]:
            self.continuations[sender] += -1 if visited else 1
