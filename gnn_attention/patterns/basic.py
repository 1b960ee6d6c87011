"""The simplest graphs: full, causal and anti-causal graphs, self loops, and pairs of sequences."""

from gnn_attention._support import checks
from gnn_attention.graph import TokenGraph, rules
from gnn_attention.graph.symbols import dst, src
from gnn_attention.patterns._builder import builder
from gnn_attention.patterns.sequences import prefix

__all__ = ["anti_causal", "causal", "causal_aligned", "cross", "encoder_decoder", "full", "no_self"]
__all__ += ["self_loops", "strict_causal"]


@builder()
def full(n: int) -> TokenGraph:
    """Every token attends to every token: ``n^2`` edges (Vaswani et al. 2017, arXiv 1706.03762).

    >>> full(5).num_edges
    25
    """
    return TokenGraph.from_rule(rules.all_pairs, n)


@builder()
def self_loops(n: int) -> TokenGraph:
    """Each token attends only to itself. The graph is ``g ** 0``, the identity of the product ``@``.

    >>> self_loops(4).edge_index.tolist()
    [[0, 1, 2, 3], [0, 1, 2, 3]]
    """
    return TokenGraph.from_rule(dst == src, n)


@builder()
def cross(num_dst: int, num_src: int) -> TokenGraph:
    """Every token of one sequence attends to every token of another.

    The bipartite graph is complete: ``num_dst * num_src`` edges (Vaswani et al. 2017, arXiv 1706.03762).

    >>> cross(2, 3).in_degree().tolist()
    [3, 3]
    """
    return TokenGraph.from_rule(rules.all_pairs, num_dst, num_src)


@builder()
def causal(n: int) -> TokenGraph:
    """Each token attends to itself and all earlier tokens: ``src <= dst``, ``n (n + 1) / 2`` edges.

    >>> print(causal(3))
    causal(3): mask[dst, src] and in-edges
    0 ■ · ·   0 <- 0
    1 ■ ■ ·   1 <- 0 1
    2 ■ ■ ■   2 <- 0 1 2
    """
    return TokenGraph.from_rule(rules.causal, n)


@builder()
def anti_causal(n: int) -> TokenGraph:
    """Each token attends to itself and all later tokens: ``src >= dst``, ``n (n + 1) / 2`` edges.

    >>> anti_causal(4).in_degree().tolist()
    [4, 3, 2, 1]
    """
    return TokenGraph.from_rule(src >= dst, n)


@builder()
def causal_aligned(num_dst: int, num_src: int, align: str) -> TokenGraph:
    """Each receiver attends to the senders up to its own time; the two lengths may differ.

    ``align`` says which ends coincide. With ``"upper_left"`` the first tokens coincide, and the edges are
    ``src <= dst``, as in scaled_dot_product_attention's ``is_causal`` and torch's ``causal_upper_left``. With
    ``"lower_right"`` the last tokens coincide, and the edges are ``src <= dst + num_src - num_dst``, as in
    flash-attention's ``causal`` and torch's ``causal_lower_right``: the receivers are the last ``num_dst`` of
    ``num_src`` tokens. If there are more receivers than senders, the first ``num_dst - num_src`` are isolated
    and receive 0. Libraries disagree, so there is no default. Raises ValueError for other values.

    >>> print(causal_aligned(2, 4, "lower_right"))
    causal_aligned(2, 4, 'lower_right'): mask[dst, src] and in-edges
    0 ■ ■ ■ ·   0 <- 0 1 2
    1 ■ ■ ■ ■   1 <- 0 1 2 3
    """
    align = checks.choice("align", align, ("upper_left", "lower_right"))
    shift = 0 if align == "upper_left" else num_src - num_dst
    return TokenGraph.from_rule(src <= dst + shift, num_dst, num_src)


@builder()
def strict_causal(n: int) -> TokenGraph:
    """Each token attends to all earlier tokens: ``src < dst``. Token 0 is isolated: it receives 0.

    >>> strict_causal(4).in_degree().tolist()
    [0, 1, 2, 3]
    """
    return TokenGraph.from_rule(src < dst, n)


@builder()
def no_self(n: int) -> TokenGraph:
    """Every token attends to every other token: ``src != dst``, ``n (n - 1)`` edges.

    >>> no_self(4).in_degree().tolist()
    [3, 3, 3, 3]
    """
    return TokenGraph.from_rule(dst != src, n)


@builder()
def encoder_decoder(source: int, target: int) -> TokenGraph:
    """Source tokens attend to each other, target tokens to the source and their own past.

    The ``source`` tokens are first. The edges are ``src < source or src <= dst``, as in
    :func:`prefix`; there are ``source^2 + source * target + target (target + 1) / 2``. See Vaswani
    et al. 2017 (arXiv 1706.03762).

    >>> encoder_decoder(2, 3).in_degree().tolist()
    [2, 2, 3, 4, 5]
    """
    return prefix(source + target, source)
