"""``python -m tests.guarantees [NAME ...]``: measure guarantees, print each as it comes, and write their
record.

Exit code 0 if every guarantee holds, 1 if one does not, 2 for wrong arguments, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Any

from gnn_attention._support import atomic_files
from gnn_attention._support.progress import Progress
from gnn_attention.verify.report import environment
from tests.guarantees import equality, runner
from tests.guarantees.draws import Draw
from tests.guarantees.record import VERSIONS, Results
from tests.guarantees.registry import GUARANTEES


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        return _measured(args) if args.case is None else repeat(args.case)
    except KeyboardInterrupt as error:
        print(": ".join(["interrupted", *map(str, error.args)]), file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"guarantees: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.guarantees", description="Measure what the library promises."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(GUARANTEES)} (default: all)")
    parser.add_argument(
        "--count", type=int, metavar="N", help="cases of each (default: as many as the guarantee states)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="guarantees measured at once (default 1)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the record as it grows")
    parser.add_argument(
        "--resume", metavar="FILE", help="carry on the record in FILE: what it holds is not measured again"
    )
    parser.add_argument(
        "--case", type=int, metavar="N", help="repeat random case N of F1 alone, backend by backend"
    )
    return parser


def _measured(args: argparse.Namespace) -> int:
    _check(args)
    place = args.json or args.resume
    found = Results((), _versions()) if args.resume is None else _earlier(args.resume)
    wanted = [name for name in (args.names or GUARANTEES) if name not in found]
    try:
        with Progress("guarantees", len(wanted)) as shown:
            for result in runner.run(
                wanted, args.count, args.jobs, lambda name, text: shown.advance(0, f"{name}: {text}")
            ):
                found = found.with_result(result).sorted(GUARANTEES)
                shown.write(f"{result}\n")
                shown.advance(1)
                if place is not None:
                    atomic_files.write(place, found.to_json() + "\n")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_left(found, place)) from None
    print(found)
    return 0 if found.ok else 1


def _check(args: argparse.Namespace) -> None:
    """ValueError for an unknown name, numbers below 1, and a folder that does not exist."""
    for name in args.names:
        if name not in GUARANTEES:
            raise ValueError(f"{name!r} is no guarantee; expected one of {', '.join(GUARANTEES)}")
    for option in ("count", "jobs"):
        number = getattr(args, option)
        if number is not None and number < 1:
            raise ValueError(f"--{option} {number}: expected 1 or more")
    atomic_files.check_place("--json", args.json or args.resume)


def _left(found: Results, place: str | None) -> str:
    """What an interrupted run leaves, and how to go on."""
    if not found.results or place is None:
        return "no guarantee was written"
    return f"{', '.join(result.name for result in found.results)} are in {place}, --resume {place} carries on"


def repeat(number: int) -> int:
    """F1's case ``number`` on every backend, line by line; exit code 1 if one is not equal to the formula."""
    print(Draw(number))
    failed = False
    for name, found in equality.case(number):
        failed = failed or isinstance(found, equality.Mismatch)
        print(f"  {name:<10} {_outcome(found)}")
    return 1 if failed else 0


def _outcome(found: Any) -> str:
    if found is None:
        return "unsupported, with a reason"
    if isinstance(found, equality.Mismatch):
        return f"MISMATCH: {found.message}"
    return f"equal: output {found.output:.3g}, gradient {found.gradient:.3g} times the error of SDPA"


def _versions() -> dict[str, Any]:
    here = environment("cpu")
    for package in VERSIONS[2:]:
        try:
            here[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            here[package] = None
    return here


def _earlier(file: str) -> Results:
    """The guarantees of an earlier run, whose versions must be those of here."""
    try:
        found, here = Results.from_file(file), _versions()
    except ValueError as error:
        raise ValueError(f"--resume {error}") from None
    for name in ("platform", *VERSIONS, "commit"):
        if found.environment.get(name) != here.get(name):
            was = f"{found.environment.get(name)!r:.60}, now {here.get(name)!r}"
            raise ValueError(
                f"--resume {file}: was measured with another {name}: {was}; begin a new record with --json"
            )
    return found


if __name__ == "__main__":
    sys.exit(main())
