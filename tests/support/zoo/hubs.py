"""Theorems of ``patterns.hubs``."""

from functools import cache

import torch
from support.zoo.row import Row, band, both_sides, once

from gnn_attention import patterns


def chosen(n: int) -> list[int]:
    return [token for token in (1, 6) if token < n]


def blocks(n: int) -> int:
    """Blocks of two tokens."""
    return (n + 1) // 2


@cache
def drawn(num: int, hubs: tuple[int, ...], num_random: int, head: int, seed: int) -> dict[int, list[int]]:
    """The random blocks of each block but the hubs: one permutation for each row of each head, in this
    order.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(head + 1):
        table = {}
        for row in range(num):
            if row not in hubs:
                far = [column for column in range(num) if column not in (*hubs, row - 1, row, row + 1)]
                table[row] = [
                    far[k] for k in torch.randperm(len(far), generator=generator).tolist()[:num_random]
                ]
    return table


def bigbird_edge(n: int, i: int, j: int, num_random: int, head: int = 0, seed: int = 0) -> bool:
    hubs = (0, blocks(n) - 1)
    row, column = i // 2, j // 2
    near = row in hubs or column in hubs or column in (row - 1, row, row + 1)
    return near or column in drawn(blocks(n), hubs, num_random, head, seed)[row]


def bigbird_degree(n: int, i: int, num_random: int) -> int:
    """The first and the last block hear all; the others two tokens for each block that they hear, one less if
    n is odd.
    """
    num, row = blocks(n), i // 2
    if row in (0, num - 1):
        return n
    heard = {0, row - 1, row, row + 1, num - 1}
    return 2 * (len(heard) + min(num_random, num - len(heard))) - n % 2


def etc_edge(n: int, i: int, j: int, num_random: int) -> bool:
    """Nodes 0 and 1 are the extra ones."""
    row, column = i // 2 - 1, j // 2 - 1
    near = i < 2 or j < 2 or column in (row - 1, row, row + 1)
    return near or column in drawn(blocks(n), (), num_random, 0, 0)[row]


def etc_degree(n: int, i: int, num_random: int) -> int:
    """Of an even number of tokens."""
    num, row = n // 2, i // 2 - 1
    near = 1 + (row > 0) + (row < num - 1)
    return n + 2 if i < 2 else 2 + 2 * (near + min(num_random, num - near))


ROWS = [
    Row(
        "sinks",
        lambda n: patterns.sinks(n, 3),
        lambda n, i, j: j <= i and j in (0, 1, 2),
        lambda n: band(n, 3),
        lambda n, i: min(i + 1, 3),
        layers=lambda n: once(n) if n <= 4 else None,
    ),
    Row(
        "sinks of all",
        lambda n: patterns.sinks(n, 3, causal=False),
        lambda n, i, j: j in (0, 1, 2),
        lambda n: n * min(n, 3),
        lambda n, i: min(n, 3),
        causal=False,
        layers=lambda n: once(n) if n <= 3 else None,
    ),
    Row(
        "global_tokens",
        lambda n: patterns.global_tokens(n, chosen(n)),
        lambda n, i, j: j <= i and (i in (1, 6) or j in (1, 6)),
        lambda n: sum(token + 1 + (n - 1 - token) for token in chosen(n)) - (n > 6),
        lambda n, i: i + 1 if i in (1, 6) else sum(token < i for token in (1, 6)),
        layers=lambda n: once(n) if n <= 2 else None,
    ),
    Row(
        "global_tokens on both sides",
        lambda n: patterns.global_tokens(n, chosen(n), causal=False),
        lambda n, i, j: i in (1, 6) or j in (1, 6),
        lambda n: n * n - (n - len(chosen(n))) ** 2,
        lambda n, i: n if i in (1, 6) else len(chosen(n)),
        causal=False,
        symmetric=True,
        layers=lambda n: once(n) if n <= 2 else 2,
    ),
    Row(
        "global_tokens, the first ones",
        lambda n: patterns.global_tokens(n, min(n, 2), causal=False),
        lambda n, i, j: i < 2 or j < 2,
        lambda n: n * n - max(n - 2, 0) ** 2,
        lambda n, i: n if i < 2 else 2,
        causal=False,
        symmetric=True,
        layers=lambda n: once(n) if n <= 3 else 2,
    ),
    Row(
        "longformer",
        lambda n: patterns.longformer(n, 2, min(n, 1)),
        lambda n, i, j: j <= i and (j == 0 or j > i - 2),
        lambda n: band(n, 2) + max(n - 2, 0),
        lambda n, i: min(i + 1, 3),
        layers=lambda n: max(n - 2, once(n)),
    ),
    Row(
        "longformer on both sides",
        lambda n: patterns.longformer(n, 3, min(n, 2), causal=False),
        lambda n, i, j: i < 2 or j < 2 or j in (i - 2, i - 1, i, i + 1, i + 2),
        lambda n: n * n - max(n - 2, 0) ** 2 + both_sides(max(n - 2, 0), 3),
        lambda n, i: n if i < 2 else min(i, 4) + 1 + min(n - 1 - i, 2),
        causal=False,
        symmetric=True,
        layers=lambda n: once(n) if n <= 5 else 2,
        sizes=(0, 1, 2, 5, 17),
    ),
    Row(
        "longformer, global tokens by position",
        lambda n: patterns.longformer(n, 1, chosen(n), causal=False),
        lambda n, i, j: i == j or i in (1, 6) or j in (1, 6),
        lambda n: n * n - (n - len(chosen(n))) ** 2 + n - len(chosen(n)),
        lambda n, i: n if i in (1, 6) else 1 + len(chosen(n)),
        causal=False,
        symmetric=True,
        layers=lambda n: once(n) if n <= 2 else 2,
    ),
    Row(
        "etc",
        lambda n: patterns.etc(n, 2, 3),
        lambda n, i, j: i < 3 or j < 3 or j in (i - 1, i, i + 1),
        lambda n: (n + 3) ** 2 - n**2 + both_sides(n, 2),
        lambda n, i: n + 3 if i < 3 else 3 + (i > 3) + 1 + (i < n + 2),
        causal=False,
        symmetric=True,
        layers=lambda n: 1 if n <= 2 else 2,
        nodes=lambda n: (n + 3, n + 3),
    ),
    Row(
        "etc, every sentence with a global token of its own",
        lambda n: patterns.etc(n, 2, 3, owner=[token // 6 for token in range(n)]),
        lambda n, i, j: j < 3 or ((j - 3) // 6 == i if i < 3 else j in (i - 1, i, i + 1)),
        lambda n: 9 + n + 3 * n + both_sides(n, 2),
        lambda n, i: 3 + min(max(n - 6 * i, 0), 6) if i < 3 else 3 + (i > 3) + 1 + (i < n + 2),
        causal=False,
        layers=lambda n: 1 if n == 0 else 2,
        nodes=lambda n: (n + 3, n + 3),
    ),
    Row(
        "bigbird",
        lambda n: patterns.bigbird(n, 2, num_random=2),
        lambda n, i, j: bigbird_edge(n, i, j, 2),
        lambda n: sum(bigbird_degree(n, i, 2) for i in range(n)),
        lambda n, i: bigbird_degree(n, i, 2),
        causal=False,
        layers=lambda n: once(n) if n <= 12 else 2,
        sizes=(0, 1, 2, 8, 10, 12, 17, 18),
    ),
    Row(
        "bigbird without random blocks",
        lambda n: patterns.bigbird(n, 2, num_random=0),
        lambda n, i, j: bigbird_edge(n, i, j, 0),
        lambda n: n * n if n <= 8 else n * n - (n - 4) ** 2 + 4 * both_sides(n // 2 - 2, 2),
        lambda n, i: bigbird_degree(n, i, 0),
        causal=False,
        symmetric=True,
        layers=lambda n: once(n) if n <= 8 else 2,
        sizes=(0, 1, 2, 8, 18),
    ),
    Row(
        "bigbird of one head",
        lambda n: patterns.bigbird(n, 2, num_random=1, heads=3, seed=5).select(0, 2),
        lambda n, i, j: bigbird_edge(n, i, j, 1, head=2, seed=5),
        lambda n: sum(bigbird_degree(n, i, 1) for i in range(n)),
        lambda n, i: bigbird_degree(n, i, 1),
        causal=False,
        layers=lambda n: once(n) if n <= 10 else 2,
        sizes=(0, 1, 2, 10, 17),
    ),
    Row(
        "bigbird_etc",
        lambda n: patterns.bigbird_etc(n, 2, 2, num_random=2),
        lambda n, i, j: etc_edge(n, i, j, 2),
        lambda n: sum(etc_degree(n, i, 2) for i in range(n + 2)),
        lambda n, i: etc_degree(n, i, 2),
        causal=False,
        layers=lambda n: 1 if n <= 8 else 2,
        nodes=lambda n: (n + 2, n + 2),
        sizes=(0, 2, 4, 8, 18),
    ),
    Row(
        "bigbird_etc without random blocks",
        lambda n: patterns.bigbird_etc(n, 2, 2, num_random=0),
        lambda n, i, j: etc_edge(n, i, j, 0),
        lambda n: (n + 2) ** 2 - n**2 + 4 * both_sides(n // 2, 2),
        lambda n, i: etc_degree(n, i, 0),
        causal=False,
        symmetric=True,
        layers=lambda n: 1 if n <= 4 else 2,
        nodes=lambda n: (n + 2, n + 2),
        sizes=(0, 2, 4, 18),
    ),
]
