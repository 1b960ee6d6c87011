"""Theorems of ``patterns.content``: Python's sort repeats its selections on small integers with ties."""

import torch


def grid(value, rows, columns, dtype=torch.float32):
    """Return the values of a function of two integers as a tensor."""
    table = [[value(i, j) for j in range(columns)] for i in range(rows)]
    return torch.tensor(table, dtype=dtype).reshape(rows, columns)


def logit(i, j):
    return (7 * i + 5 * j * j + i * j) % 11


def best_senders(i, candidates, k):
    """Return the k senders of the largest logits; among equal logits the earlier sender comes first."""
    return sorted(candidates, key=lambda j: (-logit(i, j), j))[:k]


def point(i, axis):
    return (i * i * 3) % 13 if axis == 0 else (5 * i) % 7


def k_closest(i, candidates, k):
    return sorted(candidates, key=lambda j: (sum((point(i, a) - point(j, a)) ** 2 for a in (0, 1)), j))[:k]


def bucket(r, i):
    return (i * i) % 5 if r == 0 else (i // 3) % 4


def bucket_mates(i, candidates):
    return [j for j in candidates if j != i and any(bucket(r, i) == bucket(r, j) for r in (0, 1))]


def sign(i):
    return -1 if i % 4 in (1, 2) else 1


def top_members(axis, n):
    """Return the five points with the largest coordinates along an axis."""
    return sorted(range(n), key=lambda i: (-point(i, axis), i))[:5]


def is_hashed_edge(n, i, j):
    if i == j:
        return all(sign(before) != sign(i) for before in range(i))
    return j < i and sign(i) == sign(j)


def is_routed_edge(n, i, j):
    return j <= i and any({i, j} <= set(top_members(axis, n)) for axis in (0, 1))


ROWS = """
top_k(grid(logit, n, n), 3): j <= i and j in best_senders(i, range(i + 1), 3)
    degree=min(i + 1, 3); named_at=None
top_k(grid(logit, n, n, torch.int32), 2, causal=False): j in best_senders(i, range(n), 2)
    degree=min(n, 2); causal=False; named_at=None
nearest(grid(point, n, 2), 3): j in k_closest(i, range(i + 1), 3)
    degree=min(i + 1, 3); named_at=None
nearest(grid(point, n, 2, torch.int64), 2, causal=False, loops=False): j in k_closest(i, {*range(n)} - {i}, 2)
    degree=min(n - 1, 2); causal=False; named_at=None
shared_bucket(grid(bucket, 2, n, torch.int64)): j in (bucket_mates(i, range(i)) or [i])
    named_at=None
lsh(torch.tensor([[sign(i) * (i + 1.0)] for i in range(n)]).reshape(n, 1), 6, rounds=3, seed=8):
        is_hashed_edge(n, i, j)
    layers=never(n); named_at=None
clusters([i % 3 for i in range(n)]): j <= i and (i - j) % 3 == 0
    degree=i // 3 + 1; layers=never(n)
clusters(torch.arange(n) % 2, torch.arange(n + 3) // 2, causal=False): j in ((0, 1), (2, 3))[i % 2]
    degree=2; nodes=n, n + 3; causal=False
routing(grid(point, n, 2), grid(point, n, 2), torch.eye(2), 5): is_routed_edge(n, i, j)
    named_at=None
vertical_slash(n, [c for c in (1, 5) if c < n], [s for s in (2, 4) if s < n]):
        (j in (1, 5) and i >= j) or i - j in (2, 4)
    layers=never(n)
"""
