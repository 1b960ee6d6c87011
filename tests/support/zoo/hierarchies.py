"""Theorems of ``patterns.hierarchies``."""

from collections.abc import Callable
from functools import cache

from support.zoo.row import Row, never, once, steps

from gnn_attention import patterns


def rounds(nodes: int, edge: Callable[[int, int], bool], causal: bool = False) -> int | None:
    """Layers to full reach, by sets: what a token has heard of, and what those whom it hears had heard of."""
    hears = [[src for src in range(nodes) if edge(dst, src)] for dst in range(nodes)]
    heard, layers = [{dst} for dst in range(nodes)], 0
    while any(len(heard[dst]) < (dst + 1 if causal else nodes) for dst in range(nodes)):
        further = [heard[dst].union(*(heard[src] for src in hears[dst])) for dst in range(nodes)]
        if further == heard:
            return None
        heard, layers = further, layers + 1
    return layers


def binary_ones(number: int) -> int:
    return bin(number).count("1")


def log2(n: int) -> int:
    """Rounded down; 0 of nothing."""
    return max(n.bit_length() - 1, 0)


def in_blocks(blocks: set[int], n: int, size: int) -> int:
    """How many of n tokens stand in these blocks."""
    return sum(len(range(b * size, min((b + 1) * size, n))) for b in blocks if b >= 0)


def power_edge(i: int, j: int) -> bool:
    return j <= i and (j < 3 or i // 3 - j // 3 in (0, 1, 2, 4, 8))


def power_degree(n: int, i: int) -> int:
    earlier = {0, *(i // 3 - gap for gap in (1, 2, 4, 8))} - {i // 3}
    return in_blocks(earlier, n, 3) + i % 3 + 1


def partners(n: int, i: int) -> set[int]:
    """The block of token i and those that differ in one of the digits 1, 2, 4, 8."""
    return {i // 3, *(i // 3 ^ digit for digit in (1, 2, 4, 8))}


def level_sizes(n: int) -> list[int]:
    return [n] if n < 2 else [n, *level_sizes((n + 1) // 2)]


def nodes(n: int) -> int:
    return sum(level_sizes(n))


def walk(n: int, k: int, i: int, side: int) -> list[int]:
    """Whom token i hears on one side: k nodes a level, going up to the parent of the next node not yet
    heard.
    """
    sizes, heard, at, half = level_sizes(n), [], i + side, False
    for level, size in enumerate(sizes):
        for _ in range(k):
            if 0 <= at < size:
                child = 2 * at + (side > 0)
                heard += (
                    []
                    if half and child >= sizes[level - 1]
                    else [sum(sizes[: level - half]) + (child if half else at)]
                )
            at, half = at + side, False
        half, at = at % 2 == (side > 0), at // 2
    return heard


@cache
def tree_hears(n: int, k: int, causal: bool) -> list[set[int]]:
    hears = [{i, *walk(n, k, i, -1), *(() if causal else walk(n, k, i, 1))} for i in range(n)]
    for level in range(1, len(level_sizes(n))):
        hears += [set(range(s << level, min((s + 1) << level, n))) for s in range(level_sizes(n)[level])]
    return hears


def tree_row(name: str, k: int, causal: bool) -> Row:
    return Row(
        name,
        lambda n: patterns.binary_partition(n, k, causal=causal),
        lambda n, i, j: j in tree_hears(n, k, causal)[i],
        lambda n: sum(len(heard) for heard in tree_hears(n, k, causal)),
        lambda n, i: len(tree_hears(n, k, causal)[i]),
        layers=lambda n: rounds(nodes(n), lambda i, j: j in tree_hears(n, k, causal)[i]),
        causal=False,
        acyclic=causal,
        nodes=lambda n: (nodes(n), nodes(n)),
        sizes=(0, 1, 2, 5, 16, 23),
    )


def dilated_senders(n: int, i: int, pairs: list[tuple[int, int]], head: int) -> set[int]:
    rows = [range(i - i % w + head % r, min(i - i % w + w, n), r) for w, r in pairs]
    return {j for row in rows if i in row for j in row}


def longnet_edge(i: int, j: int, pairs: list[tuple[int, int]], head: int) -> bool:
    return any(i // w == j // w and i % w % r == head % r and (i - j) % r == 0 for w, r in pairs)


def neighbourhood(n: int, i: int, size: int) -> range:
    """The tokens of the own block and of the two beside it."""
    return range(max(0, i - i % size - size), min(n, i - i % size + 2 * size))


def far_pairs(i: int) -> int:
    """From the end of the previous block of two back to the beginning of the previous block of four."""
    return max(0, min(i // 2 * 2 - 2, 2 + i // 2 % 2 * 2))


FIRST, THIRD = (1, 2, 3, 5, 8, 13), (6, 10, 16, 26)


def at_distances(n: int, i: int, distances: tuple[int, ...]) -> int:
    """How many tokens stand at these distances before and after i."""
    return sum((i >= d) + (i + d < n) for d in distances)


def pairs_at(n: int, distances: tuple[int, ...]) -> int:
    return 2 * sum(max(n - d, 0) for d in distances)


ROWS = [
    Row(
        "log_sparse",
        patterns.log_sparse,
        lambda n, i, j: j <= i and binary_ones(i - j) <= 1,
        lambda n: n + sum(n - 2**k for k in range(8) if 2**k < n),
        lambda n, i: 1 + i.bit_length(),
        layers=log2,
        sizes=(0, 1, 2, 17, 40),
    ),
    Row(
        "log_sparse on both sides",
        lambda n: patterns.log_sparse(n, causal=False),
        lambda n, i, j: binary_ones(abs(i - j)) <= 1,
        lambda n: n + 2 * sum(n - 2**k for k in range(8) if 2**k < n),
        lambda n, i: 1 + i.bit_length() + (n - 1 - i).bit_length(),
        layers=lambda n: rounds(n, lambda i, j: binary_ones(abs(i - j)) <= 1),
        causal=False,
        symmetric=True,
        sizes=(0, 1, 2, 17, 40),
    ),
    Row(
        "power_attention",
        patterns.power_attention,
        lambda n, i, j: j <= i and binary_ones(i - j) <= 1,
        lambda n: n + sum(n - 2**k for k in range(8) if 2**k < n),
        lambda n, i: 1 + i.bit_length(),
        layers=log2,
    ),
    Row(
        "power_attention in blocks",
        lambda n: patterns.power_attention(n, 3, window=2, sinks=1),
        lambda n, i, j: power_edge(i, j),
        lambda n: sum(power_degree(n, i) for i in range(n)),
        power_degree,
        layers=lambda n: rounds(n, power_edge, causal=True),
        sizes=(0, 1, 2, 17, 40),
    ),
    Row(
        "butterfly",
        patterns.butterfly,
        lambda n, i, j: binary_ones(i ^ j) <= 1,
        lambda n: n * (1 + log2(n)),
        lambda n, i: 1 + log2(n),
        layers=log2,
        causal=False,
        symmetric=True,
        sizes=(0, 1, 2, 4, 32),
    ),
    Row(
        "butterfly in blocks, cut",
        lambda n: patterns.butterfly(n, 3),
        lambda n, i, j: j // 3 in partners(n, i),
        lambda n: sum(in_blocks(partners(n, i), n, 3) for i in range(n)),
        lambda n, i: in_blocks(partners(n, i), n, 3),
        layers=lambda n: rounds(n, lambda i, j: j // 3 in partners(n, i)),
        causal=False,
        symmetric=True,
        sizes=(0, 1, 4, 17, 40),
    ),
    Row(
        "butterfly of two levels",
        lambda n: patterns.butterfly(n, levels=2),
        lambda n, i, j: i ^ j in (0, 1, 2),
        lambda n: 3 * n,
        lambda n, i: 3,
        layers=never,
        causal=False,
        symmetric=True,
        sizes=(16,),
        named_at=16,
    ),
    Row(
        "butterfly_factor",
        lambda n: patterns.butterfly_factor(n, 1),
        lambda n, i, j: i ^ j in (0, 2),
        lambda n: n + sum(i ^ 2 < n for i in range(n)),
        lambda n, i: 1 + (i ^ 2 < n),
        layers=never,
        causal=False,
        symmetric=True,
    ),
    Row(
        "butterfly_factor in blocks",
        lambda n: patterns.butterfly_factor(n, 2, block=3),
        lambda n, i, j: i // 3 ^ j // 3 in (0, 4),
        lambda n: sum(in_blocks({i // 3, i // 3 ^ 4}, n, 3) for i in range(n)),
        lambda n, i: in_blocks({i // 3, i // 3 ^ 4}, n, 3),
        layers=lambda n: 0 if n < 2 else 1 if n <= 3 else None,
        causal=False,
        symmetric=True,
    ),
    tree_row("binary_partition", 1, causal=True),
    tree_row("binary_partition on both sides", 1, causal=False),
    tree_row("binary_partition, two a level", 2, causal=True),
    tree_row("binary_partition, three a level on both sides", 3, causal=False),
    Row(
        "longnet",
        lambda n: patterns.longnet(n, [4, 16], [1, 4]),
        lambda n, i, j: j <= i and longnet_edge(i, j, [(4, 1), (16, 4)], 0),
        lambda n: sum(i % 4 + 1 for i in range(n)) + sum(i % 16 // 4 for i in range(0, n, 4)),
        lambda n, i: i % 4 + 1 + (i % 16 // 4 if i % 4 == 0 else 0),
        layers=lambda n: rounds(
            n, lambda i, j: j <= i and longnet_edge(i, j, [(4, 1), (16, 4)], 0), causal=True
        ),
        sizes=(0, 1, 2, 17, 40),
    ),
    Row(
        "longnet on both sides, of one head",
        lambda n: patterns.longnet(n, [6, 10], [2, 3], heads=4, causal=False).select(0, 3),
        lambda n, i, j: longnet_edge(i, j, [(6, 2), (10, 3)], 3),
        lambda n: sum(len(dilated_senders(n, i, [(6, 2), (10, 3)], 3)) for i in range(n)),
        lambda n, i: len(dilated_senders(n, i, [(6, 2), (10, 3)], 3)),
        layers=never,
        causal=False,
        symmetric=True,
        sizes=(0, 1, 2, 17, 40),
    ),
    Row(
        "h_matrix_level",
        lambda n: patterns.h_matrix_level(n, 4, 0),
        lambda n, i, j: j <= i and j in range(i - i % 4 - 4, i - i % 4 + 4),
        lambda n: sum(min(i, 4 + i % 4) + 1 for i in range(n)),
        lambda n, i: min(i, 4 + i % 4) + 1,
        layers=lambda n: max(once(n), steps(n, 4) - 1),
        sizes=(0, 1, 2, 17, 40),
    ),
    Row(
        "h_matrix_level above",
        lambda n: patterns.h_matrix_level(n, 2, 1),
        lambda n, i, j: i // 4 * 4 - 4 <= j < i // 2 * 2 - 2,
        lambda n: sum(far_pairs(i) for i in range(n)),
        lambda n, i: far_pairs(i),
        layers=never,
    ),
    Row(
        "h_matrix_level above, on both sides",
        lambda n: patterns.h_matrix_level(n, 1, 2, causal=False),
        lambda n, i, j: j in neighbourhood(n, i, 4) and j not in neighbourhood(n, i, 2),
        lambda n: sum(len(neighbourhood(n, i, 4)) - len(neighbourhood(n, i, 2)) for i in range(n)),
        lambda n, i: len(neighbourhood(n, i, 4)) - len(neighbourhood(n, i, 2)),
        layers=lambda n: rounds(
            n, lambda i, j: j in neighbourhood(n, i, 4) and j not in neighbourhood(n, i, 2)
        ),
        causal=False,
        symmetric=True,
        sizes=(0, 1, 2, 17, 40),
    ),
    Row(
        "fibottention, its first head",
        lambda n: patterns.fibottention(n, 3, 13, 26).select(head=0),
        lambda n, i, j: abs(i - j) in FIRST,
        lambda n: pairs_at(n, FIRST),
        lambda n, i: at_distances(n, i, FIRST),
        layers=lambda n: rounds(n, lambda i, j: abs(i - j) in FIRST),
        causal=False,
        symmetric=True,
        sizes=(0, 1, 2, 17, 40),
    ),
    Row(
        "fibottention, its last head",
        lambda n: patterns.fibottention(n, 3, 13, 26).select(head=2),
        lambda n, i, j: abs(i - j) in THIRD,
        lambda n: pairs_at(n, THIRD),
        lambda n, i: at_distances(n, i, THIRD),
        layers=lambda n: rounds(n, lambda i, j: abs(i - j) in THIRD),
        causal=False,
        symmetric=True,
        sizes=(0, 1, 2, 17, 40),
    ),
]
