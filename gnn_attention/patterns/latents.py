"""Extra nodes that are no tokens: memory, side nodes for blocks, a relay, inducing points, latents."""

from functools import partial

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph, rules, text
from gnn_attention.graph.rules import Rule
from gnn_attention.patterns import _data
from gnn_attention.patterns._symbols import compute, dst, src

__all__ = ["isab", "memory_tokens", "perceiver", "side_nodes", "star", "tglobal"]


def memory_tokens(graph: TokenGraph, m: int, causal: bool = True) -> TokenGraph:
    """``m`` memory tokens before the tokens of ``graph`` attend to all and are attended to by all.

    Among themselves these keep ``graph``. Nodes ``0 .. m - 1`` are memory, token i is node ``m + i``:
    ``dst < m or src < m or (src - m -> dst - m) in graph``, and ``src <= dst`` unless ``causal=False``; then
    the memory attends to no token and is a sink that can be learnt. ``causal=False`` is the both-way memory
    of GMAT (Gupta and Berant 2020, arXiv 2006.03274), of the Memory Transformer (Burtsev et al. 2020, arXiv
    2006.11527) and of registers in vision transformers, where ``graph`` is full. TypeError for anything but a
    graph, ValueError unless it is square.

    >>> from gnn_attention.patterns import window
    >>> memory_tokens(window(3, 1), 1, causal=False).edge_index.tolist()
    [[0, 1, 2, 3, 0, 1, 0, 2, 0, 3], [0, 0, 0, 0, 1, 1, 2, 2, 3, 3]]
    """
    _data.square("graph", graph)
    m = checks.size("m", m)
    inner = graph.rule if graph.num_dst else rules.everyone  # a graph of no tokens may be unable to answer
    rule = rules.past(partial(_memory, m, inner), causal)
    name = text.call("memory_tokens", causal, graph.name, m)
    return TokenGraph.from_rule(rule, m + graph.num_dst, heads=graph.heads, batch=graph.batch, name=name)


def tglobal(n: int, w: int, block: int) -> TokenGraph:
    """Each token attends to a window and every side node, one for each ``block`` tokens.

    ``|dst - src| < w or src >= n``. ``n`` receivers; senders are the n tokens, then ``n // block`` side
    nodes. What these are is :func:`side_nodes`. Never causal. Hugging Face's ``local_radius`` r is
    ``w = r + 1``; its defaults 127 and ``global_block_size`` 16 are ``tglobal(n, 128, 16)``. Guo et al. 2022,
    LongT5 (arXiv 2112.07916): transient global attention.

    >>> tglobal(5, 1, 2).in_degree().tolist()
    [3, 3, 3, 3, 3]
    """
    n, w, size = checks.size("n", n), checks.size("w", w), checks.size("block", block, 1)
    rule = (src >= n) | (abs(dst - src) < w)
    return TokenGraph.from_rule(rule, n, n + n // size, name=f"tglobal({n}, {w}, {size})")


def side_nodes(n: int, block: int) -> TokenGraph:
    """Side node k attends to the tokens of block k.

    ``dst = min(src // block, K - 1)`` with ``K = n // block`` side nodes. The tokens that are left over
    belong to the last block; fewer than ``block`` tokens have no side node. A side node of LongT5 is the sum
    of its tokens, made anew in each layer (Guo et al. 2022, arXiv 2112.07916, and Hugging Face's code).

    >>> print(side_nodes(5, 2))
    side_nodes(5, 2): mask[dst, src] and in-edges
    0 ■ ■ · · ·   0 <- 0 1
    1 · · ■ ■ ■   1 <- 2 3 4
    """
    n, size = checks.size("n", n), checks.size("block", block, 1)
    rule = compute(torch.clamp, src // size, 0, max(n // size - 1, 0)) == dst
    return TokenGraph.from_rule(rule, n // size, n, name=f"side_nodes({n}, {size})")


def star(n: int) -> TokenGraph:
    """``n`` satellites attend to their neighbours on a ring, their embeddings and a relay.

    The relay attends to all satellites. The Star-Transformer as one graph of ``2 n + 1`` nodes: node 0 is the
    relay, ``i = 1 .. n`` the satellites, ``n + i`` the embedding of satellite i. A satellite attends to
    itself, its two neighbours on the ring (n and 1 are neighbours), its embedding and the relay; the relay
    attends to itself and all satellites; embeddings have no in-edges and so stay what they are. ``6 n + 1``
    edges for n >= 3. The paper updates the satellites first: ``star(n).rows(1, n + 1)``, then
    ``star(n).rows(0, 1)``. fastNLP's code leaves the ring open and sets a zero node at both ends. Guo et al.
    2019, Star-Transformer (arXiv 1902.09113).

    >>> star(3).in_degree().tolist()
    [4, 5, 5, 5, 0, 0, 0]
    """
    n = checks.size("n", n)
    gap = abs(dst - src)
    ring = (src <= n) & ((gap <= 1) | (gap == n - 1))  # or the relay, which is attended to anyway
    to_satellite = (dst >= 1) & (dst <= n) & (ring | (src == 0) | (src == dst + n))
    return TokenGraph.from_rule(to_satellite | ((dst == 0) & (src <= n)), 2 * n + 1, name=f"star({n})")


def isab(n: int, m: int) -> tuple[TokenGraph, TokenGraph]:
    """``n`` elements exchange through ``m`` inducing points, in two steps.

    All points attend to all elements, then the other way. The two complete bipartite graphs ``m <- n`` and
    ``n <- m``: ``2 n m`` edges instead of ``n^2``; for m >= 1 their product is the full graph,
    ``back @ there == full(n)``. ISAB(X) = MAB(X, MAB(I, X)) of the Set Transformer (Lee et al. 2019, arXiv
    1810.00825); its pooling with k seeds is the first of ``isab(n, k)``.

    >>> there, back = isab(3, 2)
    >>> there.num_edges, back.num_edges, (back @ there).num_edges
    (6, 6, 9)
    """
    n, m = checks.size("n", n), checks.size("m", m)
    there = TokenGraph.from_rule(rules.everyone, m, n, name=f"isab({n}, {m})[0]")
    return there, TokenGraph.from_rule(rules.everyone, n, m, name=f"isab({n}, {m})[1]")


def perceiver(n: int, m: int) -> tuple[TokenGraph, TokenGraph]:
    """``m`` latents attend to all ``n`` inputs, then each other.

    The graphs ``m <- n`` and ``m <- m``, applied in turn. ``n m`` and ``m^2`` edges: the depth in latents
    does not cost what the inputs cost. The inputs have no in-edges. Jaegle et al. 2021, Perceiver (arXiv
    2103.03206).

    >>> [graph.num_edges for graph in perceiver(100, 4)]
    [400, 16]
    """
    n, m = checks.size("n", n), checks.size("m", m)
    reading = TokenGraph.from_rule(rules.everyone, m, n, name=f"perceiver({n}, {m})[0]")
    return reading, TokenGraph.from_rule(rules.everyone, m, name=f"perceiver({n}, {m})[1]")


def _memory(m: int, inner: Rule, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (dst < m) | (src < m) | inner(b, h, (dst - m).clamp(min=0), (src - m).clamp(min=0))
