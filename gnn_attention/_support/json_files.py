"""The option ``--json [FILE]`` of commands."""

import argparse
import json

from gnn_attention._support import atomic_files


def add_json(command: argparse.ArgumentParser) -> None:
    text = "write it as JSON (without FILE: to stdout)"
    command.add_argument("--json", nargs="?", const="-", metavar="FILE", help=text)


def write_json(place: str | None, record: object, report: object) -> None:
    """The report to stdout, and the record to the file of ``--json``, or for "-" to stdout instead."""
    text = record if isinstance(record, str) else json.dumps(record, indent=2)
    if place not in (None, "-"):
        atomic_files.write(place, text + "\n")
    print(text if place == "-" else report)
