"""Time and memory, measured here and now: ``gnn-attention bench [attention | training | graphs | gpu | calibrate]``.

``attention`` (what runs without a name) times every backend of ours beside every peer that is installed; ``training`` trains the
shipped model on long windows, with ours and with SDPA; ``graphs`` builds, counts and tiles graphs of a million tokens; ``gpu`` is
``attention`` for a GPU. Figures are what this machine gave; ratios travel better. A further suite is a module with a function
that measures and one that writes, and one row of ``SUITES``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gnn_attention._support import atomic_files, checks
from gnn_attention._support.progress import Progress
from gnn_attention.backends.gpu import devices
from gnn_attention.bench import attention, calibrate, gpu, graphs, plots, table, targets, training, workloads
from gnn_attention.bench.attention import run_attention
from gnn_attention.bench.graphs import run_graphs
from gnn_attention.bench.measure import Settings
from gnn_attention.bench.training import run_training

__all__ = [
    "SUITES",
    "Suite",
    "add_arguments",
    "attention",
    "gpu",
    "graphs",
    "run",
    "run_attention",
    "run_graphs",
    "run_training",
    "table",
    "targets",
    "training",
    "workloads",
]


@dataclass(frozen=True)
class Suite:
    """One thing to measure: ``measure(args, shown)`` gives the record, ``text(record)`` shows it; ``options`` are those it knows.

    ``shown`` expects as many cases as there are, and is told when each begins.
    ``pictures(record, folder)`` draws it, where it knows ``--plots``.
    """

    help: str
    options: frozenset[str]
    measure: Callable[[argparse.Namespace, Progress], dict[str, Any]]
    text: Callable[[dict[str, Any]], str]
    pictures: Callable[[dict[str, Any], Path], list[Path]] = plots.save


def _names(args: argparse.Namespace) -> list[str] | None:
    return None if args.workloads is None else [name.strip() for name in args.workloads.split(",") if name.strip()]


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


def _graphs(args: argparse.Namespace, shown: Progress) -> dict[str, Any]:
    shown.expect(len(graphs.GRAPHS) + (0 if args.no_peers else len(graphs.PEER_SIZES)))
    return run_graphs(graphs.MILLION if args.tokens is None else args.tokens, not args.no_peers, shown.begin)


def _training(args: argparse.Namespace, shown: Progress) -> dict[str, Any]:
    shown.expect(1 if args.no_peers else len(training.METHODS))
    tokens = training.LENGTH if args.tokens is None else args.tokens
    steps = training.STEPS if args.steps is None else args.steps
    return run_training(tokens, steps, not args.no_peers, shown.begin)


def _gpu(args: argparse.Namespace, shown: Progress) -> dict[str, Any]:
    if args.budget is not None and not args.budget > 0:
        raise ValueError(f"--budget must be above 0 seconds, got {args.budget}")
    resume, device = None if args.resume is None else Path(args.resume), args.device or "cuda"
    if args.calibrate and (args.quick or device.startswith("cpu")):
        raise ValueError(
            "--calibrate needs measurements on a GPU, not a trial of the benchmark: leave out --quick and --device cpu"
        )
    keep = gpu.keeper(args.json or args.resume)
    record = gpu.run_gpu(_names(args), device, args.quick, args.budget, not args.no_peers, resume, keep, shown)
    if args.calibrate:
        shown.write(f"the constants are in {devices.save_device(gpu.calibrated(record))}")
    return record


def _calibrate(args: argparse.Namespace, shown: Progress) -> dict[str, Any]:
    shown.expect(len(calibrate.CASES))
    return calibrate.run_calibration(progress=shown.begin)


SUITES = {
    "attention": Suite(
        "attention workloads, ours beside every peer (the default)",
        frozenset({"workloads", "quick", "plots", "allocator", "memory", "budget", "slowest", "no_peers"}),
        _attention,
        table.report,
    ),
    "training": Suite(
        "the shipped model trained on long windows, ours beside SDPA (about 10 minutes)",
        frozenset({"tokens", "steps", "no_peers"}),
        _training,
        training.text,
    ),
    "graphs": Suite(
        "build, count and tile graphs of a million tokens",
        frozenset({"tokens", "no_peers"}),
        _graphs,
        lambda record: "\n".join(graphs.table(record)),
    ),
    "gpu": Suite(
        "attention workloads on a GPU, ours beside every peer, and the ceilings of the device",
        frozenset({"workloads", "quick", "plots", "budget", "no_peers", "device", "resume"}),
        _gpu,
        gpu.table.report,
        gpu.plots.save,
    ),
    "calibrate": Suite("measure the constants behind backend='auto', once", frozenset(), _calibrate, calibrate.text),
}
COMMON = frozenset({"command", "what", "run", "json", "calibrate"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``gnn-attention bench``; one that belongs to another suite is refused when it runs."""
    about = "; ".join(f"{name}: {suite.help}" for name, suite in SUITES.items())
    parser.add_argument("what", nargs="?", choices=list(SUITES), default="attention", help=about)
    parser.add_argument("--calibrate", action="store_true", help="the same as the suite calibrate; gpu: keep its constants, too")
    parser.add_argument(
        "--workloads",
        metavar="A,B,...",
        help=f"attention: letters ({_letters()}) or names such as b8192; gpu: {', '.join(gpu.workloads.WORKLOADS)}",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="attention: the small workloads, few samples (about 3 minutes); gpu: a trial of tiny ones",
    )
    parser.add_argument("--plots", metavar="DIR", help="attention, gpu: write pictures into this folder (needs matplotlib)")
    parser.add_argument("--allocator", choices=[*attention.ALLOCATORS, "both"], default="default", help="attention: huge pages?")
    parser.add_argument("--memory", type=float, metavar="GIB", help="attention: leave out what needs more (default 14)")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="attention: for each method and pass (default 3); gpu: begin nothing after that",
    )
    parser.add_argument("--slowest", type=float, metavar="SECONDS", help="attention: leave out what takes longer (default 20)")
    sizes = f"graphs: tokens of each (default {graphs.MILLION:,}); training: of a window (default {training.LENGTH:,})"
    parser.add_argument("--tokens", type=int, help=sizes)
    parser.add_argument("--steps", type=int, help=f"training: of each method (default {training.STEPS})")
    parser.add_argument("--device", help="gpu: cuda (default), cuda:1, ...; cpu with --quick is a trial of the benchmark")
    parser.add_argument("--resume", metavar="FILE", help="gpu: carry on the record in FILE: what it holds is not run again")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write the record (without FILE: to stdout)")
    parser.set_defaults(run=lambda args: run(args, parser))


def _letters() -> str:
    return ", ".join(f"{letter} {family}" for letter, family in workloads.FAMILIES.items())


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """``gnn-attention bench``: print the report, or write the record. ValueError before anything is measured in vain."""
    name = "calibrate" if args.calibrate and args.what != "gpu" else args.what
    _check(args, parser, name)
    suite = SUITES[name]
    with Progress(f"bench {name}", unit="cases") as shown:
        record = suite.measure(args, shown)
    if args.json not in (None, "-"):
        atomic_files.write(args.json, json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1) if args.json == "-" else suite.text(record))
    for file in suite.pictures(record, Path(args.plots)) if args.plots else ():
        print(file, file=sys.stderr)
    if record.get("interrupted"):
        print("interrupted: the record holds the workloads that were measured", file=sys.stderr)
        return 130
    return 1 if record.get("stopped") else 0


def _check(args: argparse.Namespace, parser: argparse.ArgumentParser, name: str) -> None:
    """Options of another suite, and folders that are not there."""
    if args.calibrate:
        checks.choice("with --calibrate the suite", args.what, ["attention", "gpu", "calibrate"])
    for option, value in vars(args).items():
        if option not in SUITES[name].options | COMMON and value != parser.get_default(option):
            owners = " and ".join(owner for owner, suite in SUITES.items() if option in suite.options)
            raise ValueError(f"--{option.replace('_', '-')} belongs to bench {owners}, not to bench {name}")
    atomic_files.check_place("--json", args.json)
    if args.plots is not None and not Path(args.plots).is_dir():
        raise ValueError(f"--plots {args.plots}: expected a folder that exists, make it first")
