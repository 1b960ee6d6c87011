"""Sparse graphs without loss of expressive power: the conditions of Yun et al. 2020."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch

from gnn_attention._support import checks
from gnn_attention.analyse._everyone import ALL_PAIRS
from gnn_attention.analyse._hamiltonian import hamiltonian_path, present
from gnn_attention.analyse._walks import stack
from gnn_attention.analyse.reach import diameter, layers_between
from gnn_attention.analyse.structure import components
from gnn_attention.graph import TokenGraph

SHOWN = 8  # tokens of a path that a sentence names


@dataclass(frozen=True)
class YunConditions:
    """Which of the three conditions hold, and what shows it; ``str()`` says it in words.

    ``self_loops``: every token attends to itself in every layer, else ``no_self_loop`` is a (layer, token)
    without. ``hamiltonian_path``: there is a path through all tokens along edges of any layer, ``path`` is
    one; None if none was found within the budget, and ``obstacle`` says why there is none or what was tried.
    ``full_reach``: after some number of layers every token has received from every other, else
    ``missing_pair`` is a (src, dst) that never happens; ``layers``: the least number, None above 8192
    tokens.
    """

    self_loops: bool
    no_self_loop: tuple[int, int] | None
    hamiltonian_path: bool | None
    path: tuple[int, ...] | None
    obstacle: str | None
    full_reach: bool
    layers: int | None
    missing_pair: tuple[int, int] | None

    @property
    def hold(self) -> bool | None:
        """True if all three hold, False if one does not, None if the path was not found within the budget."""
        answers = (self.self_loops, self.hamiltonian_path, self.full_reach)
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
        if self.path is None:
            return f"{'no' if self.hamiltonian_path is False else 'not found'}: {self.obstacle}"
        shown = " -> ".join(map(str, self.path[:SHOWN]))
        return f"yes: {shown or 'of no token'}{' -> ...' if len(self.path) > SHOWN else ''}"

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

    (1) and (3) are decided. (2) is NP-hard in general: the order of the positions and its reverse are tried,
    then what forbids a path (separate components, two tokens that attend to no other token, ...), then a
    search of at most about ``budget`` edges, exact if it ends. TypeError or ValueError for wrong layers.

    >>> from gnn_attention import patterns
    >>> print(yun_conditions(patterns.window(6, 2, causal=False)))
    conditions of Yun et al. 2020: all three hold
      1 self loops        yes: every token attends to itself in every layer
      2 Hamiltonian path  yes: 0 -> 1 -> 2 -> 3 -> 4 -> 5
      3 full reach        yes: after 5 layers
    """
    stacked, budget = stack(graphs), checks.size("budget", budget)
    union = reduce(or_, stacked)
    missing = _missing_self_loop(stacked)
    answer = hamiltonian_path(union, budget)
    missing_pair = _missing_pair(union)
    layers = diameter(stacked) if missing_pair is None and union.num_dst <= ALL_PAIRS else None
    path = (answer.exists, answer.path, answer.why or None)
    return YunConditions(missing is None, missing, *path, missing_pair is None, layers, missing_pair)


def _missing_self_loop(stacked: list[TokenGraph]) -> tuple[int, int] | None:
    tokens = torch.arange(stacked[0].num_dst, device="cpu")
    for layer, graph in enumerate(stacked, 1):
        without = (~present(graph, tokens, tokens)).nonzero()
        if len(without):
            return layer, int(without[0])
    return None


def _missing_pair(union: TokenGraph) -> tuple[int, int] | None:
    # with the residual stream one cycle of the layers uses an edge of any layer: the union decides
    apart = components(union, strong=True).nonzero()
    if not len(apart):
        return None
    return (0, int(apart[0])) if layers_between(union, 0, int(apart[0])) is None else (int(apart[0]), 0)
