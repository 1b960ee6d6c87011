"""One method on one workload: right first, then its memory and its time, forward and backward, as two cases
of a record.

- ``status``: "measured", or why not, with its ``reason``: "missing", "refused", "out of memory" (also by
  estimate), "failed", "wrong", "far behind" (one of ours whose prediction is many times that of auto; one whose
  first call takes a minute)
- ``seconds``: median; ``p10, p90, samples``; backward is the backward pass alone
- ``compile_s``: of ours: a first call on a graph of 96 tokens that has the same sizes else
- ``first_s``: the first call here: the plan of this graph, and what is compiled still
- ``takes``: the backend that auto took
- ``bytes``: peak memory of a call beyond its inputs, outputs included; of backward that of a whole training
  step
- ``flops``: counted for the edges alone; ``least_bytes`` of the best kernel; ``share`` of the measured
  ceiling of this work
- ``predicted_s``: by ``backends.gpu.roofline``, the constant that ``limit``s it, and what is ``visited``
  (its ``Estimate``); ``output_error, gradient_error``: in units of SDPA's own. A peer whose errors are larger
  than what is allowed of ours is timed up to 16 times SDPA's own, with that as its ``reason``
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from benchmarks.checked import Checked, Verdict
from benchmarks.gpu.machine import Ceilings, Watch, peak_memory
from benchmarks.gpu.methods import AGAIN, FAR, LONG, predicted
from benchmarks.gpu.workloads import PASSES, bytes_of
from benchmarks.methods import AUTO, Method, Prepared, call_of
from benchmarks.process import one_line
from benchmarks.workloads import TINY_TOKENS, Problem, Workload
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.dispatch import choose
from gnn_attention.backends.gpu.devices import Device
from gnn_attention.backends.gpu.roofline import Estimate

__all__ = ["Bench", "LostDeviceError", "Pace", "failed_by"]

FEWEST_SETS, MOST_SETS, TIMES_CACHE = 4, 16, 3
PEERS_ERROR = 16.0  # times SDPA's own, up to which a peer is timed; its case says so
OUT_OF_MEMORY, FAR_BEHIND = "out of memory", "far behind"


class LostDeviceError(RuntimeError):
    """The device answers nothing any more: only a new process can go on."""


@dataclass(frozen=True)
class Pace:
    """``budget`` seconds of samples for a pass of a method, ``fewest`` to ``most`` of them, after ``warm`` calls.

    A call that takes more than ``slow`` seconds is warm at once, and measured twice; one of more than
    ``slower`` is not called again; after one of more than ``slowest``, with what it compiles, nothing is timed.
    """

    budget: float = 0.5
    fewest: int = 10
    most: int = 100
    warm: int = 3
    slow: float = 0.5
    slower: float = 5.0
    slowest: float = 60.0

    def samples(self, seconds: float) -> int:
        """How many of a call that takes so long."""
        if seconds > self.slow:
            return min(self.fewest, 2)
        return min(self.most, max(self.fewest, int(self.budget / max(seconds, 1e-7))))


class Bench:
    """A workload on a device: its inputs, the truth about some receivers, what is expected, and :meth:`cases`
    of a method.
    """

    def __init__(
        self, workload: Workload, watch: Watch, ceilings: Ceilings, costs: Device, pace: Pace, quick: bool
    ) -> None:
        """Build the graph and draw the inputs, so many sets that they do not stay in the cache."""
        workload = workload.tiny() if quick else workload
        self.workload, self.watch, self.pace, self.ceilings = workload, watch, pace, ceilings
        start = time.perf_counter()
        graph = workload.graph()
        self.build_s = time.perf_counter() - start
        first = workload.problem(graph, watch.device)
        self.sets = [
            first,
            *(workload.problem(graph, watch.device, n) for n in range(1, _sets(first, costs))),
        ]
        self.expected = predicted(first, costs)
        self.checked = Checked(first)

    @property
    def problem(self) -> Problem:
        """The first set of inputs."""
        return self.sets[0]

    def about(self) -> dict[str, Any]:
        """The description of the workload."""
        problem, kind = self.problem, self.workload.kind
        return {
            "workload": self.workload.name,
            "title": self.workload.title,
            "tokens": problem.graph.num_dst,
            "edges": problem.graph.num_edges,
            "batch": problem.inputs[0].shape[0],
            "heads": problem.heads,
            "dim": problem.dim,
            "dtype": str(problem.inputs[0].dtype).removeprefix("torch."),
            "kind": kind,
            "build_s": self.build_s,
            "sets": len(self.sets),
            "floors_ms": {which: self.floor(which) * 1e3 for which in PASSES},
            "flops": {which: problem.flops(which) for which in PASSES},
            "least_bytes": {which: bytes_of(problem, which, kind) for which in PASSES},
        }

    def cases(self, method: Method) -> list[dict[str, Any]]:
        """Both passes. :class:`LostDeviceError` if the device does not survive it."""
        place: dict[str, Any] = {"workload": self.workload.name, "method": method.name, "ours": method.ours}
        left_out = self._tried(partial(self._left_out, method))
        prepared, found = cache(partial(method.prepare, self.problem)), []
        for which in PASSES:
            case = left_out or self._tried(partial(self._measured, method, prepared, which)) or {}
            found.append({**place, "pass": which, **self._prediction(method, which), **case})
            # the other pass would take longer still
            left_out = case if case["status"] == FAR_BEHIND else left_out
        return found

    def _tried(self, work: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        """What it returns, or why it failed."""
        try:
            return work()
        except Exception as error:
            failed = failed_by(error)
        self._give_back()
        return failed

    def _left_out(self, method: Method) -> dict[str, Any] | None:
        """The case where nothing is run."""
        missing = method.missing()
        if missing is not None:
            return {"status": "missing", "reason": missing}
        refused = None if method.unsupported_reason is None else method.unsupported_reason(self.problem)
        if refused is not None:
            return {"status": "refused", "reason": refused}
        needed = 0.0 if method.bytes_needed is None else method.bytes_needed(self.problem, False)
        free = self._free()
        if free is not None and needed > free:
            reason = f"about {needed / 2**30:.1f} GiB needed, {free / 2**30:.1f} GiB are free"
            return {"status": OUT_OF_MEMORY, "reason": reason}
        behind = self._far_behind(method)
        return None if behind is None else {"status": FAR_BEHIND, "reason": behind}

    def _free(self) -> float | None:
        return float(torch.cuda.mem_get_info(self.watch.device)[0]) if self.watch.on_gpu else None

    def _far_behind(self, method: Method) -> str | None:
        """One of ours that is expected to take many times as long as the best of ours, and long."""
        expected = self.expected["forward"]
        if not method.ours or method.estimate not in expected:
            return None
        mine, best = expected[method.estimate].seconds, min(x.seconds for x in expected.values())
        if mine < LONG or mine < FAR * best:
            return None
        return f"predicted {mine * 1e3:.3g} ms, {mine / best:.0f} times that of the best: not timed"

    def _prediction(self, method: Method, which: str) -> dict[str, Any]:
        estimate = _estimate_of(method, self.expected[which], self.expected["forward"])
        if estimate is None:
            return {}
        visited = {"flops": estimate.flops, "misses": estimate.misses, "passed": estimate.passed}
        return {"predicted_s": estimate.seconds, "limit": estimate.limit, "visited": visited}

    def _measured(self, method: Method, prepare: Callable[[], Prepared], which: str) -> dict[str, Any]:
        backward = which == "backward"
        about = self._compiled(method, backward) if method.ours else {}
        start = time.perf_counter()
        prepared = prepare()
        if method.same:
            verdict = self.checked.verdict(prepared, backward)
            about |= {"output_error": verdict.output, "gradient_error": verdict.gradient}
            if not verdict.passed:
                about["reason"] = str(verdict)
                if method.ours or not _nearly(verdict):
                    return {"status": "wrong", **about}
        self.watch.wait()
        about["first_s"] = time.perf_counter() - start
        if about["first_s"] > self.pace.slowest:
            reason = f"its first call took {about['first_s']:.0f} s: not timed"
            return {"status": FAR_BEHIND, "reason": reason, **about}
        return {"status": "measured", **about, **self._timed(prepared, which)}

    def _compiled(self, method: Method, backward: bool) -> dict[str, Any]:
        """Once on a small graph, so that the first call on the large one takes its plan alone."""
        start = time.perf_counter()
        small = self.workload.problem(self.workload.graph(TINY_TOKENS), self.watch.device)
        about: dict[str, Any] = (
            {"takes": choose(call_of(self.problem)).name} if method.name in (AUTO, AGAIN) else {}
        )
        if method.unsupported_reason is not None and method.unsupported_reason(small) is not None:
            return about
        prepared, leaves = method.prepare(small), [x.detach().requires_grad_(backward) for x in small.inputs]
        with torch.set_grad_enabled(backward):
            out = prepared.call(*leaves)
        if backward:
            torch.autograd.grad(out, leaves, small.grad_out)
        self.watch.wait()
        return {**about, "compile_s": time.perf_counter() - start}

    def _timed(self, prepared: Prepared, which: str) -> dict[str, Any]:
        step = self._forward if which == "forward" else self._training_step
        marks: list[tuple[Any, Any]] = []
        memory = peak_memory(self.watch.device, lambda: step(prepared, 0, marks))
        self.watch.wait()
        if self.watch.seconds(*marks[0]) <= self.pace.slower:
            marks.clear()
            for number in range(self.pace.samples(self._warm(partial(step, prepared)))):
                step(prepared, number, marks)
        self.watch.wait()
        times = sorted(self.watch.seconds(*pair) for pair in marks)
        return {**_figures(times), "bytes": memory, "share": self.floor(which) / times[len(times) // 2]}

    def _warm(self, step: Callable[[int, list[tuple[Any, Any]]], object]) -> float:
        """Seconds of the last of the first calls."""
        marks: list[tuple[Any, Any]] = []
        seconds = 0.0
        for number in range(self.pace.warm):
            step(number, marks)
            self.watch.wait()
            seconds = self.watch.seconds(*marks[-1])
            if seconds > self.pace.slow:
                break
        return seconds

    def _forward(self, prepared: Prepared, number: int, marks: list[tuple[Any, Any]]) -> Tensor:
        inputs = self.sets[number % len(self.sets)].inputs
        with torch.no_grad():
            start = self.watch.mark()
            out = prepared.call(*inputs)
            marks.append((start, self.watch.mark()))
        return out

    def _training_step(
        self, prepared: Prepared, number: int, marks: list[tuple[Any, Any]]
    ) -> Sequence[Tensor]:
        """Forward and backward, of which the backward pass is marked."""
        problem = self.sets[number % len(self.sets)]
        leaves = [x.detach().requires_grad_() for x in problem.inputs]
        out = prepared.call(*leaves)
        start = self.watch.mark()
        found = torch.autograd.grad(out, leaves, problem.grad_out)
        marks.append((start, self.watch.mark()))
        return found

    def floor(self, which: str) -> float:
        """Seconds that the measured ceilings allow for this work: products of all edges, or gathers of a row for
        each of them.
        """
        problem, row = self.problem, 2 * self.problem.dim * self.problem.inputs[0].element_size()
        if self.workload.kind == "products":
            return problem.flops(which) / self.ceilings.products
        in_cache = problem.graph.num_src * row <= TABLE_THAT_FITS
        rate = self.ceilings.cache_rows if in_cache else self.ceilings.short_rows
        return bytes_of(problem, which, self.workload.kind) / rate

    def _give_back(self) -> None:
        """Free what a failed method allocated. :class:`LostDeviceError` if the device is lost with it."""
        gc.collect()
        if not self.watch.on_gpu:
            return
        try:
            torch.cuda.synchronize(self.watch.device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise LostDeviceError(one_line(error)) from error


def _nearly(verdict: Verdict) -> bool:
    """Whether a peer computes the same, though with larger errors: it may sum in the short dtype itself."""
    return all(error <= PEERS_ERROR for error in (verdict.output, verdict.gradient or 0.0))


TABLE_THAT_FITS = 40e6  # bytes of the keys and values of a head that a cache of 50 MB keeps


def _sets(problem: Problem, costs: Device) -> int:
    """How many sets of inputs are taken in turn: one that is three times the cache needs no other."""
    size = sum(x.numel() * x.element_size() for x in problem.inputs)
    if size >= TIMES_CACHE * costs.cache_bytes:
        return 1
    return int(min(MOST_SETS, max(FEWEST_SETS, -(-TIMES_CACHE * costs.cache_bytes // max(size, 1)))))


def _estimate_of(
    method: Method, found: Mapping[str, Estimate], forward: Mapping[str, Estimate]
) -> Estimate | None:
    """Of auto and "triton" the best: what they would choose by the forward pass."""
    if method.name in (AUTO, AGAIN, "triton"):
        names = [name for name in forward if name not in ("written out", "flex")]
        names = (
            [name for name in names if name in ("rows", "windows", "tiles")]
            if method.name == "triton"
            else names
        )
        return found.get(min(names, key=lambda name: forward[name].seconds))
    return found.get(method.estimate)


def _figures(times: Sequence[float]) -> dict[str, Any]:
    """``times`` are sorted."""
    middle, low, high = (times[min(len(times) - 1, int(share * len(times)))] for share in (0.5, 0.1, 0.9))
    return {"seconds": middle, "p10": low, "p90": high, "samples": len(times)}


def failed_by(error: Exception) -> dict[str, Any]:
    """A case of a method that raised."""
    if isinstance(error, torch.OutOfMemoryError):
        return {"status": OUT_OF_MEMORY, "reason": one_line(error)}
    refused = isinstance(error, NotImplementedError) or "No viable backend" in str(error)
    return {"status": "refused" if refused else "failed", "reason": one_line(error)}
