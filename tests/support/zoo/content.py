"""Theorems of ``patterns.content``: the data are small integers, with ties; the choices are made again by
sorting in Python.
"""

import torch
from support.zoo.row import Row, band, never, once, triangle

from gnn_attention import patterns


def rounds(edge, causal=True):
    """``layers`` of a graph whose edges follow from data: news is passed on, set by set, until nobody hears
    more.
    """

    def layers(n):
        wanted = [set(range(i + 1 if causal else n)) for i in range(n)]
        known, senders = [{i} for i in range(n)], [[j for j in range(n) if edge(n, i, j)] for i in range(n)]
        for layer in range(n + 1):
            if all(w <= k for w, k in zip(wanted, known, strict=True)):
                return layer
            known = [known[i].union(*(known[j] for j in senders[i])) for i in range(n)]
        return None

    return layers


def grid(value, rows, columns, dtype=torch.float32):
    """The values of a function of two integers as a tensor."""
    return torch.tensor([[value(i, j) for j in range(columns)] for i in range(rows)], dtype=dtype).reshape(
        rows, columns
    )


def logit(i, j):
    return (7 * i + 5 * j * j + i * j) % 11


def best(i, among, k):
    """The k senders of the largest logits, the earlier first among equals."""
    return sorted(among, key=lambda j: (-logit(i, j), j))[:k]


def point(i, axis):
    return (i * i * 3) % 13 if axis == 0 else (5 * i) % 7


def closest(i, among, k):
    return sorted(among, key=lambda j: (sum((point(i, a) - point(j, a)) ** 2 for a in (0, 1)), j))[:k]


def bucket(r, i):
    return (i * i) % 5 if r == 0 else (i // 3) % 4


def mates(i, among):
    return [j for j in among if j != i and (bucket(0, i) == bucket(0, j) or bucket(1, i) == bucket(1, j))]


def count_of_mates(n, i, causal):
    """Inclusion and exclusion over the two rounds."""
    among = range(i) if causal else [j for j in range(n) if j != i]
    both = [[bucket(r, i) == bucket(r, j) for r in (0, 1)] for j in among]
    return sum(a for a, _ in both) + sum(b for _, b in both) - sum(a and b for a, b in both)


def sign(i):
    return -1 if i % 4 in (1, 2) else 1


def members(axis, n):
    """The five points that stand highest along an axis."""
    return sorted(range(n), key=lambda i: (-point(i, axis), i))[:5]


def chosen_top(n, i, j):
    return j <= i and j in best(i, range(i + 1), 3)


def chosen_top_of_all(n, i, j):
    return j in best(i, range(n), 2)


def is_close(n, i, j):
    return j in closest(i, range(i + 1), 3)


def is_close_other(n, i, j):
    return j in closest(i, [other for other in range(n) if other != i], 2)


def is_mate(n, i, j):
    heard = mates(i, range(i))
    return j in (heard or [i])


def is_mate_anywhere(n, i, j):
    heard = mates(i, range(n))
    return j in (heard or [i])


def same_sign_before(n, i, j):
    if i == j:
        return all(sign(before) != sign(i) for before in range(i))
    return j < i and sign(i) == sign(j)


def routed(n, i, j):
    return j <= i and any({i, j} <= set(members(axis, n)) for axis in (0, 1))


ROWS = [
    Row(
        "top_k",
        lambda n: patterns.top_k(grid(logit, n, n), 3),
        chosen_top,
        lambda n: band(n, 3),
        lambda n, i: min(i + 1, 3),
        layers=rounds(chosen_top),
        named_at=None,
    ),
    Row(
        "top_k of all",
        lambda n: patterns.top_k(grid(logit, n, n, torch.int32), 2, causal=False),
        chosen_top_of_all,
        lambda n: n * min(n, 2),
        lambda n, i: min(n, 2),
        layers=rounds(chosen_top_of_all, causal=False),
        causal=False,
        named_at=None,
    ),
    Row(
        "nearest",
        lambda n: patterns.nearest(grid(point, n, 2), 3),
        is_close,
        lambda n: band(n, 3),
        lambda n, i: min(i + 1, 3),
        layers=rounds(is_close),
        named_at=None,
    ),
    Row(
        "nearest others",
        lambda n: patterns.nearest(grid(point, n, 2, torch.int64), 2, causal=False, loops=False),
        is_close_other,
        lambda n: n * min(max(n - 1, 0), 2),
        lambda n, i: min(n - 1, 2),
        layers=rounds(is_close_other, causal=False),
        causal=False,
        named_at=None,
    ),
    Row(
        "shared_bucket",
        lambda n: patterns.shared_bucket(grid(bucket, 2, n, torch.int64)),
        is_mate,
        lambda n: sum(max(1, count_of_mates(n, i, True)) for i in range(n)),
        lambda n, i: max(1, count_of_mates(n, i, True)),
        layers=rounds(is_mate),
        named_at=None,
    ),
    Row(
        "shared_bucket on both sides",
        lambda n: patterns.shared_bucket(grid(bucket, 2, n, torch.int32), causal=False),
        is_mate_anywhere,
        lambda n: sum(max(1, count_of_mates(n, i, False)) for i in range(n)),
        lambda n, i: max(1, count_of_mates(n, i, False)),
        layers=rounds(is_mate_anywhere, causal=False),
        causal=False,
        symmetric=True,
        named_at=None,
    ),
    # numbers on a line: whatever the directions are, a hash can only tell the two signs apart
    Row(
        "lsh",
        lambda n: patterns.lsh(
            torch.tensor([[sign(i) * (i + 1.0)] for i in range(n)]).reshape(n, 1), 6, rounds=3, seed=8
        ),
        same_sign_before,
        lambda n: sum(
            triangle(m) - m + (m > 0) for m in (sum(sign(i) == s for i in range(n)) for s in (1, -1))
        ),
        lambda n, i: max(1, sum(sign(j) == sign(i) for j in range(i))),
        layers=never,
        named_at=None,
    ),
    Row(
        "clusters",
        lambda n: patterns.clusters([i % 3 for i in range(n)]),
        lambda n, i, j: j <= i and (i - j) % 3 == 0,
        lambda n: sum(triangle(len(range(r, n, 3))) for r in range(3)),
        lambda n, i: i // 3 + 1,
        layers=never,
    ),
    Row(
        "clusters of two sequences",
        lambda n: patterns.clusters(torch.arange(n) % 2, torch.arange(n + 3) // 2, causal=False),
        lambda n, i, j: j in ((0, 1), (2, 3))[i % 2],
        lambda n: sum(max(0, min(n + 3 - 2 * (i % 2), 2)) for i in range(n)),
        lambda n, i: 2,
        causal=False,
        nodes=lambda n: (n, n + 3),
    ),
    Row(
        "routing",
        lambda n: patterns.routing(grid(point, n, 2), grid(point, n, 2), torch.eye(2), 5),
        routed,
        lambda n: 2 * triangle(min(n, 5)) - triangle(len(set(members(0, n)) & set(members(1, n)))),
        lambda n, i: len(
            {j for axis in (0, 1) for j in members(axis, n) if i in members(axis, n) and j <= i}
        ),
        layers=rounds(routed),
        named_at=None,
    ),
    Row(
        "vertical_slash",
        lambda n: patterns.vertical_slash(n, [0][:n], [0, 1][:n]),
        lambda n, i, j: j in (0, i - 1, i),
        lambda n: 3 * n - 3 if n > 1 else n,
        lambda n, i: min(i + 1, 3),
        layers=lambda n: max(n - 2, once(n)),
    ),
    Row(
        "vertical_slash without loops",
        lambda n: patterns.vertical_slash(n, [c for c in (1, 5) if c < n], [s for s in (2, 4) if s < n]),
        lambda n, i, j: (j in (1, 5) and i >= j) or i - j in (2, 4),
        lambda n: sum(max(0, n - x) for x in (1, 5, 2, 4)) - sum(n > x for x in (3, 5, 7, 9)),
        lambda n, i: sum(i >= x for x in (1, 5, 2, 4)) - sum(i == x for x in (3, 5, 7, 9)),
        layers=never,
    ),
]
