"""Theorems of ``patterns.blocks``: Python's sort repeats its selections on small integers with ties."""

from support.zoo.content import grid, logit, point


def largest_indices(values, k):
    """Return the indices of the k largest values; among equal values the earlier index comes first."""
    return sorted(range(len(values)), key=lambda c: (-values[c], c))[:k]


def block_tokens(c, n, size=4):
    return range(c * size, min((c + 1) * size, n))


def selected_blocks(n, i):
    """Return three blocks of 4 tokens: the first, the token's own, and those of the largest logits."""
    forced = {0, i // 4}
    others = [c for c in range(i // 4 + 1) if c not in forced]
    return forced | {others[c] for c in largest_indices([logit(i, c) for c in others], 3 - len(forced))}


def is_selected_edge(n, i, j):
    return j <= i and j // 4 in selected_blocks(n, i)


def mean_product(i, total, size):
    """Return the product of a query and the mean of some keys; it is exact, a sum of two quarters."""
    return sum(point(i, a) * total[a] for a in (0, 1)) / size


def is_moba_edge(n, i, j):
    """Return whether j is in the token's own block or in the best earlier one."""
    totals = [[sum(point(j, a) - 4 for j in block_tokens(c, n)) for a in (0, 1)] for c in range(i // 4)]
    return j <= i and j // 4 in {i // 4, *largest_indices([mean_product(i, total, 4) for total in totals], 1)}


def bound(i, keys):
    q = [point(i, a) - 6 for a in (0, 1)]
    return sum(max(q[a] * (point(j, a) - 4) for j in keys) for a in (0, 1))


def best_pages(n, i):
    """Return the best two pages of the keys up to the token."""
    pages = [[j for j in block_tokens(c, n) if j <= i] for c in range(i // 4 + 1)]
    return [pages[c] for c in largest_indices([bound(i, page) for page in pages], 2)]


def is_quest_edge(n, i, j):
    return any(j in page for page in best_pages(n, i))


def block_mean(c, n, axis):
    return sum(point(j, axis) - 4 for j in block_tokens(c, n)) / len(block_tokens(c, n))


def best_tiles(n, i):
    numbers = [sum(block_mean(i // 4, n, a) * block_mean(c, n, a) for a in (0, 1)) for c in range(-(-n // 4))]
    return largest_indices(numbers, 2)


def is_tile_edge(n, i, j):
    return j // 4 in best_tiles(n, i)


def keys(n):
    return grid(point, n, 2) - 4


def is_sorted_edge(n, i, j):
    return j <= i and j // 3 in (i // 3, i // 6)


ROWS = """
block_top_k(grid(logit, n, -(-n // 4)), 4, 3, initial=1): is_selected_edge(n, i, j)
    named_at=None
moba(grid(point, n, 2), keys(n), 4, 2): is_moba_edge(n, i, j)
    degree=4 * (i >= 4) + i % 4 + 1; named_at=None
quest(grid(point, n, 2) - 6, keys(n), 4, 2): is_quest_edge(n, i, j)
    named_at=None
compressed_blocks(n, 4, 2): i > 2 * j + 2
    degree=max(0, (i - 1) // 2); layers=0; nodes=(n, len([c for c in range(n) if 2 * c + 4 <= n])); sizes=(0,
    1, 4, 5, 17)
tile_top_k(keys(n), keys(n), 4, 2): is_tile_edge(n, i, j)
    causal=False; sizes=(0, 1, 4, 16, 17); named_at=None
sorted_blocks(n, [c // 2 for c in range(-(-n // 3))], 3): is_sorted_edge(n, i, j)
    layers=once(n) if n <= 6 else 2 if n <= 9 else None; sizes=(0, 1, 2, 9, 17)
permuted_blocks(n, torch.arange(-(-n // 5)).roll(-1), 5):
        j // 5 == i // 5 + 1 or (i // 5 == (n - 1) // 5 and j < 5)
    layers=once(n) if n <= 5 else -(-n // 5); causal=False; sizes=(0, 1, 2, 10, 17)
"""
