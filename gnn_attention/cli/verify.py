"""The command ``gnn-attention verify``: some checks or all, and the record of them."""

from __future__ import annotations

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

KEPT_EVERY = 10.0  # seconds, of which a run that is killed loses no more


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of ``gnn-attention verify``."""
    command.set_defaults(run=run_checks)
    add = command.add_argument
    add("--all", action="store_true", help="every check (default: few, which cover every pair of values)")
    add("--only", metavar="LABEL", help="only checks with this text in their label, as a failure prints it")
    add("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    add("--backend", action="append", choices=list(BACKENDS), help="only this backend; may be repeated")
    atomic_files.add_json(command)
    add("--resume", metavar="FILE", help="carry on the record in FILE: its checks are not run again")


def run_checks(args: argparse.Namespace) -> int:
    """Run the command; the exit code is 1 if a check failed."""
    place = args.json or args.resume
    file = None if place == "-" else place
    resumed = None if args.resume is None else Report.from_file(args.resume)
    latest, written = resumed, time.monotonic()
    earlier = 0 if resumed is None else len(resumed.results)

    def keep() -> None:
        if file is not None and latest is not None:
            atomic_files.write(file, latest.to_json() + "\n")

    with Progress("verify", unit="checks") as progress:

        def show(report: Report) -> None:
            nonlocal latest, written
            latest, done = report, len(report.results) - earlier
            progress.reach(done, done + report.not_started)
            if done:
                progress.advance(0, note=f"{report.results[-1].group}, {report.results[-1].dtype}")
            if time.monotonic() - written > KEPT_EVERY:
                keep()
                written = time.monotonic()

        try:
            report = verify.run(
                args.device,
                backends=args.backend,
                selection="all" if args.all else "pairs",
                only=args.only,
                jobs=_processors(args.device),
                progress=show,
                resumed=resumed,
            )
        except KeyboardInterrupt:
            keep()
            carried_on = f"the checks so far are in {file}, --resume {file} carries on"
            raise KeyboardInterrupt(
                carried_on if file and latest else "nothing was written (--json FILE would be)"
            ) from None
    if place == "-":
        print(report, file=sys.stderr)
    atomic_files.write_json(place, report.to_json(), report)
    return 0 if report.ok else 1


def _processors(device: str | None) -> int:
    """How many processes run checks: one for each processor, or one, where they would share a GPU."""
    if (device is None and torch.cuda.is_available()) or str(device).startswith("cuda"):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
