"""Time and memory, measured here and now:
``python -m benchmarks [attention | batches | calibrate | compare | start | table | training]``.

``attention`` (what runs without a name) times every backend and every peer that is installed; ``compare`` times
two commits; ``calibrate`` fits the cost model of backend="auto" to this machine; ``training`` trains the shipped
model on long windows, with ``attend`` and with SDPA; ``start`` starts commands of ``gnn-attention``; ``batches``
times a layer with a new list of edges in every step; ``table`` shows a record that one of them wrote, or
``python -m benchmarks.gpu_run`` on a GPU. Times are those of this machine; ratios travel better.

A further suite is a module with ``add_options(parser)``, ``run(args)``, which measures and returns a record, and
``text(record)``, which shows it; and a row of ``SUITES``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from benchmarks import attention, batches, calibrate, compare, records, start, training
from benchmarks.gpu import table as gpu_table
from gnn_attention._support import atomic_files

__all__ = ["SUITES", "main"]

SUITES: dict[str, tuple[ModuleType, str]] = {
    "attention": (attention, "every backend and every peer (the default)"),
    "batches": (batches, "a new list of edges in every step (a minute)"),
    "calibrate": (calibrate, "the cost model behind backend='auto', fitted to this machine (half a minute)"),
    "compare": (compare, "two commits in one run"),
    "start": (start, "how long gnn-attention takes to start (2 minutes)"),
    "training": (training, "long windows, with attend and with SDPA (10 minutes)"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a suite: 0 if it is done, 2 for wrong arguments, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in {*SUITES, "table", "-h", "--help"}:
        words.insert(0, "attention")
    args = _parser().parse_args(words)
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
    show = gpu_table.report if record["bench"] == "gpu" else SUITES[record["bench"]][0].text
    print(json.dumps(record, indent=1) if args.json == "-" else show(record))
    return 130 if record.get("interrupted") else 0


def _parser() -> argparse.ArgumentParser:
    about = (__doc__ or "").split("\n\n")[1]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=about)
    commands = parser.add_subparsers(dest="suite", required=True)
    for name, (suite, help) in SUITES.items():
        command = commands.add_parser(name, help=help)
        suite.add_options(command)
    commands.add_parser("table", help="a record as text").add_argument("record", type=Path)
    for command in commands.choices.values():
        command.add_argument(
            "--json", nargs="?", const="-", metavar="FILE", help="write the record (without FILE: to stdout)"
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
