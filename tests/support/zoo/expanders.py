"""Theorems of ``patterns.expanders``; the random ones are drawn again from the same numbers, by another
way.
"""

from functools import cache
from math import sqrt

import networkx
import torch
from support.zoo.hierarchies import binary_ones, log2, rounds
from support.zoo.row import Row, never, once, triangle

from gnn_attention import patterns


@cache
def drawn(n: int, r: int, seed: int, causal: bool) -> list[set[int]]:
    r = min(n, r)
    numbers = torch.randint(2**62, (r, n), generator=torch.Generator().manual_seed(seed)).t().tolist()
    rows = []
    for i, row in enumerate(numbers):
        allowed, senders = (i + 1 if causal else n), set()
        for number, last in zip(row, range(max(allowed - r, 0), allowed), strict=False):
            pick = number % (last + 1)
            senders.add(last if pick in senders else pick)
        rows.append(senders)
    return rows


@cache
def best(n: int, d: int, method: str, seed: int) -> list[list[float]]:
    generator, draws = torch.Generator().manual_seed(seed), []
    for _ in range(100):
        matrix = torch.zeros(n, n, dtype=torch.float64)
        for _ in range(d):
            order = torch.randperm(n, generator=generator).tolist()
            ends = (
                enumerate(order)
                if method == "permutations"
                else zip(order, order[1:] + order[:1], strict=True)
            )
            for a, b in ends:
                matrix[a, b] += 1
                matrix[b, a] += 1
        second = torch.linalg.eigvalsh(matrix)[-2].item() if n > 1 else 0.0
        draws.append((second, len(draws), matrix.tolist()))
        if second <= 2 * sqrt(2 * d - 1) + 0.1:
            break
    return min(draws)[2]


def expander_edge(n: int, i: int, j: int, d: int, method: str, seed: int, causal: bool) -> bool:
    return bool(best(n, d, method, seed)[i][j]) and (j < i if causal else j != i)


def expander_row(name: str, d: int, method: str, seed: int, causal: bool) -> Row:
    def degree(n: int, i: int) -> int:
        return sum(
            bool(x) for j, x in enumerate(best(n, d, method, seed)[i]) if (j < i if causal else j != i)
        )

    def edge(n: int, i: int, j: int) -> bool:
        return expander_edge(n, i, j, d, method, seed, causal)

    return Row(
        name,
        lambda n: patterns.expander(n, d, method=method, seed=seed, causal=causal),
        edge,
        lambda n: sum(degree(n, i) for i in range(n)),
        degree,
        layers=lambda n: rounds(n, lambda i, j: edge(n, i, j), causal=causal),
        causal=causal,
        symmetric=not causal,
        sizes=(0, 1, 2, 3, 24),
        named_at=24,
    )


def word(number: int, k: int, length: int) -> str:
    """The number with base k, most significant letter first."""
    return "".join(str(number // k**place % k) for place in reversed(range(length)))


def de_bruijn_row(name: str, k: int, lengths: dict[int, int]) -> Row:
    return Row(
        name,
        lambda n: patterns.de_bruijn(k, lengths[n]),
        lambda n, i, j: word(i, k, lengths[n])[:-1] == word(j, k, lengths[n])[1:],
        lambda n: n * k,
        lambda n, i: k,
        layers=lambda n: lengths[n],
        causal=False,
        sizes=tuple(lengths),
        named_at=max(lengths),
    )


def cell(token: int, n: int) -> tuple[int, int, int]:
    """Where a token stands on a grid of 3 by 2 by n."""
    return token // n // 2, token // n % 2, token % n


def grid_edge(n: int, i: int, j: int) -> bool:
    """Exactly one coordinate differs, and by one step round its axis."""
    away = [(x - y) % size for x, y, size in zip(cell(i, n), cell(j, n), (3, 2, n), strict=True)]
    moved = [(step, size) for step, size in zip(away, (3, 2, n), strict=True) if step]
    return len(moved) == 1 and moved[0][0] in (1, moved[0][1] - 1)


def ring_distance(n: int, i: int, j: int) -> int:
    return min((i - j) % n, (j - i) % n)


@cache
def small_world(n: int) -> networkx.Graph:
    return networkx.watts_strogatz_graph(n, 4, 0.5, seed=2)


@cache
def random_graph(n: int) -> networkx.Graph:
    return networkx.fast_gnp_random_graph(n, 0.2, seed=1)


ROWS = [
    Row(
        "random_senders",
        lambda n: patterns.random_senders(n, 3),
        lambda n, i, j: j in drawn(n, 3, 0, True)[i],
        lambda n: triangle(n) if n < 3 else 3 * n - 3,
        lambda n, i: min(i + 1, 3),
        layers=lambda n: rounds(n, lambda i, j: j in drawn(n, 3, 0, True)[i], causal=True),
        sizes=(0, 1, 2, 17, 40),
    ),
    Row(
        "random_senders from both sides",
        lambda n: patterns.random_senders(n, 2, seed=7, causal=False),
        lambda n, i, j: j in drawn(n, 2, 7, False)[i],
        lambda n: n * min(n, 2),
        lambda n, i: min(n, 2),
        layers=lambda n: rounds(n, lambda i, j: j in drawn(n, 2, 7, False)[i]),
        causal=False,
        sizes=(0, 1, 2, 17, 40),
        acyclic=None,
    ),
    expander_row("expander", 2, "cycles", 0, causal=True),
    expander_row("expander on both sides", 3, "cycles", 1, causal=False),
    expander_row("expander of permutations", 2, "permutations", 4, causal=False),
    Row(
        "hypercube",
        lambda n: patterns.hypercube(log2(n)),
        lambda n, i, j: binary_ones(i ^ j) == 1,
        lambda n: n * log2(n),
        lambda n, i: log2(n),
        layers=log2,
        causal=False,
        symmetric=True,
        sizes=(1, 2, 4, 32),
        named_at=8,
    ),
    de_bruijn_row("de_bruijn", 2, {2: 1, 4: 2, 32: 5}),
    de_bruijn_row("de_bruijn of three letters", 3, {3: 1, 9: 2, 27: 3}),
    Row(
        "torus of one axis",
        patterns.torus,
        lambda n, i, j: ring_distance(n, i, j) == 1,
        lambda n: n * min(n - 1, 2),
        lambda n, i: min(n - 1, 2),
        layers=lambda n: n // 2,
        causal=False,
        symmetric=True,
        sizes=(1, 2, 3, 17),
    ),
    Row(
        "torus",
        lambda n: patterns.torus(3, 2, n),
        grid_edge,
        lambda n: 6 * n * (3 + min(n - 1, 2)),
        lambda n, i: 3 + min(n - 1, 2),
        layers=lambda n: 2 + n // 2,
        causal=False,
        symmetric=True,
        nodes=lambda n: (6 * n, 6 * n),
        sizes=(1, 2, 3, 6),
    ),
    Row(
        "watts_strogatz, nothing moved",
        lambda n: patterns.watts_strogatz(n, 4, 0.0),
        lambda n, i, j: ring_distance(n, i, j) in (1, 2),
        lambda n: n * min(n - 1, 4),
        lambda n, i: min(n - 1, 4),
        layers=lambda n: -(-(n // 2) // 2),
        causal=False,
        symmetric=True,
        sizes=(4, 5, 6, 17),
    ),
    Row(
        "watts_strogatz",
        lambda n: patterns.watts_strogatz(n, 4, 0.5, seed=2),
        lambda n, i, j: small_world(n).has_edge(i, j),
        lambda n: 4 * n,
        lambda n, i: small_world(n).degree(i),
        layers=lambda n: networkx.diameter(small_world(n)) if networkx.is_connected(small_world(n)) else None,
        causal=False,
        symmetric=True,
        sizes=(5, 17, 40),
        named_at=17,
    ),
    Row(
        "erdos_renyi",
        lambda n: patterns.erdos_renyi(n, 0.2, seed=1),
        lambda n, i, j: random_graph(n).has_edge(i, j),
        lambda n: 2 * random_graph(n).number_of_edges(),
        lambda n, i: random_graph(n).degree(i),
        layers=lambda n: (
            0
            if not n
            else networkx.diameter(random_graph(n))
            if networkx.is_connected(random_graph(n))
            else None
        ),
        causal=False,
        symmetric=True,
        sizes=(0, 1, 2, 17, 40),
        named_at=17,
    ),
    Row(
        "erdos_renyi of everyone",
        lambda n: patterns.erdos_renyi(n, 1),
        lambda n, i, j: i != j,
        lambda n: n * (n - 1),
        lambda n, i: n - 1,
        layers=once,
        causal=False,
        symmetric=True,
    ),
    Row(
        "erdos_renyi of nobody",
        lambda n: patterns.erdos_renyi(n, 0.0, seed=5),
        lambda n, i, j: False,
        lambda n: 0,
        lambda n, i: 0,
        layers=never,
        symmetric=True,
    ),
]
