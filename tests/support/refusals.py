"""Check tables of wrong calls, each of which must raise its error; a failure lists all that do not."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial

__all__ = ["assert_errors", "assert_refusals"]

Errors = type[Exception] | tuple[type[Exception], ...]


def assert_refusals(cases: Iterable[tuple[Callable[[], object], Errors, str]]) -> None:
    """Assert that every call raises an error of its type whose text matches its pattern.

    >>> assert_refusals([(lambda: [][0], IndexError, "out of range")])
    """
    faults = [fault for number, case in enumerate(cases) if (fault := _fault(number, *case)) is not None]
    assert not faults, "\n".join(faults)


def assert_errors(table: str, names: Mapping[str, object]) -> None:
    """Assert the errors of a text table whose lines read ``call -> Error: pattern``.

    >>> assert_errors("int('x') -> ValueError: invalid literal", {})
    """
    cases = []
    for line in table.strip().splitlines():
        call, _, expected = line.partition(" -> ")
        error, _, pattern = expected.partition(": ")
        cases.append((partial(eval, call.strip(), dict(names)), getattr(builtins, error), pattern))
    assert_refusals(cases)


def _fault(number: int, call: Callable[[], object], error: Errors, pattern: str) -> str | None:
    """Return the fault of a case, or None."""
    try:
        call()
    except error as raised:
        text = str(raised)
        return None if re.search(pattern, text) else f"case {number}: expected {pattern!r}, got {text!r}"
    except Exception as raised:
        return f"case {number}: expected {error} with {pattern!r}, got {raised!r}"
    return f"case {number}: expected {pattern!r}, but nothing was raised"
