"""Theorems of ``patterns.blocks``: the data are small integers, with ties; the choices are made again by
sorting in Python.
"""

from support.zoo.content import grid, logit, point


def first_of(values, k):
    """The places of the k largest, the earlier first among equals."""
    return sorted(range(len(values)), key=lambda c: (-values[c], c))[:k]


def block_of(c, n, size=4):
    return range(c * size, min((c + 1) * size, n))


def selected(n, i):
    """Of blocks of 4: the first, the own one, and the largest of the rest, three together."""
    forced = {0, i // 4}
    others = [c for c in range(i // 4 + 1) if c not in forced]
    return forced | {others[c] for c in first_of([logit(i, c) for c in others], 3 - len(forced))}


def is_selected(n, i, j):
    return j <= i and j // 4 in selected(n, i)


def product(i, total, size):
    """A query with the mean of some keys: sums of two exact quarters."""
    return sum(point(i, a) * total[a] for a in (0, 1)) / size


def by_mean(n, i, j):
    """The own block and the best one before it."""
    totals = [[sum(point(j, a) - 4 for j in block_of(c, n)) for a in (0, 1)] for c in range(i // 4)]
    return j <= i and j // 4 in {i // 4, *first_of([product(i, total, 4) for total in totals], 1)}


def bound(i, keys):
    q = [point(i, a) - 6 for a in (0, 1)]
    return sum(max(q[a] * (point(j, a) - 4) for j in keys) for a in (0, 1))


def best_pages(n, i):
    """The best two pages of what is there when the token is written."""
    pages = [[j for j in block_of(c, n) if j <= i] for c in range(i // 4 + 1)]
    return [pages[c] for c in first_of([bound(i, page) for page in pages], 2)]


def by_bound(n, i, j):
    return any(j in page for page in best_pages(n, i))


def mean(c, n, axis):
    return sum(point(j, axis) - 4 for j in block_of(c, n)) / len(block_of(c, n))


def tiles_of(n, i):
    numbers = [sum(mean(i // 4, n, a) * mean(c, n, a) for a in (0, 1)) for c in range(-(-n // 4))]
    return first_of(numbers, 2)


def by_tile(n, i, j):
    return j // 4 in tiles_of(n, i)


def keys(n):
    return grid(point, n, 2) - 4


def halved(n, i, j):
    return j <= i and j // 3 in (i // 3, i // 6)


ROWS = """
block_top_k(grid(logit, n, -(-n // 4)), 4, 3, initial=1): is_selected(n, i, j)
    named_at=None
moba(grid(point, n, 2), keys(n), 4, 2): by_mean(n, i, j)
    degree=4 * (i >= 4) + i % 4 + 1; named_at=None
quest(grid(point, n, 2) - 6, keys(n), 4, 2): by_bound(n, i, j)
    named_at=None
compressed_blocks(n, 4, 2): i > 2 * j + 2
    degree=max(0, (i - 1) // 2); layers=0; nodes=(n, len([c for c in range(n) if 2 * c + 4 <= n])); sizes=(0,
    1, 4, 5, 17)
tile_top_k(keys(n), keys(n), 4, 2): by_tile(n, i, j)
    causal=False; sizes=(0, 1, 4, 16, 17); named_at=None
sorted_blocks(n, [c // 2 for c in range(-(-n // 3))], 3): halved(n, i, j)
    layers=once(n) if n <= 6 else 2 if n <= 9 else None; sizes=(0, 1, 2, 9, 17)
permuted_blocks(n, torch.arange(-(-n // 5)).roll(-1), 5):
        j // 5 == i // 5 + 1 or (i // 5 == (n - 1) // 5 and j < 5)
    layers=once(n) if n <= 5 else -(-n // 5); causal=False; sizes=(0, 1, 2, 10, 17)
"""
