"""Write files atomically, and add the option ``--json`` to commands."""

import argparse
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replace_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` on exit and is removed after an exception.

    Symbolic links and the mode of an existing file are kept. A path that is not a regular file (a
    pipe, ``/dev/stdout``) is written to directly. Raises OSError if the file cannot be written.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            yield file
        return
    temporary_path = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with temporary_path.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary_path)
        temporary_path.replace(target)
    finally:
        temporary_path.unlink(missing_ok=True)


def write(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write ``content`` (text as UTF-8, line ends unchanged) to ``path``, and return the path."""
    with replace_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return Path(path)


def check_output_path(option: str, path: str | None) -> None:
    """Raise ValueError if ``path`` is a folder or its parent is not one; "-" and None are accepted."""
    if path in (None, "-"):
        return
    folder = Path(str(path)).parent
    if not folder.is_dir():
        raise ValueError(f"{option} {path}: expected a folder that exists; create {folder} first")
    if Path(str(path)).is_dir():
        raise ValueError(f"{option} {path} is a folder; expected the path of a file")


def add_json(command: argparse.ArgumentParser) -> None:
    help_text = "write the results as JSON to FILE (to stdout if FILE is omitted)"
    command.add_argument("--json", nargs="?", const="-", metavar="FILE", help=help_text)


def write_json(path: str | None, record: object, report: object) -> None:
    """Write the record to ``path``, if any, and print the report; for "-" print only the record."""
    text = record if isinstance(record, str) else json.dumps(record, indent=2)
    if path not in (None, "-"):
        write(path, text + "\n")
    print(text if path == "-" else report)
