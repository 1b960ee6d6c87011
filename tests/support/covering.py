"""Long tables of cases: every row of one is a test, and the default run takes a part of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(values: Iterable[Any], first: int = 0, every: int = 3) -> list[Any]:
    """The values of an argument of a test; the default run takes every third, the others are slow tests.

    Tests over the same table begin at different ``first``, so that each of its rows is in the default run of
    some of them.
    """
    quick = first % every
    return [
        value if number % every == quick else _slow(*(value if isinstance(value, tuple) else (value,)))
        for number, value in enumerate(values)
    ]


def _slow(*arguments: Any) -> Any:
    return pytest.param(*arguments, marks=pytest.mark.slow)
