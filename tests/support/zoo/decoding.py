"""Theorems of ``patterns.decoding``."""


def diffusion_edge(n: int, i: int, j: int) -> bool:
    """Noised senders reach their own noised block; clean ones later blocks, and clean ones their own too."""
    (receiver_is_clean, x), (sender_is_clean, y) = divmod(i, n), divmod(j, n)
    if not sender_is_clean:
        return not receiver_is_clean and y // 3 == x // 3
    return y // 3 < x // 3 + receiver_is_clean


ROWS = """
block_diffusion(n, 3): diffusion_edge(n, i, j)
    degree=min(i % n - i % n % 3 + 3, n); layers=None if n else 0; nodes=2 * n; causal=False
draft_training(3, n, 2): j <= i and (j < 3 or i - j <= (i - 3) % 2)
    degree=i + 1 if i < 3 else 4 + (i - 3) % 2; layers=1 if n < 2 else None; nodes=3 + 2 * n; sizes=(0, 1, 2,
    7)
media_cross(n, range(1, n, 3), 3): i >= 1 and j // 3 == (i - 1) // 3
    degree=3 * (i >= 1); layers=once(n); nodes=(n, 3 * len(range(1, n, 3))); causal=False
media_cross(n, range(1, n, 3), 3, last=False): 3 * (j // 3) + 1 <= i
    degree=3 * ((i + 2) // 3); layers=once(n); nodes=(n, 3 * len(range(1, n, 3))); causal=False
"""
