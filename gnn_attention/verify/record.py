"""Records of checks: results as they come in, and what the newest record of a GPU says of the kernels as they
are now.

Records lie in ``tests/records/<date>-<device>.json``; the newest counts.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnn_attention.verify.report import Report, Result, label

VERIFIED, COMPILED, UNTESTED = "verified on GPU", "interpreted and compiled", "untested"
PACKAGE = Path(__file__).resolve().parent.parent
RECORDS = PACKAGE.parent / "tests" / "records"
KERNELS = ("backends/**/*.py",)
# which kernel is taken, not what it computes
CHOICE = {"cost_model.py", "devices.py", "dispatch.py", "roofline.py", "workload.py"}
SAME = ("device", "cuda", "torch", "triton", "seed", "sources")
# what a record of a GPU must hold: the last four from python -m tests.guarantees.gpu
GROUPS = {"attend", "layer", "forms", "rules", "dropout", "large", "repeat", "memory", "operators"}
COMMAND = "`python -m tests.guarantees.gpu --all --device cuda --json FILE` is ready."


@dataclass(frozen=True)
class Status:
    """What may be said of GPUs: a word for the kernels, one for everything else there, and the sentence with
    both.
    """

    kernels: str
    library: str
    sentence: str
    record: Path | None = None

    def __str__(self) -> str:
        return self.sentence


class Book:
    """The results of a run as they come in, after those of the earlier run that it carries on.

    ValueError if that was run elsewhere: on another device, with other versions, kernels or seed.
    """

    def __init__(self, environment: Mapping[str, Any], resumed: Report | None, began: float) -> None:
        here = {**environment, "sources": sources()}
        self._earlier = () if resumed is None else resumed.results
        self._environment = here if resumed is None else _same(resumed.environment, here)
        self._run = {"date": here["date"], "commit": here["commit"], "command": shlex.join(sys.argv)}
        self._began = began
        self._known = {label(result) for result in self._earlier}
        self._found: dict[int, Result] = {}

    def __contains__(self, check: object) -> bool:
        """True if the earlier run has its result, good or bad."""
        return label(check) in self._known

    def add(self, number: int, result: Result) -> None:
        """One more; the report lists them by number."""
        self._found[number] = result

    @property
    def new(self) -> int:
        """How many this run has added."""
        return len(self._found)

    def report(self, due: int) -> Report:
        """As it stands, where ``due`` results are due from this run."""
        run = {**self._run, "seconds": round(time.time() - self._began, 1), "checks": self.new}
        runs = [*self._environment.get("runs", []), run]
        results = (*self._earlier, *(self._found[number] for number in sorted(self._found)))
        return Report(results, {**self._environment, "runs": runs}, due - self.new)


def _same(earlier: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """The earlier environment, which must be that of here."""
    for name in SAME:
        if earlier.get(name) != here.get(name):
            what = "" if name == "sources" else f": {earlier.get(name)!r}, now {here.get(name)!r}"
            raise ValueError(f"the earlier record was made with other {name}{what}; begin a new record")
    return dict(earlier)


def sources(package: Path = PACKAGE) -> dict[str, str]:
    """The sha256 of every file that a kernel is made of, by its place in the package.

    >>> sorted(sources())[0], len(sources()["backends/dense.py"])
    ('backends/__init__.py', 64)
    """
    files = {file for pattern in KERNELS for file in package.glob(pattern) if file.name not in CHOICE}
    return {
        file.relative_to(package).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(files)
    }


def file_name(environment: Mapping[str, Any]) -> str:
    """``<date>-<device>.json``.

    >>> file_name({"date": "2026-11-21T01:02:03+00:00", "device": "NVIDIA H200"})
    '2026-11-21-nvidia-h200.json'
    """
    device = re.sub(r"[^a-z0-9]+", "-", str(environment["device"]).lower()).strip("-")
    return f"{str(environment['date'])[:10]}-{device}.json"


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


def status(folder: Path = RECORDS, package: Path = PACKAGE) -> Status:
    """What may be said of GPUs today: one of "verified on GPU", "interpreted and compiled" and "untested",
    and why.

    >>> status(Path("nowhere")).library
    'untested'
    """
    found = newest(folder)
    if found is None:
        return _unverified("no machine with one has run it yet")
    file, report = found
    env = report.environment
    when = f"{str(env['date'])[:10]}, {str(env.get('commit') or 'unknown')[:12]}"
    reason = _reason(report, when, sources(package))
    if reason is not None:
        return _unverified(reason, file)
    ran = len(report.results) - len(report.skipped)
    sentence = (
        f"On a GPU it is **{VERIFIED}**: {ran} checks on {env['device']} ({when}; torch {env['torch']}, triton {env['triton']}), "
        f"0 failed, {len(report.skipped)} skipped with their reasons (`tests/records/{file.name}`)."
    )
    return Status(VERIFIED, VERIFIED, sentence, file)


def _reason(report: Report, when: str, here: dict[str, str]) -> str | None:
    """Why a record verifies nothing today; None if it does."""
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


def _unverified(why: str, file: Path | None = None) -> Status:
    sentence = f"On a GPU it is **{UNTESTED}**: {why}; its kernels are **{COMPILED}**; {COMMAND}"
    return Status(COMPILED, UNTESTED, sentence, file)
