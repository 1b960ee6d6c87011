"""Records of the benchmarks: read and write them, look up their cases, and describe the machine."""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnn_attention._support import atomic_files
from tests.guarantees.environment import environment

__all__ = ["Record", "case_of", "describe_machine", "environment", "rank_correlation", "read"]
__all__ += ["value_of", "write"]

Record = dict[str, Any]
SUITES = ("attention", "batches", "calibrate", "compare", "gpu", "primitives", "start", "training")
PACKAGES = ("torch", "torch_geometric", "transformers", "networkx", "numpy")


def read(path: Path) -> Record:
    """Read a record; a file without one raises a ValueError that names the file.

    >>> read(Path("no such file"))
    Traceback (most recent call last):
    ValueError: no such file holds no record of the benchmarks (...)
    """
    try:
        record: Record = json.loads(path.read_text(encoding="utf-8"))
        if record["bench"] not in SUITES:
            raise ValueError(f"expected one of {', '.join(SUITES)}")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} holds no record of the benchmarks ({error})") from error
    return record


def case_of(record: Record, workload: str, method: str, which: str) -> Record | None:
    """Return the case of a workload, a method and a pass, measured or not; None if the record has none."""
    key = {"workload": workload, "method": method, "pass": which}
    cases = (case for case in record["cases"] if key.items() <= case.items())
    return next(cases, None)


def value_of(case: Record | None, name: str) -> float | None:
    """Return a number of a case, or None if the case was not measured or has no such number."""
    if case is None or case["status"] != "measured" or case.get(name) is None:
        return None
    return float(case[name])


def write(path: Path, record: Record) -> None:
    """Write a record atomically."""
    atomic_files.write(path, json.dumps(record, indent=1) + "\n")


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Return Spearman's rank correlation."""
    ranks = torch.stack([x.argsort().argsort(), y.argsort().argsort()]).double()
    return round(float(torch.corrcoef(ranks)[0, 1]), 4)


def describe_machine() -> Record:
    """Return date, commit, processor, memory, threads and versions, which decide how long a call takes."""
    cpu = Path("/proc/cpuinfo")
    installed = {package.name.replace("-", "_"): package.version for package in metadata.distributions()}
    lines = cpu.read_text(encoding="utf-8").splitlines() if cpu.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {
        **environment("cpu"),
        "processor": next(names, None),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "threads": torch.get_num_threads(),
        "versions": {name: installed.get(name) for name in PACKAGES},
    }
