"""Theorems of ``patterns.latents``."""

from support.zoo.row import Row, band, both_sides, once

from gnn_attention import patterns


def star_edge(n: int, i: int, j: int) -> bool:
    """Relay 0, satellites 1 .. n round a ring, their embeddings behind them."""
    if i == 0:
        return j <= n
    return i <= n and j in (0, (i - 2) % n + 1, i, i % n + 1, i + n)


ROWS = [
    Row(
        "memory_tokens",
        lambda n: patterns.memory_tokens(patterns.window(n, 2), 2),
        lambda n, i, j: j <= i and (j in (0, 1) or j > i - 2),
        lambda n: 3 + 2 * n + band(n, 2),
        lambda n, i: min(i + 1, 4) if i != 2 else 3,
        layers=lambda n: max(n - 1, 1),
        nodes=lambda n: (n + 2, n + 2),
    ),
    Row(
        "memory_tokens heard and hearing",
        lambda n: patterns.memory_tokens(patterns.window(n, 2, causal=False), 2, causal=False),
        lambda n, i, j: i < 2 or j < 2 or j in (i - 1, i, i + 1),
        lambda n: (n + 2) ** 2 - n**2 + both_sides(n, 2),
        lambda n, i: n + 2 if i < 2 else 2 + (i > 2) + 1 + (i < n + 1),
        causal=False,
        symmetric=True,
        layers=lambda n: 1 if n <= 2 else 2,
        nodes=lambda n: (n + 2, n + 2),
    ),
    Row(
        "memory_tokens of none",
        lambda n: patterns.memory_tokens(patterns.strict_causal(n), 0, causal=False),
        lambda n, i, j: j < i,
        lambda n: n * (n - 1) // 2,
        lambda n, i: i,
        layers=once,
    ),
    Row(
        "tglobal",
        lambda n: patterns.tglobal(n, 3, 4),
        lambda n, i, j: j >= n or j in (i - 2, i - 1, i, i + 1, i + 2),
        lambda n: both_sides(n, 3) + n * (n // 4),
        lambda n, i: min(i, 2) + 1 + min(n - 1 - i, 2) + n // 4,
        layers=once,
        causal=False,
        nodes=lambda n: (n, n + n // 4),
        sizes=(0, 1, 2, 4, 17),
    ),
    Row(
        "side_nodes",
        lambda n: patterns.side_nodes(n, 4),
        lambda n, i, j: j in range(4 * i, 4 * i + 4) or (j >= 4 * i and i == n // 4 - 1),
        lambda n: n if n >= 4 else 0,
        lambda n, i: 4 + (n % 4 if i == n // 4 - 1 else 0),
        layers=once,
        causal=False,
        nodes=lambda n: (n // 4, n),
        sizes=(0, 1, 3, 4, 7, 8, 19),
    ),
    Row(
        "star",
        patterns.star,
        star_edge,
        lambda n: (1, 5, 11)[n] if n < 3 else 6 * n + 1,
        lambda n, i: n + 1 if i == 0 else min(n, 3) + 2 if i <= n else 0,
        layers=lambda n: None if n else 0,
        causal=False,
        nodes=lambda n: (2 * n + 1, 2 * n + 1),
        sizes=(0, 1, 2, 3, 4, 9),
    ),
    Row(
        "isab there",
        lambda n: patterns.isab(n, 3)[0],
        lambda n, i, j: True,
        lambda n: 3 * n,
        lambda n, i: n,
        causal=False,
        nodes=lambda n: (3, n),
    ),
    Row(
        "isab back",
        lambda n: patterns.isab(n, 3)[1],
        lambda n, i, j: True,
        lambda n: 3 * n,
        lambda n, i: 3,
        causal=False,
        nodes=lambda n: (n, 3),
    ),
    Row(
        "perceiver reading",
        lambda n: patterns.perceiver(n, 4)[0],
        lambda n, i, j: True,
        lambda n: 4 * n,
        lambda n, i: n,
        causal=False,
        nodes=lambda n: (4, n),
    ),
    Row(
        "perceiver thinking",
        lambda n: patterns.perceiver(9, n)[1],
        lambda n, i, j: True,
        lambda n: n * n,
        lambda n, i: n,
        causal=False,
        symmetric=True,
        layers=once,
    ),
]
