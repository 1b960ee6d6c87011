"""Records of the core on a GPU, and what the newest one says of each backend in each dtype.

A record lies in ``tests/records/<date>-<device>.json``: an environment, the result of every check, which checks
each cell (a backend in a dtype) has, and a digest of what the device runs for each backend. Sources are compared
without comments and docstrings. A later change marks a cell as changed; it does not erase the record.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gnn_attention.verify import Report, Result
from tests.guarantees.environment import ROOT, environment, output
from tests.guarantees.gpu_core import MESSAGE_PASSING, core_checks, digest

RECORDS = ROOT / "tests" / "records"
COMMAND = "`python3 -m benchmarks.gpu_run` is ready"
# patterns of the files that the device runs for a backend; those after "!" are left out
RUNS = {
    "rows": (
        *("gnn_attention/backends/gpu/**/*.py", "!gnn_attention/backends/gpu/flash_varlen.py"),
        *("gnn_attention/backends/rows.py", "gnn_attention/backends/dropout.py"),
        "gnn_attention/edge_softmax.py",
    ),
    "dense": ("gnn_attention/backends/dense.py",),
    "varlen": ("gnn_attention/backends/varlen.py", "gnn_attention/backends/gpu/flash_varlen.py"),
    "flex": ("gnn_attention/backends/flex.py", "gnn_attention/backends/_flex_block_mask.py"),
    "reference": (*("gnn_attention/backends/reference.py", "gnn_attention/edge_softmax.py"),),
    MESSAGE_PASSING: ("gnn_attention/layer/**/*.py",),
}
CHECKS = "checks"  # the digest of what judges
JUDGES = (
    *("gnn_attention/verify/*.py", "!gnn_attention/verify/processes.py"),
    "!gnn_attention/verify/__init__.py",
    *("tests/guarantees/gpu_*.py", "!tests/guarantees/gpu_record.py"),
)


# ---- where a record was made


def gpu_environment(device: str) -> dict[str, Any]:
    """The environment of a run, with the driver and the compilers of a GPU."""
    about = environment(device) | dict.fromkeys(("driver", "cudnn", "capability", "triton_key", "ptxas"))
    if device.startswith("cuda"):
        about["driver"] = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        about["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        about["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        with suppress(ImportError, AttributeError):
            cache = importlib.import_module("triton.runtime.cache")
            # kernels compiled by other sources of Triton are other kernels
            about["triton_key"] = hashlib.sha256(cache.triton_key().encode()).hexdigest()
        about["ptxas"] = ptxas_release()
    return about


def ptxas_release() -> str | None:
    """The release of the assembler in use, that of ``TRITON_PTXAS_PATH`` or Triton's own, or None."""
    spec = importlib.util.find_spec("triton")
    own = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas" if spec and spec.origin else None
    program = os.environ.get("TRITON_PTXAS_PATH") or own
    release = re.search(r"V([0-9.]+)", output(str(program), "--version") or "")
    return release[1] if release else None


def digests(root: Path = ROOT) -> dict[str, str]:
    """The digest of what the device runs for each backend, and of what judges."""
    return {name: _digest_of_files(root, patterns) for name, patterns in {**RUNS, CHECKS: JUDGES}.items()}


def _digest_of_files(root: Path, patterns: Iterable[str]) -> str:
    files: set[Path] = set()
    for pattern in patterns:
        if pattern.startswith("!"):
            files.discard(root / pattern[1:])
        else:
            files.update(root.glob(pattern))
    # without their names: a file may be renamed
    return digest(source_digest(file.read_text(encoding="utf-8")) for file in files)


@functools.lru_cache(maxsize=1024)
def source_digest(text: str) -> str:
    """The sha256 of a source without its comments and docstrings.

    >>> source_digest("def f(x):\\n    'Doc.'\\n    return x + 1") == source_digest("def f(x): return x + 1  # why")
    True
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


# ---- records


def _cells(checks: Iterable[Any]) -> dict[str, list[Any]]:
    """Checks, or results, of each backend in each dtype."""
    cells = defaultdict[str, list[Any]](list)
    for check in checks:
        cells[f"{check.backend} {check.dtype}"].append(check)
    return dict(cells)


@functools.cache
def core_cells() -> dict[str, dict[str, Any]]:
    """Of each cell of the core: how many checks it has, and the digest of their labels."""
    cells = _cells(core_checks())
    return {
        name: {"checks": len(each), "labels": digest(check.label for check in each)}
        for name, each in cells.items()
    }


def write_record(results: Iterable[Result], place: Mapping[str, Any], folder: Path = RECORDS) -> Path:
    """Write the results of a run of the core, and return the file ``<date>-<device>.json``.

    ``place`` is :func:`gpu_environment`, with ``trial=True`` if the run was a rehearsal.
    """
    results = tuple(results)
    about = {**place, "cells": core_cells(), "digests": digests()}
    missing = {check.label for check in core_checks()}.difference(result.label for result in results)
    device = re.sub(r"[^a-z0-9]+", "-", str(place["device"]).lower()).strip("-")
    # two runs of a day are two files: 2026-11-23T0914
    file = folder / f"{str(place['date'])[:16].replace(':', '')}-{device}.json"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(Report(results, about, len(missing)).to_json() + "\n", encoding="utf-8")
    return file


def records(folder: Path = RECORDS) -> list[tuple[Path, Report]]:
    """The records of checks on GPUs, the newest first; those of benchmarks and of CPUs are none."""
    dated = []
    for file in folder.glob("*.json"):
        made = json.loads(file.read_text(encoding="utf-8"))
        if {"environment", "not_started", "results"} <= made.keys() and made["environment"].get("cuda"):
            dated.append((str(made["environment"]["date"]), file))
    return [(file, Report.from_file(file)) for _, file in sorted(dated, reverse=True)]


def refusal(report: Report, now: Mapping[str, str]) -> str | None:
    """Why a record says nothing of any cell, or None; ``now`` are today's digests of sources."""
    about = report.environment
    if about.get("trial") or about.get("interpreted") is not False:
        return "was a rehearsal, whose kernels were interpreted"
    if not any(result.passed for result in report.results):
        return "ran no check that passed"
    if not {"cells", "digests"} <= about.keys() or not about["digests"].keys() >= now.keys():
        return "does not say which sources and checks it ran"
    if about["digests"][CHECKS] == now[CHECKS] and about["cells"] != core_cells():
        return "was not of the core of checks"
    return None


def _problem(results: list[Result], cell: Mapping[str, Any]) -> str | None:
    """Why a cell is not verified: what failed, was skipped or was not run; None if it is."""
    skipped = sum(result.skipped is not None for result in results)
    failed = sum(not result.passed for result in results) - skipped
    counts = {"failed": failed, "skipped": skipped, "not run": cell["checks"] - len(results)}
    if any(counts.values()):
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    is_core = digest(result.label for result in results) == cell["labels"]
    return None if is_core else "other checks than those of the core"


def newest(folder: Path = RECORDS, root: Path = ROOT) -> tuple[Path, Report] | None:
    """The newest record of a GPU that says something of a cell, or None."""
    made, now = records(folder), digests(root)
    return next(((file, report) for file, report in made if refusal(report, now) is None), None)


def status(folder: Path = RECORDS, root: Path = ROOT) -> str:
    """What is verified on a GPU, in one sentence.

    >>> status(Path("nowhere"))
    'On a GPU the library is **untested**: no machine with one has run the checks yet; `python3 -m benchmarks.gpu_run` is ready.'
    """
    untested, made = "On a GPU the library is **untested**:", records(folder)
    if not made:
        return f"{untested} no machine with one has run the checks yet; {COMMAND}."
    record, now = newest(folder, root), digests(root)
    if record is None:
        return f"{untested} the last run ({_when(made[0][1])}) {refusal(made[0][1], now)}; {COMMAND}."
    file, report = record
    cells, before = report.environment["cells"], report.environment["digests"]
    results = _cells(report.results)
    problems = {name: _problem(results.get(name, []), cell) for name, cell in cells.items()}
    notes = [f"{name}: {problem}" for name, problem in problems.items() if problem]
    changed = [name if name != CHECKS else "the checks" for name in now if before[name] != now[name]]
    notes += [f"changed since: {', '.join(changed)}"] if changed else []
    ending = "".join(f"; {note}" for note in notes)
    verified = [name for name, problem in problems.items() if problem is None]
    if not verified:
        return f"{untested} the last run ({_when(report)}) verified nothing{ending}."
    backends = defaultdict[str, list[str]](list)
    for name in verified:
        backend, dtype = name.split()
        backends[backend].append(dtype)
    counts = ", ".join(f"{backend} in {', '.join(dtypes)}" for backend, dtypes in backends.items())
    checks = sum(len(results[name]) for name in verified)
    place = f"`tests/records/{file.name}`"
    return f"The library is **verified** on {_when(report)}: {counts}, {checks:,} checks{ending} ({place})."


def _when(report: Report) -> str:
    about = report.environment
    return f"{about['device']} at {str(about.get('commit') or 'unknown')[:12]}, {str(about['date'])[:10]}"


# ---- the table of the documentation


def markdown(folder: Path = RECORDS, root: Path = ROOT) -> str:
    """What is verified on GPUs, and the table of the record if there is one."""
    record, sentence = newest(folder, root), status(folder, root)
    return sentence if record is None else f"{sentence}\n\n{table(record[1])}"


def table(report: Report) -> str:
    """Checks, and the worst error as a share of what is allowed, by backend and dtype."""
    rows = [
        ["backend", "dtype", "checks", "failed", "skipped", "worst error of what is allowed"],
        ["---"] * 6,
    ]
    for name, results in sorted(_cells(report.results).items()):
        ran = [result for result in results if result.skipped is None]
        failed = sum(not result.passed for result in ran)
        shares = [result.share for result in ran if result.share is not None]
        counts = map(str, (len(ran), failed, len(results) - len(ran)))
        rows.append([*name.split(), *counts, f"{max(shares):.2f}" if shares else "-"])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
