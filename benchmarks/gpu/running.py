"""The workloads of a GPU one after another, in one process, into a record that is kept after every method.

The fields of a record, which is written whole or not at all:

- ``bench``: "gpu"; ``schema`` 1; ``measurement``: False for a rehearsal on a CPU
- the fields of :func:`tests.guarantees.gpu_record.gpu_environment`, and ``memory`` of the device
- ``ceilings``: :class:`~benchmarks.gpu.machine.Ceilings`, measured first
- ``workloads`` and ``cases``: see :mod:`benchmarks.gpu.measuring`
- ``begun``: how often each method of a workload was begun; one that took its process with it twice has failed
- ``due``: the names of all workloads of the run
- ``unbuilt``: why a workload has no graph or no inputs
- ``targets``: :mod:`benchmarks.gpu.targets`, met or not
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.gpu import machine, targets
from benchmarks.gpu.machine import Ceilings, Watch
from benchmarks.gpu.measuring import Bench, LostDeviceError, Pace
from benchmarks.gpu.methods import methods_of
from benchmarks.gpu.workloads import PASSES, WORKLOADS
from benchmarks.methods import Method
from benchmarks.process import one_line
from benchmarks.records import Record
from benchmarks.workloads import Workload
from gnn_attention._support import atomic_files
from tests.guarantees.gpu_record import gpu_environment

__all__ = ["read_bench", "run_workloads", "waiting"]

TRIAL, TRIAL_TOKENS = Pace(0.0, 1, 1, 1), 16  # a kernel is interpreted edge by edge
DONE, LATE, LOST = 0, 3, 75  # exit codes


def run_workloads(file: Path, names: Sequence[str], device: str, trial: bool, until: float) -> int:
    """Measure what the record in ``file`` does not hold yet, and return an exit code.

    No method is begun that could not end by ``until``, judged by the longest one so far.
    """
    place, longest = torch.device(device), 0.0
    record = read_bench(file) or _new_record(place)
    record["due"] = list(names)
    for workload in (WORKLOADS[name] for name in names):
        workload = replace(workload.tiny(), tokens=TRIAL_TOKENS) if trial else workload
        bench: Bench | None = None
        for method in waiting(record, workload):
            if time.time() + longest > until:
                return LATE
            if not _begin(record, workload, method, file):
                continue
            if bench is None:
                bench = _build(record, workload, place, trial)
            if bench is None:
                _keep(record, file)
                if _is_lost(place):
                    return LOST
                break
            # how long a graph takes to build says nothing about the next method
            start = time.monotonic()
            try:
                record["cases"] += bench.cases(method)
            except LostDeviceError as error:
                record["cases"] += _failed(workload, method, f"it took the device with it: {error}")
                _keep(record, file)
                return LOST
            _keep(record, file)
            longest = max(longest, time.monotonic() - start)
        del bench
        gc.collect()
        if place.type == "cuda":
            torch.cuda.empty_cache()
    return DONE


def _build(record: Record, workload: Workload, place: torch.device, trial: bool) -> Bench | None:
    """The workload on the device; None if that fails, which is the result of all its methods."""
    try:
        bench = Bench(workload, Watch(place), Ceilings(**record["ceilings"]), TRIAL if trial else Pace())
        record["workloads"].append(bench.about())
        return bench
    except Exception as error:
        reason = f"the workload cannot be built: {one_line(error)}"
    record["unbuilt"][workload.name] = reason
    for method in waiting(record, workload):
        record["cases"] += _failed(workload, method, reason)
    return None


def _is_lost(place: torch.device) -> bool:
    if place.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(place)
    except RuntimeError:
        return True
    return False


def waiting(record: Record | None, workload: Workload) -> list[Method]:
    """The methods that have no case yet; nothing is tried until it succeeds."""
    cases = [] if record is None else record["cases"]
    done = {case["method"] for case in cases if case["workload"] == workload.name}
    return [method for method in methods_of(workload.name, workload.peers) if method.name not in done]


def read_bench(file: Path) -> Record | None:
    """The record in a file, or None."""
    record: Record | None = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    return record


def _new_record(place: torch.device) -> Record:
    on_gpu = place.type == "cuda"
    about = {**gpu_environment(str(place)), "measurement": on_gpu}
    about["memory"] = torch.cuda.get_device_properties(place).total_memory if on_gpu else None
    ceilings = asdict(machine.ceilings(place))
    empty: Record = {"workloads": [], "cases": [], "begun": {}, "due": [], "unbuilt": {}, "targets": []}
    return {"bench": "gpu", "schema": 1, **about, "ceilings": ceilings, **empty}


def _begin(record: Record, workload: Workload, method: Method, file: Path) -> bool:
    """Note that a method is begun: the next moment may be the last. False if that was so twice before."""
    name = f"{workload.name}: {method.name}"
    times = record["begun"].get(name, 0)
    record["begun"][name] = times + 1
    if times > 1:
        record["cases"] += _failed(workload, method, "begun twice without a result")
    _keep(record, file)
    return bool(times <= 1)


def _failed(workload: Workload, method: Method, reason: str) -> list[Record]:
    place = {"workload": workload.name, "method": method.name, "ours": method.ours}
    return [{**place, "pass": which, "status": "failed", "reason": reason} for which in PASSES]


def _keep(record: Record, file: Path) -> None:
    # a workload that an earlier process described is described once
    record["workloads"] = list({about["workload"]: about for about in record["workloads"]}.values())
    record["targets"] = targets.judged(record)
    atomic_files.write(str(file), json.dumps(record, indent=1) + "\n")
