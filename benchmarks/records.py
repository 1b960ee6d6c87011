"""Records of the benchmarks: where they were made, and how their cases are looked up."""

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

__all__ = [
    "Record",
    "case_of",
    "circumstances",
    "environment",
    "rank_correlation",
    "read",
    "value_of",
    "write",
]

Record = dict[str, Any]
SUITES = ("attention", "batches", "calibrate", "compare", "gpu", "start", "training")
PACKAGES = ("torch", "torch_geometric", "transformers", "networkx", "numpy")


def read(path: Path) -> Record:
    """A record from its file; ValueError that names the file if it holds none.

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
    """The case of a workload, a method and a pass, measured or not; None if the record has none."""
    wanted = {"workload": workload, "method": method, "pass": which}
    cases = (case for case in record["cases"] if wanted.items() <= case.items())
    return next(cases, None)


def value_of(case: Record | None, name: str) -> float | None:
    """A number of a measured case; None where there is none."""
    if case is None or case["status"] != "measured" or case.get(name) is None:
        return None
    return float(case[name])


def write(path: Path, record: Record) -> None:
    """Write a record, whole or not at all."""
    atomic_files.write(path, json.dumps(record, indent=1) + "\n")


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's."""
    ranks = torch.stack([x.argsort().argsort(), y.argsort().argsort()]).double()
    return round(float(torch.corrcoef(ranks)[0, 1]), 4)


def circumstances() -> Record:
    """Date, commit, processor, memory, threads and versions, without which a time says little."""
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
