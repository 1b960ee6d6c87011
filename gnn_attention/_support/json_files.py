"""JSON that this package wrote, and the option ``--json [FILE]`` of its commands."""

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from gnn_attention._support import atomic_files
from gnn_attention._support.checks import quoted


def parsed(content: str) -> dict[str, Any]:
    """The JSON object of a text; ValueError says what is wrong with it, the caller says of which file."""
    value = json.loads(content)
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


def add_json(command: argparse.ArgumentParser) -> None:
    text = "write it as JSON (without FILE: to stdout)"
    command.add_argument("--json", nargs="?", const="-", metavar="FILE", help=text)


def write_json(place: str | None, record: object, report: object) -> None:
    """The report to stdout, and the record to the file of ``--json``, or for "-" to stdout instead."""
    text = record if isinstance(record, str) else json.dumps(record, indent=2)
    if place not in (None, "-"):
        atomic_files.write(place, text + "\n")
    print(text if place == "-" else report)
