"""How fast information mixes: the spectral gap of a random walk along the edges."""

import math
from collections.abc import Iterator

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.analyse._walks import edges_of, stack
from gnn_attention.analyse.influence import edge_weights
from gnn_attention.analyse.structure import components
from gnn_attention.graph import TokenGraph

LARGEST_DENSE = 1024  # tokens up to which all eigenvalues are computed
LANCZOS_STEPS = 1000
CHECK_EVERY = 50
Steps = Iterator[tuple[list[float], list[float]]]


def spectral_gap(
    graph: TokenGraph, absolute: bool = False, tolerance: float = 1e-6, weights: Tensor | None = None
) -> float:
    """``1 - lambda_2`` of the random walk on the graph, its edges taken in both directions.

    How well connected it is. A is the 0/1 adjacency with ``A[i, j] = 1`` if ``i -> j`` or ``j -> i`` is an
    edge (a self loop is a 1 on the diagonal), D its row sums;
    ``1 = lambda_1 >= lambda_2 >= ... >= lambda_n >= -1`` are the eigenvalues of ``D^-1 A``. The gap is the
    second smallest eigenvalue of the normalised Laplacian ``1 - D^-1/2 A D^-1/2``: exactly 0 if the graph
    falls apart (an isolated token too), and expanders keep it away from 0 as n grows. ``absolute=True``:
    ``1 - max(|lambda_2|, |lambda_n|)``, which bounds the mixing time; 0 for a bipartite graph.

    Up to 1024 tokens from all eigenvalues, above by Lanczos iteration to within ``tolerance``. ValueError for
    less than two tokens, another graph than a plain square one, and where the iteration does not converge.

    With ``weights [E]`` in the order of ``edge_index``: ``1 - |lambda_2|`` of the matrix W of these weights,
    in their direction, the eigenvalues in order of their absolute values. Where rows of W sum to 1, layers
    without residual stream bring all tokens together as ``|lambda_2| ** layers`` (rank collapse, arXiv
    2410.07799). ValueError above 1024 tokens.

    >>> from gnn_attention import patterns
    >>> round(spectral_gap(patterns.no_self(5)), 6)  # lambda_2 = ... = lambda_n = -1 / (n - 1)
    1.25
    """
    stack(graph)
    if graph.num_dst < 2:
        raise ValueError(f"spectral_gap needs at least two tokens, got {graph!r}")
    if weights is not None:
        return _of_weights(graph, edge_weights(graph, weights))
    if bool(components(graph).any()):
        return 0.0
    matrix, first = _normalised(graph)
    if graph.num_dst <= LARGEST_DENSE:
        values = torch.linalg.eigvalsh(matrix.to_dense())
        largest = float(values[:-1].abs().max() if absolute else values[-2])
    else:
        largest = _by_lanczos(_lanczos(matrix, first), absolute, tolerance, repr(graph))
    return max(0.0, 1.0 - largest)


def _of_weights(graph: TokenGraph, weights: Tensor) -> float:
    if graph.num_dst > LARGEST_DENSE:
        raise ValueError(f"spectral_gap of weights takes at most {LARGEST_DENSE} tokens, got {graph!r}")
    matrix = torch.zeros(graph.num_dst, graph.num_src, dtype=torch.float64, device="cpu")
    src, dst = edges_of(graph)
    matrix[dst, src] = weights
    return 1.0 - float(torch.linalg.eigvals(matrix).abs().sort().values[-2])


def _normalised(graph: TokenGraph) -> tuple[Tensor, Tensor]:
    """``D^-1/2 A D^-1/2``, sparse, and its first eigenvector: the square roots of the degrees, normed."""
    tokens, (src, dst) = graph.num_dst, edges_of(graph)
    key = torch.unique(torch.cat([dst * tokens + src, src * tokens + dst]))
    places = torch.stack([key // tokens, key % tokens])
    degree = torch.bincount(places[0], minlength=tokens).double()
    values = degree[places].prod(0).rsqrt()
    matrix = torch.sparse_coo_tensor(places, values, (tokens, tokens), is_coalesced=True)
    return matrix, (degree / degree.sum()).sqrt()


def _by_lanczos(steps: Steps, absolute: bool, tolerance: float, name: str) -> float:
    # an eigenvalue lies within the residual of a Ritz value, and the largest is not below it: the value is
    # good enough where the residual is small, or where it is within the tolerance of 1 itself
    value, residual = 0.0, math.inf
    for alpha, beta in steps:
        if len(alpha) % CHECK_EVERY == 0 or beta[-1] <= tolerance:
            value, residual = _ritz(alpha, beta, absolute)
            if min(residual, 1.0 - value) <= tolerance:
                return value
    left = f"at most {1.0 - value:.2g}, with an error of {residual:.1g} after {LANCZOS_STEPS} steps"
    hint = f"pass a larger tolerance than {tolerance:.1g}, or take fewer tokens"
    raise ValueError(f"the spectral gap of {name} is {left}: {hint}")


def _lanczos(matrix: Tensor, first: Tensor) -> Steps:
    """The tridiagonal matrix step by step, orthogonal to the first eigenvector."""
    seed = torch.Generator().manual_seed(0)
    start = torch.randn(len(first), generator=seed, dtype=first.dtype, device="cpu")
    before, vector = torch.zeros_like(first), start - (first @ start) * first
    vector = vector / vector.norm()
    alpha: list[float] = []
    beta: list[float] = [0.0]
    for _ in range(LANCZOS_STEPS):
        image = matrix @ vector
        alpha.append(float(image @ vector))
        image = image - alpha[-1] * vector - beta[-1] * before
        image = image - (first @ image) * first
        beta.append(float(image.norm()))
        yield alpha, beta
        before, vector = vector, image / beta[-1]


def _ritz(alpha: list[float], beta: list[float], absolute: bool) -> tuple[float, float]:
    # the largest eigenvalue (or absolute value) of the tridiagonal matrix, and the norm of its residual
    off = torch.tensor(beta[1:-1], dtype=torch.float64, device="cpu")
    tridiagonal = torch.tensor(alpha, dtype=torch.float64, device="cpu").diag() + off.diag(1) + off.diag(-1)
    values, vectors = torch.linalg.eigh(tridiagonal)
    best = int((values.abs() if absolute else values).argmax())
    return float(values[best].abs() if absolute else values[best]), beta[-1] * float(vectors[-1, best].abs())
