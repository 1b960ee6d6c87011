"""Turn the workloads of a GPU into tasks, and their results into a record.

The record has the ``ceilings`` of :func:`~benchmarks.gpu.machine.ceilings`, the ``workloads``, the reasons why some
could not be built (``unbuilt``), and the ``targets``; ``measurement`` is False for a rehearsal. Its ``cases``, forward
and backward, have the fields of :mod:`benchmarks.measuring` and

- ``takes``: the backend that auto took
- ``bytes``: peak memory of a call beyond its inputs, outputs included; for "backward", of a whole training step
- ``share``: the least time that the measured ceilings allow, divided by the time
- ``ratio``: the time divided by that of auto
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
    """The tasks that measure the ceilings, describe each workload and measure each method on it.

    All results are written to ``file``, where a process that follows a death finds the earlier ones.
    """

    workloads: Sequence[Workload]
    device: torch.device
    settings: Settings
    file: Path

    def all(self) -> Iterator[Task]:
        """Yield all tasks in the order in which they run."""
        yield Task("ceilings", "ceilings", partial(machine.ceilings, self.device))
        for workload in self.workloads:
            yield Task(workload.name, workload.name, partial(self.describe, workload))
            for method in methods_of(workload):
                run = partial(self.measure, workload, method)
                yield Task(f"{workload.name}: {method.name}", workload.name, run)

    def describe(self, workload: Workload) -> Record:
        """Return the description of a workload, or the reason why it cannot be built."""
        # Free the last workload before the next one is built.
        _bench.cache_clear()
        try:
            bench = _bench(workload, self.device, self.settings)
            problem, graph = bench.problem, bench.problem.graph
            gathers = None
            if workload.kind == "gathers":
                gathers = machine.gather_rate(graph, problem.heads * problem.dim, self.device)
        except Exception as error:
            return {"unbuilt": f"the workload cannot be built: {one_line(error)}"}
        ceilings = Lines.read(self.file).results["ceilings"]
        about: Record = {"workload": workload.name, "title": workload.title}
        about |= {"kind": workload.kind, "gathers": gathers}
        about |= {"tokens": graph.num_dst, "senders": graph.num_src, "edges": graph.num_edges}
        about |= {"heads": problem.heads, "dim": problem.dim, "build_s": round(bench.build_s, 2)}
        about["dtype"] = str(problem.inputs[0].dtype).removeprefix("torch.")
        # The least time that the measured ceilings allow for the products, or the gathers, of all edges.
        rate, amount = (gathers, bytes_of) if gathers else (ceilings["products"], Problem.flops)
        about["floors_ms"] = {which: 1e3 * amount(problem, which) / rate for which in PASSES}
        return {"workload": about}

    def measure(self, workload: Workload, method: Method) -> Record:
        """Measure both passes of a method."""
        about = Lines.read(self.file).results[workload.name]
        if "workload" not in about:
            return {"cases": _failed(workload, method, about.get("unbuilt") or about["death"])}
        bench, cases = _bench(workload, self.device, self.settings), list[Record]()
        for which in PASSES:
            if cases and cases[0]["status"] != "measured":
                # A method that cannot run forward is not tried with its backward pass.
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
        """Combine all results into a record; None if the ceilings are not measured yet."""
        results = Lines.read(self.file).results
        if "products" not in results.get("ceilings", {}):
            return None
        record: Record = {"bench": "gpu", "schema": 1, **about, "measurement": measurement}
        record |= {"ceilings": results["ceilings"], "workloads": [], "cases": [], "unbuilt": {}}
        for workload in self.workloads:
            description = results.get(workload.name, {})
            if "workload" in description:
                record["workloads"].append(description["workload"])
            else:
                reason = (
                    description.get("unbuilt") or description.get("death") or "not begun, no time was left"
                )
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
        if not measurement:
            # The numbers of a rehearsal are compared with no target.
            targets = [{**row, "value": None, "met": None} for row in targets]
        return {**record, "targets": targets}


@lru_cache(maxsize=1)
def _bench(workload: Workload, device: torch.device, settings: Settings) -> Bench:
    gc.collect()
    return Bench(workload, device, settings)


def _failed(workload: Workload, method: Method, reason: str) -> list[Record]:
    about = {"workload": workload.name, "method": method.name, "ours": method.ours}
    return [{**about, "pass": which, "status": "failed", "reason": reason} for which in PASSES]
