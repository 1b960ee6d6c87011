"""The whole benchmark of a GPU: workload by workload, method by method, saved as it goes, carried on after a
stop.

The record, as ``--json`` keeps it after every method (the file is written whole or not at all):

- ``bench``: "gpu"; ``schema`` 1; ``quick``; ``measurement`` False for a trial on a CPU
- (environment): device, driver, versions, flags, commit, ``sources`` (hashes of the kernels),
  ``arguments``; ``runs``: when each call began and how many seconds it took, as ``--resume`` carries a
  record on
- ``constants``: those of ``backends.gpu.devices`` that predictions were made with
- ``ceilings``: :class:`~benchmarks.gpu.machine.Ceilings`, measured in the first call
- ``workloads``: :meth:`~benchmarks.gpu.measuring.Bench.about`
- ``cases``: :mod:`benchmarks.gpu.measuring`
- ``begun``: how often each method of a workload was begun: one that took its process with it twice has failed
- ``waiting``: how many methods of the chosen workloads have not been run yet, and ``stopped``: why, if not
  for the budget
- ``targets``: :mod:`benchmarks.gpu.targets` with what was measured, met or not
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.gpu import machine, targets
from benchmarks.gpu.machine import Ceilings, Watch
from benchmarks.gpu.measuring import Bench, LostDeviceError, Pace
from benchmarks.gpu.methods import methods_of
from benchmarks.gpu.workloads import PASSES, WORKLOADS
from benchmarks.methods import Method
from benchmarks.records import Record, read
from benchmarks.workloads import Workload, select
from gnn_attention._support import atomic_files
from gnn_attention._support.progress import Progress
from gnn_attention.backends.gpu import devices
from gnn_attention.backends.gpu.devices import Device

__all__ = ["keeper", "run_gpu"]

SAME = (
    "device",
    "torch",
    "triton",
    "cuda",
    "commit",
    "dirty",
    "sources",
    "quick",
)  # or a record is not carried on
TRIAL = Pace(0.0, 1, 1, 1)


def run_gpu(
    workloads: Sequence[str] | None = None,
    device: str = "cuda",
    quick: bool = False,
    budget: float | None = None,
    with_peers: bool = True,
    resume: Path | None = None,
    keep: Callable[[Record], None] | None = None,
    progress: Progress | None = None,
) -> Record:
    """All that fits into ``budget`` seconds, after what the record in the file ``resume`` holds; ``keep`` is
    called after each.

    ValueError without a GPU (``device="cpu"`` with ``quick`` is a trial), for an unknown workload, or for a
    record that was made elsewhere.
    """
    began, place, chosen = (
        time.monotonic(),
        machine.chosen_device(device, quick),
        select(WORKLOADS, workloads),
    )
    shown = progress or Progress("benchmarks gpu", shown=False)
    shown.advance(0, "the ceilings of the device")
    record = _begun(place, quick, resume)
    run = {"date": record["date"], "seconds": 0.0}
    record["runs"].append(run)
    methods = {workload.name: methods_of(workload.peers, with_peers) for workload in chosen}
    longest = 0.0
    shown.expect(sum(len(_waiting(record, workload, methods)) for workload in chosen))
    for workload in chosen:
        bench: Bench | None = None
        for method in _waiting(record, workload, methods):
            start = time.monotonic()
            if budget is not None and start - began + longest > budget:
                break
            shown.begin(f"{workload.title}: {method.name}")
            bench = bench or _bench(record, workload, place, quick)
            if _begin(record, workload, method, keep):
                _add(record, bench, method)
            longest = max(longest, time.monotonic() - start)
            run["seconds"] = round(time.monotonic() - began, 1)
            _finish(record, chosen, methods, keep)
            if "stopped" in record:
                return record
        del bench
        _tidy(place)
    return _finish(record, chosen, methods, keep)


def _begin(record: Record, workload: Workload, method: Method, keep: Callable[[Record], None] | None) -> bool:
    """Note that a method is begun: the next moment may be the last. False if that was so twice before."""
    name = f"{workload.name}: {method.name}"
    times = record.setdefault("begun", {}).get(name, 0)
    if times > 1:
        record["cases"] += _failed(workload.name, method, "begun twice without a result")
        return False
    record["begun"][name] = times + 1
    if keep is not None:
        keep(record)
    return True


def _failed(workload: str, method: Method, reason: str) -> list[Record]:
    place = {"workload": workload, "method": method.name, "ours": method.ours}
    return [{**place, "pass": which, "status": "failed", "reason": reason} for which in PASSES]


def _add(record: Record, bench: Bench, method: Method) -> None:
    """The cases of a method, failed ones if it takes the device with it."""
    try:
        record["cases"] += bench.cases(method)
    except LostDeviceError as error:
        name = bench.workload.name
        record["cases"] += _failed(name, method, str(error))
        record["stopped"] = f"{method.name} on {name} took the device with it: {error}"


def _tidy(place: torch.device) -> None:
    """Before the next workload takes its memory."""
    gc.collect()
    if place.type == "cuda":
        torch.cuda.empty_cache()


def _begun(place: torch.device, quick: bool, resume: Path | None) -> Record:
    """A record without cases, or the one to carry on."""
    here = {"bench": "gpu", "schema": 1, "quick": quick, **machine.described(place, sys.argv[1:])}
    if resume is None:
        costs = devices.device_of(place)
        found = machine.ceilings(place)
        return {
            **here,
            "constants": asdict(costs),
            "ceilings": asdict(found),
            "runs": [],
            "workloads": [],
            "cases": [],
            "waiting": None,
            "targets": [],
        }
    record = read(resume, "gpu")
    for name in SAME:
        if record[name] != here[name]:
            other = f"another {name} ({record[name]!r}, here {here[name]!r})"
            raise ValueError(f"{resume} was made with {other}: begin a new record")
    record.pop("stopped", None)
    return {**record, "date": here["date"]}


def _waiting(record: Record, workload: Workload, methods: Mapping[str, Sequence[Method]]) -> list[Method]:
    """The methods that have no case yet. What failed or was refused has one: nothing is tried until it
    succeeds.
    """
    done = {case["method"] for case in record["cases"] if case["workload"] == workload.name}
    return [method for method in methods[workload.name] if method.name not in done]


def _bench(record: Record, workload: Workload, place: torch.device, quick: bool) -> Bench:
    costs, found = Device(**record["constants"]), Ceilings(**record["ceilings"])
    bench = Bench(workload, Watch(place), found, costs, TRIAL if quick else Pace(), quick)
    record["workloads"] = [w for w in record["workloads"] if w["workload"] != workload.name] + [bench.about()]
    return bench


def _finish(
    record: Record,
    chosen: Sequence[Workload],
    methods: Mapping[str, Sequence[Method]],
    keep: Callable[[Record], None] | None,
) -> Record:
    record["waiting"] = sum(len(_waiting(record, workload, methods)) for workload in chosen)
    record["targets"] = targets.judged(record)
    if keep is not None:
        keep(record)
    return record


def keeper(path: str | None) -> Callable[[Record], None] | None:
    """What writes a record into a file after each method; None where there is no file."""
    if path in (None, "-"):
        return None

    def keep(record: Record) -> None:
        atomic_files.write(str(path), json.dumps(record, indent=1) + "\n")

    return keep
