"""``python -m tests.guarantees.gpu``: ``gnn-attention verify`` with the checks that need a checkout and a GPU,
and what the records say.

The further checks are those of the core for shapes, larger graphs, equal bits, memory, operators and far
offsets. Options are those of ``gnn-attention verify``; the exit code is 0 if every check holds, 1 if one does
not, 2 for wrong arguments, 130 after Ctrl-C. ``--status`` and ``--markdown`` run nothing: they print what the
newest record in tests/records verifies, in a sentence and as a page of the documentation shows it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from gnn_attention.cli.verify import add_arguments, run_checks
from gnn_attention.verify.check import Check, Settings
from tests.guarantees.gpu_core import MESSAGE_PASSING, TRIAL, Sizes, core_checks
from tests.guarantees.gpu_record import markdown, status

GROUPS = ("shapes", "large", "repeat", "memory", "operators", "far")


def more_checks(settings: Settings) -> Iterator[Check]:
    """The checks of the core that ``gnn-attention verify`` does not have."""
    backends = {backend.name for backend in settings.backends} | (
        {MESSAGE_PASSING} if settings.walk else set()
    )
    sizes = Sizes() if settings.device.startswith("cuda") else TRIAL
    for check in core_checks(settings.device, sizes):
        if check.group in GROUPS and check.backend in backends and check.dtype in settings.dtypes:
            yield check


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    description = "Check everything on a GPU."
    parser = argparse.ArgumentParser(prog="python -m tests.guarantees.gpu", description=description)
    add_arguments(parser)
    said = "run nothing: print what is verified on a GPU"
    parser.add_argument("--status", action="store_true", help=f"{said}, in a sentence")
    parser.add_argument("--markdown", action="store_true", help=f"{said}, with a table")
    args = parser.parse_args(arguments)
    if args.status or args.markdown:
        print(status() if args.status else markdown())
        return 0
    try:
        return run_checks(args, [more_checks])
    except KeyboardInterrupt as error:
        print(": ".join(["interrupted", *map(str, error.args)]), file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
