"""Several hops: which tokens reach which in the end, and through which edges a token is reached at all."""

from functools import partial

import torch

from gnn_attention._support import checks
from gnn_attention._support.dynamo import not_compiled
from gnn_attention._support.shapes import Tensor
from gnn_attention.algebra import _operands
from gnn_attention.algebra.stacks import at_positions_of, each_alone
from gnn_attention.analyse.reach import receptive_field
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.intervals.arithmetic import evaluate
from gnn_attention.graph.rules import Rule

__all__ = ["ancestry", "closure"]


@not_compiled
def closure(g: TokenGraph, hops: int | None = None, reflexive: bool = False) -> TokenGraph:
    """The transitive closure: dst attends to src if a walk leads from src to dst.

    A walk of 1 to ``hops`` hops; None = of any length. ``g | g ** 2 | ... | g ** hops``.
    ``reflexive=True`` is the reflexive-transitive closure, ``g ** 0`` as well: every token attends to itself,
    as a state that is carried along does; it is what a stack of ``hops`` layers over g lets through.
    networkx's ``transitive_closure``. Its list is by receiver, then sender; about log2(hops) products.

    >>> from gnn_attention import patterns
    >>> step = patterns.window(4, 2) - patterns.window(4, 1)
    >>> print(closure(step, 2))
    closure(window(4, 2) - window(4, 1), 2): mask[dst, src] and in-edges
    0 · · · ·   0 <- none
    1 ■ · · ·   1 <- 0
    2 ■ ■ · ·   2 <- 0 1
    3 · ■ ■ ·   3 <- 1 2
    >>> closure(step) == patterns.strict_causal(4), closure(step, reflexive=True) == patterns.causal(4)
    (True, True)
    """
    _operands.square("closure", g, "only their walks can be longer than a hop")
    most = g.num_dst if hops is None else checks.size("hops", hops)  # no shortest walk is longer
    shown = "" if hops is None else str(most), "reflexive=True" if reflexive else ""
    name = _operands.name("closure", (g,), *shown)
    return each_alone(lambda plain: _closure_of(plain, most, reflexive), g, name)


@not_compiled
def ancestry(g: TokenGraph, token: int, hops: int | None = None) -> TokenGraph:
    """The edges through which anything reaches a token.

    Its line of descent in a tree, its receptive field in ``hops`` layers. The edges of g whose receiver is
    ``token`` or one of its ancestors at most ``hops - 1`` hops away; None = however far. All else about the
    graph stays: ``attend`` gives ``token`` the same in both after ``hops`` layers. It looks at the edges; the
    result is g's rule where g is a rule, and lists keep their order. Forward: ``ancestry(g.T, token).T``.

    >>> from gnn_attention import patterns
    >>> ancestry(patterns.tree([-1, 0, 0, 1]), 3).edge_index.tolist()
    [[0, 0, 1, 0, 1, 3], [0, 1, 1, 3, 3, 3]]
    """
    _operands.square("ancestry", g, "only their walks can be longer than a hop")
    token = checks.position("token", token)
    if not 0 <= token < g.num_dst:
        raise IndexError(f"token must be in 0 .. {g.num_dst - 1}, got {token}")
    most = g.num_dst if hops is None else checks.size("hops", hops)
    name = _operands.name("ancestry", (g,), str(token), "" if hops is None else str(most))
    return each_alone(lambda plain: _edges_to(plain, token, most), g, name)


def _of_receivers(inner: Rule, receives: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return receives.to(dst.device)[dst] & evaluate(inner, b, h, dst, src)


def _closure_of(g: TokenGraph, hops: int, reflexive: bool) -> TokenGraph:
    if reflexive:
        return _walks_up_to(g, hops)
    return g @ _walks_up_to(g, hops - 1) if hops else g**0 - g**0


def _walks_up_to(g: TokenGraph, hops: int) -> TokenGraph:
    """Walks of 0 to ``hops`` hops: ``(g ** 0 | g) ** hops`` by squaring, until nothing is added."""
    result, power = g**0, g**0 | g**1
    while hops:
        result = result @ power if hops % 2 else result
        hops //= 2
        twice = power @ power if hops else power
        if twice.num_edges == power.num_edges:
            return result @ power if hops else result
        power = twice
    return result


def _edges_to(g: TokenGraph, token: int, hops: int) -> TokenGraph:
    receives = torch.zeros(g.num_dst, dtype=torch.bool, device="cpu")
    if hops:
        receives[receptive_field(g, token, hops - 1)] = True
    if g.listed_edges is None:
        graph = TokenGraph.from_rule(partial(_of_receivers, g.rule, receives), g.num_dst)
    else:
        graph = TokenGraph.from_edges(g.listed_edges[:, receives[g.listed_edges[1]]], g.num_dst)
    return at_positions_of(g, graph)
