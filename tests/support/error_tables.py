"""Tables of wrong calls as text: ``call -> Error: pattern``, a line each."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from functools import partial

from support.refusals import assert_refusals

__all__ = ["assert_errors"]


def assert_errors(table: str, names: Mapping[str, object]) -> None:
    """Every call of the table raises its error with a text that matches its pattern.

    >>> assert_errors("int('x') -> ValueError: invalid literal", {})
    """
    cases = []
    for line in table.strip().splitlines():
        call, _, rest = line.partition(" -> ")
        error, _, pattern = rest.partition(": ")
        cases.append((partial(eval, call.strip(), dict(names)), getattr(builtins, error), pattern))
    assert_refusals(cases)
