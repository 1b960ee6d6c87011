"""Train the small language model, one over each of several graphs, or readers of a tree.

``python -m examples.training [train | compare | reach]``

Exit code 0, 2 for wrong arguments, 130 after Ctrl-C.
"""

import argparse
import sys
from collections.abc import Sequence

from examples import commands
from examples.training import compare, tasks, trainer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default that of ``sys.argv``, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.training", description=__doc__)
    choices = parser.add_subparsers(dest="command", required=True, metavar="command")
    about = {"train": "train it on the standard library's sources"}
    about["compare"] = "train one model over several graphs, all else equal: loss against edges"
    about["reach"] = "a task that only reach can answer, over several graphs"
    for name, module in {"train": trainer, "compare": compare, "reach": tasks}.items():
        command = choices.add_parser(name, help=about[name])
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return commands.run(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
