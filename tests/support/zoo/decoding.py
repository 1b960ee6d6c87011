"""Theorems of ``patterns.decoding``."""

from support.zoo.row import Row, once, triangle

from gnn_attention import patterns


def blocks_up_to_own(n: int) -> int:
    """The sum of ``min(3 (i // 3 + 1), n)`` over all i: k whole blocks of three and r tokens more."""
    k, r = divmod(n, 3)
    return 9 * triangle(k) + r * n


def diffusion_edge(n: int, i: int, j: int) -> bool:
    """Noised senders speak to their own noised block; clean ones to later blocks, and if these are clean to
    their own too.
    """
    (receiver_is_clean, x), (sender_is_clean, y) = divmod(i, n), divmod(j, n)
    if not sender_is_clean:
        return not receiver_is_clean and y // 3 == x // 3
    return y // 3 < x // 3 + receiver_is_clean


def images_so_far(n: int) -> int:
    """Over text tokens 1 .. n - 1, an image at each third: the sum of how many stand at or before."""
    k, r = divmod(max(n - 1, 0), 3)
    return 3 * triangle(k) + r * (k + 1)


ROWS = [
    Row(
        "block_diffusion",
        lambda n: patterns.block_diffusion(n, 3),
        diffusion_edge,
        lambda n: 2 * blocks_up_to_own(n),
        lambda n, i: min(i % n - i % n % 3 + 3, n),
        causal=False,
        nodes=lambda n: (2 * n, 2 * n),
        layers=lambda n: None if n else 0,
    ),
    Row(
        "block_diffusion, token by token",
        lambda n: patterns.block_diffusion(n, 1),
        lambda n, i, j: i == j or n <= j < i + (i < n) * n,
        lambda n: 2 * triangle(n),
        lambda n, i: i % n + 1,
        causal=False,
        acyclic=True,
        nodes=lambda n: (2 * n, 2 * n),
        layers=lambda n: None if n else 0,
    ),
    Row(
        "draft_training",
        lambda n: patterns.draft_training(3, n, 2),
        lambda n, i, j: j <= i and (j < 3 or i - j <= (i - 3) % 2),
        lambda n: 6 + 9 * n,
        lambda n, i: i + 1 if i < 3 else 4 + (i - 3) % 2,
        nodes=lambda n: (3 + 2 * n, 3 + 2 * n),
        layers=lambda n: 1 if n < 2 else None,
        sizes=(0, 1, 2, 7),
    ),
    Row(
        "draft_training without a prefix",
        lambda n: patterns.draft_training(0, n, 4),
        lambda n, i, j: j <= i and i - j <= i % 4,
        lambda n: 10 * n,
        lambda n, i: i % 4 + 1,
        nodes=lambda n: (4 * n, 4 * n),
        layers=lambda n: n if n < 2 else None,
        sizes=(0, 1, 2, 5),
    ),
    Row(
        "media_cross",
        lambda n: patterns.media_cross(n, range(1, n, 3), 3),
        lambda n, i, j: i >= 1 and j // 3 == (i - 1) // 3,
        lambda n: 3 * max(n - 1, 0),
        lambda n, i: 3 * (i >= 1),
        causal=False,
        nodes=lambda n: (n, 3 * len(range(1, n, 3))),
        layers=once,
    ),
    Row(
        "media_cross of all images so far",
        lambda n: patterns.media_cross(n, range(1, n, 3), 3, last=False),
        lambda n, i, j: 3 * (j // 3) + 1 <= i,
        lambda n: 3 * images_so_far(n),
        lambda n, i: 3 * ((i + 2) // 3),
        causal=False,
        nodes=lambda n: (n, 3 * len(range(1, n, 3))),
        layers=once,
    ),
]
