"""Theorems of ``patterns.grids``."""

from itertools import product

Shape = tuple[int, ...]


def coordinates(shape: Shape) -> list[Shape]:
    """Return the coordinates of every token."""
    return list(product(*map(range, shape)))


def pairs(shape: Shape, i: int, j: int) -> list[tuple[int, int, int]]:
    """Return, for each axis, its size, the receiver's coordinate and the sender's."""
    return list(zip(shape, coordinates(shape)[i], coordinates(shape)[j], strict=True))


def nearest_coordinates(size: int, x: int, kernel: int, step: int = 1) -> list[int]:
    """Return the ``kernel`` coordinates nearest to x at multiples of ``step``, the lower one first."""
    return sorted(range(x % step, size, step), key=lambda y: (abs(y - x), y))[:kernel]


def in_neighbourhood(shape: Shape, kernel: Shape, i: int, j: int, dilation: Shape = (1, 1, 1)) -> bool:
    """Return whether, along each axis, j is among the coordinates nearest to i."""
    axes = zip(pairs(shape, i, j), kernel, dilation, strict=False)
    return all(y in nearest_coordinates(size, x, k, d) for (size, x, y), k, d in axes)


def swin_window(size: int, x: int, window: int, shift: int) -> tuple[int, bool]:
    """Return the window of x after a cyclic shift of the padded grid, and whether x wrapped around."""
    padded = -(-size // window) * window
    return (x - shift) % padded // window, x < shift


def near_block(x: int, y: int, block: int, halo: int) -> bool:
    """Return whether y is within ``halo`` of some coordinate of x's block."""
    return any(abs(y - z) <= halo for z in range(x - x % block, x - x % block + block))


def generation_time(i: int) -> tuple[int, int, int, int]:
    """Return when a pixel of a picture 6 wide is generated, block by block of 2 x 3."""
    row, column = divmod(i, 6)
    return row // 2, column // 3, row, column


def in_memory(i: int, j: int) -> bool:
    """Return whether j is in i's block, at most one row above it, or at most two columns to its side."""
    (top, left), (row, column) = (i // 12 * 2, i % 6 // 3 * 3), divmod(j, 6)
    return row in range(top - 1, top + 2) and column in range(left - 2, left + 5)


def count_within(n: int, i: int, w: int, first: int = 0) -> int:
    """Return the number of tokens in ``first .. n - 1`` that are less than w away from i."""
    return len({j for j in range(i - w + 1, i + w) if first <= j < n})


ROWS = """
natten((n, n), 3): in_neighbourhood((n, n), (3, 3), i, j)
    degree=9; layers=max(1, n - 2); nodes=n * n; causal=False; sizes=(3, 4, 6)
natten((2, n, 4), (1, 5, 2)): in_neighbourhood((2, n, 4), (1, 5, 2), i, j)
    degree=10; layers=None; nodes=8 * n; causal=False; sizes=(5, 7)
natten((n,), 3, dilation=2): j in nearest_coordinates(n, i, 3, 2)
    degree=3; layers=never(n); causal=False; sizes=(6, 7, 17); named_at=8
natten((n, 3), (2, 3), causal=(True, False)): i // 3 - j // 3 in (0, 1)
    degree=3 * min(i // 3 + 1, 2); layers=None; nodes=3 * n; causal=False; sizes=(2, 5)
swin((n, n), 4, 2): all(swin_window(n, x, 4, 2) == swin_window(n, y, 4, 2) for _, x, y in pairs((n, n), i, j))
    layers=None; nodes=n * n; symmetric=True; sizes=(4, 8)
swin((n,), 4, 1): swin_window(n, i, 4, 1) == swin_window(n, j, 4, 1)
    layers=None if n > 1 else 0; symmetric=True; sizes=(1, 2, 18)
haloed_blocks((n, n), 2, 1): all(near_block(x, y, 2, 1) for _, x, y in pairs((n, n), i, j))
    layers=steps(n - 1, 2); nodes=n * n; causal=False; sizes=(2, 4, 6)
axial((2, n, 3)): sum(x != y for _, x, y in pairs((2, n, 3), i, j)) < 2
    degree=n + 3; layers=2 if n == 1 else 3; nodes=6 * n; symmetric=True; sizes=(1, 2, 4)
axial((2, n, 3), axis=1): [x == y for _, x, y in pairs((2, n, 3), i, j)][::2] == [True, True]
    degree=n; layers=None; nodes=6 * n; symmetric=True; sizes=(1, 2, 4)
image_local_2d((n, 6), (2, 3), (1, 2)): in_memory(i, j) and generation_time(j) <= generation_time(i)
    layers=None; nodes=6 * n; causal=False; acyclic=True; sizes=(2, 4, 6); named_at=4
sliding_tile((n,), 2, 1): i // 2 == j // 2
    degree=2; layers=1 if n == 2 else None; symmetric=True; sizes=(2, 6); named_at=4
sliding_tile((4, n), 2, (1, 2), tiled=True): in_neighbourhood((2, n // 2), (1, 2), i // 4, j // 4)
    degree=8; layers=None; nodes=4 * n; causal=False; sizes=(4, 6, 8); named_at=6
svg_spatial(n, 3, 4): j in range(i - 3, i + 4)
    layers=steps(3 * n - 1, 3); nodes=3 * n; symmetric=True; sizes=(0, 1, 2, 5)
svg_temporal(n, 4, 2): i % 4 - j % 4 in (-1, 0, 1)
    degree=n * (2 if i % 4 in (0, 3) else 3); layers=3 if n else 0; nodes=4 * n; symmetric=True; sizes=(0, 1,
    2, 4)
"""
