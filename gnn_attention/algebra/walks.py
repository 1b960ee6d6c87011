"""Walks of several hops, and the pairs of tokens that they connect."""

from dataclasses import replace

from gnn_attention._support import checks
from gnn_attention._support.dynamo import not_compiled
from gnn_attention.algebra import _operands
from gnn_attention.algebra.stacks import per_head, per_sample
from gnn_attention.graph import TokenGraph

__all__ = ["closure"]


@not_compiled
def closure(g: TokenGraph, hops: int | None = None, reflexive: bool = False) -> TokenGraph:
    """Return the transitive closure: dst attends to src if a walk leads from src to dst.

    The walk has 1 to ``hops`` hops, or any number if ``hops`` is None:
    ``g | g ** 2 | ... | g ** hops``. ``reflexive=True`` adds ``g ** 0``, a self loop for every
    token, as if each layer kept the token's state. Then there is an edge wherever ``hops`` layers
    over g pass a message. The closure computes about log2(hops) products; its edge list is sorted
    by receiver, then sender. This is networkx's ``transitive_closure``.

    >>> from gnn_attention import patterns
    >>> step = patterns.window(4, 2) - patterns.window(4, 1)
    >>> closure(step, 2).in_degree().tolist()
    [0, 1, 2, 2]
    >>> closure(step) == patterns.strict_causal(4), closure(step, reflexive=True) == patterns.causal(4)
    (True, True)
    """
    _operands.check_square("closure", g, "only square graphs have walks of several hops")
    # No shortest walk has more hops than the graph has tokens.
    max_hops = g.num_dst if hops is None else checks.size("hops", hops)
    hops_text = "" if hops is None else str(max_hops)
    name = _operands.format_call("closure", (g,), hops_text, "reflexive=True" if reflexive else "")
    sample_graphs = []
    for b in range(g.batch or 1):
        head_graphs = [_close_slice(g.select(b, h), max_hops, reflexive) for h in range(g.heads or 1)]
        sample_graphs.append(head_graphs[0] if g.heads is None else per_head(*head_graphs))
    return replace(sample_graphs[0] if g.batch is None else per_sample(*sample_graphs), name=name)


def _close_slice(g: TokenGraph, max_hops: int, reflexive: bool) -> TokenGraph:
    if reflexive:
        return _walks_up_to(g, max_hops)
    return g @ _walks_up_to(g, max_hops - 1) if max_hops else g**0 - g**0


def _walks_up_to(g: TokenGraph, max_hops: int) -> TokenGraph:
    """Return ``(g ** 0 | g) ** max_hops`` by repeated squaring. Stop once a square adds no edge."""
    result, power = g**0, g**0 | g**1
    while max_hops:
        result = result @ power if max_hops % 2 else result
        max_hops //= 2
        square = power @ power if max_hops else power
        if square.num_edges == power.num_edges:
            return result @ power if max_hops else result
        power = square
    return result
