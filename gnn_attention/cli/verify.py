"""The command ``gnn-attention verify``: run some or all checks, and record them."""

import argparse
import os
import sys
import time

import torch

from gnn_attention import verify
from gnn_attention._support import atomic_files
from gnn_attention._support.progress import Progress
from gnn_attention.backends import BACKENDS
from gnn_attention.verify.report import Report

# A killed run loses at most the checks of its last SAVE_INTERVAL seconds.
SAVE_INTERVAL = 10.0


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gnn-attention verify``."""
    command.set_defaults(run=run_verify)
    add = command.add_argument
    add("--all", action="store_true", help="run all checks (default: a few that cover all pairs of values)")
    add("--only", metavar="LABEL", help="run only checks with this text in their label, which failures print")
    add("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    add("--backend", action="append", choices=list(BACKENDS), help="check only this backend; may be repeated")
    atomic_files.add_json(command)
    add("--resume", metavar="FILE", help="continue the record in FILE without repeating its checks")


def run_verify(args: argparse.Namespace) -> int:
    destination = args.json or args.resume
    file = None if destination == "-" else destination
    earlier_report = None if args.resume is None else Report.from_file(args.resume)
    num_earlier_results = 0 if earlier_report is None else len(earlier_report.results)
    latest_report = earlier_report
    last_save_time = time.monotonic()

    def save() -> None:
        if file is not None and latest_report is not None:
            atomic_files.write(file, latest_report.to_json() + "\n")

    with Progress("verify", unit="checks") as progress:

        def update(report: Report) -> None:
            nonlocal latest_report, last_save_time
            latest_report = report
            num_done = len(report.results) - num_earlier_results
            progress.reach(num_done, num_done + report.not_started)
            if num_done:
                progress.advance(0, note=f"{report.results[-1].group}, {report.results[-1].dtype}")
            if time.monotonic() - last_save_time > SAVE_INTERVAL:
                save()
                last_save_time = time.monotonic()

        try:
            report = verify.run(
                args.device,
                backends=args.backend,
                selection="all" if args.all else "pairs",
                only=args.only,
                jobs=_count_processes(args.device),
                progress=update,
                resumed=earlier_report,
            )
        except KeyboardInterrupt:
            save()
            if file is None or latest_report is None:
                raise KeyboardInterrupt("nothing was written; --json FILE saves the checks") from None
            raise KeyboardInterrupt(f"the checks are in {file}; continue with --resume {file}") from None
    if destination == "-":
        print(report, file=sys.stderr)
    atomic_files.write_json(destination, report.to_json(), report)
    return 0 if report.ok else 1


def _count_processes(device: str | None) -> int:
    """Return the number of processors, or 1 for a GPU, which several processes would share."""
    if (device is None and torch.cuda.is_available()) or str(device).startswith("cuda"):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
