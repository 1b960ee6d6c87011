"""Records of the benchmarks: what was measured where, read from files, and looked up case by case."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gnn_attention.verify.report import environment

__all__ = ["Record", "case_of", "cases_of", "circumstances", "read", "value_of", "workload_of"]

Record = dict[str, Any]
SUITES = ("attention", "training", "start", "batches", "gpu")
PACKAGES = ("torch_geometric", "transformers", "networkx")


def read(path: Path, bench: str | None = None) -> Record:
    """A record from its file, of the suite ``bench`` if that is given; ValueError that names the file if it
    holds none.

    >>> read(Path("no such file"))
    Traceback (most recent call last):
    ValueError: no such file holds no record of the benchmarks (...)
    """
    expected = SUITES if bench is None else (bench,)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if (
            not isinstance(record, dict)
            or record.get("bench") not in expected
            or record.get("schema", 1) != 1
        ):
            raise ValueError(f"expected one of {', '.join(expected)}, schema 1")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} holds no record of the benchmarks ({error})") from error
    return record


def cases_of(record: Record, **wanted: object) -> Iterator[Record]:
    """The measured cases with these fields, in the record's order."""
    for case in record["cases"]:
        if case["status"] == "measured" and all(case.get(name) == value for name, value in wanted.items()):
            yield case


def case_of(
    record: Record, workload: str, method: str, which: str, allocator: str = "default"
) -> Record | None:
    """One case, measured or not; None if it is not in the record. ``allocator`` is that of a record of a
    CPU.
    """
    wanted = (workload, method, which, allocator)
    keys = ("workload", "method", "pass")
    found = (
        c for c in record["cases"] if (*(c[key] for key in keys), c.get("allocator", "default")) == wanted
    )
    return next(found, None)


def workload_of(record: Record, name: str, allocator: str = "default") -> Record | None:
    """What the record says of a workload; None if it is not there."""
    found = (
        w for w in record["workloads"] if w["workload"] == name and w.get("allocator", "default") == allocator
    )
    return next(found, None)


def value_of(case: Record | None, name: str) -> float | None:
    """A number of a measured case; None where there is none."""
    if case is None or case["status"] != "measured" or case.get(name) is None:
        return None
    return float(case[name])


def circumstances() -> Record:
    """Date, commit, processor, memory, threads and versions: without them a time says little."""
    about = environment("cpu")
    versions = {name: _version(name) for name in PACKAGES}
    return {
        **about,
        "processor": _processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "threads": torch.get_num_threads(),
        "versions": {"torch": about["torch"], **versions, "numpy": about["numpy"]},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str | None:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
