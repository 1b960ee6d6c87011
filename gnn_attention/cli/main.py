"""Parse the arguments of ``gnn-attention`` and run one of its commands.

A command's module is imported only for that command or its help. The exit code is 0 if
all checks passed, 1 if a check failed, 2 for wrong arguments and 130 after Ctrl-C.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from gnn_attention import __version__
from gnn_attention._support import atomic_files

# Each command is a module of this package.
COMMANDS = {
    "verify": "check every form and backend against dense attention in float64",
    "audit": "check that information in a language model flows exactly along a graph",
    "attribute": "find the edges and heads that a language model needs for given text",
    "bench": "time attention on a few graphs, and compare other installed libraries",
    "graphs": "list every builder of graphs, with its definition and an example",
    "draw": "draw a graph, e.g. 'window(64, 8)' or karate.graphml",
    "explore": "write a page that shows, edge by edge, how a model processes text",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default that of ``sys.argv``, and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A closed stream is None, and a replacement may lack this method.
        with suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        return _run(_build_parser(arguments).parse_args(arguments))
    except KeyboardInterrupt as interrupt:
        print(": ".join(["interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    try:
        atomic_files.check_output_path("--json", getattr(args, "json", None))
        code: int = args.run(args)
        print(end="", flush=True)
    except BrokenPipeError:
        # A reader such as a pager has closed the pipe, so Python's last flush would also fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, IndexError, ImportError, OSError) as error:
        with suppress(OSError):
            print(f"gnn-attention {args.command}: {error}", file=sys.stderr)
        return 2
    return code


def _build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gnn-attention", description="Attention masks as graphs.")
    parser.add_argument("--version", action="version", version=f"gnn_attention {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name in arguments[:1]:
            importlib.import_module(f"gnn_attention.cli.{name}").add_arguments(command)
    return parser
