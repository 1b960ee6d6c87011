"""Covering arrays: every pair of values of any two arguments occurs in some row, by far fewer rows than the
product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from gnn_attention.verify.selection import covering, grid


def pairwise(allowed: Callable[..., bool] | None = None, **arguments: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of values, one of each argument, that cover all pairs; ``allowed(**row)`` leaves out rows that
    cannot occur.

    >>> pairwise(a=[1, 2], b="xy", c=[True, False])
    [(1, 'x', True), (1, 'y', False), (2, 'x', False), (2, 'y', True)]
    """
    places = grid(**{name: range(len(values)) for name, values in arguments.items()})
    rows = [{name: arguments[name][place] for name, place in row.items()} for row in places]
    able = [number for number, row in enumerate(rows) if allowed is None or allowed(**row)]
    chosen = covering([places[number] for number in able], 2)
    return [tuple(rows[able[number]].values()) for number in chosen]


def thinned(values: Iterable[Any], first: int = 0, every: int = 3) -> list[Any]:
    """The values of an argument of a test, of which the default run takes every third.

    The others are slow tests. Tests over the same table begin at different ``first``, so that each of its
    rows is in the default run of some of them.
    """
    quick = first % every
    return [
        value if number % every == quick else _slow(*(value if isinstance(value, tuple) else (value,)))
        for number, value in enumerate(values)
    ]


def _slow(*arguments: Any) -> Any:
    return pytest.param(*arguments, marks=pytest.mark.slow)
