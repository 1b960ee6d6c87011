"""The workloads of a GPU as tasks, and the record that their results make.

A method on a workload is right first, then its memory and its time are measured, forward and backward, as two
cases:

- ``status``: "measured", or why not, with its ``reason``: "missing", "refused", "out of memory", "failed",
  "wrong", "slow" (its first call took a minute)
- ``seconds``: the median; ``least``, ``p10``, ``p90``, ``samples``; backward is the backward pass alone; ``ratio``
  to the time of auto
- ``first_s``: the first call: the plan of this graph, and what is compiled
- ``takes``: the backend that auto took
- ``bytes``: peak memory of a call beyond its inputs, outputs included; of backward, of a whole training step
- ``share``: of what the measured ceilings allow for this work
- ``output_error``, ``gradient_error``: in units of SDPA's own. A peer whose errors are larger than what is
  allowed of ours is timed up to 16 times SDPA's own, with that as its ``reason``

The record has these ``cases``, the ``workloads``, why a workload has no graph (``unbuilt``), the names of all
(``due``), the ``ceilings`` of :func:`~benchmarks.gpu.machine.ceilings`, and the ``targets``; ``measurement`` is
False for a rehearsal.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.checked import Checked, Verdict
from benchmarks.gpu import machine, targets
from benchmarks.gpu.machine import Watch
from benchmarks.gpu.methods import methods_of
from benchmarks.gpu.processes import Lines, Task
from benchmarks.gpu.workloads import PASSES, bytes_of
from benchmarks.methods import AUTO, Method, Prepared, call_of, refusal
from benchmarks.process import is_out_of_memory, one_line
from benchmarks.records import Record, case_of, value_of
from benchmarks.workloads import Problem, Workload
from gnn_attention.backends.dispatch import choose

__all__ = ["REHEARSAL", "Bench", "Pace", "record_of", "tasks_of"]

CACHE_BYTES, FEWEST_SETS, MOST_SETS, TIMES_CACHE = 50e6, 4, 16, 3
PEERS_ERROR = 16.0  # times SDPA's own, up to which a peer is timed; its case says so
OUT_OF_MEMORY = "out of memory"
Marks = list[tuple[Any, Any]]


@dataclass(frozen=True)
class Pace:
    """``budget`` seconds of samples for a pass of a method, ``fewest`` to ``most`` of them, after ``warm`` calls.

    A call that takes more than ``slow`` seconds is measured twice. After a first call of more than ``slowest``
    seconds, with what it compiles, nothing is timed.
    """

    budget: float = 0.4
    fewest: int = 10
    most: int = 60
    warm: int = 2
    slow: float = 0.5
    slowest: float = 60.0

    def samples(self, seconds: float) -> int:
        """How many of a call that takes so long."""
        if seconds > self.slow:
            return min(self.fewest, 2)
        return min(self.most, max(self.fewest, int(self.budget / max(seconds, 1e-7))))


REHEARSAL = Pace(0.0, 1, 1, 1)


class Bench:
    """A workload on a device: its inputs, the truth about some receivers, and :meth:`cases` of a method."""

    def __init__(
        self, workload: Workload, device: torch.device, ceilings: dict[str, float], pace: Pace
    ) -> None:
        """Build the graph and draw the inputs, so many sets that they do not stay in the cache."""
        self.workload, self.watch, self.pace, self.ceilings = workload, Watch(device), pace, ceilings
        start = time.perf_counter()
        graph = workload.graph()
        self.build_s = time.perf_counter() - start
        self.problem = workload.problem(graph, device)
        others = (workload.problem(graph, device, seed) for seed in range(1, _sets(self.problem)))
        self.sets = [self.problem, *others]
        self.checked = Checked(self.problem)
        width = self.problem.heads * self.problem.dim
        self.gathers = machine.gather_rate(graph, width, device) if workload.kind == "gathers" else None

    def about(self) -> Record:
        """The description of the workload."""
        problem, graph = self.problem, self.problem.graph
        return {
            "workload": self.workload.name,
            "title": self.workload.title,
            "tokens": graph.num_dst,
            "senders": graph.num_src,
            "edges": graph.num_edges,
            "heads": problem.heads,
            "dim": problem.dim,
            "dtype": str(problem.inputs[0].dtype).removeprefix("torch."),
            "kind": self.workload.kind,
            "gathers": self.gathers,
            "build_s": round(self.build_s, 2),
            "floors_ms": {which: self.floor(which) * 1e3 for which in PASSES},
            "flops": {which: problem.flops(which) for which in PASSES},
            "least_bytes": {which: bytes_of(problem, which) for which in PASSES},
        }

    def cases(self, method: Method) -> list[Record]:
        """Both passes."""
        prepared, cases = cache(partial(method.prepare, self.problem)), list[Record]()
        ended: Record | None = None
        for which in PASSES:
            try:
                case = (
                    ended
                    or refusal(method, self.problem, "forward")
                    or self._measured(method, prepared, which)
                )
            except Exception as error:
                case = _failed_by(error)
                gc.collect()
            cases.append(
                {
                    "workload": self.workload.name,
                    "method": method.name,
                    "ours": method.ours,
                    "pass": which,
                    **case,
                }
            )
            # the other pass would take longer still
            ended = case if case["status"] in ("slow", OUT_OF_MEMORY) else None
        return cases

    def _measured(self, method: Method, prepare: Callable[[], Prepared], which: str) -> Record:
        backward = which == "backward"
        about: Record = {"takes": choose(call_of(self.problem)).name} if method.name.startswith(AUTO) else {}
        start = time.perf_counter()
        prepared = prepare()
        if method.same:
            verdict = self.checked.verdict(prepared, backward)
            about |= {"output_error": verdict.output, "gradient_error": verdict.gradient}
            if not verdict.passed:
                about["reason"] = str(verdict)
                if method.ours or not _is_nearly_exact(verdict):
                    return {"status": "wrong", **about}
        self.watch.wait()
        about["first_s"] = round(time.perf_counter() - start, 3)
        if about["first_s"] > self.pace.slowest:
            return {"status": "slow", **about, "reason": f"its first call took {about['first_s']:.0f} s"}
        return {"status": "measured", **about, **self._timed(prepared, which)}

    def _timed(self, prepared: Prepared, which: str) -> Record:
        step = self._forward if which == "forward" else self._training_step
        marks: Marks = []
        memory = machine.peak_memory(self.watch.device, lambda: step(prepared, 0, marks))
        for number in range(self.pace.warm):
            step(prepared, number, marks)
        self.watch.wait()
        samples = self.pace.samples(self.watch.seconds(*marks.pop()))
        marks.clear()
        for number in range(samples):
            step(prepared, number, marks)
        self.watch.wait()
        times = sorted(self.watch.seconds(*pair) for pair in marks)
        median, low, high = (times[min(samples - 1, int(share * samples))] for share in (0.5, 0.1, 0.9))
        spread = {"seconds": median, "least": times[0], "p10": low, "p90": high, "samples": samples}
        return {**spread, "bytes": memory, "share": self.floor(which) / median}

    def floor(self, which: str) -> float:
        """Seconds that the measured ceilings allow: products of all edges, or their gathers."""
        if self.gathers is None:
            return self.problem.flops(which) / self.ceilings["products"]
        return bytes_of(self.problem, which) / self.gathers

    def _forward(self, prepared: Prepared, number: int, marks: Marks) -> Tensor:
        inputs = self.sets[number % len(self.sets)].inputs
        with torch.no_grad():
            start = self.watch.mark()
            out = prepared.call(*inputs)
            marks.append((start, self.watch.mark()))
        return out

    def _training_step(self, prepared: Prepared, number: int, marks: Marks) -> Sequence[Tensor]:
        """Forward and backward, of which the backward pass is marked."""
        problem = self.sets[number % len(self.sets)]
        leaves = [x.detach().requires_grad_() for x in problem.inputs]
        out = prepared.call(*leaves)
        start = self.watch.mark()
        gradients = torch.autograd.grad(out, leaves, problem.grad_out)
        marks.append((start, self.watch.mark()))
        return gradients


def _is_nearly_exact(verdict: Verdict) -> bool:
    """Whether a peer computes the same, though with larger errors: it may sum in the short dtype itself."""
    return all(error <= PEERS_ERROR for error in (verdict.output, verdict.gradient or 0.0))


def _sets(problem: Problem) -> int:
    """How many sets of inputs are taken in turn: one that is three times the cache needs no other."""
    size = sum(x.numel() * x.element_size() for x in problem.inputs)
    if size >= TIMES_CACHE * CACHE_BYTES:
        return 1
    return int(min(MOST_SETS, max(FEWEST_SETS, -(-TIMES_CACHE * CACHE_BYTES // max(size, 1)))))


def _failed_by(error: Exception) -> Record:
    """The case of a method that raised."""
    reason = one_line(error)
    refused = isinstance(error, NotImplementedError) or "No viable backend" in reason
    status = OUT_OF_MEMORY if is_out_of_memory(reason) else "refused" if refused else "failed"
    return {"status": status, "reason": reason}


# ---- tasks, and the record


def tasks_of(workloads: Sequence[Workload], device: torch.device, pace: Pace, file: Path) -> Iterator[Task]:
    """The ceilings, then for each workload its description and the cases of each method.

    A process that comes after a death reads the ceilings from the ``file`` of all results.
    """

    @lru_cache(maxsize=1)
    def bench(workload: Workload) -> Bench:
        gc.collect()
        return Bench(workload, device, Lines.read(file).results["ceilings"], pace)

    def describe(workload: Workload) -> Record:
        try:
            return {"workload": bench(workload).about()}
        except Exception as error:
            return {"unbuilt": f"the workload cannot be built: {one_line(error)}"}

    def measure(workload: Workload, method: Method) -> Record:
        why = Lines.read(file).results[workload.name].get("unbuilt")
        return {"cases": _failed(workload, method, why) if why else bench(workload).cases(method)}

    yield Task("ceilings", "ceilings", lambda: machine.ceilings(device))
    for workload in workloads:
        yield Task(workload.name, workload.name, partial(describe, workload))
        for method in methods_of(workload):
            name = f"{workload.name}: {method.name}"
            yield Task(name, workload.name, partial(measure, workload, method))


def _failed(workload: Workload, method: Method, reason: str) -> list[Record]:
    place = {"workload": workload.name, "method": method.name, "ours": method.ours}
    return [{**place, "pass": which, "status": "failed", "reason": reason} for which in PASSES]


def record_of(workloads: Sequence[Workload], file: Path, about: Record, measurement: bool) -> Record | None:
    """What the results in a file come to; None before the ceilings are measured."""
    results = Lines.read(file).results
    if "products" not in results.get("ceilings", {}):
        return None
    record: Record = {"bench": "gpu", "schema": 1, **about, "measurement": measurement}
    record |= {"ceilings": results["ceilings"], "workloads": [], "cases": [], "unbuilt": {}}
    record["due"] = [workload.name for workload in workloads]
    for workload in workloads:
        described = results.get(workload.name, {})
        if "workload" in described:
            record["workloads"].append(described["workload"])
        elif described:
            record["unbuilt"][workload.name] = described.get("unbuilt") or described["death"]
        for method in methods_of(workload):
            result = results.get(f"{workload.name}: {method.name}", {})
            death = _failed(workload, method, result["death"]) if "death" in result else []
            record["cases"] += result.get("cases", death)
    for case in record["cases"]:
        auto = value_of(case_of(record, case["workload"], AUTO, case["pass"]), "seconds")
        if auto is not None and case["status"] == "measured":
            case["ratio"] = case["seconds"] / auto
    return {**record, "targets": targets.judged(record)}
