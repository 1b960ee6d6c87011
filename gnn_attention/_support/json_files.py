"""JSON that a stranger may have written: read within limits, and whatever is wrong with it is one short ValueError."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["MOST_BYTES", "check_fields", "finite", "parsed", "read", "text"]

MOST_BYTES = 2**24  # of a file
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # an escape that may stand for half a character


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object of a file: :func:`parsed` of its :func:`text`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "a.json"
    ...     _ = file.write_text('{"a": [1, 2]}')
    ...     read(file)
    {'a': [1, 2]}
    """
    return parsed(text(path))


def text(path: str | os.PathLike[str]) -> str:
    """A file as text. ValueError says what is wrong with it, the caller says of which file; OSError is the system's."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError("it is no file")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes, which is the most that is read")
    return content.decode("utf-8")


def parsed(content: str) -> dict[str, Any]:
    """The JSON object of a text; ValueError where it is none, has a name twice or half a character, or nests too deep.

    >>> parsed('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: the name 'a' is there twice
    """
    found = _loaded(content)
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}, expected a JSON object")
    return found


def finite(value: object) -> float:
    """A number of JSON as a float; ValueError for what is none, NaN, infinite or beyond a float.

    >>> finite(2), finite(0.5)
    (2.0, 0.5)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e308:  # an int may be any size
        raise ValueError(f"{_shown(value)} is no finite number")
    return float(value)


def check_fields(found: object, kinds: Mapping[str, Callable[[Any], bool]], what: str) -> None:
    """ValueError unless ``found`` is an object whose fields are these, each of its kind.

    >>> check_fields({"n": "1"}, {"n": lambda value: isinstance(value, int)}, "the record")
    Traceback (most recent call last):
    ValueError: the record has "1" for 'n'
    """
    if not isinstance(found, dict):
        raise ValueError(f"{what} is {_shown(found)}, expected an object")
    for name, fits in kinds.items():
        if name not in found:
            raise ValueError(f"{what} has no {name!r}")
        if not fits(found[name]):
            raise ValueError(f"{what} has {_shown(found[name])} for {name!r}")


def _loaded(content: str) -> Any:
    try:
        found = json.loads(content, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError("it nests deeper than Python's recursion goes") from None
    if _HALF.search(content):
        _check_whole(found)
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {_cut(repr(twice))} is there twice")
    return found


def _check_whole(found: Any) -> None:
    """ValueError for half a character, on which later prints and writes would fail."""
    try:
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"it holds {error.object[error.start]!r}, half a character") from None


def _shown(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return (
        "a large number"
        if isinstance(value, int) and abs(value) >= 10**40
        else _cut(json.dumps(value).replace("\x7f", "\\u007f"))
    )


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:56]} ..."
