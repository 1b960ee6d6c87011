"""Theorems of ``patterns.hubs``."""

from functools import cache

import torch


def global_positions(n: int) -> list[int]:
    return [token for token in (1, 6) if token < n]


def num_blocks(n: int) -> int:
    """Return the number of blocks of two tokens."""
    return (n + 1) // 2


@cache
def random_blocks(size: int, hubs: tuple[int, ...], num_random: int, head: int, seed: int) -> dict:
    """Return the random blocks of each block but the hubs, drawn by one permutation per head and row."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(head + 1):
        table = {}
        for row in range(size):
            if row not in hubs:
                candidates = [
                    column for column in range(size) if column not in (*hubs, row - 1, row, row + 1)
                ]
                order = torch.randperm(len(candidates), generator=generator).tolist()
                table[row] = [candidates[k] for k in order[:num_random]]
    return table


def bigbird_edge(n: int, i: int, j: int, num_random: int, head: int = 0, seed: int = 0) -> bool:
    hubs = (0, num_blocks(n) - 1)
    row, column = i // 2, j // 2
    near = row in hubs or column in hubs or column in (row - 1, row, row + 1)
    return near or column in random_blocks(num_blocks(n), hubs, num_random, head, seed)[row]


def etc_edge(n: int, i: int, j: int, num_random: int) -> bool:
    """Return whether (i, j) is an edge of BigBird-ETC, in which the nodes 0 and 1 are global."""
    row, column = i // 2 - 1, j // 2 - 1
    near = i < 2 or j < 2 or column in (row - 1, row, row + 1)
    return near or column in random_blocks(num_blocks(n), (), num_random, 0, 0)[row]


def star_edge(n: int, i: int, j: int) -> bool:
    """Return whether (i, j) is an edge; nodes are a relay, a ring of n satellites and their embeddings."""
    if i == 0:
        return j <= n
    return i <= n and j in (0, (i - 2) % n + 1, i, i % n + 1, i + n)


ROWS = """
sinks(n, 3): j <= i and j in (0, 1, 2)
    degree=min(i + 1, 3); layers=once(n) if n <= 4 else None
global_tokens(n, global_positions(n)): j <= i and (i in (1, 6) or j in (1, 6))
    degree=i + 1 if i in (1, 6) else sum(token < i for token in (1, 6)); layers=once(n) if n <= 2 else None
global_tokens(n, global_positions(n), causal=False): i in (1, 6) or j in (1, 6)
    degree=n if i in (1, 6) else len(global_positions(n)); layers=once(n) if n <= 2 else 2; symmetric=True
longformer(n, 3, min(n, 2), causal=False): i < 2 or j < 2 or j in (i - 2, i - 1, i, i + 1, i + 2)
    degree=n if i < 2 else min(i, 4) + 1 + min(n - 1 - i, 2); layers=once(n) if n <= 5 else 2; symmetric=True;
    sizes=(0, 1, 2, 5, 17)
etc(n, 2, 3): i < 3 or j < 3 or j in (i - 1, i, i + 1)
    degree=n + 3 if i < 3 else 3 + (i > 3) + 1 + (i < n + 2); layers=1 if n <= 2 else 2; nodes=n + 3;
    symmetric=True
bigbird(n, 2, num_random=2): bigbird_edge(n, i, j, 2)
    layers=once(n) if n <= 12 else 2; causal=False; sizes=(0, 1, 2, 8, 10, 12, 17, 18)
bigbird(n, 2, num_random=1, heads=3, seed=5).select(0, 2): bigbird_edge(n, i, j, 1, head=2, seed=5)
    layers=once(n) if n <= 10 else 2; causal=False; sizes=(0, 1, 2, 10, 17)
bigbird_etc(n, 2, 2, num_random=2): etc_edge(n, i, j, 2)
    layers=1 if n <= 8 else 2; nodes=n + 2; causal=False; sizes=(0, 2, 4, 8, 18)
memory_tokens(window(n, 2), 2): j <= i and (j in (0, 1) or j > i - 2)
    degree=min(i + 1, 4) if i != 2 else 3; layers=max(n - 1, 1); nodes=n + 2
memory_tokens(window(n, 2, causal=False), 2, causal=False): i < 2 or j < 2 or j in (i - 1, i, i + 1)
    degree=n + 2 if i < 2 else 2 + (i > 2) + 1 + (i < n + 1); layers=1 if n <= 2 else 2; nodes=n + 2;
    symmetric=True
tglobal(n, 3, 4): j >= n or j in (i - 2, i - 1, i, i + 1, i + 2)
    degree=min(i, 2) + 1 + min(n - 1 - i, 2) + n // 4; layers=once(n); nodes=n, n + n // 4; causal=False;
    sizes=(0, 1, 2, 4, 17)
side_nodes(n, 4): j in range(4 * i, 4 * i + 4) or (j >= 4 * i and i == n // 4 - 1)
    degree=4 + (n % 4 if i == n // 4 - 1 else 0); layers=once(n); nodes=n // 4, n; causal=False; sizes=(0, 1,
    3, 4, 7, 8, 19)
star(n): star_edge(n, i, j)
    degree=n + 1 if i == 0 else min(n, 3) + 2 if i <= n else 0; layers=None if n else 0; nodes=2 * n + 1;
    causal=False; sizes=(0, 1, 2, 3, 4, 9)
isab(n, 3)[0]: True
    degree=n; nodes=3, n; causal=False
perceiver(n, 4)[0]: True
    degree=n; nodes=4, n; causal=False
perceiver(9, n)[1]: True
    degree=n; layers=once(n); symmetric=True
"""
