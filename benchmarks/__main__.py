"""Time and memory, measured here and now:
``python -m benchmarks [attention | training | start | batches | calibrate | table]``.

``attention`` (what runs without a name) times every backend and every peer that is installed; ``training``
trains the shipped model on long windows, with ``attend`` and with SDPA; ``start`` starts commands of
``gnn-attention``; ``batches`` times a layer with a new list of edges in every step; ``calibrate`` fits the cost model behind
``backend="auto"`` to this machine and saves it; ``table`` shows a record
that one of them wrote, or ``python -m benchmarks.gpu_run`` on a GPU. Times are those of this machine; ratios
travel better.
A further suite is a module that measures and writes text, and one row of ``SUITES``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import attention, batches, calibrate, plots, records, start, table, training, workloads
from benchmarks.attention import run_attention
from benchmarks.gpu import table as gpu_table
from benchmarks.measure import Settings
from benchmarks.training import run_training
from gnn_attention._support import atomic_files
from gnn_attention._support.progress import Progress

__all__ = ["SUITES", "Suite", "main"]


@dataclass(frozen=True)
class Suite:
    """One thing to measure: ``measure(args, shown)`` gives the record, ``text(record)`` shows it; ``options``
    are those it takes.

    ``shown`` expects as many cases as there are, and is called when each begins.
    ``pictures(record, folder)`` draws it, where it takes ``--plots``.
    """

    help: str
    options: frozenset[str]
    measure: Callable[[argparse.Namespace, Progress], dict[str, Any]]
    text: Callable[[dict[str, Any]], str]
    pictures: Callable[[dict[str, Any], Path], list[Path]] = lambda record, folder: []


def _names(args: argparse.Namespace) -> list[str] | None:
    return (
        None
        if args.workloads is None
        else [name.strip() for name in args.workloads.split(",") if name.strip()]
    )


def _attention(args: argparse.Namespace, shown: Progress) -> dict[str, Any]:
    names = _names(args)
    allocators = attention.ALLOCATORS if args.allocator == "both" else (args.allocator,)
    settings = Settings.quick() if args.quick else Settings()
    for option, unit in (("memory", "GiB"), ("budget", "seconds"), ("slowest", "seconds")):
        if getattr(args, option) is not None and not getattr(args, option) > 0:
            raise ValueError(f"--{option} must be above 0 {unit}, got {getattr(args, option)}")
    settings = settings if args.memory is None else replace(settings, memory=args.memory * 2**30)
    settings = settings if args.budget is None else replace(settings, budget=args.budget)
    settings = settings if args.slowest is None else replace(settings, slowest=args.slowest)
    shown.expect(len(attention.chosen(names, args.quick, allocators)))
    return run_attention(names, args.quick, allocators, not args.no_peers, settings, shown.begin)


def _training(args: argparse.Namespace, shown: Progress) -> dict[str, Any]:
    shown.expect(1 if args.no_peers else len(training.METHODS))
    tokens = training.LENGTH if args.tokens is None else args.tokens
    steps = training.STEPS if args.steps is None else args.steps
    return run_training(tokens, steps, not args.no_peers, shown.begin)


def _start(args: argparse.Namespace, shown: Progress) -> dict[str, Any]:
    shown.expect(start.ROUNDS)
    return start.run_start(progress=shown.begin)


def _batches(args: argparse.Namespace, shown: Progress) -> dict[str, Any]:
    shown.expect(len(batches.WORKLOADS))
    return batches.run_batches(progress=shown.begin)


def _calibrate(args: argparse.Namespace, shown: Progress) -> dict[str, Any]:
    shown.expect(len(calibrate.CASES) + 1)
    return calibrate.run_calibration(shown.begin)


def _show(args: argparse.Namespace, shown: Progress) -> dict[str, Any]:
    if args.record is None:
        raise ValueError("table needs the file of a record: python -m benchmarks table FILE")
    return records.read(Path(args.record))


def _report(record: dict[str, Any]) -> str:
    return gpu_table.report(record) if record["bench"] == "gpu" else SUITES[record["bench"]].text(record)


def _pictures(record: dict[str, Any], folder: Path) -> list[Path]:
    suite = SUITES.get(record["bench"])
    return [] if suite is None else suite.pictures(record, folder)


SUITES = {
    "attention": Suite(
        "attention workloads, every backend and every peer (the default)",
        frozenset({"workloads", "quick", "plots", "allocator", "memory", "budget", "slowest", "no_peers"}),
        _attention,
        table.report,
        plots.save,
    ),
    "training": Suite(
        "the shipped model trained on long windows, with attend and with SDPA (about 10 minutes)",
        frozenset({"tokens", "steps", "no_peers"}),
        _training,
        training.text,
    ),
    "start": Suite(
        "how long gnn-attention takes to start, next to import gnn_attention (about 2 minutes)",
        frozenset(),
        _start,
        start.text,
    ),
    "batches": Suite(
        "a new list of edges in every step, beside torch_geometric's TransformerConv (about a minute)",
        frozenset(),
        _batches,
        batches.text,
    ),
}
SUITES["calibrate"] = Suite(
    "fit the cost model behind backend='auto' to this machine (half a minute)",
    frozenset(),
    _calibrate,
    calibrate.text,
)
SUITES["table"] = Suite(
    "a record as text, and with --plots as pictures",
    frozenset({"record", "plots", "markdown"}),
    _show,
    _report,
    _pictures,
)
COMMON = frozenset({"what", "json"})


def _parser() -> argparse.ArgumentParser:
    """All options; one that belongs to another suite is refused when it runs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Time and memory of attention along graphs."
    )
    about = "; ".join(f"{name}: {suite.help}" for name, suite in SUITES.items())
    parser.add_argument("what", nargs="?", choices=list(SUITES), default="attention", help=about)
    parser.add_argument("record", nargs="?", metavar="FILE", help="table: the record")
    parser.add_argument(
        "--markdown", action="store_true", help="table: the short table of the README, and the targets"
    )
    names = f"letters ({_letters()}) or names such as b8192"
    parser.add_argument("--workloads", metavar="A,B,...", help=f"attention: {names}")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="attention: the small workloads, few samples (about 3 minutes)",
    )
    parser.add_argument(
        "--plots", metavar="DIR", help="attention: write pictures into this folder (needs matplotlib)"
    )
    parser.add_argument(
        "--allocator",
        choices=[*attention.ALLOCATORS, "both"],
        default="default",
        help="attention: huge pages?",
    )
    parser.add_argument(
        "--memory", type=float, metavar="GIB", help="attention: leave out what needs more (default 14)"
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="attention: for each method and pass (default 3)",
    )
    parser.add_argument(
        "--slowest", type=float, metavar="SECONDS", help="attention: leave out what takes longer (default 20)"
    )
    sizes = f"training: tokens of a window (default {training.LENGTH:,})"
    parser.add_argument("--tokens", type=int, help=sizes)
    parser.add_argument("--steps", type=int, help=f"training: of each method (default {training.STEPS})")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write the record (without FILE: to stdout)"
    )
    return parser


def _letters() -> str:
    return ", ".join(f"{letter} {family}" for letter, family in workloads.FAMILIES.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a suite: 0 if it is done, 2 for wrong arguments, 130 after Ctrl-C."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        _check(args, parser)
        return _run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, ImportError, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    suite = SUITES[args.what]
    with Progress(f"benchmarks {args.what}", unit="cases") as shown:
        record = suite.measure(args, shown)
    if args.json not in (None, "-"):
        atomic_files.write(args.json, json.dumps(record, indent=1) + "\n")
    text = _markdown(record) if args.markdown else suite.text(record)
    print(json.dumps(record, indent=1) if args.json == "-" else text)
    for file in suite.pictures(record, Path(args.plots)) if args.plots else ():
        print(file, file=sys.stderr)
    if record.get("interrupted"):
        print("interrupted: the record holds the workloads that were measured", file=sys.stderr)
        return 130
    return 0


def _markdown(record: dict[str, Any]) -> str:
    tables: dict[str, Callable[[dict[str, Any]], str]] = {
        "attention": partial(table.table, only=table.README),
        "gpu": gpu_table.table,
    }
    if record["bench"] not in tables:
        raise ValueError(f"--markdown shows records of {' and '.join(tables)}, not of {record['bench']}")
    return f"{tables[record['bench']](record)}\n\n{table.targets_line(record)}"


def _check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """ValueError for options of another suite, and for folders that are not there."""
    for option, value in vars(args).items():
        if option not in SUITES[args.what].options | COMMON and value != parser.get_default(option):
            owners = " and ".join(owner for owner, suite in SUITES.items() if option in suite.options)
            given = option if option == "record" else f"--{option.replace('_', '-')}"
            raise ValueError(f"{given} belongs to {owners}, not to {args.what}")
    atomic_files.check_place("--json", args.json)
    if args.plots is not None and not Path(args.plots).is_dir():
        raise ValueError(f"--plots {args.plots}: expected a folder that exists, make it first")


if __name__ == "__main__":
    sys.exit(main())
