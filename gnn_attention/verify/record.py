"""Records of checks, and what the newest one says of the kernels as they are now.

Records lie in ``tests/records/<date>-<device>.json``; the newest of a GPU counts.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gnn_attention.verify.report import Report, Result

VERIFIED, COMPILED, UNTESTED = "verified on GPU", "interpreted and compiled", "untested"
PACKAGE = Path(__file__).resolve().parent.parent
RECORDS = PACKAGE.parent / "tests" / "records"
# which kernel is taken, not what it computes
CHOICE = {"cost_model.py", "devices.py", "dispatch.py", "roofline.py", "workload.py"}
SAME = ("device", "cuda", "torch", "triton", "seed", "sources")
# what a record of a GPU must hold: the last four from python -m tests.guarantees.gpu
GROUPS = {"attend", "layer", "forms", "rules", "dropout", "large", "repeat", "memory", "operators"}
COMMAND = "`python -m tests.guarantees.gpu --all --device cuda --json FILE` is ready."


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
    run = {
        "date": datetime.datetime.fromtimestamp(began, datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "seconds": round(time.time() - began, 1),
        "checks": len(found),
    }
    about = {**earlier.environment, "runs": [*earlier.environment.get("runs", []), run]}
    return Report((*earlier.results, *(found[n] for n in sorted(found))), about, due - len(found))


def sources(package: Path = PACKAGE) -> dict[str, str]:
    """The sha256 of every file that a kernel is made of, by its place in the package.

    >>> sorted(sources())[0], len(sources()["backends/dense.py"])
    ('backends/__init__.py', 64)
    """
    files = (file for file in sorted(package.glob("backends/**/*.py")) if file.name not in CHOICE)
    return {f.relative_to(package).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def newest(folder: Path = RECORDS) -> tuple[Path, Report] | None:
    """The newest record of checks on a GPU, and where it lies; None if there is none."""
    found = []
    for file in folder.glob("*.json"):
        text = file.read_text(encoding="utf-8")
        # those of benchmarks and of guarantees have other fields
        record = json.loads(text)
        if {"environment", "summary", "results"} <= record.keys() and record["environment"].get("cuda"):
            found.append((record["environment"]["date"], file.name, text))
    if not found:
        return None
    _, name, text = max(found)
    return folder / name, Report.from_json(text)


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
    ran = len(report.results) - len(report.skipped)
    where = f"{env['device']} ({_when(report)}; torch {env['torch']}, triton {env['triton']})"
    skipped = f"0 failed, {len(report.skipped)} skipped with their reasons (`tests/records/{file.name}`)."
    return f"On a GPU it is **{VERIFIED}**: {ran} checks on {where}, {skipped}"


def _when(report: Report) -> str:
    return (
        f"{str(report.environment['date'])[:10]}, {str(report.environment.get('commit') or 'unknown')[:12]}"
    )


def _reason(report: Report, here: dict[str, str]) -> str | None:
    """Why a record verifies nothing today; None if it does."""
    when = _when(report)
    if not report.ok:
        counts = f"{len(report.failures)} failed, {report.not_started} not started"
        return f"its last verification ({when}) does not stand: {counts}"
    if report.environment.get("selection", "all") != "all":
        return f"its last verification ({when}) was of some checks, not --all"
    if missing := GROUPS - {result.group for result in report.results}:
        return f"its last verification ({when}) lacks the checks of {', '.join(sorted(missing))}"
    if report.environment.get("sources") != here:
        return f"kernels changed since the last GPU verification ({when})"
    return None
