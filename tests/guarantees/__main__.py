"""``python -m tests.guarantees [NAME ...]``: measure guarantees, print each result, and write a record.

Exit code 0 if every guarantee holds, 1 if one does not, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnn_attention._support.progress import Progress
from tests.guarantees.environment import environment
from tests.guarantees.guarantee import Guarantee, Tell
from tests.guarantees.registry import GUARANTEES


def main(arguments: Sequence[str] | None = None) -> int:
    names = ", ".join(GUARANTEES)
    parser = argparse.ArgumentParser(
        prog="python -m tests.guarantees", description="Measure what the library promises."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {names} (default: all)")
    parser.add_argument("--count", type=int, metavar="N", help="cases of each guarantee (default: all)")
    parser.add_argument("--json", metavar="FILE", help="write the record after each guarantee")
    args = parser.parse_args(arguments)
    for name in args.names:
        if name not in GUARANTEES:
            parser.error(f"{name!r} is not a guarantee; expected one of {names}")
    if args.count is not None and args.count < 1:
        parser.error(f"--count {args.count}: expected 1 or more")
    if args.json is not None and not Path(args.json).absolute().parent.is_dir():
        parser.error(f"--json {args.json}: expected a file in a folder that exists")
    record: dict[str, Any] = {"environment": environment("cpu"), "guarantees": []}
    results = record["guarantees"]
    for name in args.names or GUARANTEES:
        with Progress(name, unit="cases") as progress:
            results.append(measure(GUARANTEES[name], args.count, progress.begin))
        print(describe(results[-1]), flush=True)
        if args.json is not None:
            Path(args.json).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
    num_failures = sum(not result["holds"] for result in results)
    print(f"{len(results)} guarantees, {f'{num_failures} FAILED' if num_failures else 'all hold'}")
    return 1 if num_failures else 0


def measure(guarantee: Guarantee, count: int | None, tell: Tell) -> dict[str, Any]:
    """Measure a guarantee in ``count`` cases (default: its full count) and return its row of the record."""
    cases = guarantee.full if count is None else count
    start = time.monotonic()
    outcome = guarantee.measure(cases, tell)
    return {
        "name": guarantee.name,
        "promise": guarantee.promise,
        "bar": guarantee.bar,
        "count": cases,
        "full": cases >= guarantee.full,
        "value": outcome.value,
        "holds": outcome.holds,
        "failures": list(outcome.failures),
        "seconds": round(time.monotonic() - start, 1),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def describe(result: dict[str, Any]) -> str:
    """Return the text that is printed for a row of the record."""
    scope = "" if result["full"] else f" (in part: {result['count']:,} cases)"
    lines = [
        f"{'holds' if result['holds'] else 'FAILS'}  {result['name']}: {result['promise']}{scope}",
        f"       bar: {result['bar']}",
        f"       {result['value']}",
    ]
    lines += [f"       failed: {case}" for case in result["failures"][:20]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
