"""``gnn-attention verify | audit | bench | graphs | draw | explore | attribute``.

A command's module is imported when the command is called, or its help.
Exit code 0 if all checks passed, 1 if a check failed, 2 for wrong arguments, 130 after Ctrl-C.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from gnn_attention import __version__
from gnn_attention._support import atomic_files

# names of modules of this package, and the lines of the help
COMMANDS = {
    "verify": "check every form and backend against dense attention in float64",
    "audit": "does information in a language model flow exactly along a graph?",
    "attribute": "which edges of which heads a language model needs for a text, and its loss on them alone",
    "bench": "the time of attention along a few graphs, beside what else is installed",
    "graphs": "list the zoo: every builder, its definition, an example",
    "draw": "draw a graph, e.g. 'window(64, 8)' or karate.graphml",
    "explore": "write a page that shows a text going through a model, edge by edge",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default that of ``sys.argv``, and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # a closed stream is None, and some are no file
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        return _run(_parser(arguments).parse_args(arguments))
    except KeyboardInterrupt as interrupt:
        print(": ".join(["interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    try:
        atomic_files.check_output_path("--json", getattr(args, "json", None))
        code: int = args.run(args)
        print(end="", flush=True)
    except BrokenPipeError:
        # The reader, a pager for example, has closed the pipe: Python's last flush would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, IndexError, ImportError, OSError) as error:
        with suppress(OSError):  # a stderr without a reader
            print(f"gnn-attention {args.command}: {error}", file=sys.stderr)
        return 2
    return code


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gnn-attention", description="Attention masks as graphs.")
    parser.add_argument("--version", action="version", version=f"gnn_attention {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name in arguments[:1]:
            importlib.import_module(f"gnn_attention.cli.{name}").add_arguments(command)
    return parser
