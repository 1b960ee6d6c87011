"""Where a graph is narrow: effective resistance and curvature of its edges, taken in both directions."""

from __future__ import annotations

import torch

from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.analyse._walks import edges_of, stack
from gnn_attention.analyse.structure import components
from gnn_attention.graph import TokenGraph, edge_list

LARGEST = 4096  # tokens of a dense matrix that is inverted or multiplied
PLACES_AT_ONCE = 2**24


def effective_resistance(
    graph: TokenGraph, pairs: Int[Tensor, "2 edges"] | None = None
) -> Float[Tensor, " edges"]:
    """The resistance between two tokens if every edge, in either direction, is a wire of 1 ohm.

    ``(e_i - e_j)^T L^+ (e_i - e_j)`` with L the Laplacian of the simple undirected graph: small where many
    short ways lead, inf where none does, 0 for a token and itself. ``2 * edges * R`` is the commute time of a
    random walk. Over the edges of that graph it sums to tokens - components (Foster 1949).

    Args:
        graph: a plain square graph of at most 4096 tokens.
        pairs: ``[2, K]`` tokens; None for ``edge_index``.

    Returns:
        float64 ``[K]``, or ``[E]``.

    Raises:
        ValueError, TypeError, IndexError: another graph, or pairs that are none. Source: arXiv 2512.09182.

    >>> from gnn_attention import patterns
    >>> [round(ohm, 6) for ohm in effective_resistance(patterns.causal(3)).tolist()]  # triangle: 2 / 3
    [0.0, 0.666667, 0.0, 0.666667, 0.666667, 0.0]
    """
    joined = _adjacency("effective_resistance", graph).double()
    first, second = _pairs(graph, pairs)
    part = components(graph)
    same = (part == part.unsqueeze(1)).double()
    # the projection onto what is constant on a component makes L positive definite and leaves differences
    laplacian = joined.sum(1).diag() - joined + same / same.sum(1)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(laplacian))
    ohm = inverse.diagonal()[first] + inverse.diagonal()[second] - 2 * inverse[first, second]
    return (
        ohm.clamp(min=0.0)
        .masked_fill(first == second, 0.0)
        .masked_fill(part[first] != part[second], torch.inf)
    )


def curvature(graph: TokenGraph, pairs: Int[Tensor, "2 edges"] | None = None) -> Float[Tensor, " edges"]:
    """The balanced Forman curvature of edges ``i - j``, taken in both directions (arXiv 2111.14522).

    ``2/d_i + 2/d_j - 2 + 2 t/max + t/min + (s_i + s_j) / (c * max)``: d are degrees without self loops, max
    and min the larger and the smaller of both, t the triangles on the edge, s_i the neighbours of i on a
    4-cycle over it without a diagonal, c the most of these that go through one of them. 0 where a degree is
    1, and for a self loop. Negative where the edge is a bottleneck (-> -2 in trees), positive in dense
    parts. Time is edges x tokens^2.

    Takes, returns and raises what :func:`effective_resistance` does; ValueError also for a pair that is no
    edge in either direction.

    >>> from gnn_attention import patterns
    >>> curvature(patterns.no_self(5)).unique().tolist()  # n / (n - 1)
    [1.25]
    """
    joined = _adjacency("curvature", graph)
    first, second = _pairs(graph, pairs)
    strange = (joined[first, second] == 0) & (first != second)
    if bool(strange.any()):
        i, j = int(first[strange][0]), int(second[strange][0])
        raise ValueError(f"pairs must be edges of {graph!r} in some direction, got {i} and {j}")
    many = max(1, PLACES_AT_ONCE // max(1, len(joined)))
    ends = zip(torch.split(first, many), torch.split(second, many), strict=True)
    parts = [_balanced_forman(joined, *pair) for pair in ends]
    return torch.cat(parts).masked_fill(first == second, 0.0)


def _balanced_forman(joined: Tensor, first: Tensor, second: Tensor) -> Tensor:
    degree = joined.double().sum(1)
    low = torch.minimum(degree[first], degree[second])
    high = torch.maximum(degree[first], degree[second])
    triangles = (joined[first] * joined[second]).double().sum(1)
    here, most_here = _squares(joined, first, second)
    there, most_there = _squares(joined, second, first)
    squares = (here + there) / torch.maximum(most_here, most_there).clamp(min=1)
    bent = 2 / low + 2 / high - 2 + 2 * triangles / high + triangles / low + squares / high
    return bent.where(low > 1, 0.0)


def _squares(joined: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    """Neighbours of i alone on a 4-cycle i - k - w - j with w a neighbour of j alone; the most w of one k."""
    mine = joined[i] * (1 - joined[j])
    mine[torch.arange(len(j), device="cpu"), j] = 0
    # i itself is a neighbour of j, not of i, and of each k
    cycles = mine * ((joined[j] * (1 - joined[i])) @ joined - 1)
    return (cycles > 0).double().sum(1), cycles.double().amax(1)


def _adjacency(what: str, graph: TokenGraph) -> Float[Tensor, "tokens tokens"]:
    stack(graph)
    if graph.num_dst > LARGEST:
        raise ValueError(f"{what} makes a matrix of at most {LARGEST} tokens, got {graph!r}: take fewer")
    src, dst = edges_of(graph)
    joined = torch.zeros(graph.num_dst, graph.num_dst, device="cpu")
    joined[src, dst] = joined[dst, src] = 1.0
    return joined.fill_diagonal_(0.0)


def _pairs(graph: TokenGraph, pairs: Tensor | None) -> tuple[Tensor, Tensor]:
    chosen = graph.edge_index if pairs is None else edge_list.checked(pairs, graph.num_dst, graph.num_src)
    return chosen[0], chosen[1]
