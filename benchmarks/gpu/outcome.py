"""What a GPU run leaves: its record, a page that sums it up, and one file that holds everything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu import archives, groups
from benchmarks.gpu.phases import CHECKED, Run, phase_checks
from gnn_attention._support import atomic_files
from gnn_attention.verify import Report, Result
from gnn_attention.verify.report import label

__all__ = ["BENCHES", "PLACE", "carry", "failures", "pack", "read_benchmark", "write_record", "write_summary"]

PLACE = "place.json"
BENCHES = ("bench", "peers")


def results(run: Run, *phases: str) -> Iterator[Result]:
    """Of these phases, as their files have them."""
    for phase in phases:
        yield from groups.results(sorted(run.out.glob(f"{phase}.*.jsonl")))


def failures(run: Run) -> list[Result]:
    """Of all checks that were run."""
    return Report(tuple(results(run, *CHECKED))).failures


def write_record(run: Run) -> Path | None:
    """The record of the core, as ``gnn-attention verify --status`` reads it; None if nothing was checked.

    An incomplete one says how many checks are missing, and does not stand.
    """
    place = json.loads((run.out / PLACE).read_text())
    found = {label(result): result for result in results(run, "core")}
    due = [check.label for check in phase_checks(run, "core")]
    if not found:
        return None
    mine = tuple(found[name] for name in due if name in found)
    report = Report(mine, place, len(due) - len(mine))
    # two of a day have two names: 2026-11-23T0914
    when = place["date"][:16].replace(":", "")
    file = run.out / f"{when}-{place['device'].replace(' ', '-')}.json"
    atomic_files.write(str(file), report.to_json() + "\n")
    return file


def write_summary(run: Run) -> str:
    """Into ``summary.txt``."""
    text = _summary(run)
    atomic_files.write(str(run.out / "summary.txt"), text)
    return text


def _summary(run: Run) -> str:
    """One page: what was run in each phase, what failed, where."""
    place = json.loads((run.out / PLACE).read_text())
    versions = f"torch {place['torch']}, triton {place['triton']}, core {place['core'][:12]}"
    lines = [f"{place['device']}, {versions}, {len(place['calls'])} calls", *_kernels(place)]
    for phase in CHECKED:
        lines += _phase(run, phase)
    for name in BENCHES:
        lines += _benchmark(run, name)
    return "\n".join(lines) + "\n"


def _kernels(place: dict[str, Any]) -> Iterator[str]:
    for number, call in enumerate(place["calls"], 1):
        if "compiled" in call:
            yield f"call {number}: {call['ready']} kernels were compiled before, {call['compiled']} in it"


def _phase(run: Run, phase: str) -> Iterator[str]:
    due, report = len(phase_checks(run, phase)), Report(tuple(results(run, phase)))
    shares = [result.share for result in report.results if result.share is not None]
    worst = f", worst {max(shares):.2f} of what is allowed" if shares else ""
    counts = f"{len(report.failures)} FAILED, {len(report.skipped)} skipped"
    yield f"{phase}: {len(report.results)} of {due} checks, {counts}{worst}"
    for result in report.failures:
        yield f"  FAILED {label(result)}\n    {result.message[:300]}"
    reasons = dict.fromkeys(result.skipped for result in report.skipped)
    for reason in reasons:
        names = [label(result) for result in report.skipped if result.skipped == reason]
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        yield f"  skipped: {reason}: {'; '.join(names[:6])}{more}"


def read_benchmark(run: Run, name: str) -> dict[str, Any]:
    """The record of a benchmark; one without cases if there is none yet."""
    file = run.out / f"{name}.json"
    empty: dict[str, Any] = {"cases": [], "waiting": None, "targets": []}
    return json.loads(file.read_text()) if file.exists() else empty


def _benchmark(run: Run, name: str) -> Iterator[str]:
    record = read_benchmark(run, name)
    waiting = "all" if record["waiting"] is None else record["waiting"]
    yield f"{name}: {len(record['cases'])} cases, {waiting} methods waiting"
    for case in record["cases"]:
        if case["status"] in ("failed", "wrong"):
            place = f"{case['workload']}, {case['method']}, {case['pass']}"
            yield f"  {case['status'].upper()} {place}\n    {case['reason'][:300]}"
    judged = [row for row in record["targets"] if row["met"] is not None]
    if judged:
        yield f"  {sum(row['met'] for row in judged)} of {len(judged)} judged targets met"


def pack(run: Run, archive: Path) -> None:
    """Everything that is there by now, as one file."""
    archives.pack(run.out, [file for file in sorted(run.out.iterdir()) if _is_result(file)], archive)


def carry(earlier: Path, out: Path) -> None:
    """Put what an earlier call left, its folder or its archive, into a folder where that is not there yet.

    ValueError for one that is damaged, or begun and not more.
    """
    if earlier.is_dir():
        found = {file.name: file.read_bytes() for file in earlier.iterdir() if _is_result(file)}
    else:
        found = archives.members(earlier)
    if PLACE not in found:
        raise ValueError(f"{earlier} holds nothing of an earlier call")
    # the place comes last: a folder that has it has everything
    for name, data in sorted(found.items(), key=lambda item: item[0] == PLACE):
        if not (out / Path(name).name).exists():
            atomic_files.write(out / Path(name).name, data)


def _is_result(file: Path) -> bool:
    """A file that was written to its end."""
    return file.is_file() and not file.name.startswith(".")
