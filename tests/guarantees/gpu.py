"""``python -m tests.guarantees.gpu``: what the records say of GPUs, and one check of the core alone.

``--status`` and ``--markdown`` print what the newest record in tests/records verifies, in a sentence and as a
page of the documentation shows it. ``--only TEXT`` runs the checks of the core with this text in their label, as
a failure of ``benchmarks.gpu_run`` prints it; the exit code is 1 if one of them did not pass.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.guarantees.gpu_core import core_checks
from tests.guarantees.gpu_record import markdown, status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.guarantees.gpu", description=__doc__)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--status", action="store_true", help="what is verified on a GPU, in a sentence")
    chosen.add_argument("--markdown", action="store_true", help="the same with a table")
    chosen.add_argument("--only", metavar="TEXT", help="run the checks with this text in their label")
    parser.add_argument("--device", default="cuda", help="where they run (default: cuda)")
    args = parser.parse_args(arguments)
    if args.only is None:
        print(status() if args.status else markdown())
        return 0
    results = [check() for check in core_checks(args.device) if args.only in check.label]
    print(*results, sep="\n")
    return 0 if results and all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
