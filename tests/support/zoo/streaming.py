"""Theorems of ``patterns.streaming``."""

from support.zoo.row import Row, band, once, steps, triangle

from gnn_attention import patterns


def cache(i: int, start: int, recent: int) -> list[int]:
    """What a cache of ``start`` first and ``recent`` last tokens holds when token i has been added, one token
    after another.
    """
    held: list[int] = []
    for token in range(i + 1):
        while len(held) >= start + recent:
            held.pop(start)
        held.append(token)
    return held


ROWS = [
    Row(
        "sink_window",
        lambda n: patterns.sink_window(n, 3, 2),
        lambda n, i, j: j in cache(i, 2, 3),
        lambda n: band(n, 5),
        lambda n, i: min(i + 1, 5),
        layers=lambda n: max(once(n), steps(n - 3, 2)),
    ),
    Row(
        "sink_window with its four sinks",
        lambda n: patterns.sink_window(n, 1),
        lambda n, i, j: j in cache(i, 4, 1),
        lambda n: band(n, 5),
        lambda n, i: min(i + 1, 5),
        layers=lambda n: once(n) if n < 6 else None,
    ),
    Row(
        "sink_window without a sink",
        lambda n: patterns.sink_window(n, 4, 0),
        lambda n, i, j: j in (i, i - 1, i - 2, i - 3),
        lambda n: band(n, 4),
        lambda n, i: min(i + 1, 4),
        layers=lambda n: steps(n - 1, 3),
    ),
    Row(
        "duo_attention, a streaming head",
        lambda n: patterns.duo_attention(n, 3, [1], 2, 1).select(head=2),
        lambda n, i, j: j in cache(i, 1, 2),
        lambda n: band(n, 3),
        lambda n, i: min(i + 1, 3),
        layers=lambda n: max(once(n), n - 2),
    ),
    Row(
        "duo_attention, a retrieval head",
        lambda n: patterns.duo_attention(n, 3, [1], 2, 1).select(head=1),
        lambda n, i, j: j <= i,
        triangle,
        lambda n, i: i + 1,
        layers=once,
    ),
]
