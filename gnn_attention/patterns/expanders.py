"""Random and expander graphs, which connect all tokens with few edges in few layers."""

from math import prod
from typing import Any

import torch

from gnn_attention._support import checks
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.symbols import any_of, dst, src
from gnn_attention.patterns._builder import builder
from gnn_attention.patterns.basic import strict_causal
from gnn_attention.patterns.grids import row_major_strides

__all__ = ["de_bruijn", "erdos_renyi", "expander", "hypercube", "random_senders", "torus", "watts_strogatz"]


@builder()
def random_senders(n: int, r: int, seed: int = 0, causal: bool = True) -> TokenGraph:
    """Each token attends to r random tokens among itself and its past, or among all if ``causal=False``.

    Each receiver draws its senders uniformly, without replacement and independently of other
    receivers. The in-degree is ``min(dst + 1, r)``, or ``min(n, r)`` if not causal. BigBird (Zaheer
    et al. 2020, arXiv 2007.14062) has such edges, but its code draws whole blocks, as
    :func:`bigbird` does.

    >>> random_senders(1000, 3).in_degree().unique().tolist()
    [1, 2, 3]
    """
    r = min(r, n)
    token = torch.arange(n, device="cpu")
    num_candidates = token + 1 if causal else torch.full_like(token, n)
    num_samples = num_candidates.clamp(max=r)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    random_numbers = torch.randint(2**62, (r, n), generator=generator, device="cpu")
    # This is Floyd's sampling algorithm for all receivers at once. Unused entries keep the maximum.
    senders = torch.full_like(random_numbers, torch.iinfo(torch.int64).max)
    for step in range(r):
        last = num_candidates - num_samples + step
        sample = random_numbers[step] % (last + 1)
        is_repeated = (senders[:step] == sample).any(0)
        senders[step] = torch.where(step < num_samples, torch.where(is_repeated, last, sample), senders[step])
    edges = torch.stack([senders.sort(0).values.t().flatten(), token.repeat_interleave(r)])
    return TokenGraph.from_edges(edges[:, edges[0] < n], n)


@builder(d=1)
def expander(n: int, d: int, seed: int = 0, causal: bool = True) -> TokenGraph:
    """A random graph of in-degree at most ``2 d`` with nearly the largest possible spectral gap.

    The graph is the union of d random cycles through all tokens, each edge in both directions,
    without self loops (add ``window(n, 1)`` for these). For every ``e > 0`` the second eigenvalue
    is at most ``2 sqrt(2 d - 1) + e`` with a probability that tends to 1 as n grows (Friedman 2004,
    arXiv cs/0405020, which counts an edge that is drawn twice as two). Exphormer (Shirzad et al. 2023, arXiv
    2303.06147) uses ``causal=False``. The causal graph, which keeps the edges ``src < dst``, is an
    addition of this library: no theorem about expanders applies to it, and token 0 is isolated.

    >>> expander(200, 3, causal=False).in_degree().unique().tolist()
    [4, 5, 6]
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    cycles = [torch.randperm(n, generator=generator, device="cpu") for _ in range(d)]
    pairs = torch.cat([torch.stack([cycle, cycle.roll(1)], 1) for cycle in cycles])
    graph = _undirected_graph(pairs, n)
    return graph & strict_causal(n) if causal else graph


@builder()
def hypercube(dimension: int) -> TokenGraph:
    """Each of ``2^dimension`` tokens attends to those whose number differs in one binary digit.

    The in-degree is ``dimension``; the graph is symmetric without self loops, and
    ``hypercube(d) | window(2**d, 1)`` is ``butterfly(2**d)``. Any token reaches any other within
    ``dimension`` layers. This is networkx's ``hypercube_graph`` with nodes read as binary numbers.

    >>> hypercube(2).edge_index.tolist()
    [[1, 2, 0, 3, 0, 3, 1, 2], [0, 0, 1, 1, 2, 2, 3, 3]]
    """
    differing_digits = dst ^ src
    rule = any_of(differing_digits == 2**digit for digit in range(dimension))
    return TokenGraph.from_rule(rule, 2**dimension)


@builder(k=1, length=1)
def de_bruijn(k: int, length: int) -> TokenGraph:
    """A word attends to each word that becomes it by dropping the first letter and appending one.

    The tokens are the ``n = k^length`` words of ``length`` letters, numbered in base k. The edges
    are ``dst // k == src % (n // k)``. In-degree and out-degree are k, and the k words that repeat one letter
    attend to themselves. Between any two words there is exactly one walk of ``length`` edges, so every token
    has received from every token after ``length = log_k n`` layers. No graph of in-degree ``k > 1``
    needs fewer: one layer less reaches at most ``1 + k + ... + k^(length - 1) < n`` tokens.

    >>> de_bruijn(2, 2).edge_index.tolist()
    [[0, 2, 0, 2, 1, 3, 1, 3], [0, 0, 1, 1, 2, 2, 3, 3]]
    """
    return TokenGraph.from_rule(dst // k == src % k ** (length - 1), k**length)


def torus(*sizes: int) -> TokenGraph:
    """Each token attends to its two neighbours along every axis of a grid without borders.

    Tokens are numbered row by row: the last axis varies fastest. An axis adds 2 to the in-degree if
    its size is 3 or more, 1 if its size is 2, and 0 if its size is 1. The graph is symmetric
    without self loops. Any token reaches any other within ``sum of size // 2`` layers. ``torus(n)``
    is a ring.

    >>> torus(3, 4).select().edge_index[0, :4].tolist()   # token 0 attends to: right, left, below, above
    [1, 3, 4, 8]
    """
    axis_sizes = [checks.size("each entry of sizes", size, 1) for size in sizes]
    step_rules = []
    for stride, size in zip(row_major_strides(axis_sizes), axis_sizes, strict=True):
        # A step changes the number by one stride, and a step round the end by line - stride.
        line = stride * size
        distance = abs(dst - src)
        is_step = (distance == stride) | (distance == line - stride)
        if size > 1:
            step_rules.append(is_step & (dst // line == src // line))
    name = f"torus({', '.join(map(str, axis_sizes))})"
    return TokenGraph.from_rule(any_of(step_rules), prod(axis_sizes), name=name)


@builder()
def watts_strogatz(n: int, k: int, p: float, seed: int = 0) -> TokenGraph:
    """A small world: tokens attend to ``k // 2`` neighbours on each side of a ring; some links are moved.

    With probability p one end of a link is replaced by a random token, so there are always
    ``2 n (k // 2)`` edges (for ``k = n`` all pairs but self loops). The graph is symmetric without
    self loops and may be disconnected. It is drawn by networkx's ``watts_strogatz_graph``. Source:
    Watts and Strogatz 1998, Nature 393. Raises ValueError if ``k > n`` or p is outside [0, 1].

    >>> watts_strogatz(20, 4, 0.1).num_edges
    80
    """
    if k > n:
        raise ValueError(f"k must be at most n = {n}, the number of tokens, got {k}")
    import networkx

    p = checks.probability("p", p, allow_one=True)
    return _undirected_graph(list(networkx.watts_strogatz_graph(n, k, p, seed=seed).edges), n)


@builder()
def erdos_renyi(n: int, p: float, seed: int = 0) -> TokenGraph:
    """Any two tokens attend to each other with probability p, independently of other pairs.

    The graph is symmetric without self loops and has ``p n (n - 1)`` edges on average. It is almost
    surely connected if p is well above ``log(n) / n``, and almost surely not if p is well below. It
    is drawn by networkx's ``fast_gnp_random_graph``. Raises ValueError if p is outside [0, 1].

    >>> erdos_renyi(5, 1.0).num_edges
    20
    """
    import networkx

    p = checks.probability("p", p, allow_one=True)
    return _undirected_graph(list(networkx.fast_gnp_random_graph(n, p, seed=seed).edges), n)


def _undirected_graph(pairs: Any, n: int) -> TokenGraph:
    """Return the graph of pairs ``[E, 2]`` in both directions, without duplicates and self loops."""
    i, j = torch.as_tensor(pairs, dtype=torch.int64, device="cpu").reshape(-1, 2).unbind(1)
    edge_keys = torch.unique(torch.cat([i * n + j, j * n + i])[(i != j).repeat(2)])
    return TokenGraph.from_edges(torch.stack([edge_keys % max(n, 1), edge_keys // max(n, 1)]), n)
