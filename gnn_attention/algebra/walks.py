"""Several hops: which tokens reach which in the end."""

from dataclasses import replace

from gnn_attention._support import checks
from gnn_attention._support.dynamo import not_compiled
from gnn_attention.algebra import _operands
from gnn_attention.algebra.stacks import per_head, per_sample
from gnn_attention.graph import TokenGraph

__all__ = ["closure"]


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
    samples = []
    for batch in range(g.batch or 1):
        heads = [_closure(g.select(batch, head), most, reflexive) for head in range(g.heads or 1)]
        samples.append(heads[0] if g.heads is None else per_head(*heads))
    return replace(samples[0] if g.batch is None else per_sample(*samples), name=name)


def _closure(g: TokenGraph, hops: int, reflexive: bool) -> TokenGraph:
    """The closure of a plain graph."""
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
