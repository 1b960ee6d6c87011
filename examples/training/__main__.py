"""Train the small language model along one graph or several, or train models on a task about reach.

``python -m examples.training [train | compare | reach]``

The exit code is 0, 2 for wrong arguments, or 130 after Ctrl-C.
"""

import argparse
import sys
from collections.abc import Sequence

from examples import commands
from examples.training import compare, tasks, trainer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default with the arguments of ``sys.argv``, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.training", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, module, description in (
        ("train", trainer, "train the model on the source code of the standard library"),
        ("compare", compare, "train the same model along several graphs, and compare loss and edges"),
        ("reach", tasks, "train on a task that needs a graph with enough reach, along several graphs"),
    ):
        command = subparsers.add_parser(name, help=description)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return commands.run(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
