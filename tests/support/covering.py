"""Covering arrays: every pair of values of any two arguments occurs in some row, by far fewer rows than the
product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
