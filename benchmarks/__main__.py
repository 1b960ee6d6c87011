"""Time and memory, measured here and now:
``python -m benchmarks [attention | batches | compare | start | table | training]``.

``attention`` (what runs without a name) times every backend and every peer that is installed; ``compare`` times
this checkout against another; ``training`` trains the shipped model on long windows, with ``attend`` and with
SDPA; ``start`` starts commands of ``gnn-attention``; ``batches`` times a layer with a new list of edges in every
step; ``table`` shows a record that one of them wrote, or ``python -m benchmarks.gpu_run`` on a GPU. Times are
those of this machine; ratios travel better. A further suite is a module that measures, and one row of ``SUITES``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import attention, batches, compare, records, start, table, training
from benchmarks.gpu import table as gpu_table
from gnn_attention._support import atomic_files

__all__ = ["SUITES", "Suite", "main"]


@dataclass(frozen=True)
class Suite:
    """``run(args)`` measures one thing and gives the record, ``text(record)`` shows it."""

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], dict[str, Any]]
    text: Callable[[dict[str, Any]], str]


def _add_record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("record", type=Path, help="the file of a record")


def _show(record: dict[str, Any]) -> str:
    return gpu_table.report(record) if record["bench"] == "gpu" else SUITES[record["bench"]].text(record)


SUITES = {
    "attention": Suite(
        "every backend and every peer (the default)", attention.add_options, attention.run, table.report
    ),
    "compare": Suite("this checkout against another one", compare.add_options, compare.run, compare.text),
    "training": Suite(
        "long windows, with attend and with SDPA (10 minutes)",
        training.add_options,
        training.run,
        training.text,
    ),
    "start": Suite(
        "how long gnn-attention takes to start (2 minutes)", start.add_options, start.run, start.text
    ),
    "batches": Suite(
        "a new list of edges in every step (a minute)", batches.add_options, batches.run, batches.text
    ),
    "table": Suite("a record as text", _add_record, lambda args: records.read(args.record), _show),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a suite: 0 if it is done, 2 for wrong arguments, 130 after Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] not in {*SUITES, "-h", "--help"}:
        given.insert(0, "attention")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").partition("\n\n")[2]
    )
    commands = parser.add_subparsers(dest="suite", required=True)
    for name, suite in SUITES.items():
        command = commands.add_parser(name, help=suite.help)
        suite.add_options(command)
        command.add_argument(
            "--json", nargs="?", const="-", metavar="FILE", help="write the record (without FILE: to stdout)"
        )
    args = parser.parse_args(given)
    try:
        atomic_files.check_place("--json", args.json)
        record = SUITES[args.suite].run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, ImportError, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    written = json.dumps(record, indent=1)
    if args.json not in (None, "-"):
        atomic_files.write(args.json, written + "\n")
    print(written if args.json == "-" else SUITES[args.suite].text(record))
    if record.get("interrupted"):
        print("interrupted: the record holds the workloads that were measured", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
