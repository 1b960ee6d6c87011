"""The command ``gnn-attention verify``: some checks or all, and the record of them."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence

import torch

from gnn_attention import verify
from gnn_attention._support import atomic_files
from gnn_attention._support.progress import Progress
from gnn_attention.backends import BACKENDS
from gnn_attention.verify.cases import GRAPHS
from gnn_attention.verify.check import DTYPES
from gnn_attention.verify.report import Report, Result


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of ``gnn-attention verify``, and of a command that runs more checks."""
    command.set_defaults(run=run_checks)
    add = command.add_argument
    add("--all", action="store_true", help="every check (default: few, which cover every pair of values)")
    add("--only", metavar="LABEL", help="only checks with this text in their label, as a failure prints it")
    add("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    add("--dtype", action="append", choices=list(DTYPES), help="only this dtype; may be repeated")
    add("--backend", action="append", choices=list(BACKENDS), help="only this backend; may be repeated")
    graph = "only this graph; may be repeated"
    add("--graph", action="append", choices=list(GRAPHS), help=graph, metavar="NAME")
    add("--seed", type=int, default=0, help="of the random inputs (default 0)")
    add("--no-trained", action="store_true", help="leave out the trained model")
    add("--jobs", type=int, metavar="N", help="checks at once (default: one for each processor, on a GPU 1)")
    budget = "begin no check after that; carry on with --resume"
    add("--budget", type=float, default=math.inf, metavar="SECONDS", help=budget)
    record = "write every result as it comes (no FILE: to stdout)"
    add("--json", nargs="?", const="-", metavar="FILE", help=record)
    add("--resume", metavar="FILE", help="carry on the record in FILE: its checks are not run again")


def run_checks(args: argparse.Namespace, more: Sequence[verify.Group] = ()) -> int:
    """Run the command, with ``more`` groups of checks; the exit code is 1 if any failed."""
    place = args.json or args.resume
    file = None if place == "-" else place
    atomic_files.check_place("--json", place)
    try:
        resumed = None if args.resume is None else Report.from_file(args.resume)
    except ValueError as error:
        raise ValueError(f"--resume {error}") from None
    try:
        report = _report(args, file, resumed, more)
    except KeyboardInterrupt:
        left = f"the checks so far are in {file}, --resume {file} carries on"
        raise KeyboardInterrupt(left if file else "nothing was written (--json FILE would be)") from None
    if place == "-":
        print(report.to_json())
    shown = f"{report.table()}\n\n{report}" if args.all else report
    print(shown, file=sys.stderr if place == "-" else sys.stdout)
    return 0 if report.ok else 1


def _report(
    args: argparse.Namespace, file: str | None, resumed: Report | None, more: Sequence[verify.Group]
) -> Report:
    def keep(report: Report) -> None:
        if file is not None:
            atomic_files.write(file, report.to_json() + "\n")

    which = args.device, args.dtype, args.backend, args.graph
    with Progress("verify", unit="checks") as progress:

        def show(done: int, due: int, result: Result) -> None:
            if progress.total is None:
                progress.expect(due)
            progress.advance(1, note=f"{result.group}, {result.dtype}")

        report = verify.run(
            *which,
            trained=not args.no_trained,
            seed=args.seed,
            more=more,
            progress=show,
            jobs=_processors(args.device) if args.jobs is None else args.jobs,
            budget=args.budget,
            resumed=resumed,
            keep=keep,
            selection="all" if args.all else "pairs",
            only=args.only,
        )
    keep(report)
    return report


def _processors(device: str | None) -> int:
    """Processes of a CPU's checks; on a GPU, which they would share, one."""
    if (device is None and torch.cuda.is_available()) or str(device).startswith("cuda"):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
