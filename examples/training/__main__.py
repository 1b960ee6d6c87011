"""Train the small language model, one over each of several graphs, or readers of a tree.

``python -m examples.training [train | compare | reach]``

Exit code 0, 2 for wrong arguments, 130 after Ctrl-C.
"""

import argparse
import sys
from collections.abc import Sequence

from examples import training
from examples.training import compare, tasks
from gnn_attention._support import atomic_files


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default that of ``sys.argv``, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    train = commands.add_parser("train", help="train it on the standard library's sources")
    training.add_arguments(train)
    train.set_defaults(run=training.run)
    about = "train one model over several graphs, all else equal: loss against edges"
    compare.add_arguments(commands.add_parser("compare", help=about))
    reach = commands.add_parser("reach", help="a task that only reach can answer, over several graphs")
    tasks.add_arguments(reach)
    reach.set_defaults(run=tasks.run)
    args = parser.parse_args(arguments)
    try:
        atomic_files.check_place("--json", getattr(args, "json", None))
        code: int = args.run(args)
    except KeyboardInterrupt as interrupt:
        print(": ".join(["interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return 130
    except (ValueError, TypeError, IndexError, ImportError, OSError) as error:
        print(f"{parser.prog} {args.command}: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
