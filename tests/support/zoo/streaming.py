"""Theorems of ``patterns.local``."""


def cache(i: int, start: int, recent: int) -> list[int]:
    """The entries of a cache of ``start`` first and ``recent`` last tokens once token i is added."""
    entries: list[int] = []
    for token in range(i + 1):
        while len(entries) >= start + recent:
            entries.pop(start)
        entries.append(token)
    return entries


ROWS = """
sink_window(n, 3, 2): j in cache(i, 2, 3)
    degree=min(i + 1, 5); layers=max(once(n), steps(n - 3, 2))
sink_window(n, 1): j in cache(i, 4, 1)
    degree=min(i + 1, 5); layers=once(n) if n < 6 else None
sink_window(n, 4, 0): j in (i, i - 1, i - 2, i - 3)
    degree=min(i + 1, 4); layers=steps(n - 1, 3)
duo_attention(n, 3, [1], 2, 1).select(head=2): j in cache(i, 1, 2)
    degree=min(i + 1, 3); layers=max(once(n), n - 2)
duo_attention(n, 3, [1], 2, 1).select(head=1): j <= i
    degree=i + 1; layers=once(n)
"""
