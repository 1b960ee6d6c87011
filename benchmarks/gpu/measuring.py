"""One method on one workload: right first, then its memory and its time, forward and backward, as two cases.

- ``status``: "measured", or why not, with its ``reason``: "missing", "refused", "out of memory" (also by
  estimate), "failed", "wrong", "slow" (its first call took a minute)
- ``seconds``: the median; ``least``, ``p10``, ``p90``, ``samples``; backward is the backward pass alone
- ``first_s``: the first call: the plan of this graph, and what is compiled
- ``takes``: the backend that auto took
- ``bytes``: peak memory of a call beyond its inputs, outputs included; of backward, of a whole training step
- ``share``: of what the measured ceilings allow for this work
- ``output_error``, ``gradient_error``: in units of SDPA's own. A peer whose errors are larger than what is
  allowed of ours is timed up to 16 times SDPA's own, with that as its ``reason``
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from benchmarks.checked import Checked, Verdict
from benchmarks.gpu.machine import Ceilings, Watch, gather_rate, peak_memory
from benchmarks.gpu.methods import call_of
from benchmarks.gpu.workloads import PASSES, bytes_of
from benchmarks.methods import Method, Prepared
from benchmarks.process import is_out_of_memory, one_line
from benchmarks.workloads import Problem, Workload
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.dispatch import choose

__all__ = ["Bench", "LostDeviceError", "Pace", "failed_by"]

CACHE_BYTES, FEWEST_SETS, MOST_SETS, TIMES_CACHE = 50e6, 4, 16, 3
PEERS_ERROR = 16.0  # times SDPA's own, up to which a peer is timed; its case says so
OUT_OF_MEMORY = "out of memory"
Case = dict[str, Any]
Marks = list[tuple[Any, Any]]


class LostDeviceError(RuntimeError):
    """The device answers nothing any more: only a new process can go on."""


@dataclass(frozen=True)
class Pace:
    """``budget`` seconds of samples for a pass of a method, ``fewest`` to ``most`` of them, after ``warm`` calls.

    A call that takes more than ``slow`` seconds is warm at once, and measured twice. After a first call of
    more than ``slowest`` seconds, with what it compiles, nothing is timed.
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


class Bench:
    """A workload on a device: its inputs, the truth about some receivers, and :meth:`cases` of a method."""

    def __init__(self, workload: Workload, watch: Watch, ceilings: Ceilings, pace: Pace) -> None:
        """Build the graph and draw the inputs, so many sets that they do not stay in the cache."""
        self.workload, self.watch, self.pace, self.ceilings = workload, watch, pace, ceilings
        start = time.perf_counter()
        graph = workload.graph()
        self.build_s = time.perf_counter() - start
        first = workload.problem(graph, watch.device)
        more = [workload.problem(graph, watch.device, seed) for seed in range(1, _sets(first))]
        self.sets = [first, *more]
        self.checked = Checked(first)
        width = first.heads * first.dim
        self.gathers = gather_rate(graph, width, watch.device) if workload.kind == "gathers" else None

    @property
    def problem(self) -> Problem:
        """The first set of inputs."""
        return self.sets[0]

    def about(self) -> Case:
        """The description of the workload."""
        problem = self.problem
        return {
            "workload": self.workload.name,
            "title": self.workload.title,
            "tokens": problem.graph.num_dst,
            "senders": problem.graph.num_src,
            "edges": problem.graph.num_edges,
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

    def cases(self, method: Method) -> list[Case]:
        """Both passes. :class:`LostDeviceError` if the device does not survive it."""
        place: Case = {"workload": self.workload.name, "method": method.name, "ours": method.ours}
        refused = self._tried(partial(self._refusal, method))
        prepared = cache(partial(method.prepare, self.problem))
        cases = []
        for which in PASSES:
            case = refused or self._tried(partial(self._measured, method, prepared, which)) or {}
            cases.append({**place, "pass": which, **case})
            # the other pass would take longer still
            refused = case if case["status"] in ("slow", OUT_OF_MEMORY) else refused
        return cases

    def _tried(self, work: Callable[[], Case | None]) -> Case | None:
        """What it returns, or why it failed."""
        try:
            return work()
        except Exception as error:
            failed = failed_by(error)
        self._release_memory()
        return failed

    def _refusal(self, method: Method) -> Case | None:
        """The case where nothing is run."""
        missing = method.missing()
        if missing is not None:
            return {"status": "missing", "reason": f"not there: {missing}"}
        reason = None if method.unsupported_reason is None else method.unsupported_reason(self.problem)
        if reason is not None:
            return {"status": "refused", "reason": reason}
        needed = 0.0 if method.bytes_needed is None else method.bytes_needed(self.problem, False)
        free = torch.cuda.mem_get_info(self.watch.device)[0] if self.watch.on_gpu else None
        if free is not None and needed > free:
            text = f"about {needed / 2**30:.1f} GiB needed, {free / 2**30:.1f} GiB are free"
            return {"status": OUT_OF_MEMORY, "reason": text}
        return None

    def _measured(self, method: Method, prepare: Callable[[], Prepared], which: str) -> Case:
        backward = which == "backward"
        about: Case = {"takes": choose(call_of(self.problem)).name} if method.name.startswith("auto") else {}
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
            return {"status": "slow", "reason": f"its first call took {about['first_s']:.0f} s", **about}
        return {"status": "measured", **about, **self._timed(prepared, which)}

    def _timed(self, prepared: Prepared, which: str) -> Case:
        step = self._forward if which == "forward" else self._training_step
        marks: Marks = []
        memory = peak_memory(self.watch.device, lambda: step(prepared, 0, marks))
        seconds = self._warm(partial(step, prepared))
        marks.clear()
        for number in range(self.pace.samples(seconds)):
            step(prepared, number, marks)
        self.watch.wait()
        times = sorted(self.watch.seconds(*pair) for pair in marks)
        return {**_figures(times), "bytes": memory, "share": self.floor(which) / times[len(times) // 2]}

    def floor(self, which: str) -> float:
        """Seconds that the measured ceilings allow: products of all edges, or their gathers."""
        if self.gathers is None:
            return self.problem.flops(which) / self.ceilings.products
        return bytes_of(self.problem, which) / self.gathers

    def _warm(self, step: Callable[[int, Marks], object]) -> float:
        """Seconds of the last of the first calls."""
        marks: Marks = []
        seconds = 0.0
        for number in range(self.pace.warm):
            step(number, marks)
            self.watch.wait()
            seconds = self.watch.seconds(*marks[-1])
            if seconds > self.pace.slow:
                break
        return seconds

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

    def _release_memory(self) -> None:
        """Free what a failed method allocated. :class:`LostDeviceError` if the device is lost with it."""
        gc.collect()
        if not self.watch.on_gpu:
            return
        try:
            torch.cuda.synchronize(self.watch.device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise LostDeviceError(one_line(error)) from error


def _is_nearly_exact(verdict: Verdict) -> bool:
    """Whether a peer computes the same, though with larger errors: it may sum in the short dtype itself."""
    return all(error <= PEERS_ERROR for error in (verdict.output, verdict.gradient or 0.0))


def _sets(problem: Problem) -> int:
    """How many sets of inputs are taken in turn: one that is three times the cache needs no other."""
    size = sum(x.numel() * x.element_size() for x in problem.inputs)
    if size >= TIMES_CACHE * CACHE_BYTES:
        return 1
    return int(min(MOST_SETS, max(FEWEST_SETS, -(-TIMES_CACHE * CACHE_BYTES // max(size, 1)))))


def _figures(times: Sequence[float]) -> Case:
    """Median, least, and tenths of sorted times."""
    last = len(times) - 1
    median, low, high = (times[min(last, int(share * len(times)))] for share in (0.5, 0.1, 0.9))
    return {"seconds": median, "least": times[0], "p10": low, "p90": high, "samples": len(times)}


def failed_by(error: Exception) -> Case:
    """The case of a method that raised."""
    if is_out_of_memory(one_line(error)):
        return {"status": OUT_OF_MEMORY, "reason": one_line(error)}
    refused = isinstance(error, NotImplementedError) or "No viable backend" in str(error)
    return {"status": "refused" if refused else "failed", "reason": one_line(error)}
