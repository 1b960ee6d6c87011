"""Theorems of ``patterns.strided``."""

from support.zoo.row import once


def two(n: int, reached: int) -> int:
    """One layer up to the size that one layer covers, then two."""
    return once(n) if n <= reached else 2


ROWS = """
strides(n, 4): j in range(i, -1, -4)
    degree=i // 4 + 1; layers=never(n)
strides(n, 4, causal=False): i % 4 == j % 4
    degree=i // 4 + 1 + (n - 1 - i) // 4; layers=never(n); symmetric=True
summary_tokens(n, 5, 2): j in (*range(3, i + 1, 5), *range(4, i + 1, 5))
    degree=i // 5 * 2 + (i % 5 >= 3) + (i % 5 >= 4); layers=never(n)
sparse_strided(n, 4): j in (*range(i - 4, i + 1), *range(i, -1, -4))
    degree=min(i + 1, 4) + i // 4; layers=two(n, 5)
sparse_strided(n, 4, causal=False): j in (*range(i - 4, i + 5), *range(i % 4, n, 4))
    degree=min(i + 1, 4) + i // 4 + min(n - 1 - i, 3) + (n - 1 - i) // 4; layers=two(n, 5); symmetric=True
sparse_strided(n, 4, heads=3).select(0, 2): j in range(i - 4, i + 1)
    degree=min(i + 1, 5); layers=-(-max(n - 1, 0) // 4)
sparse_strided(n, 4, heads=2, causal=False).select(0, 1): i % 4 == j % 4
    degree=i // 4 + 1 + (n - 1 - i) // 4; layers=never(n); symmetric=True
sparse_fixed(n, 5, 2): j in (*range(i - i % 5, i + 1), *range(3, i, 5), *range(4, i, 5))
    degree=i % 5 + 1 + i // 5 * 2; layers=two(n, 5)
sparse_fixed(n, 4, 1, causal=False): j in (*range(i - i % 4, i - i % 4 + 4), *range(3, n, 4))
    layers=two(n, 4) if n % 4 == 0 or n < 4 else None; causal=False
sparse_fixed(n, 5, 2, heads=3).select(0, 1): j in (*range(i - i % 5, i + 1), *range(1, i, 5), *range(2, i, 5))
    degree=i % 5 + 1 + i // 5 * 2; layers=once(n) if n <= 5 else None
"""
