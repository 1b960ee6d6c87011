"""What was verified on a GPU, and whether it still holds: records of ``verify``, the hashes of the kernels, three words.

Records lie in ``tests/records/<date>-<device>.json``; the newest counts. What is said of GPUs, here and in the README, is made
from it and from the sources as they are now, and from nothing else.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnn_attention.verify.report import Report, Result

__all__ = [
    "COMPILED",
    "RECORDS",
    "UNTESTED",
    "VERIFIED",
    "Book",
    "Status",
    "file_name",
    "newest",
    "readme",
    "sources",
    "status",
    "table",
]

VERIFIED, COMPILED, UNTESTED = "verified on GPU", "interpreted and compiled", "untested"
PACKAGE = Path(__file__).resolve().parent.parent
RECORDS = PACKAGE.parent / "tests" / "records"
KERNELS = ("backends/**/*.py",)
CHOICE = {
    "cost_model.py",
    "devices.py",
    "dispatch.py",
    "roofline.py",
    "workload.py",
}  # which kernel is taken, not what it computes


@dataclass(frozen=True)
class Status:
    """What may be said of GPUs: a word for the kernels, one for everything else there, and the sentence that holds both."""

    kernels: str
    library: str
    sentence: str
    record: Path | None = None

    def __str__(self) -> str:
        """The sentence."""
        return self.sentence


class Book:
    """The results of a run as they come in, after those of the earlier run that it carries on.

    ValueError if that was run elsewhere: on another device, with other versions, kernels or seed.
    """

    def __init__(self, environment: Mapping[str, Any], resumed: Report | None = None, began: float | None = None) -> None:
        """Nothing yet but what was there."""
        here = {**environment, "sources": sources()}
        self._earlier = () if resumed is None else resumed.results
        self._environment = here if resumed is None else _same(resumed.environment, here)
        self._run = {"date": here["date"], "commit": here["commit"], "command": shlex.join(sys.argv)}
        self._began = time.time() if began is None else began
        self._known = {_key(result) for result in self._earlier}
        self._found: dict[int, Result] = {}

    def holds(self, check: Any) -> bool:
        """True if the earlier run has its result, good or bad."""
        return _key(check) in self._known

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


def _key(checked: Any) -> tuple[str, str, str, str]:
    return checked.group, checked.backend, checked.dtype, checked.name


def _same(earlier: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """The earlier circumstances, which must be those of here."""
    for name in ("device", "cuda", "torch", "triton", "seed", "sources"):
        if earlier.get(name) != here.get(name):
            told = "" if name == "sources" else f": {earlier.get(name)!r}, now {here.get(name)!r}"
            raise ValueError(f"the earlier record was made with other {name}{told}; begin a new record")
    return dict(earlier)


def sources(package: Path = PACKAGE) -> dict[str, str]:
    """The sha256 of every file that a kernel is made of, by its place in the package.

    >>> sorted(sources())[0], len(sources()["backends/dense.py"])
    ('backends/__init__.py', 64)
    """
    files = {file for pattern in KERNELS for file in package.glob(pattern) if file.name not in CHOICE}
    return {file.relative_to(package).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}


def file_name(environment: Mapping[str, Any]) -> str:
    """``<date>-<device>.json``.

    >>> file_name({"date": "2026-11-21T01:02:03+00:00", "device": "NVIDIA H200"})
    '2026-11-21-nvidia-h200.json'
    """
    device = re.sub(r"[^a-z0-9]+", "-", str(environment["device"]).lower()).strip("-")
    return f"{str(environment['date'])[:10]}-{device}.json"


def newest(folder: Path = RECORDS) -> tuple[Path, Report] | None:
    """The newest record of checks on a GPU, and where it lies; None if there is none."""
    found = [(report.environment["date"], file, report) for file, report in _gpu_records(folder)]
    if not found:
        return None
    _, file, report = max(found, key=lambda entry: (entry[0], entry[1].name))
    return file, report


def status(folder: Path = RECORDS, package: Path = PACKAGE) -> Status:
    """What may be said of GPUs today: one of "verified on GPU", "interpreted and compiled" and "untested", and why.

    >>> status(Path("nowhere")).library
    'untested'
    """
    found = newest(folder)
    if found is None:
        return Status(COMPILED, UNTESTED, f"{_unverified('no machine with one has run it yet')}")
    file, report = found
    env = report.environment
    when = f"{str(env['date'])[:10]}, {str(env.get('commit') or 'unknown')[:12]}"
    if not report.ok:
        counts = f"{len(report.failures)} failed, {report.not_started} not started"
        return Status(COMPILED, UNTESTED, _unverified(f"its last verification ({when}) does not stand: {counts}"), file)
    if env.get("selection", "all") != "all":
        return Status(COMPILED, UNTESTED, _unverified(f"its last verification ({when}) was of some checks, not --all"), file)
    if env.get("sources") != sources(package):
        return Status(COMPILED, UNTESTED, _unverified(f"kernels changed since the last GPU verification ({when})"), file)
    ran = len(report.results) - len(report.skipped)
    sentence = (
        f"On a GPU it is **{VERIFIED}**: {ran} checks on {env['device']} ({when}; torch {env['torch']}, triton {env['triton']}), "
        f"0 failed, {len(report.skipped)} skipped with their reasons (`tests/records/{file.name}`)."
    )
    return Status(VERIFIED, VERIFIED, sentence, file)


def _unverified(why: str) -> str:
    return (
        f"On a GPU it is **{UNTESTED}**: {why}; its kernels are **{COMPILED}**; "
        "`gnn-attention verify --all --device cuda --json FILE` is ready."
    )


def readme(folder: Path = RECORDS, package: Path = PACKAGE) -> str:
    """What the README says of GPUs: the sentence, and the table of the newest record if there is one."""
    found = newest(folder)
    said = str(status(folder, package))
    return said if found is None else f"{said}\n\n{table(found[1])}"


def table(report: Report) -> str:
    """A record as a table in Markdown: checks, and the worst errors in units of what SDPA's own are, by backend and dtype."""
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in report.results:
        groups[result.backend, result.dtype].append(result)
    rows = [[*key, *_cells(results)] for key, results in sorted(groups.items())]
    head = ["backend", "dtype", "checks", "failed", "skipped", "output (allowed: 2, float64: 1)", "gradient (3, float64: 1)"]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def _cells(results: list[Result]) -> Iterator[str]:
    ran = [r for r in results if r.skipped is None]
    yield str(len(ran))
    yield str(sum(not r.passed for r in ran))
    yield str(len(results) - len(ran))
    for name in ("output", "gradient"):
        worst = [value for r in ran if (value := getattr(r, name)) is not None]
        yield f"{max(worst):.2f}" if worst else "-"


def _gpu_records(folder: Path) -> Iterator[tuple[Path, Report]]:
    """Records of checks, not those of benchmarks, made where there was a GPU."""
    for file in sorted(folder.glob("*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, dict) and {"environment", "summary", "results"} <= found.keys() and found["environment"].get("cuda"):
            yield file, Report.from_json(json.dumps(found))
