"""The option ``--json`` of the commands."""

from __future__ import annotations

import argparse

from gnn_attention._support import atomic_files


def add_json(command: argparse.ArgumentParser) -> None:
    """``--json [FILE]``."""
    text = "write it as JSON (without FILE: to stdout)"
    command.add_argument("--json", nargs="?", const="-", metavar="FILE", help=text)


def write_json(place: str | None, text: str) -> None:
    """To the file of ``--json``, or to stdout for "-"; nothing for None."""
    if place == "-":
        print(text)
    elif place is not None:
        atomic_files.write(place, text + "\n")
