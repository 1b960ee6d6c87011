"""Run a command of this folder: print an error in one line, and return an exit code."""

import argparse
import sys
from collections.abc import Callable, Sequence

from gnn_attention._support import atomic_files


def run(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    command: Callable[[argparse.Namespace], object] | None = None,
) -> int:
    """Parse the arguments, call the command (by default ``args.run``) and return the exit code.

    The exit code is 0, 2 for wrong arguments, or 130 after Ctrl-C.
    """
    args = parser.parse_args(arguments)
    try:
        atomic_files.check_output_path("--json", getattr(args, "json", None))
        (command or args.run)(args)
    except KeyboardInterrupt as interrupt:
        print(": ".join(["interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return 130
    except (ValueError, TypeError, IndexError, ImportError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0
