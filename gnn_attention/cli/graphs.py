"""The command ``gnn-attention graphs``: the zoo."""

import argparse
import shutil
from dataclasses import asdict

from gnn_attention._support import json_files
from gnn_attention.convert import catalogue


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of ``gnn-attention graphs``."""
    command.add_argument("name", nargs="*", help="only these builders")
    json_files.add_json(command)
    command.set_defaults(run=_graphs)


def _graphs(args: argparse.Namespace) -> int:
    found = catalogue.entries(args.name or None)
    listed = [asdict(entry) | {"edges_per_token": entry.edges_per_token} for entry in found]
    width = min(shutil.get_terminal_size((100, 0)).columns, 120)
    json_files.write_json(args.json, listed, catalogue.listing(found, width))
    return 0
