"""Tables of wrong calls: each must raise its error, and all that do not are listed together."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial

__all__ = ["assert_errors", "assert_refusals"]

Errors = type[Exception] | tuple[type[Exception], ...]


def assert_refusals(cases: Iterable[tuple[Callable[[], object], Errors, str]]) -> None:
    """Every call raises an error of its type whose text contains a match of its pattern; one test for a table
    of many.

    >>> assert_refusals([(lambda: [][0], IndexError, "out of range")])
    """
    faults = [fault for number, case in enumerate(cases) if (fault := _fault(number, *case)) is not None]
    assert not faults, "\n".join(faults)


def assert_errors(table: str, names: Mapping[str, object]) -> None:
    """The same of a table as text, ``call -> Error: pattern``, a line each.

    >>> assert_errors("int('x') -> ValueError: invalid literal", {})
    """
    cases = []
    for line in table.strip().splitlines():
        call, _, rest = line.partition(" -> ")
        error, _, pattern = rest.partition(": ")
        cases.append((partial(eval, call.strip(), dict(names)), getattr(builtins, error), pattern))
    assert_refusals(cases)


def _fault(number: int, call: Callable[[], object], error: Errors, pattern: str) -> str | None:
    """What is wrong with a case, None for nothing."""
    try:
        call()
    except error as raised:
        found = str(raised)
        return None if re.search(pattern, found) else f"case {number}: expected {pattern!r}, got {found!r}"
    except Exception as raised:
        return f"case {number}: expected {error} with {pattern!r}, got {raised!r}"
    return f"case {number}: expected {pattern!r}, but nothing was raised"
