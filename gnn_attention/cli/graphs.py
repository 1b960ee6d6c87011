"""The command ``gnn-attention graphs``: the zoo."""

import argparse
import importlib
import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby

from gnn_attention._support import json_files
from gnn_attention.convert import catalogue


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of ``gnn-attention graphs``."""
    command.add_argument("name", nargs="*", help="only these builders")
    json_files.add_json(command)
    command.set_defaults(run=_graphs)


def _graphs(args: argparse.Namespace) -> int:
    found = catalogue.entries(args.name or None)
    width = min(shutil.get_terminal_size((100, 0)).columns, 120)
    json_files.write_json(args.json, [asdict(entry) for entry in found], _listing(found, width))
    return 0


def _listing(entries: Iterable[catalogue.Entry], width: int) -> str:
    """The entries as text, under a heading for each family."""
    lines = []
    for family, members in groupby(entries, key=lambda entry: entry.family):
        module = importlib.import_module(f"gnn_attention.patterns.{family}")
        sentence = catalogue.first_sentence(module).rstrip(".")
        lines += ["", *textwrap.wrap(f"{family}: {sentence}", width)]
        for entry in members:
            rate = entry.edges_per_token
            counted = "a value for each edge" if rate is None else f"{rate:.3g} senders each"
            lines += ["", f"  {entry.example}".ljust(width - len(counted) - 1) + f" {counted}"]
            definition = textwrap.fill(entry.definition.replace("``", "`"), width - 4)
            lines.append(textwrap.indent(definition, "    "))
    return "\n".join(lines[1:])
