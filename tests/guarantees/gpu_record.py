"""The newest record of the core on a GPU says what is verified.

A record is a file ``tests/records/<date>-<device>.json`` with an environment and the result of every check. A cell
(a backend, or the options of edges, in a dtype) is verified if all of its checks in today's core passed. If the package has changed since,
the status says so, but the record, which names its commit, still counts.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gnn_attention.verify import Report, Result
from tests.guarantees.environment import ROOT, environment, output
from tests.guarantees.gpu_core import core_checks

RECORDS = ROOT / "tests" / "records"
COMMAND = "`python3 -m benchmarks.gpu_run` is ready"

# ---- the environment of a record


def gpu_environment(device: str) -> dict[str, Any]:
    """Return the environment of a run, with the driver and the compilers of a GPU."""
    facts = environment(device) | dict.fromkeys(("driver", "cudnn", "capability", "triton_key", "ptxas"))
    if device.startswith("cuda"):
        facts["driver"] = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        facts["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        facts["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        with suppress(ImportError, AttributeError):
            cache = importlib.import_module("triton.runtime.cache")
            # Other sources of Triton may compile other kernels.
            facts["triton_key"] = hashlib.sha256(cache.triton_key().encode()).hexdigest()
        facts["ptxas"] = ptxas_release()
    return facts


def ptxas_release() -> str | None:
    """Return the release of the assembler of ``TRITON_PTXAS_PATH`` or of Triton, or None."""
    spec = importlib.util.find_spec("triton")
    origin = spec.origin if spec else None
    bundled_program = Path(origin).parent / "backends" / "nvidia" / "bin" / "ptxas" if origin else None
    program = os.environ.get("TRITON_PTXAS_PATH") or bundled_program
    release = re.search(r"V([0-9.]+)", output(str(program), "--version") or "")
    return release[1] if release else None


# ---- records


def _cells(checks: Iterable[Any]) -> dict[str, list[Any]]:
    """Group checks or results by backend and dtype; features of edges and normalisers have their own cells."""
    cells = defaultdict[str, list[Any]](list)
    for check in checks:
        subject = "edge_attr/normaliser" if check.group == "edges" else check.backend
        cells[f"{subject} {check.dtype}"].append(check)
    return dict(cells)


@functools.cache
def core_labels() -> dict[str, list[str]]:
    """Return the labels of the checks of each cell of the core."""
    return {name: [check.label for check in cell] for name, cell in _cells(core_checks()).items()}


def write_record(results: Iterable[Result], place: Mapping[str, Any], folder: Path = RECORDS) -> Path:
    """Write the results of a run of the core, and return the file ``<date>-<device>.json``.

    ``place`` is :func:`gpu_environment`, with ``trial=True`` if the run was a rehearsal.
    """
    results = tuple(results)
    missing = {label for cell in core_labels().values() for label in cell} - {r.label for r in results}
    device = re.sub(r"[^a-z0-9]+", "-", str(place["device"]).lower()).strip("-")
    # The time, as in 2026-11-23T0914, gives two runs of a day two files.
    file = folder / f"{str(place['date'])[:16].replace(':', '')}-{device}.json"
    folder.mkdir(parents=True, exist_ok=True)
    # Error messages may name files of the machine.
    paths = rf"{re.escape(str(ROOT))}/|/[^\s\"\\]*/site-packages/"
    text = re.sub(paths, "", Report(results, dict(place), len(missing)).to_json())
    file.write_text(text + "\n", encoding="utf-8")
    return file


def records(folder: Path = RECORDS) -> list[tuple[Path, Report]]:
    """Return the records of checks on GPUs, the newest first; other files are records of benchmarks or CPUs."""
    dated_files = []
    for file in folder.glob("*.json"):
        record = json.loads(file.read_text(encoding="utf-8"))
        if {"environment", "not_started", "results"} <= record.keys() and record["environment"].get("cuda"):
            dated_files.append((str(record["environment"]["date"]), file))
    return [(file, Report.from_file(file)) for _, file in sorted(dated_files, reverse=True)]


def refusal(report: Report) -> str | None:
    """Return why a record verifies no cell, or None if it may verify one."""
    facts = report.environment
    if facts.get("trial") or facts.get("interpreted") is not False:
        return "was a rehearsal, whose kernels were interpreted"
    return None if any(result.passed for result in report.results) else "ran no check that passed"


def _problem(labels: Iterable[str], results: Mapping[str, Result]) -> str:
    """Return the counts of checks that failed, were skipped or did not run, or "" for a verified cell."""
    outcomes = [results.get(label) for label in labels]
    num_skipped = sum(result is not None and result.skipped is not None for result in outcomes)
    num_failed = sum(result is not None and not result.passed for result in outcomes) - num_skipped
    counts = {"failed": num_failed, "skipped": num_skipped, "not run": outcomes.count(None)}
    return ", ".join(f"{count} check{'s' * (count > 1)} {state}" for state, count in counts.items() if count)


def newest(folder: Path = RECORDS) -> tuple[Path, Report] | None:
    """Return the newest record of a GPU that may verify a cell, or None."""
    return next(((file, report) for file, report in records(folder) if refusal(report) is None), None)


def status(folder: Path = RECORDS) -> str:
    """Return a sentence on what is verified on a GPU.

    >>> status(Path("nowhere"))
    'On a GPU the library is **untested**: no machine with one has run the checks yet; `python3 -m benchmarks.gpu_run` is ready.'
    """
    subject = "On a GPU the library is **untested**:"
    reports, record = [report for _, report in records(folder)], newest(folder)
    if not reports:
        return f"{subject} no machine with one has run the checks yet; {COMMAND}."
    if record is None:
        return f"{subject} the last run ({_place(reports[0])}) {refusal(reports[0])}; {COMMAND}."
    file, report = record
    results, cells = {result.label: result for result in report.results}, core_labels()
    cells_by_problem = defaultdict[str, list[str]](list)
    for name, labels in cells.items():
        cells_by_problem[_problem(labels, results)].append(name)
    verified_cells = cells_by_problem.pop("", [])
    notes = [f" {problem} for {_join_cells(names)}." for problem, names in cells_by_problem.items()]
    if report.environment.get("sources") != environment("cpu")["sources"]:
        notes.append(" The package has changed since.")
    if not verified_cells:
        return f"{subject} the last run ({_place(report)}) verified nothing.{''.join(notes)}"
    count = sum(len(cells[name]) for name in verified_cells)
    return (
        f"The library is **verified** on {_place(report)}, for {_join_cells(verified_cells)}: {count:,} checks passed."
        f"{''.join(notes)} The record is `tests/records/{file.name}`."
    )


def _join_cells(cells: Iterable[str]) -> str:
    """Join the names of cells, such as ``rows (float32) and every dtype of varlen``."""
    dtypes = defaultdict[str, list[str]](list)
    for name in cells:
        dtypes[name.split()[0]].append(name.split()[1])
    sizes = Counter(name.split()[0] for name in core_labels())
    texts = [f"{b} ({', '.join(names)})" for b, names in dtypes.items() if len(names) < sizes[b]]
    complete = [backend for backend, names in dtypes.items() if len(names) == sizes[backend]]
    return " and ".join(texts + ([f"every dtype of {', '.join(complete)}"] if complete else []))


def _place(report: Report) -> str:
    facts = report.environment
    return f"{facts['device']} at {str(facts.get('commit') or 'unknown')[:12]}, {str(facts['date'])[:10]}"


# ---- the table of the documentation


def markdown(folder: Path = RECORDS) -> str:
    """Return the status, and the table of the newest record if there is one."""
    record, sentence = newest(folder), status(folder)
    return sentence if record is None else f"{sentence}\n\n{table(record[1])}"


def table(report: Report) -> str:
    """Return a table of the checks and the worst error by backend and dtype."""
    rows = [
        ["backend", "dtype", "checks", "failed", "skipped", "worst error of what is allowed"],
        ["---"] * 6,
    ]
    for name, results in sorted(_cells(report.results).items()):
        finished_checks = [result for result in results if result.skipped is None]
        num_failed = sum(not result.passed for result in finished_checks)
        shares = [result.share for result in finished_checks if result.share is not None]
        counts = map(str, (len(finished_checks), num_failed, len(results) - len(finished_checks)))
        rows.append([*name.split(), *counts, f"{max(shares):.2f}" if shares else "-"])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
