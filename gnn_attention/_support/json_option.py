"""The option ``--json`` of the commands."""

from __future__ import annotations

import argparse

from gnn_attention._support import atomic_files


def add_json(command: argparse.ArgumentParser) -> None:
    """``--json [FILE]``."""
    text = "write it as JSON (without FILE: to stdout)"
    command.add_argument("--json", nargs="?", const="-", metavar="FILE", help=text)


def write_json(place: str | None, text: str, report: object = None) -> None:
    """To the file of ``--json``, or for "-" to stdout, in place of the report."""
    if place == "-":
        print(text)
        return
    if place is not None:
        atomic_files.write(place, text + "\n")
    if report is not None:
        print(report)
