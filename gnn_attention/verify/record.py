"""Records of checks, and what the newest one says of the kernels as they are now.

Records lie in ``tests/records/<date>-<device>.json``; the newest of a GPU counts.
"""

import datetime
import hashlib
import json
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gnn_attention.verify.report import Report, Result, label

VERIFIED, COMPILED, UNTESTED = "verified on GPU", "interpreted and compiled", "untested"
PACKAGE = Path(__file__).resolve().parent.parent
RECORDS = PACKAGE.parent / "tests" / "records"
# the checks that a record must hold, all passed: python -m tests.guarantees.gpu_core lists them
CORE = "d81cf2ae7c47da0451174a688def0e4fc3a15c01112bbee209b499c08cbfcb01"
# what computes, builds forms or judges
FOLDERS = ("_support", "backends", "graph", "verify")
FILES = ("attend.py", "edges.py", "rotary.py", "score_mods.py")
# which kernel is taken, how checks are run and shown: not what is computed
CHOICE = {"cost_model.py", "devices.py", "dispatch.py", "roofline.py", "workload.py"}
SHOWN = {"circumstances.py", "layer_checks.py", "processes.py", "progress.py", "record.py", "report.py"}
SAME = ("device", "cuda", "torch", "triton", "seed", "sources")
COMMAND = "`python -m benchmarks.gpu_run --out FOLDER` is ready."


def begin(environment: Mapping[str, Any], resumed: Report | None) -> Report:
    """The report that a run adds to: an empty one, or the earlier one that it carries on.

    ValueError if that was run elsewhere: on another device, with other versions, kernels or seed.
    """
    here = {**environment, "sources": sources()}
    if resumed is None:
        return Report((), here)
    for name in SAME:
        earlier, now = resumed.environment.get(name), here.get(name)
        if earlier != now:
            what = "" if name == "sources" else f": {earlier!r}, now {now!r}"
            raise ValueError(f"the earlier record was made with other {name}{what}; begin a new record")
    return resumed


def add(earlier: Report, found: Mapping[int, Result], due: int, began: float) -> Report:
    """The earlier results and those found, by number, of the ``due`` ones of a run that began then."""
    date, seconds = datetime.datetime.fromtimestamp(began, datetime.UTC), round(time.time() - began, 1)
    run: dict[str, Any] = {"date": date.isoformat(timespec="seconds"), "command": shlex.join(sys.argv)}
    run |= {"seconds": seconds, "checks": len(found)}
    about = {**earlier.environment, "runs": [*earlier.environment.get("runs", []), run]}
    return Report((*earlier.results, *(found[n] for n in sorted(found))), about, due - len(found))


def sources(package: Path = PACKAGE) -> dict[str, str]:
    """The sha256 of every file that computes, builds forms or judges, by its place in the package.

    In a checkout with them the checks of GPUs, which are not in the package.

    >>> {"backends/dense.py", "graph/tiling.py", "verify/measure.py"} <= sources().keys()
    True
    """
    found = [file for folder in FOLDERS for file in package.glob(f"{folder}/**/*.py")]
    found += [package / name for name in FILES if (package / name).exists()]
    places = {file.relative_to(package).as_posix(): file for file in found if file.name not in CHOICE | SHOWN}
    checks = package.parent / "tests" / "guarantees"
    places |= {f"tests/guarantees/{file.name}": file for file in checks.glob("gpu_*.py")}
    return {place: hashlib.sha256(places[place].read_bytes()).hexdigest() for place in sorted(places)}


def digest(labels: Iterable[str]) -> str:
    """The sha256 of the names of checks, in whatever order.

    >>> digest(["b", "a"]) == digest(["a", "b"]) != digest(["a"])
    True
    """
    return hashlib.sha256("\n".join(sorted(labels)).encode()).hexdigest()


def newest(folder: Path = RECORDS) -> tuple[Path, Report] | None:
    """The newest record of checks on a GPU, and where it lies; None if there is none."""
    found = []
    for file in folder.glob("*.json"):
        made = json.loads(file.read_text(encoding="utf-8"))
        # those of benchmarks and of guarantees have other fields
        if {"environment", "summary", "results"} <= made.keys() and made["environment"].get("cuda"):
            found.append((made["environment"]["date"], file))
    return (max(found)[1], Report.from_file(max(found)[1])) if found else None


def status(folder: Path = RECORDS, package: Path = PACKAGE) -> str:
    """What may be said of GPUs today: "verified on GPU", "interpreted and compiled" or "untested", and why.

    >>> "On a GPU it is **untested**: " in status(Path("nowhere"))
    True
    """
    found = newest(folder)
    why = "no machine with one has run it yet" if found is None else _reason(found[1], sources(package))
    if found is None or why is not None:
        return f"On a GPU it is **{UNTESTED}**: {why}; its kernels are **{COMPILED}**; {COMMAND}"
    (file, report), env = found, found[1].environment
    where = f"{env['device']} ({_when(report)}; torch {env['torch']}, triton {env['triton']})"
    checks = f"{len(report.results)} checks on {where}, 0 failed, 0 skipped (`tests/records/{file.name}`)"
    return f"On a GPU it is **{VERIFIED}**: {checks}."


def _when(report: Report) -> str:
    env = report.environment
    return f"{str(env['date'])[:10]}, {str(env.get('commit') or 'unknown')[:12]}"


def _reason(report: Report, here: dict[str, str]) -> str | None:
    last, about = f"its last verification ({_when(report)})", report.environment
    if not report.ok or report.skipped:
        found = f"{len(report.failures)} failed, {len(report.skipped)} skipped"
        return f"{last} does not stand: {found}, {report.not_started} not started"
    if about.get("trial") or about.get("interpreted") is not False:
        return f"{last} was a rehearsal, whose kernels were interpreted"
    if digest(label(result) for result in report.results) != CORE:
        return f"{last} was not of the core of checks as it is now"
    if about.get("sources") != here:
        return f"kernels, forms or checks changed since the last GPU verification ({_when(report)})"
    return None
