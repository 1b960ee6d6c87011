"""``gnn-attention verify | audit | bench | explore | graphs | draw | cost | generate | ...``.

Exit code 0 if all checks passed, 1 if a check failed, 2 for wrong arguments, 130 after Ctrl-C.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress

from gnn_attention import __version__
from gnn_attention._support import atomic_files, output
from gnn_attention.cli import attribute, audit, bench, compare, cost, explore, generate, graphs, heads, verify


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gnn-attention", description="Attention masks as graphs.")
    parser.add_argument("--version", action="version", version=f"gnn_attention {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    verify.add_verify(commands)
    audit.add_audit(commands)
    attribute.add_attribute(commands)
    bench.add_bench(commands)
    graphs.add_graphs(commands)
    graphs.add_draw(commands)
    generate.add_generate(commands)
    explore.add_explore(commands)
    heads.add_heads(commands)
    compare.add_compare(commands)
    cost.add_cost(commands)
    return parser
