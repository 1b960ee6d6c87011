"""``gnn-attention verify | audit | bench | explore | graphs | draw | cost | generate | ...``.

A command's module is imported when the command is called, or its help.
Exit code 0 if all checks passed, 1 if a check failed, 2 for wrong arguments, 130 after Ctrl-C.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from gnn_attention import __version__
from gnn_attention._support import atomic_files, output

# names of modules of this package, and the lines of the help
COMMANDS = {
    "verify": "check every form and backend against dense attention in float64",
    "audit": "does information in a language model flow exactly along a graph?",
    "attribute": "which edges of which heads a language model needs for a text, and its loss on them alone",
    "bench": "time and memory of attention along graphs, next to what is installed",
    "graphs": "list the zoo: every builder, its definition, an example",
    "draw": "draw a graph, e.g. 'window(64, 8)' or karate.graphml",
    "generate": "let the trained model continue a text, along the edges of a graph",
    "explore": "write a page that shows a text going through a model, edge by edge",
    "compare": "loss and speed of a pretrained model along graphs, without training",
    "cost": "multiply-accumulates, bytes and cache of the forms of attention and of a graph",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default that of ``sys.argv``, and return its exit code."""
    output.prepare()
    try:
        return _run(_parser().parse_args(arguments))
    except KeyboardInterrupt as interrupt:
        print(": ".join(["interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    try:
        atomic_files.check_place("--json", getattr(args, "json", None))
        code: int = args.run(args)
    except BrokenPipeError:  # the reader, a pager for example, has closed the pipe
        output.finish()
        return 0
    except (ValueError, TypeError, IndexError, ImportError, OSError) as error:
        with suppress(OSError):  # a stderr without a reader
            print(f"gnn-attention {args.command}: {error}", file=sys.stderr)
        return 2
    return code if output.finish() else 0


class _Commands(argparse._SubParsersAction):  # type: ignore[type-arg]
    """A module adds the arguments of its command when the command stands on the command line."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *option: Any
    ) -> None:
        command = values[0]
        importlib.import_module(f"gnn_attention.cli.{command}").add_arguments(self.choices[command])
        super().__call__(parser, namespace, values, *option)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gnn-attention", description="Attention masks as graphs.")
    parser.add_argument("--version", action="version", version=f"gnn_attention {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command", action=_Commands)
    for command, text in COMMANDS.items():
        commands.add_parser(command, help=text)
    return parser
