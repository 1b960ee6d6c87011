"""``gnn-attention verify | audit | bench | explore | graphs | draw | cost | generate | train | compare | reach``.

Exit code 0 if everything held, 1 if a check failed, 2 for wrong arguments, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress

from gnn_attention import __version__, training
from gnn_attention._support import interrupts, output
from gnn_attention.cli import audit, bench, cost, generate, graphs
from gnn_attention.cli import explore as _explore_command
from gnn_attention.cli import verify as _verify_command
from gnn_attention.training import compare, tasks

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    output.prepare()
    try:
        with interrupts.deliverable():
            return _run(_parser().parse_args(arguments))
    except KeyboardInterrupt as told:
        print(": ".join(["interrupted", *map(str, told.args)]), file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    try:
        code: int = args.run(args)
    except BrokenPipeError:  # the reader, a pager for example, has seen enough
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
    added = parser.add_subparsers(dest="command", required=True, metavar="command")
    _verify_command.add_verify(added)
    audit.add_audit(added)
    bench.add_bench(added)
    graphs.add_graphs(added)
    graphs.add_draw(added)
    generate.add_generate(added)
    _explore_command.add_explore(added)
    train = added.add_parser("train", help="train the small language model on the standard library's sources")
    training.add_arguments(train)
    train.set_defaults(run=training.run)
    reach = added.add_parser("reach", help="a task that only reach can answer, learnt over several graphs")
    tasks.add_arguments(reach)
    reach.set_defaults(run=tasks.run)
    compare.add_compare(added)
    cost.add_cost(added)
    return parser


if __name__ == "__main__":
    sys.exit(main())
