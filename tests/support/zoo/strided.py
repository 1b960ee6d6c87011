"""Theorems of ``patterns.strided``."""

from support.zoo.row import Row, band, never, once, triangle

from gnn_attention import patterns


def earlier(n: int, stride: int) -> int:
    """Sum of ``i // stride`` over all tokens: for each, how many whole strides lie before it."""
    whole, rest = divmod(n, stride)
    return stride * triangle(whole - 1) + rest * whole


def within(n: int, stride: int) -> int:
    """Edges of causal chunks."""
    return n // stride * triangle(stride) + triangle(n % stride)


def two(n: int, reached: int) -> int:
    """One layer up to the size that one layer covers, then two."""
    return once(n) if n <= reached else 2


ROWS = [
    Row(
        "strides",
        lambda n: patterns.strides(n, 4),
        lambda n, i, j: j in range(i, -1, -4),
        lambda n: n + earlier(n, 4),
        lambda n, i: i // 4 + 1,
        layers=never,
    ),
    Row(
        "strides on both sides",
        lambda n: patterns.strides(n, 4, causal=False),
        lambda n, i, j: i % 4 == j % 4,
        lambda n: n + 2 * earlier(n, 4),
        lambda n, i: i // 4 + 1 + (n - 1 - i) // 4,
        causal=False,
        symmetric=True,
        layers=never,
    ),
    Row(
        "summary_tokens",
        lambda n: patterns.summary_tokens(n, 5, 2),
        lambda n, i, j: j in (*range(3, i + 1, 5), *range(4, i + 1, 5)),
        lambda n: 2 * earlier(n, 5) + n // 5 * 3 + (n % 5 == 4),
        lambda n, i: i // 5 * 2 + (i % 5 >= 3) + (i % 5 >= 4),
        layers=never,
    ),
    Row(
        "summary_tokens for all",
        lambda n: patterns.summary_tokens(n, 5, 2, causal=False),
        lambda n, i, j: j in (*range(3, n, 5), *range(4, n, 5)),
        lambda n: n * ((n + 1) // 5 + n // 5),
        lambda n, i: (n + 1) // 5 + n // 5,
        causal=False,
        layers=never,
    ),
    Row(
        "sparse_strided",
        lambda n: patterns.sparse_strided(n, 4),
        lambda n, i, j: j in (*range(i - 4, i + 1), *range(i, -1, -4)),
        lambda n: band(n, 4) + earlier(n, 4),
        lambda n, i: min(i + 1, 4) + i // 4,
        layers=lambda n: two(n, 5),
    ),
    Row(
        "sparse_strided on both sides",
        lambda n: patterns.sparse_strided(n, 4, causal=False),
        lambda n, i, j: j in (*range(i - 4, i + 5), *range(i % 4, n, 4)),
        lambda n: 2 * (band(n, 4) + earlier(n, 4)) - n,
        lambda n, i: min(i + 1, 4) + i // 4 + min(n - 1 - i, 3) + (n - 1 - i) // 4,
        causal=False,
        symmetric=True,
        layers=lambda n: two(n, 5),
    ),
    Row(
        "sparse_strided, the first head",
        lambda n: patterns.sparse_strided(n, 4, heads=3).select(0, 2),
        lambda n, i, j: j in range(i - 4, i + 1),
        lambda n: band(n, 5),
        lambda n, i: min(i + 1, 5),
        layers=lambda n: -(-max(n - 1, 0) // 4),
    ),
    Row(
        "sparse_strided, the second head",
        lambda n: patterns.sparse_strided(n, 4, heads=2, causal=False).select(0, 1),
        lambda n, i, j: i % 4 == j % 4,
        lambda n: n + 2 * earlier(n, 4),
        lambda n, i: i // 4 + 1 + (n - 1 - i) // 4,
        causal=False,
        symmetric=True,
        layers=never,
    ),
    Row(
        "sparse_fixed",
        lambda n: patterns.sparse_fixed(n, 5, 2),
        lambda n, i, j: j in (*range(i - i % 5, i + 1), *range(3, i, 5), *range(4, i, 5)),
        lambda n: within(n, 5) + 2 * earlier(n, 5),
        lambda n, i: i % 5 + 1 + i // 5 * 2,
        layers=lambda n: two(n, 5),
    ),
    Row(
        "sparse_fixed on both sides",
        lambda n: patterns.sparse_fixed(n, 4, 1, causal=False),
        lambda n, i, j: j in (*range(i - i % 4, i - i % 4 + 4), *range(3, n, 4)),
        lambda n: n * (n // 4) + n // 4 * 12 + (n % 4) ** 2,
        lambda n, i: n // 4 + (3 if i // 4 < n // 4 else n % 4),
        causal=False,
        layers=lambda n: two(n, 4) if n % 4 == 0 or n < 4 else None,
    ),
    Row(
        "sparse_fixed, the second of three heads",
        lambda n: patterns.sparse_fixed(n, 5, 2, heads=3).select(0, 1),
        lambda n, i, j: j in (*range(i - i % 5, i + 1), *range(1, i, 5), *range(2, i, 5)),
        lambda n: within(n, 5) + 2 * earlier(n, 5),
        lambda n, i: i % 5 + 1 + i // 5 * 2,
        layers=lambda n: once(n) if n <= 5 else None,
    ),
    Row(
        "sparse_fixed, the third of three heads begins again",
        lambda n: patterns.sparse_fixed(n, 5, 2, heads=3).select(0, 2),
        lambda n, i, j: j in (*range(i - i % 5, i + 1), *range(3, i, 5), *range(4, i, 5)),
        lambda n: within(n, 5) + 2 * earlier(n, 5),
        lambda n, i: i % 5 + 1 + i // 5 * 2,
        layers=lambda n: two(n, 5),
    ),
]
