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


def competing(i):
    return first_of([logit(i, c) for c in range(i // 4 + 1)], 2)


def competes(n, i, j):
    return j <= i and j // 4 in competing(i)


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
    degree=4 * min(i // 4, 2) + i % 4 + 1; named_at=None
block_top_k(grid(logit, n, -(-n // 4), torch.int64), 4, 2, local=0): competes(n, i, j)
    degree=sum(min(4, i - 4 * c + 1) for c in competing(i)); named_at=None
moba(grid(point, n, 2), keys(n), 4, 2): by_mean(n, i, j)
    degree=4 * (i >= 4) + i % 4 + 1; named_at=None
quest(grid(point, n, 2) - 6, keys(n), 4, 2): by_bound(n, i, j)
    degree=sum(map(len, best_pages(n, i))); named_at=None
compressed_blocks(n, 4, 2): i > 2 * j + 2
    degree=max(0, (i - 1) // 2); layers=0; nodes=(n, len([c for c in range(n) if 2 * c + 4 <= n])); sizes=(0,
    1, 4, 5, 17)
compressed_blocks(n, 3): (i + 1) // 3 > j
    degree=(i + 1) // 3; layers=0; nodes=n, n // 3
tile_top_k(keys(n), keys(n), 4, 2): by_tile(n, i, j)
    degree=sum(len(block_of(c, n)) for c in tiles_of(n, i)); causal=False; sizes=(0, 1, 4, 16, 17);
    named_at=None
sorted_blocks(n, [c // 2 for c in range(-(-n // 3))], 3): halved(n, i, j)
    degree=i + 1 if i < 3 else 3 + i % 3 + 1; layers=once(n) if n <= 6 else 2 if n <= 9 else None; sizes=(0,
    1, 2, 9, 17)
sorted_blocks(n, list(range(-(-n // 6)))[::-1], 6, causal=False):
        i // 6 == j // 6 or i // 6 + j // 6 == (n - 1) // 6
    degree=n if n <= 12 else 6 if i // 6 == 1 else n - 6; layers=once(n) if n <= 12 else None; symmetric=True;
    sizes=(0, 1, 2, 12, 17)
permuted_blocks(n, torch.arange(-(-n // 5)).roll(-1), 5):
        j // 5 == i // 5 + 1 or (i // 5 == (n - 1) // 5 and j < 5)
    degree=min(5, n) if i // 5 == (n - 1) // 5 else len(block_of(i // 5 + 1, n, 5)); layers=once(n) if n <= 5
    else -(-n // 5); causal=False; sizes=(0, 1, 2, 10, 17)
"""
