"""The workloads of a GPU as tasks, and the record that their results make.

The record has the ``ceilings`` of :func:`~benchmarks.gpu.machine.ceilings`, the ``workloads``, why one has no
graph (``unbuilt``), and the ``targets``; ``measurement`` is False for a rehearsal. Its ``cases``, forward and
backward, have the fields of :mod:`benchmarks.measuring`, and

- ``takes``: the backend that auto took
- ``bytes``: peak memory of a call beyond its inputs, outputs included; of backward, of a whole training step
- ``share``: of what the measured ceilings allow for this work; ``ratio`` to the time of auto
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch

from benchmarks.gpu import machine
from benchmarks.gpu.methods import methods_of
from benchmarks.gpu.processes import Lines, Task
from benchmarks.gpu.workloads import PASSES, TARGETS, bytes_of
from benchmarks.measuring import Bench, Settings
from benchmarks.methods import AUTO, Method, call_of
from benchmarks.process import one_line
from benchmarks.records import Record, case_of, value_of
from benchmarks.targets import judge
from benchmarks.workloads import Problem, Workload
from gnn_attention.backends.dispatch import choose

__all__ = ["MEASUREMENT", "REHEARSAL", "Tasks"]

MEASUREMENT = Settings(budget=0.4, fewest=10, most=60, long=0.5)
REHEARSAL = Settings(budget=0.0, fewest=1, most=1, long=0.0, slowest=300.0)


@dataclass(frozen=True)
class Tasks:
    """The ceilings, then for each workload its description and the cases of each method, and what comes of them.

    All results stand in ``file``: there a process that comes after a death finds those before it.
    """

    workloads: Sequence[Workload]
    device: torch.device
    settings: Settings
    file: Path

    def all(self) -> Iterator[Task]:
        """In the order in which they are done."""
        yield Task("ceilings", "ceilings", partial(machine.ceilings, self.device))
        for workload in self.workloads:
            yield Task(workload.name, workload.name, partial(self.describe, workload))
            for method in methods_of(workload):
                run = partial(self.measure, workload, method)
                yield Task(f"{workload.name}: {method.name}", workload.name, run)

    def describe(self, workload: Workload) -> Record:
        """The description of a workload, or why it has none."""
        _bench.cache_clear()  # the one before it goes before the next one comes
        try:
            bench = _bench(workload, self.device, self.settings)
            problem, graph = bench.problem, bench.problem.graph
            gathers = None
            if workload.kind == "gathers":
                gathers = machine.gather_rate(graph, problem.heads * problem.dim, self.device)
        except Exception as error:
            return {"unbuilt": f"the workload cannot be built: {one_line(error)}"}
        ceilings = Lines.read(self.file).results["ceilings"]
        about: Record = {
            "workload": workload.name,
            "title": workload.title,
            "kind": workload.kind,
            "gathers": gathers,
        }
        about |= {"tokens": graph.num_dst, "senders": graph.num_src, "edges": graph.num_edges}
        about |= {"heads": problem.heads, "dim": problem.dim, "build_s": round(bench.build_s, 2)}
        about["dtype"] = str(problem.inputs[0].dtype).removeprefix("torch.")
        # what the measured ceilings allow: products of all edges, or their gathers
        rate, amount = (gathers, bytes_of) if gathers else (ceilings["products"], Problem.flops)
        about["floors_ms"] = {which: 1e3 * amount(problem, which) / rate for which in PASSES}
        return {"workload": about}

    def measure(self, workload: Workload, method: Method) -> Record:
        """Both passes of a method."""
        about = Lines.read(self.file).results[workload.name]
        if "workload" not in about:
            return {"cases": _failed(workload, method, about.get("unbuilt") or about["death"])}
        bench, cases = _bench(workload, self.device, self.settings), list[Record]()
        for which in PASSES:
            if cases and cases[0]["status"] != "measured":
                # what cannot run forward is not tried with its backward pass
                cases.append({**cases[0], "pass": which})
                continue
            trial = bench.trial(method, which)
            if trial.step is not None:
                bench.sample(trial, range(self.settings.samples(trial.seconds)))
            if trial.step is not None:
                trial.case |= trial.figures()
                trial.case["share"] = about["workload"]["floors_ms"][which] / 1e3 / trial.case["seconds"]
            if method.name.startswith(AUTO):
                trial.case["takes"] = choose(call_of(bench.problem)).name
            cases.append(trial.case)
            del trial
            gc.collect()
        return {"cases": cases}

    def record(self, about: Record, measurement: bool) -> Record | None:
        """What all results come to; None before the ceilings are measured."""
        results = Lines.read(self.file).results
        if "products" not in results.get("ceilings", {}):
            return None
        record: Record = {"bench": "gpu", "schema": 1, **about, "measurement": measurement}
        record |= {"ceilings": results["ceilings"], "workloads": [], "cases": [], "unbuilt": {}}
        for workload in self.workloads:
            described = results.get(workload.name, {})
            if "workload" in described:
                record["workloads"].append(described["workload"])
            else:
                reason = described.get("unbuilt") or described.get("death") or "not begun, no time was left"
                record["unbuilt"][workload.name] = reason
            for method in methods_of(workload):
                result = results.get(f"{workload.name}: {method.name}", {})
                death = _failed(workload, method, result["death"]) if "death" in result else []
                record["cases"] += result.get("cases", death)
        for case in record["cases"]:
            auto = value_of(case_of(record, case["workload"], AUTO, case["pass"]), "seconds")
            if auto is not None and case["status"] == "measured":
                case["ratio"] = case["seconds"] / auto
        targets = judge(record, TARGETS, PASSES)
        if not measurement:  # a rehearsal meets and misses nothing
            targets = [{**row, "value": None, "met": None} for row in targets]
        return {**record, "targets": targets}


@lru_cache(maxsize=1)
def _bench(workload: Workload, device: torch.device, settings: Settings) -> Bench:
    gc.collect()
    return Bench(workload, device, settings)


def _failed(workload: Workload, method: Method, reason: str) -> list[Record]:
    place = {"workload": workload.name, "method": method.name, "ours": method.ours}
    return [{**place, "pass": which, "status": "failed", "reason": reason} for which in PASSES]
