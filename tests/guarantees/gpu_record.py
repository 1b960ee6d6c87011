"""Records of the core on a GPU, and what the newest one says of each backend in each dtype.

A record lies in ``tests/records/<date>-<device>.json``: an environment, the result of every check, which checks
each cell (a backend in a dtype) has, and a digest of what the device runs for each backend. Sources are compared
as syntax trees without docstrings, and private names are numbered: a comment, a docstring or the renaming of a
private name changes no digest. A later change marks a cell as changed; it does not erase the record.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnn_attention.verify.report import Report, Result, label
from tests.guarantees.gpu_core import MESSAGE_PASSING, core_checks, digest

Cell = tuple[str, str]  # a backend and a dtype
Labels = dict[Cell, list[str]]

ROOT = Path(__file__).resolve().parents[2]
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
    *("gnn_attention/verify/*.py", "!gnn_attention/verify/circumstances.py"),
    *("!gnn_attention/verify/processes.py", "!gnn_attention/verify/record.py"),
    *("!gnn_attention/verify/report.py", "!gnn_attention/verify/__init__.py"),
    *("tests/guarantees/gpu_*.py", "!tests/guarantees/gpu_record.py"),
)


# ---- digests of sources


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
    """The sha256 of a syntax tree without docstrings, whose private names are numbers.

    >>> source_digest("def _a(x):\\n    'Doc.'\\n    return x + 1") == source_digest("def _b(x): return x + 1")
    True
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_text(body[0]):
            node.body = body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
    return hashlib.sha256(_plain(tree, {}).encode()).hexdigest()


def _is_text(node: ast.AST) -> bool:
    """Whether a statement is a string alone, such as a docstring."""
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)  # type: ignore[attr-defined]


def _plain(node: Any, numbers: dict[str, int]) -> str:
    """A node in words that do not depend on the version of Python, with private names by number."""
    if isinstance(node, list):
        return f"[{' '.join(_plain(item, numbers) for item in node)}]"
    if isinstance(node, str):
        return ".".join(_public_name(name, numbers) for name in node.split("."))
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Constant):
        return f"Constant({node.value!r})"
    fields = ((key, value) for key, value in ast.iter_fields(node) if value is not None and value != [])
    inside = " ".join(f"{key}={_plain(value, numbers)}" for key, value in fields)
    return f"{type(node).__name__}({inside})"


def _public_name(name: str, numbers: dict[str, int]) -> str:
    if name.startswith("_") and not name.startswith("__"):
        return f"_{numbers.setdefault(name, len(numbers))}"
    return name


# ---- records


def cells_of(checks: Iterable[Any]) -> Labels:
    """The labels of checks, or of results, of each backend in each dtype."""
    cells = defaultdict[Cell, list[str]](list)
    for check in checks:
        cells[check.backend, check.dtype].append(label(check))
    return dict(cells)


@functools.cache
def core_labels() -> Labels:
    """The labels of the core as it is now."""
    return cells_of(core_checks())


def write_record(results: Iterable[Result], place: Mapping[str, Any], folder: Path = RECORDS) -> Path:
    """Write the results of a run of the core, and return the file ``<date>-<device>.json``.

    ``place`` is ``gnn_attention.verify.environment(device)``, with ``trial=True`` if the run was a rehearsal.
    """
    core, results = core_labels(), tuple(results)
    cells = {_name(cell): {"checks": len(names), "labels": digest(names)} for cell, names in core.items()}
    about = {**place, "cells": cells, "digests": digests()}
    missing = {name for names in core.values() for name in names} - {label(result) for result in results}
    device = re.sub(r"[^a-z0-9]+", "-", str(place["device"]).lower()).strip("-")
    # two runs of a day are two files: 2026-11-23T0914
    when = str(place["date"])[:16].replace(":", "")
    file = folder / f"{when}-{device}.json"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(Report(results, about, len(missing)).to_json() + "\n", encoding="utf-8")
    return file


def _name(cell: Cell) -> str:
    return " ".join(cell)


def records(folder: Path = RECORDS) -> list[tuple[Path, Report]]:
    """The records of checks on GPUs, the newest first; those of benchmarks and of CPUs are none."""
    dated = []
    for file in folder.glob("*.json"):
        made = json.loads(file.read_text(encoding="utf-8"))
        if {"environment", "summary", "results"} <= made.keys() and made["environment"].get("cuda"):
            dated.append((str(made["environment"]["date"]), file))
    return [(file, Report.from_file(file)) for _, file in sorted(dated, reverse=True)]


@dataclass(frozen=True)
class Standing:
    """What a record says today: the dtypes of each backend that passed all checks, and the other cells."""

    verified: Mapping[str, list[str]]
    checks: int
    other: Mapping[str, str]
    changed: list[str]


def refusal(report: Report, core: Labels, now: Mapping[str, str]) -> str | None:
    """Why a record says nothing of any cell, or None: ``core`` and ``now`` are today's labels and digests."""
    about, labels = report.environment, [label(result) for result in report.results]
    if about.get("trial") or about.get("interpreted") is not False:
        return "was a rehearsal, whose kernels were interpreted"
    if not any(result.passed for result in report.results):
        return "ran no check that passed"
    cells, before = about.get("cells"), about.get("digests")
    if not isinstance(cells, dict) or not isinstance(before, dict) or not before.keys() >= now.keys():
        return "does not say which sources and checks it ran"
    if len(set(labels)) < len(labels):
        return "holds the result of a check twice"
    if not {_name(cell) for cell in cells_of(report.results)} <= cells.keys():
        return "holds checks that are not of the core"
    listed = {name: cell["labels"] for name, cell in cells.items()}
    if before[CHECKS] == now[CHECKS] and listed != {
        _name(cell): digest(names) for cell, names in core.items()
    }:
        return "was not of the core of checks"
    return None


def standing(report: Report, now: Mapping[str, str]) -> Standing:
    """What each cell of a record came to, and what changed since then."""
    verified, other, checks = defaultdict[str, list[str]](list), dict[str, str](), 0
    results = defaultdict[str, list[Result]](list)
    for result in report.results:
        results[_name((result.backend, result.dtype))].append(result)
    for name, cell in report.environment["cells"].items():
        problem = _problem(results[name], cell)
        if problem is None:
            backend, dtype = name.split()
            verified[backend].append(dtype)
            checks += len(results[name])
        else:
            other[name] = problem
    before = report.environment["digests"]
    changed = [name for name in now if name != CHECKS and before[name] != now[name]]
    return Standing(
        verified, checks, other, changed + (["the checks"] if before[CHECKS] != now[CHECKS] else [])
    )


def _problem(results: list[Result], cell: Mapping[str, Any]) -> str | None:
    """Why a cell is not verified: what failed, was skipped or was not run; None if it is."""
    skipped = sum(result.skipped is not None for result in results)
    failed = sum(not result.passed for result in results) - skipped
    counts = {"failed": failed, "skipped": skipped, "not run": cell["checks"] - len(results)}
    if any(counts.values()):
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    same = digest(label(result) for result in results) == cell["labels"]
    return None if same else "other checks than those of the core"


def newest(folder: Path = RECORDS, root: Path = ROOT) -> tuple[Path, Report] | None:
    """The newest record of a GPU that says something of a cell, or None."""
    made = records(folder)
    core, now = (core_labels(), digests(root)) if made else ({}, {})
    return next(((file, report) for file, report in made if refusal(report, core, now) is None), None)


def status(folder: Path = RECORDS, root: Path = ROOT) -> str:
    """What is verified on a GPU, in one sentence.

    >>> status(Path("nowhere"))
    'On a GPU the library is **untested**: no machine with one has run the checks yet; `python3 -m benchmarks.gpu_run` is ready.'
    """
    made = records(folder)
    if not made:
        return f"On a GPU the library is **untested**: no machine with one has run the checks yet; {COMMAND}."
    record = newest(folder, root)
    if record is None:
        reason = refusal(made[0][1], core_labels(), digests(root))
        return (
            f"On a GPU the library is **untested**: the last run ({_when(made[0][1])}) {reason}; {COMMAND}."
        )
    stands = standing(record[1], digests(root))
    others = [f"{name}: {problem}" for name, problem in stands.other.items()]
    others += [f"changed since: {', '.join(stands.changed)}"] if stands.changed else []
    ending = "".join(f"; {other}" for other in others)
    if not stands.verified:
        return f"On a GPU the library is **untested**: the last run ({_when(record[1])}) verified nothing{ending}."
    return f"The library is **verified** on {_when(record[1])}: {_counts(stands)}{ending} (`tests/records/{record[0].name}`)."


def _when(report: Report) -> str:
    about = report.environment
    return f"{about['device']} at {str(about.get('commit') or 'unknown')[:12]}, {str(about['date'])[:10]}"


def _counts(stands: Standing) -> str:
    """Which backends, in how many dtypes each, by how many checks."""
    dtypes = ", ".join(str(len(names)) for names in stands.verified.values())
    return f"{', '.join(stands.verified)} in {dtypes} dtypes, {stands.checks:,} checks"


# ---- the table of the documentation


def markdown(folder: Path = RECORDS, root: Path = ROOT) -> str:
    """What is verified on GPUs, and the table of the record if there is one."""
    record, sentence = newest(folder, root), status(folder, root)
    return sentence if record is None else f"{sentence}\n\n{table(record[1])}"


def table(report: Report) -> str:
    """Checks, and the worst errors in units of SDPA's own, by backend and dtype."""
    head = ["backend", "dtype", "checks", "failed", "skipped"]
    head += ["output (allowed: 2, float64: 1)", "gradient (3, float64: 1)"]
    cells = defaultdict[Cell, list[Result]](list)
    for result in report.results:
        cells[result.backend, result.dtype].append(result)
    rows = [[*cell, *_summary(results)] for cell, results in sorted(cells.items())]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def _summary(results: list[Result]) -> Iterator[str]:
    ran = [result for result in results if result.skipped is None]
    yield str(len(ran))
    yield str(sum(not result.passed for result in ran))
    yield str(len(results) - len(ran))
    for name in ("output", "gradient"):
        errors = [error for result in ran if (error := getattr(result, name)) is not None]
        yield f"{max(errors):.2f}" if errors else "-"
