"""Random and expander graphs: few edges, few layers to full reach."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod, sqrt

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import TokenGraph, text
from gnn_attention.patterns._symbols import any_of, dst, src
from gnn_attention.patterns.grids import places

__all__ = ["de_bruijn", "erdos_renyi", "expander", "hypercube", "random_senders", "torus", "watts_strogatz"]

LANCZOS_STEPS = 64  # of the estimate of an eigenvalue; its error is far below the margin of a draw


def random_senders(n: int, r: int, seed: int = 0, causal: bool = True) -> TokenGraph:
    """Each token attends to r random tokens up to itself (of all with ``causal=False``).

    Drawn uniformly without replacement, for each receiver afresh; itself is one of those it may draw.
    In-degree ``min(dst + 1, r)``, or ``min(n, r)``. The random part of BigBird (Zaheer et al. 2020, arXiv
    2007.14062), which its code draws by blocks, next to the window and the global blocks.

    >>> random_senders(1000, 3).in_degree().unique().tolist()
    [1, 2, 3]
    """
    n, r, seed = checks.size("n", n), checks.size("r", r), checks.size("seed", seed)
    token = torch.arange(n, device="cpu")
    drawn = _distinct(token + 1 if causal else torch.full_like(token, n), min(r, n), seed)
    src, row = drawn.sort(0).values.t().flatten(), token.repeat_interleave(len(drawn))
    edges = torch.stack([src, row])[:, src < n]
    name = text.call("random_senders", causal, n, r, seed=(seed, 0))
    return TokenGraph.from_edges(edges, n, name=name)


def expander(
    n: int, d: int, method: str = "cycles", seed: int = 0, draws: int = 100, causal: bool = True
) -> TokenGraph:
    """A random graph of at most ``2 d`` neighbours each, whose spectral gap is nearly the largest possible.

    ``method="cycles"``: d random cycles through all tokens; ``"permutations"``: the edges ``i - p(i)`` of d
    random permutations p; each edge in both directions. Of up to ``draws`` draws the first is taken whose
    second eigenvalue is at most ``2 sqrt(2 d - 1) + 0.1`` (counting an edge drawn twice twice), else the one
    of the smallest. No self loops: join ``window(n, 1)``. The expander of Exphormer (Shirzad et al. 2023,
    arXiv 2303.06147, and its code, which takes the complete graph up to 10 nodes; the graph of its attention
    is the union of a given graph, this one and virtual nodes) is ``causal=False``. The causal graph, its
    edges ``src < dst`` alone, is this library's and not the paper's: no theorem on expanders holds for it,
    and token 0 has no in-edges.

    >>> expander(200, 3, causal=False).in_degree().unique().tolist()
    [4, 5, 6]
    """
    n, d, seed = checks.size("n", n), checks.size("d", d, 1), checks.size("seed", seed)
    method = checks.choice("method", method, ["cycles", "permutations"])
    neighbours = _best_draw(n, d, method, seed, checks.size("draws", draws, 1))
    token = torch.arange(n, device="cpu").expand_as(neighbours)
    edges = torch.stack([neighbours.flatten(), token.flatten()])
    chosen = edges[:, edges[0] < edges[1] if causal else edges[0] != edges[1]]
    options = {"method": (method, "cycles"), "seed": (seed, 0), "draws": (draws, 100)}
    return _coalesce(chosen, n, text.call("expander", causal, n, d, **options))


def hypercube(dimension: int) -> TokenGraph:
    """Each of ``2^dimension`` tokens attends to those whose number differs in one binary digit.

    In-degree ``dimension``; symmetric, no self loops: ``hypercube(d) | window(2**d, 1)`` is
    ``butterfly(2**d)``. Any token is reached by any other within ``dimension`` layers. As networkx's
    ``hypercube_graph``, digits read as a binary number.

    >>> hypercube(2).edge_index.tolist()
    [[1, 2, 0, 3, 0, 3, 1, 2], [0, 0, 1, 1, 2, 2, 3, 3]]
    """
    dimension = checks.size("dimension", dimension)
    differ = dst ^ src
    rule = any_of(differ == 2**digit for digit in range(dimension))
    return TokenGraph.from_rule(rule, 2**dimension, name=f"hypercube({dimension})")


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
    k, length = checks.size("k", k, 1), checks.size("length", length, 1)
    rule = dst // k == src % k ** (length - 1)
    return TokenGraph.from_rule(rule, k**length, name=f"de_bruijn({k}, {length})")


def torus(*sizes: int) -> TokenGraph:
    """A grid closed in every direction.

    Each token attends to its two neighbours along each axis, the last being next to the first. Tokens are
    numbered row by row (the last axis runs fastest). In-degree 2 for each axis of 3 or more, 1 for an axis of
    2, 0 for an axis of 1; symmetric, no self loops. Every token has received from every token after
    ``sum of size // 2`` layers. ``torus(n)`` is a ring. As networkx's periodic ``grid_graph``, but for the
    self loops that it gives an axis of 1.

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


def watts_strogatz(n: int, k: int, p: float, seed: int = 0) -> TokenGraph:
    """A small world: a ring of ``k // 2`` neighbours a side, each link moved with probability p.

    A link keeps one of its ends and gets a random other one, so there are always ``2 n (k // 2)`` edges (for
    ``k < n``, else all pairs); symmetric, no self loops, perhaps not connected. Made by networkx's
    ``watts_strogatz_graph`` from its own random numbers. Watts and Strogatz 1998, "Collective dynamics of
    'small-world' networks", Nature 393. Raises ValueError for ``k > n`` or p outside [0, 1].

    >>> watts_strogatz(20, 4, 0.1).num_edges
    80
    """
    n, k, seed = checks.size("n", n), checks.size("k", k), checks.size("seed", seed)
    if k > n:
        raise ValueError(f"k must be at most n = {n}, the number of tokens, got {k}")
    import networkx

    p = checks.probability("p", p, certain=True)
    name = text.call("watts_strogatz", True, n, k, p, seed=(seed, 0))
    return _both_directions(networkx.watts_strogatz_graph(n, k, p, seed=seed).edges, n, name)


def erdos_renyi(n: int, p: float, seed: int = 0) -> TokenGraph:
    """Every two tokens attend to each other with probability p, each pair by itself.

    Symmetric, no self loops. About ``p n (n - 1)`` edges; connected nearly surely if p is well above
    ``log(n) / n``, nearly never well below. Made by networkx's ``fast_gnp_random_graph`` from its own random
    numbers. Raises ValueError for p outside [0, 1].

    >>> erdos_renyi(5, 1.0).num_edges
    20
    """
    n, p, seed = checks.size("n", n), checks.probability("p", p, certain=True), checks.size("seed", seed)
    import networkx

    name = text.call("erdos_renyi", True, n, p, seed=(seed, 0))
    return _both_directions(networkx.fast_gnp_random_graph(n, p, seed=seed).edges, n, name)


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


def _best_draw(n: int, d: int, method: str, seed: int, draws: int) -> Int[Tensor, "degree tokens"]:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    good, smallest = 2 * sqrt(2 * d - 1) + 0.1, float("inf")
    best = torch.empty(2 * d, 0, dtype=torch.int64, device="cpu")
    for _ in range(draws if n else 0):
        neighbours = _draw(n, d, method, generator)
        second = _second_eigenvalue(neighbours)
        if second < smallest:
            best, smallest = neighbours, second
        if smallest <= good:
            break
    return best


def _draw(n: int, d: int, method: str, generator: torch.Generator) -> Int[Tensor, "degree tokens"]:
    orders = [torch.randperm(n, generator=generator, device="cpu") for _ in range(d)]
    if method == "permutations":
        return torch.stack([p for order in orders for p in (order, order.argsort())])
    after = [order.roll(-1)[order.argsort()] for order in orders]
    return torch.stack([p for step in after for p in (step, step.argsort())])


def _second_eigenvalue(neighbours: Int[Tensor, "degree tokens"]) -> float:
    """The largest eigenvalue of a regular multigraph after its degree, by Lanczos, never from above."""
    n = neighbours.shape[1]
    seed = torch.Generator(device="cpu").manual_seed(0)
    start = torch.randn(n, generator=seed, dtype=torch.float64, device="cpu")
    # the eigenvector of the degree: all the same
    basis = [torch.full((n,), n**-0.5, dtype=torch.float64, device="cpu")]
    while len(basis) <= min(LANCZOS_STEPS, n - 1):
        known = torch.stack(basis)
        for _ in range(2):  # twice is enough: orthogonal to rounding
            start = start - known.t() @ (known @ start)
        if float(start.norm()) < 1e-9:
            break
        basis.append(start / start.norm())
        start = basis[-1][neighbours].sum(0)
    if len(basis) == 1:
        return -float("inf")
    inside = torch.stack(basis[1:])
    projected = inside @ torch.stack([vector[neighbours].sum(0) for vector in inside]).t()
    return float(torch.linalg.eigvalsh(projected)[-1])


def _both_directions(edges: Iterable[tuple[int, int]], n: int, name: str) -> TokenGraph:
    pairs = torch.tensor(list(edges), dtype=torch.int64, device="cpu").reshape(-1, 2).t()
    return _coalesce(torch.cat([pairs, pairs.flip(0)], 1), n, name)


def _coalesce(edges: Int[Tensor, "2 edges"], n: int, name: str) -> TokenGraph:
    keys = torch.unique(edges[1] * n + edges[0])
    return TokenGraph.from_edges(torch.stack([keys % max(n, 1), keys // max(n, 1)]), n, name=name)
