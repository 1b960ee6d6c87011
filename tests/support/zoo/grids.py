"""Theorems of ``patterns.grids``."""

from itertools import pairwise, product
from math import prod

from support.zoo.row import Row, both_sides, never, steps, triangle

from gnn_attention import patterns

Shape = tuple[int, ...]


def places(shape: Shape) -> list[Shape]:
    """The coordinates of every token."""
    return list(product(*map(range, shape)))


def pairs(shape: Shape, i: int, j: int) -> list[tuple[int, int, int]]:
    """For each axis its size, the receiver's coordinate and the sender's."""
    return list(zip(shape, places(shape)[i], places(shape)[j], strict=True))


def nearest(size: int, x: int, kernel: int, step: int = 1) -> list[int]:
    """The ``kernel`` coordinates nearest to x among those a multiple of ``step`` away, the lower one
    first.
    """
    return sorted(range(x % step, size, step), key=lambda y: (abs(y - x), y))[:kernel]


def rolled(size: int, x: int, window: int, shift: int) -> tuple[int, bool]:
    """The window of x after a cyclic shift of the padded grid, and whether the shift carried x around."""
    padded = -(-size // window) * window
    return (x - shift) % padded // window, x < shift


def lengths(n: int, window: int, shift: int) -> list[int]:
    """The sizes of the windows of a line."""
    starts = [0, *range(shift or window, n, window), n]
    return [stop - start for start, stop in pairwise(starts)]


def near_block(x: int, y: int, block: int, halo: int) -> bool:
    """True if y is within ``halo`` of some coordinate of x's block."""
    return any(abs(y - z) <= halo for z in range(x - x % block, x - x % block + block))


def haloed(n: int, x: int) -> int:
    """How many coordinates a block of two and a halo of one around x hold."""
    return min(x // 2 * 2, 1) + min(n - x // 2 * 2, 3)


def generated(i: int) -> tuple[int, int, int, int]:
    """When a pixel of a picture 6 wide is generated, block (2 x 3) by block."""
    row, column = divmod(i, 6)
    return row // 2, column // 3, row, column


def in_memory(i: int, j: int) -> bool:
    """True if j lies in i's block, one row above it or two columns beside it."""
    (top, left), (row, column) = (i // 12 * 2, i % 6 // 3 * 3), divmod(j, 6)
    return row in range(top - 1, top + 2) and column in range(left - 2, left + 5)


def remembered(i: int) -> int:
    """How many tokens of that memory come before i's block: five columns wide above, two columns to the
    left.
    """
    return (5 if i >= 12 else 0) + (4 if i % 6 >= 3 else 0)


def tile_major(shape: Shape, tile: int) -> list[Shape]:
    """The coordinates of every token, tile by tile."""
    return sorted(places(shape), key=lambda place: (tuple(x // tile for x in place), place))


def around(n: int, i: int, w: int, first: int = 0) -> int:
    """How many of ``first .. n - 1`` are nearer than w to i."""
    return len({j for j in range(i - w + 1, i + w) if first <= j < n})


ROWS = [
    Row(
        "natten",
        lambda n: patterns.natten((n, n), 3),
        lambda n, i, j: all(y in nearest(size, x, 3) for size, x, y in pairs((n, n), i, j)),
        lambda n: 9 * n * n,
        lambda n, i: 9,
        layers=lambda n: max(1, n - 2),
        causal=False,
        nodes=lambda n: (n * n, n * n),
        sizes=(3, 4, 6),
    ),
    Row(
        "natten with an even kernel",
        lambda n: patterns.natten((n,), 4),
        lambda n, i, j: j in nearest(n, i, 4),
        lambda n: 4 * n,
        lambda n, i: 4,
        layers=lambda n: max(1, n - 3),
        causal=False,
        sizes=(4, 5, 17),
    ),
    Row(
        "natten in three dimensions",
        lambda n: patterns.natten((2, n, 4), (1, 5, 2)),
        lambda n, i, j: all(
            y in nearest(*axis, k) for (*axis, y), k in zip(pairs((2, n, 4), i, j), (1, 5, 2), strict=True)
        ),
        lambda n: 80 * n,
        lambda n, i: 10,
        layers=lambda n: None,
        causal=False,
        nodes=lambda n: (8 * n, 8 * n),
        sizes=(5, 7),
    ),
    Row(
        "natten dilated",
        lambda n: patterns.natten((n, 4), (3, 2), dilation=(2, 1)),
        lambda n, i, j: all(
            y in nearest(*axis, k, d)
            for (*axis, y), k, d in zip(pairs((n, 4), i, j), (3, 2), (2, 1), strict=True)
        ),
        lambda n: 24 * n,
        lambda n, i: 6,
        layers=never,
        causal=False,
        nodes=lambda n: (4 * n, 4 * n),
        sizes=(6, 7, 10),
        named_at=7,
    ),
    Row(
        "natten strided",
        lambda n: patterns.natten((n,), 4, stride=2),
        lambda n, i, j: j in nearest(n, i | 1, 4),
        lambda n: 4 * n,
        lambda n, i: 4,
        layers=lambda n: n // 2 if n > 4 else 1,
        causal=False,
        sizes=(4, 8, 16),
    ),
    Row(
        "natten strided and dilated",
        lambda n: patterns.natten((n,), 3, dilation=2, stride=3),
        lambda n, i, j: j in nearest(n, min(i // 6 * 6 + 2 + i % 2, n - 1 - (n - 1 - i) % 2), 3, 2),
        lambda n: 3 * n,
        lambda n, i: 3,
        layers=never,
        causal=False,
        sizes=(6, 7, 17),
        named_at=8,
    ),
    Row(
        "natten causal",
        lambda n: patterns.natten((n,), 3, causal=True),
        lambda n, i, j: j in (i - 2, i - 1, i),
        lambda n: 3 * n - 3,
        lambda n, i: min(i + 1, 3),
        layers=lambda n: steps(n - 1, 2),
        sizes=(3, 17),
    ),
    Row(
        "natten causal along one axis",
        lambda n: patterns.natten((n, 3), (2, 3), causal=(True, False)),
        lambda n, i, j: i // 3 - j // 3 in (0, 1),
        lambda n: 9 * (2 * n - 1),
        lambda n, i: 3 * min(i // 3 + 1, 2),
        layers=lambda n: None,
        causal=False,
        nodes=lambda n: (3 * n, 3 * n),
        sizes=(2, 5),
    ),
    Row(
        "natten causal and strided",
        lambda n: patterns.natten((n,), 3, stride=2, causal=True),
        lambda n, i, j: j in (range(i - 1, i + 1) if i % 2 == 0 else range(i - 2, i + 1)),
        lambda n: 5 * n // 2 - 2,
        lambda n, i: 3 if i % 2 and i > 1 else min(i + 1, 2),
        layers=lambda n: n // 2,
        sizes=(4, 8, 16),
        named_at=6,
    ),
    Row(
        "swin",
        lambda n: patterns.swin((n, n), 2),
        lambda n, i, j: all(x // 2 == y // 2 for _, x, y in pairs((n, n), i, j)),
        lambda n: 4 * n * n,
        lambda n, i: 4,
        layers=lambda n: 1 if n == 2 else None,
        causal=False,
        symmetric=True,
        nodes=lambda n: (n * n, n * n),
        sizes=(2, 4, 6),
    ),
    Row(
        "swin shifted",
        lambda n: patterns.swin((n, n), 4, 2),
        lambda n, i, j: all(rolled(n, x, 4, 2) == rolled(n, y, 4, 2) for _, x, y in pairs((n, n), i, j)),
        lambda n: (4 * (n - 2)) ** 2,
        lambda n, i: prod(2 if x in (0, 1, n - 2, n - 1) else 4 for x in divmod(i, n)),
        layers=lambda n: None,
        causal=False,
        symmetric=True,
        nodes=lambda n: (n * n, n * n),
        sizes=(4, 8),
    ),
    Row(
        "swin on a grid that the window does not divide",
        lambda n: patterns.swin((n,), 4, 1),
        lambda n, i, j: rolled(n, i, 4, 1) == rolled(n, j, 4, 1),
        lambda n: sum(length**2 for length in lengths(n, 4, 1)),
        lambda n, i: 1 if i == 0 else min(n, i - (i - 1) % 4 + 4) - (i - (i - 1) % 4),
        layers=lambda n: None if n > 1 else 0,
        causal=False,
        symmetric=True,
        sizes=(1, 2, 18),
    ),
    Row(
        "haloed_blocks",
        lambda n: patterns.haloed_blocks((n, n), 2, 1),
        lambda n, i, j: all(near_block(x, y, 2, 1) for _, x, y in pairs((n, n), i, j)),
        lambda n: (4 * n - 4) ** 2,
        lambda n, i: prod(haloed(n, x) for x in divmod(i, n)),
        layers=lambda n: steps(n - 1, 2),
        causal=False,
        nodes=lambda n: (n * n, n * n),
        sizes=(2, 4, 6),
    ),
    Row(
        "haloed_blocks of one token",
        lambda n: patterns.haloed_blocks((n, 3), 1, (1, 0)),
        lambda n, i, j: j in (i - 3, i, i + 3),
        lambda n: 3 * both_sides(n, 2),
        lambda n, i: 1 + (i >= 3) + (i + 3 < 3 * n),
        layers=lambda n: None,
        causal=False,
        symmetric=True,
        nodes=lambda n: (3 * n, 3 * n),
        sizes=(1, 5),
    ),
    Row(
        "axial",
        lambda n: patterns.axial((n, 3)),
        lambda n, i, j: i // 3 == j // 3 or i % 3 == j % 3,
        lambda n: 3 * n * (n + 2),
        lambda n, i: n + 2,
        layers=lambda n: 1 if n == 1 else 2,
        causal=False,
        symmetric=True,
        nodes=lambda n: (3 * n, 3 * n),
        sizes=(1, 2, 5),
    ),
    Row(
        "axial in three dimensions",
        lambda n: patterns.axial((2, n, 3)),
        lambda n, i, j: sum(x != y for _, x, y in pairs((2, n, 3), i, j)) < 2,
        lambda n: 6 * n * (n + 3),
        lambda n, i: n + 3,
        layers=lambda n: 2 if n == 1 else 3,
        causal=False,
        symmetric=True,
        nodes=lambda n: (6 * n, 6 * n),
        sizes=(1, 2, 4),
    ),
    Row(
        "axial along one axis",
        lambda n: patterns.axial((2, n, 3), axis=1),
        lambda n, i, j: [x == y for _, x, y in pairs((2, n, 3), i, j)][::2] == [True, True],
        lambda n: 6 * n * n,
        lambda n, i: n,
        layers=lambda n: None,
        causal=False,
        symmetric=True,
        nodes=lambda n: (6 * n, 6 * n),
        sizes=(1, 2, 4),
    ),
    Row(
        "image_local_2d",
        lambda n: patterns.image_local_2d((n, 6), (2, 3), (1, 2)),
        lambda n, i, j: in_memory(i, j) and generated(j) <= generated(i),
        lambda n: n * triangle(6) + 6 * (4 * n // 2 + 5 * (n - 2)),
        lambda n, i: i // 6 % 2 * 3 + i % 3 + 1 + remembered(i),
        layers=lambda n: None,
        causal=False,
        acyclic=True,
        nodes=lambda n: (6 * n, 6 * n),
        sizes=(2, 4, 6),
        named_at=4,
    ),
    Row(
        "sliding_tile",
        lambda n: patterns.sliding_tile((n, 4), 2, (3, 2)),
        lambda n, i, j: j // 8 in nearest(n // 2, i // 8, 3),
        lambda n: 96 * n,
        lambda n, i: 24,
        layers=lambda n: max(1, n // 2 - 2),
        causal=False,
        nodes=lambda n: (4 * n, 4 * n),
        sizes=(6, 8, 10),
        named_at=8,
    ),
    Row(
        "sliding_tile with text",
        lambda n: patterns.sliding_tile((n,), 2, 1, text=2),
        lambda n, i, j: i // 2 == j // 2 or i >= n or j >= n,
        lambda n: 4 * n + 2 * (n + 2),
        lambda n, i: 4 if i < n else n + 2,
        layers=lambda n: 1 if n == 2 else 2,
        causal=False,
        symmetric=True,
        nodes=lambda n: (n + 2, n + 2),
        sizes=(2, 6),
        named_at=4,
    ),
    Row(
        "sliding_tile, tile by tile",
        lambda n: patterns.sliding_tile((4, n), 2, (1, 2), tiled=True),
        lambda n, i, j: all(
            y // 2 in nearest(size // 2, x // 2, k)
            for size, x, y, k in zip(
                (4, n), tile_major((4, n), 2)[i], tile_major((4, n), 2)[j], (1, 2), strict=True
            )
        ),
        lambda n: 32 * n,
        lambda n, i: 8,
        layers=lambda n: None,
        causal=False,
        nodes=lambda n: (4 * n, 4 * n),
        sizes=(4, 6, 8),
        named_at=6,
    ),
    Row(
        "svg_spatial",
        lambda n: patterns.svg_spatial(n, 3, 4, prompt=2),
        lambda n, i, j: i in (0, 1) or j in (0, 1) or j in range(i - 3, i + 4),
        lambda n: 2 * (3 * n + 2) + 6 * n + both_sides(3 * n, 4),
        lambda n, i: 3 * n + 2 if i < 2 else 2 + around(3 * n + 2, i, 4, 2),
        layers=lambda n: 1 if n < 2 else 2,
        causal=False,
        symmetric=True,
        nodes=lambda n: (3 * n + 2, 3 * n + 2),
        sizes=(0, 1, 2, 5),
    ),
    Row(
        "svg_spatial and the first frame",
        lambda n: patterns.svg_spatial(n, 3, 2, prompt=1, first_frame=True),
        lambda n, i, j: i == 0 or j in (0, 1, 2, 3, i - 1, i, i + 1),
        lambda n: 3 * n + 1 + 12 * n + max(9 * n - 10, 0),
        lambda n, i: 3 * n + 1 if i == 0 else 4 + around(3 * n + 1, i, 2, 4),
        layers=lambda n: min(n, 2),
        causal=False,
        nodes=lambda n: (3 * n + 1, 3 * n + 1),
        sizes=(0, 1, 2, 5),
    ),
    Row(
        "svg_temporal",
        lambda n: patterns.svg_temporal(n, 4, 2, prompt=1),
        lambda n, i, j: i == 0 or j == 0 or (i - 1) % 4 - (j - 1) % 4 in (-1, 0, 1),
        lambda n: 8 * n + 1 + 10 * n * n,
        lambda n, i: 4 * n + 1 if i == 0 else 1 + n * (2 if i % 4 in (0, 1) else 3),
        layers=lambda n: 2 if n else 0,
        causal=False,
        symmetric=True,
        nodes=lambda n: (4 * n + 1, 4 * n + 1),
        sizes=(0, 1, 2, 4),
    ),
    Row(
        "svg_temporal without a prompt",
        lambda n: patterns.svg_temporal(n, 4, 2),
        lambda n, i, j: abs(i % 4 - j % 4) < 2,
        lambda n: 10 * n * n,
        lambda n, i: n * (2 if i % 4 in (0, 3) else 3),
        layers=lambda n: 3 if n else 0,
        causal=False,
        symmetric=True,
        nodes=lambda n: (4 * n, 4 * n),
        sizes=(0, 1, 2, 4),
    ),
]
