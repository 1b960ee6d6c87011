"""A workload on a device, and what a method does on it: right first, then its memory, then its time.

A trial is a method and a pass: "forward", "backward" (the backward pass alone) or "both". Its case has

- ``status``: "measured", or why not, with its ``reason``: "missing", "refused", "out of memory", "failed",
  "wrong", "too slow"
- ``seconds``: the median; ``least``, ``samples``
- ``first_s``: the first call: the plan of this graph, and what is compiled
- ``output_error``, ``gradient_error``: in units of SDPA's own. A peer whose errors are larger than what is
  allowed of ours is timed up to 16 times SDPA's own, with that as its ``reason``
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

__all__ = ["Bench", "Settings", "Trial", "paired_ratio", "timed_rounds"]

FLUSHED = 2**28  # bytes that are written before a call on a GPU, so that nothing is left in its cache
PEERS_ERROR = 16.0  # times SDPA's own, up to which a peer is timed; its case says so


@dataclass(frozen=True)
class Settings:
    """How long to measure: ``budget`` seconds for a method and pass, ``fewest`` to ``most`` samples.

    A call of more than ``long`` seconds is timed once, one of more than ``slowest`` seconds is left out, as is
    what needs more than ``memory`` bytes.
    """

    budget: float = 3.0
    fewest: int = 3
    most: int = 100
    long: float = 4.0
    slowest: float = 20.0
    memory: float = 14 * 2**30

    def samples(self, seconds: float) -> int:
        """How many of a call that takes so long."""
        if seconds > self.long:
            return 1
        return min(self.most, max(self.fewest, int(self.budget / max(seconds, 1e-7))))


@dataclass
class Trial:
    """A method and a pass: its case so far, and its call while it is to be timed.

    ``step()`` runs a call and returns the marks around it, ``seconds`` is what it took before, and
    ``times`` are its samples by round.
    """

    case: Record
    step: Callable[[], tuple[Any, Any]] | None = None
    seconds: float = 0.0
    times: dict[int, float] = field(default_factory=dict)

    def close(self, status: str, reason: str) -> Trial:
        """Leave it out, with the reason."""
        self.case |= {"status": status, "reason": reason}
        self.step = None
        return self

    def fail(self, error: Exception) -> Trial:
        """Leave it out for an error."""
        reason = one_line(error)
        refused = isinstance(error, NotImplementedError) or "No viable backend" in reason
        status = "out of memory" if is_out_of_memory(reason) else "refused" if refused else "failed"
        return self.close(status, reason)

    def figures(self) -> Record:
        """Median and least of the samples."""
        times = list(self.times.values())
        figures = {"seconds": statistics.median(times), "least": min(times), "samples": len(times)}
        return {"status": "measured", **figures}


class Bench:
    """A workload on a device: its inputs, the truth about some receivers, and trials of methods."""

    def __init__(self, workload: Workload, device: torch.device, settings: Settings) -> None:
        """Build the graph, draw the inputs, and compute the truth."""
        self.workload, self.watch, self.settings = workload, Watch(device), settings
        start = time.perf_counter()
        graph = workload.graph()
        self.build_s = time.perf_counter() - start
        self.problem = workload.problem(graph, device)
        self.flushed = torch.empty(FLUSHED if self.watch.on_gpu else 0, dtype=torch.uint8, device=device)
        self.checked = Checked(self.problem)

    def trial(self, method: Method, which: str) -> Trial:
        """Hold a method against float64 and measure the memory and seconds of a call, or say why not."""
        trial = Trial(
            {"workload": self.workload.name, "method": method.name, "ours": method.ours, "pass": which}
        )
        if (refused := refusal(method, self.problem, which)) is not None:
            return trial.close(**refused)
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
                    nearly = max(output, gradient) <= PEERS_ERROR
                    if method.ours or not nearly:  # a peer may sum in the short dtype itself
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
        """Time a call in each of these rounds; a trial that fails is left out from then on."""
        try:
            assert trial.step is not None
            marks = {number: trial.step() for number in rounds}
            self.watch.wait()
        except Exception as error:
            trial.fail(error)
            return
        trial.times |= {number: self.watch.seconds(*pair) for number, pair in marks.items()}

    def _step(self, prepared: Prepared, which: str) -> tuple[Any, Any]:
        """One call and the marks around it; of "backward" the backward pass is marked alone."""
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


def timed_rounds(bench: Bench, trials: Sequence[Trial], seed: int = 0) -> None:
    """Time trials in interleaved rounds, each in a random order of its own.

    A trial takes part in as many rounds as its budget allows, spread evenly.
    """
    wanted = [bench.settings.samples(trial.seconds) for trial in trials]
    rounds, rng = max(wanted, default=0), random.Random(seed)
    for number in range(rounds):
        for trial, own in rng.sample(list(zip(trials, wanted, strict=True)), len(trials)):
            if trial.step is not None and _takes_part(number, own, rounds):
                bench.sample(trial, [number])


def _takes_part(number: int, wanted: int, rounds: int) -> bool:
    """True for ``wanted`` of the ``rounds``, evenly spread.

    >>> [number for number in range(9) if _takes_part(number, 3, 9)]
    [2, 5, 8]
    """
    return (number + 1) * wanted // rounds > number * wanted // rounds


def paired_ratio(ours: Trial, theirs: Trial) -> float | None:
    """The median of ``theirs / ours`` over the rounds in which both took part: how many times faster ours is.

    >>> slow, fast = Trial({}, times={0: 4.0, 1: 9.0, 2: 5.0}), Trial({}, times={0: 2.0, 2: 2.0})
    >>> paired_ratio(fast, slow)
    2.25
    """
    rounds = theirs.times.keys() & ours.times.keys()
    return statistics.median(theirs.times[n] / ours.times[n] for n in rounds) if rounds else None
