"""Split long tables of cases: every row is a test, but the default run takes only some of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thin(values: Iterable[Any], first: int = 0, every: int = 3) -> list[Any]:
    """Return the values of a test's argument, and mark all but one in ``every`` as slow tests.

    Tests of the same table pass different ``first``, so that each row is in the default run of one of them.
    """
    cases = []
    for number, value in enumerate(values):
        arguments = value if isinstance(value, tuple) else (value,)
        is_quick = number % every == first % every
        cases.append(value if is_quick else pytest.param(*arguments, marks=pytest.mark.slow))
    return cases
