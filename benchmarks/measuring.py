"""Measure methods on a workload and a device: first their errors, then their memory, then their time.

A trial is a method and a pass: "forward", "backward" (the backward pass alone) or "both". Its case has the keys

- ``status``: "measured", or else, with a ``reason``, "missing", "refused", "out of memory", "failed", "wrong" or
  "too slow"
- ``seconds``: the median time; ``least`` time; number of ``samples``
- ``first_s``: the seconds of the first call, which includes planning and compilation
- ``output_error``, ``gradient_error``: errors as multiples of SDPA's own. A peer that exceeds the tolerance for our
  backends is still timed if its errors are at most 16 times SDPA's own; its case then has a ``reason``
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.checked import Checked
from benchmarks.gpu.machine import Watch, peak_bytes
from benchmarks.methods import Method, Prepared, refusal
from benchmarks.process import is_out_of_memory, one_line
from benchmarks.records import Record
from benchmarks.workloads import Workload

__all__ = ["Bench", "Settings", "Trial", "paired_ratio", "time_rounds"]

FLUSHED = 2**28  # bytes written before each call on a GPU, to flush its cache
PEERS_ERROR = 16.0  # multiple of SDPA's own error up to which a peer is timed


@dataclass(frozen=True)
class Settings:
    """How long to measure: ``budget`` seconds for each method and pass, with ``fewest`` to ``most`` samples.

    A call that takes more than ``long`` seconds is timed once; one that takes more than ``slowest`` seconds or
    needs more than ``memory`` bytes is not timed.
    """

    budget: float = 3.0
    fewest: int = 3
    most: int = 100
    long: float = 4.0
    slowest: float = 20.0
    memory: float = 14 * 2**30

    def samples(self, seconds: float) -> int:
        """Return the number of samples of a call that takes ``seconds``."""
        if seconds > self.long:
            return 1
        return min(self.most, max(self.fewest, int(self.budget / max(seconds, 1e-7))))


@dataclass
class Trial:
    """A method and a pass, with the case recorded so far.

    ``step()`` runs a call and returns the marks around it, or is None if the trial is not timed; ``seconds`` is the
    time of a first call, and ``times`` holds the samples by round.
    """

    case: Record
    step: Callable[[], tuple[Any, Any]] | None = None
    seconds: float = 0.0
    times: dict[int, float] = field(default_factory=dict)

    def close(self, status: str, reason: str) -> Trial:
        """End the trial with a status and a reason."""
        self.case |= {"status": status, "reason": reason}
        self.step = None
        return self

    def fail(self, error: Exception) -> Trial:
        """End the trial because of an error."""
        reason = one_line(error)
        is_refusal = isinstance(error, NotImplementedError) or "No viable backend" in reason
        status = "out of memory" if is_out_of_memory(reason) else "refused" if is_refusal else "failed"
        return self.close(status, reason)

    def figures(self) -> Record:
        """Return the median, the least and the number of the samples."""
        times = list(self.times.values())
        figures = {"seconds": statistics.median(times), "least": min(times), "samples": len(times)}
        return {"status": "measured", **figures}


class Bench:
    """A workload on a device: its inputs, the float64 reference, and the trials of methods."""

    def __init__(self, workload: Workload, device: torch.device, settings: Settings) -> None:
        """Build the graph, draw the inputs, and compute the reference."""
        self.workload, self.watch, self.settings = workload, Watch(device), settings
        start = time.perf_counter()
        graph = workload.graph()
        self.build_s = time.perf_counter() - start
        self.problem = workload.problem(graph, device)
        self.flushed = torch.empty(FLUSHED if self.watch.on_gpu else 0, dtype=torch.uint8, device=device)
        self.checked = Checked(self.problem)

    def trial(self, method: Method, which: str) -> Trial:
        """Compare a method with float64 and measure memory and time of a call, or record why this fails."""
        trial = Trial(
            {"workload": self.workload.name, "method": method.name, "ours": method.ours, "pass": which}
        )
        if (reason_not_run := refusal(method, self.problem, which)) is not None:
            return trial.close(**reason_not_run)
        try:
            start = time.perf_counter()
            prepared = method.prepare(self.problem)
            if method.same:
                backward = which != "forward"
                outcome = self.checked.verdict(prepared, backward)
                output, gradient = outcome.output or 0.0, outcome.gradient or 0.0
                trial.case |= {"output_error": output, "gradient_error": gradient if backward else None}
                if not outcome.passed:
                    reason = f"errors {output:.3g} and {gradient:.3g} of SDPA's own (allowed 2, 3)"
                    # A peer may accumulate in the short dtype, so it gets a wider tolerance.
                    if method.ours or max(output, gradient) > PEERS_ERROR:
                        return trial.close("wrong", reason)
                    trial.case["reason"] = reason
            self.watch.wait()
            trial.case["first_s"] = round(time.perf_counter() - start, 4)
            trial.step = lambda: self._step(prepared, which)
            trial.case |= peak_bytes(self.watch, trial.step)
        except Exception as error:
            return trial.fail(error)
        self.sample(trial, [0])
        trial.seconds = trial.times.pop(0, 0.0)
        if trial.seconds > self.settings.slowest:
            limit = self.settings.slowest
            return trial.close("too slow", f"a call took {trial.seconds:.2g} s, the limit is {limit:g}")
        return trial

    def sample(self, trial: Trial, rounds: Sequence[int]) -> None:
        """Time a call in each of these rounds; a trial that fails is not timed again."""
        try:
            assert trial.step is not None
            marks = {number: trial.step() for number in rounds}
            self.watch.wait()
        except Exception as error:
            trial.fail(error)
            return
        trial.times |= {number: self.watch.seconds(*pair) for number, pair in marks.items()}

    def _step(self, prepared: Prepared, which: str) -> tuple[Any, Any]:
        """Run one call and return the marks around it; "backward" marks the backward pass alone."""
        problem, mark = self.problem, self.watch.mark
        self.flushed.zero_()
        if which == "forward":
            with torch.no_grad():
                start = mark()
                out = prepared.call(*problem.inputs)
                return start, mark()
        leaves = [x.detach().requires_grad_() for x in problem.inputs]
        start = mark()
        out = prepared.call(*leaves)
        start = mark() if which == "backward" else start
        gradients = torch.autograd.grad(out, [*leaves, *prepared.parameters], problem.grad_out)
        stop = mark()
        del gradients
        return start, stop


def time_rounds(bench: Bench, trials: Sequence[Trial], seed: int = 0) -> None:
    """Time trials in interleaved rounds, each round in a new random order.

    A trial takes part in as many rounds as its budget allows, and these are spread evenly.
    """
    counts = [bench.settings.samples(trial.seconds) for trial in trials]
    rounds, rng = max(counts, default=0), random.Random(seed)
    for number in range(rounds):
        for trial, count in rng.sample(list(zip(trials, counts, strict=True)), len(trials)):
            if trial.step is not None and _takes_part(number, count, rounds):
                bench.sample(trial, [number])


def _takes_part(number: int, count: int, rounds: int) -> bool:
    """Return whether round ``number`` is one of ``count`` that are spread evenly over ``rounds``.

    >>> [number for number in range(9) if _takes_part(number, 3, 9)]
    [2, 5, 8]
    """
    return (number + 1) * count // rounds > number * count // rounds


def paired_ratio(ours: Trial, theirs: Trial) -> float | None:
    """Return the median of ``theirs / ours`` over common rounds: how many times faster ours is.

    >>> slow, fast = Trial({}, times={0: 4.0, 1: 9.0, 2: 5.0}), Trial({}, times={0: 2.0, 2: 2.0})
    >>> paired_ratio(fast, slow)
    2.25
    """
    rounds = theirs.times.keys() & ours.times.keys()
    return statistics.median(theirs.times[n] / ours.times[n] for n in rounds) if rounds else None
