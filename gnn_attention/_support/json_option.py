"""The option ``--json`` of the commands."""

import argparse
import json

from gnn_attention._support import atomic_files


def add_json(command: argparse.ArgumentParser) -> None:
    """``--json [FILE]``."""
    text = "write it as JSON (without FILE: to stdout)"
    command.add_argument("--json", nargs="?", const="-", metavar="FILE", help=text)


def write_json(place: str | None, found: object, report: object) -> None:
    """The report to stdout, and what was found to the file of ``--json``, or for "-" to stdout instead."""
    text = found if isinstance(found, str) else json.dumps(found, indent=2)
    if place not in (None, "-"):
        atomic_files.write(place, text + "\n")
    print(text if place == "-" else report)
