"""Random and expander graphs: few edges, few layers to full reach."""

from math import prod
from typing import Any

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.symbols import any_of, dst, src
from gnn_attention.patterns._builder import builder
from gnn_attention.patterns.basic import strict_causal
from gnn_attention.patterns.grids import places

__all__ = ["de_bruijn", "erdos_renyi", "expander", "hypercube", "random_senders", "torus", "watts_strogatz"]


@builder()
def random_senders(n: int, r: int, seed: int = 0, causal: bool = True) -> TokenGraph:
    """Each token attends to r random tokens up to itself (of all with ``causal=False``).

    Drawn uniformly without replacement, for each receiver afresh; itself is one of those it may draw.
    In-degree ``min(dst + 1, r)``, or ``min(n, r)``. The random part of BigBird (Zaheer et al. 2020, arXiv
    2007.14062), which its code draws by blocks, next to the window and the global blocks.

    >>> random_senders(1000, 3).in_degree().unique().tolist()
    [1, 2, 3]
    """
    token = torch.arange(n, device="cpu")
    drawn = _distinct(token + 1 if causal else torch.full_like(token, n), min(r, n), seed)
    src, row = drawn.sort(0).values.t().flatten(), token.repeat_interleave(len(drawn))
    return TokenGraph.from_edges(torch.stack([src, row])[:, src < n], n)


@builder(d=1)
def expander(n: int, d: int, seed: int = 0, causal: bool = True) -> TokenGraph:
    """A random graph of at most ``2 d`` neighbours each, whose spectral gap is nearly the largest possible.

    The union of d random cycles through all tokens, each edge in both directions. For every ``e > 0`` the
    second eigenvalue is at most ``2 sqrt(2 d - 1) + e`` with a probability that tends to 1 as n grows
    (Friedman 2004, arXiv cs/0405020; an edge drawn twice counts twice). No self loops: join ``window(n, 1)``.
    The expander of Exphormer (Shirzad et al. 2023, arXiv 2303.06147) is ``causal=False``. The causal graph,
    its edges ``src < dst`` alone, is this library's and not the paper's: no theorem on expanders holds for
    it, and token 0 has no in-edges.

    >>> expander(200, 3, causal=False).in_degree().unique().tolist()
    [4, 5, 6]
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    cycles = [torch.randperm(n, generator=generator, device="cpu") for _ in range(d)]
    graph = _undirected_graph(torch.cat([torch.stack([cycle, cycle.roll(1)], 1) for cycle in cycles]), n)
    return graph & strict_causal(n) if causal else graph


@builder()
def hypercube(dimension: int) -> TokenGraph:
    """Each of ``2^dimension`` tokens attends to those whose number differs in one binary digit.

    In-degree ``dimension``; symmetric, no self loops: ``hypercube(d) | window(2**d, 1)`` is
    ``butterfly(2**d)``. Any token is reached by any other within ``dimension`` layers. As networkx's
    ``hypercube_graph``, digits read as a binary number.

    >>> hypercube(2).edge_index.tolist()
    [[1, 2, 0, 3, 0, 3, 1, 2], [0, 0, 1, 1, 2, 2, 3, 3]]
    """
    differ = dst ^ src
    return TokenGraph.from_rule(any_of(differ == 2**digit for digit in range(dimension)), 2**dimension)


@builder(k=1, length=1)
def de_bruijn(k: int, length: int) -> TokenGraph:
    """A word attends to those that become it by dropping their first letter and adding one.

    The words of ``length`` letters out of k are the numbers below ``n = k^length`` with base k:
    ``dst // k == src % (n // k)``. In-degree and out-degree k, the k words of one letter attending to
    themselves; directed. Between any two words there is exactly one walk of ``length`` edges, so after
    ``length = log_k n`` layers every token has received from every token. No graph of in-degree ``k > 1``
    does it in fewer: one layer less receives from ``1 + k + ... + k^(length - 1) < n`` tokens at most.

    >>> de_bruijn(2, 2).edge_index.tolist()
    [[0, 2, 0, 2, 1, 3, 1, 3], [0, 0, 1, 1, 2, 2, 3, 3]]
    """
    return TokenGraph.from_rule(dst // k == src % k ** (length - 1), k**length)


def torus(*sizes: int) -> TokenGraph:
    """A grid closed in every direction.

    Each token attends to its two neighbours along each axis, the last being next to the first. Tokens are
    numbered row by row (the last axis runs fastest). In-degree 2 for each axis of 3 or more, 1 for an axis of
    2, 0 for an axis of 1; symmetric, no self loops. Every token has received from every token after
    ``sum of size // 2`` layers. ``torus(n)`` is a ring.

    >>> torus(3, 4).select().edge_index[0, :4].tolist()   # token 0 attends to: right, left, below, above
    [1, 3, 4, 8]
    """
    lengths = [checks.size("each of sizes", size, 1) for size in sizes]
    steps = []
    for stride, length in zip(places(lengths), lengths, strict=True):
        # One step along an axis: the numbers differ by one stride, or by all but one round the end.
        away, line = abs(dst - src), stride * length
        step = (away == stride) | (away == line - stride)
        steps += [step & (dst // line == src // line)] if length > 1 else []
    name = f"torus({', '.join(map(str, lengths))})"
    return TokenGraph.from_rule(any_of(steps), prod(lengths), name=name)


@builder()
def watts_strogatz(n: int, k: int, p: float, seed: int = 0) -> TokenGraph:
    """A small world: a ring of ``k // 2`` neighbours a side, each link moved with probability p.

    A link keeps one of its ends and gets a random other one, so there are always ``2 n (k // 2)`` edges (for
    ``k < n``, else all pairs); symmetric, no self loops, perhaps not connected. Made by networkx's
    ``watts_strogatz_graph`` from its own random numbers. Watts and Strogatz 1998, "Collective dynamics of
    'small-world' networks", Nature 393. Raises ValueError for ``k > n`` or p outside [0, 1].

    >>> watts_strogatz(20, 4, 0.1).num_edges
    80
    """
    if k > n:
        raise ValueError(f"k must be at most n = {n}, the number of tokens, got {k}")
    import networkx

    p = checks.probability("p", p, certain=True)
    return _undirected_graph(list(networkx.watts_strogatz_graph(n, k, p, seed=seed).edges), n)


@builder()
def erdos_renyi(n: int, p: float, seed: int = 0) -> TokenGraph:
    """Every two tokens attend to each other with probability p, each pair by itself.

    Symmetric, no self loops. About ``p n (n - 1)`` edges; connected nearly surely if p is well above
    ``log(n) / n``, nearly never well below. Made by networkx's ``fast_gnp_random_graph`` from its own random
    numbers. Raises ValueError for p outside [0, 1].

    >>> erdos_renyi(5, 1.0).num_edges
    20
    """
    import networkx

    p = checks.probability("p", p, certain=True)
    return _undirected_graph(list(networkx.fast_gnp_random_graph(n, p, seed=seed).edges), n)


def _distinct(bound: Int[Tensor, " rows"], r: int, seed: int) -> Int[Tensor, "r rows"]:
    """r distinct numbers below each bound, or all and then a huge one (Floyd's algorithm)."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    numbers = torch.randint(2**62, (r, len(bound)), generator=generator, device="cpu")
    taken = torch.full_like(numbers, torch.iinfo(torch.int64).max)
    wanted = bound.clamp(max=r)
    for step in range(r):
        last = bound - wanted + step
        draw = numbers[step] % (last + 1)
        again = (taken[:step] == draw).any(0)
        taken[step] = torch.where(step < wanted, torch.where(again, last, draw), taken[step])
    return taken


def _undirected_graph(pairs: Any, n: int) -> TokenGraph:
    """The edges ``[E, 2]`` in both directions, each once, without self loops."""
    one, other = torch.as_tensor(pairs, dtype=torch.int64, device="cpu").reshape(-1, 2).unbind(1)
    keys = torch.unique(torch.cat([one * n + other, other * n + one])[(one != other).repeat(2)])
    return TokenGraph.from_edges(torch.stack([keys % max(n, 1), keys // max(n, 1)]), n)
