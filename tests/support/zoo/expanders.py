"""Theorems of ``patterns.expanders``, whose random graphs are built in another way from the same numbers."""

from functools import cache

import networkx
import torch


@cache
def random_rows(n: int, r: int, seed: int, causal: bool) -> list[set[int]]:
    r = min(n, r)
    numbers = torch.randint(2**62, (r, n), generator=torch.Generator().manual_seed(seed)).t().tolist()
    rows = []
    for i, row in enumerate(numbers):
        count, senders = (i + 1 if causal else n), set()
        for number, last in zip(row, range(max(count - r, 0), count), strict=False):
            sample = number % (last + 1)
            senders.add(last if sample in senders else sample)
        rows.append(senders)
    return rows


@cache
def cycle_neighbours(n: int, d: int, seed: int) -> list[set[int]]:
    """Return the neighbours of each token on d random cycles."""
    generator, neighbours = torch.Generator().manual_seed(seed), [set() for _ in range(n)]
    for _ in range(d):
        order = torch.randperm(n, generator=generator).tolist()
        for a, b in zip(order, order[1:] + order[:1], strict=True):
            neighbours[a].add(b)
            neighbours[b].add(a)
    return neighbours


def word(number: int, k: int, length: int) -> str:
    """Return the number in base k, with the most significant digit first."""
    return "".join(str(number // k**place % k) for place in reversed(range(length)))


def cell(token: int, n: int) -> tuple[int, int, int]:
    """Return the coordinates of a token on a grid of 3 by 2 by n."""
    return token // n // 2, token // n % 2, token % n


def grid_edge(n: int, i: int, j: int) -> bool:
    """Return whether exactly one coordinate differs, by one step round its axis."""
    gaps = [(x - y) % size for x, y, size in zip(cell(i, n), cell(j, n), (3, 2, n), strict=True)]
    steps = [(step, size) for step, size in zip(gaps, (3, 2, n), strict=True) if step]
    return len(steps) == 1 and steps[0][0] in (1, steps[0][1] - 1)


def ring_distance(n: int, i: int, j: int) -> int:
    return min((i - j) % n, (j - i) % n)


@cache
def small_world(n: int) -> networkx.Graph:
    return networkx.watts_strogatz_graph(n, 4, 0.5, seed=2)


@cache
def random_graph(n: int) -> networkx.Graph:
    return networkx.fast_gnp_random_graph(n, 0.2, seed=1)


def diameter(graph: networkx.Graph) -> int | None:
    return networkx.diameter(graph) if networkx.is_connected(graph) else None


ROWS = """
random_senders(n, 3): j in random_rows(n, 3, 0, True)[i]
    sizes=(0, 1, 2, 17, 40)
random_senders(n, 2, seed=7, causal=False): j in random_rows(n, 2, 7, False)[i]
    degree=min(n, 2); causal=False; sizes=(0, 1, 2, 17, 40)
expander(n, 2): j < i and j in cycle_neighbours(n, 2, 0)[i]
    sizes=(0, 1, 2, 3, 24); named_at=24
expander(n, 3, seed=1, causal=False): i != j and j in cycle_neighbours(n, 3, 1)[i]
    symmetric=True; sizes=(0, 1, 2, 3, 24); named_at=24
hypercube(log2(n)): binary_ones(i ^ j) == 1
    degree=log2(n); layers=log2(n); symmetric=True; sizes=(1, 2, 4, 32); named_at=8
de_bruijn(3, n): word(i, 3, n)[:-1] == word(j, 3, n)[1:]
    degree=3; layers=n; nodes=3**n; causal=False; sizes=(1, 2, 3); named_at=3
torus(n): ring_distance(n, i, j) == 1
    degree=min(n - 1, 2); layers=n // 2; symmetric=True; sizes=(1, 2, 3, 17)
torus(3, 2, n): grid_edge(n, i, j)
    degree=3 + min(n - 1, 2); layers=2 + n // 2; nodes=6 * n; symmetric=True; sizes=(1, 2, 3, 6)
watts_strogatz(n, 4, 0.5, seed=2): small_world(n).has_edge(i, j)
    layers=diameter(small_world(n)); symmetric=True; sizes=(5, 17, 40); named_at=17
erdos_renyi(n, 0.2, seed=1): random_graph(n).has_edge(i, j)
    layers=diameter(random_graph(n)) if n else 0; symmetric=True; sizes=(0, 1, 2, 17, 40); named_at=17
"""
