"""``python -m tests.guarantees.gpu``: ``gnn-attention verify`` with the checks that only a GPU and a checkout
can do.

They are larger graphs, the same bits in every run, bounds on memory, and operators that compilers may rely
on. Options are those of ``gnn-attention verify``; the exit code is 0 if every check holds, 1 if one does not,
2 for wrong arguments, 130 after Ctrl-C.
``--markdown`` prints what the newest record in tests/records says, as a page of the documentation shows it.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from gnn_attention.cli.verify import add_options, run_checks
from gnn_attention.verify.record import PACKAGE, RECORDS, newest, status
from gnn_attention.verify.report import Report, Result
from tests.guarantees.gpu_checks import gpu_checks
from tests.guarantees.gpu_large import large_checks

MORE = (large_checks, gpu_checks)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.guarantees.gpu", description="Check everything on a GPU."
    )
    add_options(parser)
    parser.add_argument(
        "--markdown", action="store_true", help="run nothing: print the newest record as a table"
    )
    args = parser.parse_args(arguments)
    if args.markdown:
        print(markdown())
        return 0
    try:
        return run_checks(args, MORE)
    except KeyboardInterrupt as error:
        print(": ".join(["interrupted", *map(str, error.args)]), file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2


def markdown(folder: Path = RECORDS, package: Path = PACKAGE) -> str:
    """What is verified on GPUs, and the table of the newest record if there is one."""
    found = newest(folder)
    sentence = str(status(folder, package))
    return sentence if found is None else f"{sentence}\n\n{table(found[1])}"


def table(report: Report) -> str:
    """Checks, and the worst errors in units of SDPA's own, by backend and dtype."""
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in report.results:
        groups[result.backend, result.dtype].append(result)
    rows = [[*key, *_cells(results)] for key, results in sorted(groups.items())]
    head = [
        "backend",
        "dtype",
        "checks",
        "failed",
        "skipped",
        "output (allowed: 2, float64: 1)",
        "gradient (3, float64: 1)",
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def _cells(results: list[Result]) -> Iterator[str]:
    ran = [r for r in results if r.skipped is None]
    yield str(len(ran))
    yield str(sum(not r.passed for r in ran))
    yield str(len(results) - len(ran))
    for name in ("output", "gradient"):
        worst = [value for r in ran if (value := getattr(r, name)) is not None]
        yield f"{max(worst):.2f}" if worst else "-"


if __name__ == "__main__":
    sys.exit(main())
