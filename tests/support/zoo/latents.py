"""Theorems of ``patterns.latents``."""


def star_edge(n: int, i: int, j: int) -> bool:
    """Relay 0, satellites 1 .. n round a ring, their embeddings behind them."""
    if i == 0:
        return j <= n
    return i <= n and j in (0, (i - 2) % n + 1, i, i % n + 1, i + n)


ROWS = """
memory_tokens(window(n, 2), 2): j <= i and (j in (0, 1) or j > i - 2)
    degree=min(i + 1, 4) if i != 2 else 3; layers=max(n - 1, 1); nodes=n + 2
memory_tokens(window(n, 2, causal=False), 2, causal=False): i < 2 or j < 2 or j in (i - 1, i, i + 1)
    degree=n + 2 if i < 2 else 2 + (i > 2) + 1 + (i < n + 1); layers=1 if n <= 2 else 2; nodes=n + 2;
    symmetric=True
tglobal(n, 3, 4): j >= n or j in (i - 2, i - 1, i, i + 1, i + 2)
    degree=min(i, 2) + 1 + min(n - 1 - i, 2) + n // 4; layers=once(n); nodes=n, n + n // 4; causal=False;
    sizes=(0, 1, 2, 4, 17)
side_nodes(n, 4): j in range(4 * i, 4 * i + 4) or (j >= 4 * i and i == n // 4 - 1)
    degree=4 + (n % 4 if i == n // 4 - 1 else 0); layers=once(n); nodes=n // 4, n; causal=False; sizes=(0, 1,
    3, 4, 7, 8, 19)
star(n): star_edge(n, i, j)
    degree=n + 1 if i == 0 else min(n, 3) + 2 if i <= n else 0; layers=None if n else 0; nodes=2 * n + 1;
    causal=False; sizes=(0, 1, 2, 3, 4, 9)
isab(n, 3)[0]: True
    degree=n; nodes=3, n; causal=False
perceiver(n, 4)[0]: True
    degree=n; nodes=4, n; causal=False
perceiver(9, n)[1]: True
    degree=n; layers=once(n); symmetric=True
"""
