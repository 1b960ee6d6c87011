"""The command ``gnn-attention graphs``: list the builders of graphs."""

import argparse
import importlib
from dataclasses import asdict
from itertools import groupby

from gnn_attention._support import atomic_files
from gnn_attention.convert import catalogue


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gnn-attention graphs``."""
    command.add_argument("name", nargs="*", help="list only these builders")
    atomic_files.add_json(command)
    command.set_defaults(run=run_graphs)


def run_graphs(args: argparse.Namespace) -> int:
    entries = catalogue.entries(args.name or None)
    lines = []
    for family, members in groupby(entries, key=lambda entry: entry.family):
        module = importlib.import_module(f"gnn_attention.patterns.{family}")
        lines += ["", f"{family}: {catalogue.first_sentence(module)}"]
        for entry in members:
            lines += ["", f"  {entry.example}", f"    {entry.definition.replace('``', '`')}"]
    atomic_files.write_json(args.json, [asdict(entry) for entry in entries], "\n".join(lines[1:]))
    return 0
