"""``python -m tests.guarantees.gpu``: print what is verified on GPUs, or run single checks of the core.

``--status`` and ``--markdown`` print what the newest record in tests/records verifies, as a sentence and as a
table of the documentation. ``--only TEXT`` runs the checks of the core whose label contains this text;
``benchmarks.gpu_run`` prints the label of each failure. The exit code is 1 if one of them fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.guarantees.gpu_core import core_checks
from tests.guarantees.gpu_record import markdown, status


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.guarantees.gpu", description=__doc__)
    actions = parser.add_mutually_exclusive_group(required=True)
    actions.add_argument("--status", action="store_true", help="print a sentence on what is verified")
    actions.add_argument("--markdown", action="store_true", help="print the sentence and a table")
    actions.add_argument("--only", metavar="TEXT", help="run the checks whose label contains this text")
    parser.add_argument("--device", default="cuda", help="device of the checks (default: cuda)")
    args = parser.parse_args(arguments)
    if args.only is None:
        print(status() if args.status else markdown())
        return 0
    results = [check() for check in core_checks(args.device) if args.only in check.label]
    print(*results, sep="\n")
    return 0 if results and all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
