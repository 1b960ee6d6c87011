"""Theorems of ``patterns.decoding``."""

from support.zoo.row import triangle


def blocks_up_to_own(n: int) -> int:
    """The sum of ``min(3 (i // 3 + 1), n)`` over all i: k whole blocks of three and r tokens more."""
    k, r = divmod(n, 3)
    return 9 * triangle(k) + r * n


def diffusion_edge(n: int, i: int, j: int) -> bool:
    """Noised senders reach their own noised block; clean ones later blocks, and clean ones their own too."""
    (receiver_is_clean, x), (sender_is_clean, y) = divmod(i, n), divmod(j, n)
    if not sender_is_clean:
        return not receiver_is_clean and y // 3 == x // 3
    return y // 3 < x // 3 + receiver_is_clean


def images_so_far(n: int) -> int:
    """Over text tokens 1 .. n - 1, an image at each third: the sum of how many stand at or before."""
    k, r = divmod(max(n - 1, 0), 3)
    return 3 * triangle(k) + r * (k + 1)


ROWS = """
block_diffusion(n, 3): diffusion_edge(n, i, j)
    degree=min(i % n - i % n % 3 + 3, n); count=2 * blocks_up_to_own(n); layers=None if n else 0;
    nodes=2 * n; causal=False
block_diffusion(n, 1): i == j or n <= j < i + (i < n) * n
    degree=i % n + 1; count=2 * triangle(n); layers=None if n else 0; nodes=2 * n; causal=False; acyclic=True
draft_training(3, n, 2): j <= i and (j < 3 or i - j <= (i - 3) % 2)
    degree=i + 1 if i < 3 else 4 + (i - 3) % 2; count=6 + 9 * n; layers=1 if n < 2 else None;
    nodes=3 + 2 * n; sizes=(0, 1, 2, 7)
draft_training(0, n, 4): j <= i and i - j <= i % 4
    degree=i % 4 + 1; count=10 * n; layers=n if n < 2 else None; nodes=4 * n; sizes=(0, 1, 2, 5)
media_cross(n, range(1, n, 3), 3): i >= 1 and j // 3 == (i - 1) // 3
    degree=3 * (i >= 1); count=3 * max(n - 1, 0); layers=once(n); nodes=(n, 3 * len(range(1, n, 3)));
    causal=False
media_cross(n, range(1, n, 3), 3, last=False): 3 * (j // 3) + 1 <= i
    degree=3 * ((i + 2) // 3); count=3 * images_so_far(n); layers=once(n);
    nodes=(n, 3 * len(range(1, n, 3))); causal=False
"""
