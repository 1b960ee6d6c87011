"""The part of ``gnn-attention verify`` that measures figures of trust: ``--figures``, ``--figure NAME``, ``--case NUMBER``."""

from __future__ import annotations

import argparse
import importlib.metadata
from typing import Any

from gnn_attention._support import atomic_files
from gnn_attention._support.progress import Progress
from gnn_attention.figures import _running, equality
from gnn_attention.figures._table import FIGURES
from gnn_attention.figures.draws import Draw
from gnn_attention.figures.results import VERSIONS, Results
from gnn_attention.verify.circumstances import environment

__all__ = ["add_options", "asked_for", "repeat", "run"]


def add_options(command: argparse.ArgumentParser) -> None:
    """``--figures`` and what goes with it."""
    command.add_argument(
        "--figures", action="store_true", help="measure the figures of trust instead (hours; --jobs, --json, --resume)"
    )
    command.add_argument("--figure", action="append", choices=list(FIGURES), help="only this figure; may be repeated")
    command.add_argument("--count", type=int, metavar="N", help="of figures: cases of each (default: as many as it asks for)")
    command.add_argument("--case", type=int, metavar="N", help="repeat random case N of figure F1 alone")


def asked_for(args: argparse.Namespace) -> bool:
    """True if figures are asked for, not checks. ValueError where an option of the one stands beside the other."""
    figures = bool(args.figures or args.figure)
    if args.count is not None and not figures:
        raise ValueError("--count belongs to --figures; add it, or leave --count out")
    checks = ("device", "dtype", "backend", "graph", "budget", "no_trained", "status", "seed")
    odd = [name for name in checks if figures and getattr(args, name)]
    if odd:
        raise ValueError(f"--{odd[0].replace('_', '-')} belongs to the checks, not to --figures; run them apart")
    return figures


def run(args: argparse.Namespace) -> int:
    """Measure, print each figure as it comes and all at the end; exit code 1 if one does not hold."""
    if args.count is not None and args.count < 1:
        raise ValueError(f"--count {args.count}: expected 1 or more")
    if args.jobs < 1:
        raise ValueError(f"--jobs {args.jobs}: expected 1 or more")
    place = args.json or args.resume
    atomic_files.check_place("--json", place)
    found = Results((), _versions()) if args.resume is None else _earlier(args.resume)
    wanted = [name for name in (args.figure or FIGURES) if name not in found]
    try:
        with Progress("verify --figures", 100, "%") as shown:
            shares = _running.Shares(wanted, args.count, shown)
            for result in _running.run(wanted, args.count, args.jobs, shares.say):
                shares.say(result.name, None)
                found = found.with_result(result).sorted(FIGURES)
                shown.write(f"{result}\n")
                if place not in (None, "-"):
                    atomic_files.write(place, found.to_json() + "\n")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_left(found, place)) from None
    print(found.to_json() if place == "-" else found)
    return 0 if found.ok else 1


def _left(found: Results, place: str | None) -> str:
    """What an interrupted run leaves, and how to go on."""
    if not found.results or place in (None, "-"):
        return "no figure was written"
    return f"{', '.join(result.name for result in found.results)} are in {place}, --resume {place} carries on"


def repeat(number: int) -> int:
    """F1's case ``number`` on every backend, line by line; exit code 1 if one is not equal to the formula."""
    print(Draw(number))
    failed = False
    for name, found in equality.case(number):
        failed = failed or isinstance(found, equality.Mismatch)
        print(f"  {name:<10} {_told(found)}")
    return 1 if failed else 0


def _told(found: Any) -> str:
    if found is None:
        return "refuses it by name"
    if isinstance(found, equality.Mismatch):
        return f"MISMATCH: {found.message}"
    return f"equal: output {found.output:.3g}, gradient {found.gradient:.3g} of the yardstick"


def _versions() -> dict[str, Any]:
    here = environment("cpu")
    for package in VERSIONS[2:]:
        try:
            here[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            here[package] = None
    return here


def _earlier(file: str) -> Results:
    """The figures of an earlier run, whose versions must be those of here."""
    try:
        found, here = Results.from_file(file), _versions()
    except ValueError as error:
        raise ValueError(f"--resume {error}") from None
    for name in ("platform", *VERSIONS, "commit"):
        if found.environment.get(name) != here.get(name):
            was = f"{found.environment.get(name)!r:.60}, now {here.get(name)!r}"
            raise ValueError(f"--resume {file}: was measured with another {name}: {was}; begin a new record with --json")
    return found
