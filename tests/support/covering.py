"""Covering arrays: every pair of values of any two arguments occurs in some row, by far fewer rows than the
product.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["pairwise"]


def pairwise(allowed: Callable[..., bool] | None = None, **arguments: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of values, one of each argument, that cover all pairs; ``allowed(**row)`` leaves out rows that
    cannot occur.

    Greedy over the product in its order, so that the same arguments give the same rows.

    >>> pairwise(a=[1, 2], b="xy", c=[True, False])
    [(1, 'x', True), (1, 'y', False), (2, 'x', False), (2, 'y', True)]
    """
    names = list(arguments)
    rows = list(itertools.product(*(range(len(arguments[name])) for name in names)))
    values = {row: tuple(arguments[name][i] for name, i in zip(names, row, strict=True)) for row in rows}
    if allowed is not None:
        rows = [row for row in rows if allowed(**dict(zip(names, values[row], strict=True)))]
    return [values[row] for row in _covering(rows)]


def _covering(rows: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: sum(pair in missing for pair in _pairs(row)))
        missing.difference_update(_pairs(best))
        chosen.append(best)
    return chosen


def _pairs(row: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    return list(itertools.combinations(enumerate(row), 2))
