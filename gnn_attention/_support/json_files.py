"""JSON files that this package wrote: a file that holds something else is one short ValueError."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gnn_attention._support.text import one_line


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object of a file; ValueError says what is wrong with it, the caller says of which file."""
    return parsed(Path(path).read_text("utf-8"))


def parsed(content: str) -> dict[str, Any]:
    """The JSON object of a text.

    >>> parsed("[1]")
    Traceback (most recent call last):
    ValueError: it is a list, expected a JSON object
    """
    try:
        found = json.loads(content)
    except RecursionError:
        raise ValueError("it nests deeper than Python's recursion goes") from None
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}, expected a JSON object")
    return found


def check_fields(found: object, kinds: Mapping[str, Callable[[Any], bool]], what: str) -> None:
    """ValueError unless ``found`` is an object that has these fields, each of its kind.

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


def _shown(value: object) -> str:
    return one_line(json.dumps(value), 60)
