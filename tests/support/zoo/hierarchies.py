"""Theorems of ``patterns.hierarchies``."""

from functools import cache


def power_edge(i: int, j: int) -> bool:
    return j <= i and (j < 3 or i // 3 - j // 3 in (0, 1, 2, 4, 8))


def partners(n: int, i: int) -> set[int]:
    """Return the block of token i and the blocks that differ from it in one binary digit."""
    return {i // 3, *(i // 3 ^ digit for digit in (1, 2, 4, 8))}


def level_sizes(n: int) -> list[int]:
    return [n] if n < 2 else [n, *level_sizes((n + 1) // 2)]


def num_nodes(n: int) -> int:
    return sum(level_sizes(n))


def context_nodes(n: int, k: int, i: int, side: int) -> list[int]:
    """Return the senders of token i on one side: k nodes a level, then on from the parent of the next."""
    sizes, senders, at, half = level_sizes(n), [], i + side, False
    for level, size in enumerate(sizes):
        for _ in range(k):
            if 0 <= at < size:
                child = 2 * at + (side > 0)
                if not (half and child >= sizes[level - 1]):
                    senders.append(sum(sizes[: level - half]) + (child if half else at))
            at, half = at + side, False
        half, at = at % 2 == (side > 0), at // 2
    return senders


@cache
def tree_senders(n: int, k: int, causal: bool) -> list[set[int]]:
    sides = (-1,) if causal else (-1, 1)
    senders = [{i}.union(*(context_nodes(n, k, i, side) for side in sides)) for i in range(n)]
    for level in range(1, len(level_sizes(n))):
        senders += [set(range(s << level, min((s + 1) << level, n))) for s in range(level_sizes(n)[level])]
    return senders


def longnet_edge(i: int, j: int, pairs: list[tuple[int, int]], head: int) -> bool:
    return any(i // w == j // w and i % w % r == head % r and (i - j) % r == 0 for w, r in pairs)


def neighbourhood(n: int, i: int, size: int) -> range:
    """Return the tokens of the block of i and of the two blocks next to it."""
    return range(max(0, i - i % size - size), min(n, i - i % size + 2 * size))


FIRST, THIRD = (1, 2, 3, 5, 8, 13), (6, 10, 16, 26)

ROWS = """
log_sparse(n): j <= i and binary_ones(i - j) <= 1
    degree=1 + i.bit_length(); layers=log2(n); sizes=(0, 1, 2, 17, 40)
log_sparse(n, causal=False): binary_ones(abs(i - j)) <= 1
    degree=1 + i.bit_length() + (n - 1 - i).bit_length(); symmetric=True; sizes=(0, 1, 2, 17, 40)
power_attention(n, 3, window=2, sinks=1): power_edge(i, j)
    sizes=(0, 1, 2, 17, 40)
butterfly(n): binary_ones(i ^ j) <= 1
    degree=1 + log2(n); layers=log2(n); symmetric=True; sizes=(0, 1, 2, 4, 32)
butterfly(n, 3): j // 3 in partners(n, i)
    symmetric=True; sizes=(0, 1, 4, 17, 40)
butterfly_factor(n, 2, block=3): i // 3 ^ j // 3 in (0, 4)
    layers=0 if n < 2 else 1 if n <= 3 else None; symmetric=True
binary_partition(n, 1): j in tree_senders(n, 1, True)[i]
    nodes=num_nodes(n); causal=False; acyclic=True; sizes=(0, 1, 2, 5, 16, 23)
binary_partition(n, 3, causal=False): j in tree_senders(n, 3, False)[i]
    nodes=num_nodes(n); causal=False; acyclic=False; sizes=(0, 1, 2, 5, 16, 23)
longnet(n, [4, 16], [1, 4]): j <= i and longnet_edge(i, j, [(4, 1), (16, 4)], 0)
    degree=i % 4 + 1 + (i % 16 // 4 if i % 4 == 0 else 0); sizes=(0, 1, 2, 17, 40)
longnet(n, [6, 10], [2, 3], heads=4, causal=False).select(0, 3): longnet_edge(i, j, [(6, 2), (10, 3)], 3)
    layers=never(n); symmetric=True; sizes=(0, 1, 2, 17, 40)
h_matrix_level(n, 4, 0): j <= i and j in range(i - i % 4 - 4, i - i % 4 + 4)
    degree=min(i, 4 + i % 4) + 1; layers=max(once(n), steps(n, 4) - 1); sizes=(0, 1, 2, 17, 40)
h_matrix_level(n, 1, 2, causal=False): j in neighbourhood(n, i, 4) and j not in neighbourhood(n, i, 2)
    symmetric=True; sizes=(0, 1, 2, 17, 40)
fibottention(n, 3, 13, 26).select(head=2): abs(i - j) in THIRD
    symmetric=True; sizes=(0, 1, 2, 17, 40)
"""
