"""Theorems of ``patterns.local``."""

from support.zoo.row import once


def cache_entries(i: int, start: int, recent: int) -> list[int]:
    """Return what a cache of the ``start`` first and ``recent`` last tokens holds after token i is added."""
    entries: list[int] = []
    for token in range(i + 1):
        while len(entries) >= start + recent:
            entries.pop(start)
        entries.append(token)
    return entries


def depth(n: int, largest: int) -> int:
    """Return the layers to full reach: one up to the size that one layer covers, then two."""
    return once(n) if n <= largest else 2


ROWS = """
window(n, 3): j in (i, i - 1, i - 2)
    degree=min(i + 1, 3); layers=steps(n - 1, 2)
window(n, 3, causal=False): -3 < i - j < 3
    degree=min(i, 2) + 1 + min(n - 1 - i, 2); layers=steps(n - 1, 2); symmetric=True
dilated(n, 3, 4): j in (i, i - 4, i - 8)
    degree=min(i // 4 + 1, 3); layers=never(n)
dilated(n, 2, 5, causal=False): j in (i - 5, i, i + 5)
    degree=(i >= 5) + 1 + (i + 5 < n); layers=never(n); symmetric=True
band(n, 3, 1): j in (i - 3, i - 2, i - 1, i, i + 1)
    degree=min(i, 3) + 1 + (i + 1 < n); layers=max(n - 1, 0); causal=False
band(n, 7, 5, 3): j in (i - 6, i - 3, i, i + 3)
    degree=1 + (i >= 3) + (i >= 6) + (i + 3 < n); layers=never(n); causal=False
chunked(n, 4, before=1): j in range(i - i % 4 - 4, i + 1)
    degree=i % 4 + 1 + (4 if i >= 4 else 0); layers=max(once(n), (n - 1) // 4)
chunked(n, 3, before=1, after=2, causal=False): j in range(i - i % 3 - 3, i - i % 3 + 9)
    degree=min(i // 3, 1) * 3 + min(9, n - i + i % 3); layers=max(once(n), (n - 1) // 3); causal=False
segment_recurrence(n, 4, 3): j in range({0: i - 3, 1: i - 4, 2: i - 5, 3: i - 6}[i % 4], i + 1)
    degree=i % 4 + 1 + (3 if i >= 4 else 0); layers=once(n) if n <= 4 else (n - 1) // 4 + 1
sink_window(n, 3, 2): j in cache_entries(i, 2, 3)
    degree=min(i + 1, 5); layers=max(once(n), steps(n - 3, 2))
duo_attention(n, 3, [1], 2, 1).select(head=2): j in cache_entries(i, 1, 2)
    degree=min(i + 1, 3); layers=max(once(n), n - 2)
duo_attention(n, 3, [1], 2, 1).select(head=1): j <= i
    degree=i + 1; layers=once(n)
strides(n, 4): j in range(i, -1, -4)
    degree=i // 4 + 1; layers=never(n)
strides(n, 4, causal=False): i % 4 == j % 4
    degree=i // 4 + 1 + (n - 1 - i) // 4; layers=never(n); symmetric=True
summary_tokens(n, 5, 2): j in (*range(3, i + 1, 5), *range(4, i + 1, 5))
    degree=i // 5 * 2 + (i % 5 >= 3) + (i % 5 >= 4); layers=never(n)
sparse_strided(n, 4): j in (*range(i - 4, i + 1), *range(i, -1, -4))
    degree=min(i + 1, 4) + i // 4; layers=depth(n, 5)
sparse_strided(n, 4, causal=False): j in (*range(i - 4, i + 5), *range(i % 4, n, 4))
    degree=min(i + 1, 4) + i // 4 + min(n - 1 - i, 3) + (n - 1 - i) // 4; layers=depth(n, 5); symmetric=True
sparse_fixed(n, 5, 2): j in (*range(i - i % 5, i + 1), *range(3, i, 5), *range(4, i, 5))
    degree=i % 5 + 1 + i // 5 * 2; layers=depth(n, 5)
sparse_fixed(n, 4, 1, causal=False): j in (*range(i - i % 4, i - i % 4 + 4), *range(3, n, 4))
    layers=depth(n, 4) if n % 4 == 0 or n < 4 else None; causal=False
"""
