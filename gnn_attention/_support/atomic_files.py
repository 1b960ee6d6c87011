"""Files written whole or not at all, first next to their place, and the option ``--json`` of commands."""

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
    """A file open for writing that replaces ``path`` when the block ends well, and is removed otherwise.

    A link stays a link to what is replaced, and a mode stays as it was. What is no regular file (a pipe,
    ``/dev/stdout``) is written to directly. OSError where nothing can be written.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            yield file
        return
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def write(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write a whole file, text as UTF-8 with its line ends as they are, and return its path."""
    with replace_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return Path(path)


def check_place(option: str, path: str | None) -> None:
    """ValueError where a file that an option names could not be written; "-" and None pass."""
    if path in (None, "-"):
        return
    folder = Path(str(path)).parent
    if not folder.is_dir():
        raise ValueError(f"{option} {path}: expected a folder that exists, make {folder} first")
    if Path(str(path)).is_dir():
        raise ValueError(f"{option} {path} is a folder: give a file in it")


def add_json(command: argparse.ArgumentParser) -> None:
    text = "write it as JSON (without FILE: to stdout)"
    command.add_argument("--json", nargs="?", const="-", metavar="FILE", help=text)


def write_json(place: str | None, record: object, report: object) -> None:
    """The report to stdout, and the record to the file of ``--json``, or for "-" to stdout instead."""
    text = record if isinstance(record, str) else json.dumps(record, indent=2)
    if place not in (None, "-"):
        write(place, text + "\n")
    print(text if place == "-" else report)
