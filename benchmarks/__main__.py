"""Measure time and memory on this machine:
``python -m benchmarks [attention | batches | calibrate | compare | primitives | start | table | training]``.

``attention`` (the default) times every backend and every installed peer; ``compare`` times two commits;
``calibrate`` fits the cost model of backend="auto" to this machine; ``training`` trains the shipped model on long
windows, with ``attend`` and with SDPA; ``start`` times how long commands of ``gnn-attention`` take to start;
``batches`` times a layer with a new edge list in every step; ``primitives`` times edge features, biases, derivatives
and edge primitives; ``table`` prints a record of one of these suites or of ``python -m benchmarks.gpu_run``. Times
hold for this machine only; ratios carry over better to others.

To add a suite, write a module with ``add_options(parser)``, ``run(args)``, which measures and returns a record, and
``text(record)``, which formats the record, and add a row to ``SUITES``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from benchmarks import attention, batches, calibrate, compare, primitives, records, start, training
from benchmarks.gpu import table as gpu_table
from gnn_attention._support import atomic_files

__all__ = ["SUITES", "main"]

SUITES: dict[str, tuple[ModuleType, str]] = {
    "attention": (attention, "time every backend and every peer (the default)"),
    "batches": (batches, "time a layer with a new edge list in every step (a minute)"),
    "calibrate": (calibrate, "fit the cost model of backend='auto' to this machine (half a minute)"),
    "compare": (compare, "time two commits in one run"),
    "primitives": (primitives, "time edge features, biases, derivatives and edge primitives (3 minutes)"),
    "start": (start, "time how long gnn-attention takes to start (2 minutes)"),
    "training": (training, "train on long windows, with attend and with SDPA (10 minutes)"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a suite and return the exit code: 0 for success, 2 for wrong arguments, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] not in {*SUITES, "table", "-h", "--help"}:
        arguments.insert(0, "attention")
    args = _parser().parse_args(arguments)
    try:
        atomic_files.check_output_path("--json", args.json)
        record = records.read(args.record) if args.suite == "table" else SUITES[args.suite][0].run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, ImportError, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    if args.json not in (None, "-"):
        records.write(Path(args.json), record)
    format_record = gpu_table.report if record["bench"] == "gpu" else SUITES[record["bench"]][0].text
    print(json.dumps(record, indent=1) if args.json == "-" else format_record(record))
    return 130 if record.get("interrupted") else 0


def _parser() -> argparse.ArgumentParser:
    description = (__doc__ or "").split("\n\n")[1]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=description)
    commands = parser.add_subparsers(dest="suite", required=True)
    for name, (suite, help) in SUITES.items():
        command = commands.add_parser(name, help=help)
        suite.add_options(command)
    commands.add_parser("table", help="print a record as text").add_argument("record", type=Path)
    for command in commands.choices.values():
        command.add_argument(
            "--json", nargs="?", const="-", metavar="FILE", help="write the record (without FILE: to stdout)"
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
