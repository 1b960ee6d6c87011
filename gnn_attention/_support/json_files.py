"""JSON files that this package wrote: a file that holds something else is one short ValueError."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gnn_attention._support.checks import quoted


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object of a file; ValueError says what is wrong with it, the caller says of which file."""
    return parsed(Path(path).read_text("utf-8"))


def parsed(content: str) -> dict[str, Any]:
    """The JSON object of a text."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("it nests deeper than Python's recursion goes") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__}, expected a JSON object")
    return value


def check_fields(value: object, kinds: Mapping[str, Callable[[Any], bool]], what: str) -> None:
    """ValueError unless ``value`` is an object that has these fields, each of its kind."""
    fields = value if isinstance(value, dict) else {}
    for name, fits in kinds.items():
        if name not in fields or not fits(fields[name]):
            got = quoted(fields[name]) if name in fields else "none"
            raise ValueError(f"{what} must have a valid {name!r}, got {got}")
