"""Attention workloads, every backend and every peer: ``python -m benchmarks attention``.

Each workload runs in a fresh process, once for each allocator setting: memory first (every method and pass in
a fork of its own), then the check against float64, then all methods timed in interleaved rounds. The record,
as ``--json`` writes it:

- ``bench``: "attention"; ``schema`` 1; ``quick`` true or false; date, commit, processor, threads, versions,
  ...
- ``settings``: how long was measured, see :class:`~benchmarks.measure.Settings`
- ``variables``: the environment of the children, for each allocator setting
- ``workloads``: one for each graph and allocator: ``workload, title, tokens, edges, heads, dim,
  allocator``, the ``limits`` that were measured in the same process (``gemm_gflops, copy_gb_s``),
  ``probe_gflops``, ``plan_s`` (graph built)
- ``cases``: one for each workload, allocator, method and pass ("forward", "both" = forward and backward):
  ``status`` "measured" or why not ("missing", "refused", "out of memory by estimate", "too slow by
  estimate", "failed", "wrong") with its ``reason``; of a measured one ``seconds`` (median), ``fastest``,
  ``first_s`` (its first call: plans, compilers), ``samples``, ``retries``, ``noisy``, ``ratio`` (median
  paired ratio to "auto": how many times faster auto is), ``memory_mb`` (peak during a call, outputs and
  gradients included), ``roofline`` (share of the matrix-product rate), ``output_error``, ``gradient_error``
  (of SDPA's own)
- ``growth``: exponents p of ``~ T^p`` (family b) and ``~ E^p`` (family e), see :mod:`benchmarks.summary`
- ``crossover``: the density at which ours and SDPA with a mask meet, at 2048 tokens
- ``targets``: :mod:`benchmarks.targets` with the measured value of each, met or not
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from benchmarks import process, summary, targets
from benchmarks.checked import Checked
from benchmarks.measure import Guard, Settings, Timing, limits, paired_ratio, timed_rounds
from benchmarks.methods import AUTO, Method, Prepared, ours, peers
from benchmarks.records import circumstances
from benchmarks.workloads import WORKLOADS, Problem, Workload, select, small

__all__ = ["ALLOCATORS", "PASSES", "chosen", "measure_problem", "measure_workload", "run_attention"]

ALLOCATORS = ("default", "thp")
PASSES = ("forward", "both")
Progress = Callable[[str], None]


def run_attention(
    workloads: Sequence[str] | None = None,
    quick: bool = False,
    allocators: Sequence[str] = ("default",),
    with_peers: bool = True,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """All chosen workloads as one record, after Ctrl-C those that were measured.

    ValueError for an unknown workload, OSError where this is not Linux.
    """
    pairs = chosen(workloads, quick, allocators)
    process.forget_peak()  # OSError before anything is measured
    settings = settings or (Settings.quick() if quick else Settings())
    start, measured, threads = time.perf_counter(), [], torch.get_num_threads()
    variables = {allocator: process.environment(allocator) for allocator in allocators}
    with (
        tempfile.TemporaryDirectory() as kernels
    ):  # compiled by one child, used by the next, and by no other process
        try:
            for allocator, workload in pairs:
                (progress or _silent)(f"{workload.title} ({allocator})")
                own = {**variables[allocator], "TORCHINDUCTOR_CACHE_DIR": kernels}
                measured.append(_in_a_child(workload, allocator, settings, with_peers, threads, own))
        except KeyboardInterrupt:
            if not measured:
                raise
    record = {
        "bench": "attention",
        "schema": 1,
        "quick": quick,
        "interrupted": len(measured) < len(pairs),
        **circumstances(),
        "took_s": round(time.perf_counter() - start, 1),
        "settings": asdict(settings),
        "variables": variables,
        "workloads": [result["workload"] for result in measured],
        "cases": [case for result in measured for case in result["cases"]],
    }
    return {**record, **summary.summary(record), "targets": targets.judged(record)}


def chosen(
    workloads: Sequence[str] | None, quick: bool, allocators: Sequence[str]
) -> list[tuple[str, Workload]]:
    """Allocators and workloads that belong together; the crossover is measured once. ValueError for an
    unknown workload.
    """
    found = select(WORKLOADS, workloads, quick)
    return [(a, w) for a in allocators for w in found if w.family != "x" or a == allocators[0]]


def _silent(what: str) -> None:
    pass


def _in_a_child(
    workload: Workload,
    allocator: str,
    settings: Settings,
    with_peers: bool,
    threads: int,
    variables: dict[str, str],
) -> dict[str, Any]:
    """A workload in a fresh process; if that dies, all its methods have failed."""
    arguments = {
        "name": workload.name,
        "allocator": allocator,
        "settings": asdict(settings),
        "with_peers": with_peers,
        "threads": threads,
    }
    try:
        result: dict[str, Any] = process.in_a_process(
            __name__, "measure_workload", arguments, variables, timeout=1800
        )
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        methods = [method.name for method in (*ours(), *peers(workload.peers if with_peers else ()))]
        failed = {
            "workload": workload.name,
            "allocator": allocator,
            "status": "failed",
            "reason": process.one_line(error),
        }
        cases = [{**failed, "method": name, "pass": which} for name in methods for which in PASSES]
        return {"workload": {**failed, "title": workload.title, "tokens": workload.tokens}, "cases": cases}
    return result


def measure_workload(
    name: str, allocator: str, settings: dict[str, Any], with_peers: bool, threads: int
) -> dict[str, Any]:
    """A workload of the table, in this process, which must have started no threads yet; ``threads`` are for
    the measurements.
    """
    workload, limited = WORKLOADS[name], Settings(**settings)
    process.limit_memory(int(1.3 * limited.memory) + 3 * 2**30)
    torch.set_num_threads(1)  # forks come first
    start = time.perf_counter()
    problem = workload.problem()
    built = {"plan_s": time.perf_counter() - start}
    methods = [*ours(), *peers(workload.peers if with_peers else ())]
    described = {"workload": name, "title": workload.title, "allocator": allocator, "tokens": workload.tokens}
    about, cases = measure_problem(problem, methods, limited, threads)
    place = {"workload": name, "allocator": allocator}
    return {"workload": {**described, **built, **about}, "cases": [{**place, **case} for case in cases]}


@dataclass
class _Case:
    """One method and pass, and what is known of it so far."""

    method: Method
    both: bool
    found: dict[str, Any] = field(default_factory=dict)
    call: Callable[[], object] | None = None
    estimate: float = 0.0

    @property
    def open(self) -> bool:
        return "status" not in self.found

    def close(self, status: str, reason: str, **more: float) -> None:
        self.found = {"status": status, "reason": reason, **more}

    def record(self) -> dict[str, Any]:
        return {"method": self.method.name, "ours": self.method.ours, "pass": PASSES[self.both], **self.found}


def measure_problem(
    problem: Problem, methods: Sequence[Method], settings: Settings, threads: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Memory, correctness and time of every method on a problem: the workload's description, and its
    cases.
    """
    cases = [_Case(method, both) for method in methods for both in (False, True)]
    for case in cases:
        _leave_out(case, problem, settings)
    for case in cases:
        _weigh(case, problem, threads)
    torch.set_num_threads(threads)
    measured_limits, guard = limits(), Guard(settings.fraction, settings.patience, settings.allowance)
    _check(cases, problem, settings.slowest)
    for both in (False, True):
        _time(
            [case for case in cases if case.open and case.both == both],
            problem,
            settings,
            guard,
            measured_limits,
        )
    about = {
        "edges": problem.graph.num_edges,
        "heads": problem.heads,
        "dim": problem.dim,
        "layer": problem.layer is not None,
    }
    return {**about, "limits": measured_limits, "probe_gflops": guard.best}, [case.record() for case in cases]


def _leave_out(case: _Case, problem: Problem, settings: Settings) -> None:
    """Before anything is run: what is missing, refused or beyond the limits."""
    method = case.method
    refused = None if method.unsupported_reason is None else method.unsupported_reason(problem)
    needed = 0.0 if method.bytes_needed is None else method.bytes_needed(problem, case.both)
    seconds = 0.0 if method.seconds_needed is None else method.seconds_needed(problem, case.both)
    if (missing := method.missing()) is not None:
        case.close("missing", missing)
    elif refused is not None or (case.both and method.backward is not None):
        case.close("refused", refused or str(method.backward))
    elif needed > settings.memory:
        reason = f"{needed / 2**30:.1f} GiB, the limit is {settings.memory / 2**30:.1f}"
        case.close("out of memory by estimate", reason, bytes=needed)
    elif seconds > settings.slowest:
        case.close(
            "too slow by estimate",
            f"{seconds:.0f} s a call, the limit is {settings.slowest:.0f}",
            estimated_s=seconds,
        )


def _weigh(case: _Case, problem: Problem, threads: int) -> None:
    """The peak memory of one call, in a fork; one that fails there is not tried again."""
    if not case.open:
        return
    try:
        case.found["memory_mb"] = process.in_a_fork(lambda: _peak_of(case, problem, threads))
    except RuntimeError as error:
        refused = str(error).startswith(("NotImplementedError", "RefusalError"))
        case.close("refused" if refused else "failed", str(error))


def _peak_of(case: _Case, problem: Problem, threads: int) -> float:
    """MB beyond what was there before the call. What a method keeps from its first call on is not the
    call's.
    """
    torch.set_num_threads(threads)
    if not case.method.keeps:
        little = small(problem.layer is not None)
        _call_of(case.method.prepare(little), little, case.both)()
    call = _call_of(case.method.prepare(problem), problem, case.both)
    if case.method.keeps:
        call()
    _give_back()
    before = process.forget_peak()
    call()
    return max(process.peak() - before, 0.0)


def _give_back() -> None:
    """Freed memory goes back to the system, where the C library can (glibc)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _call_of(prepared: Prepared, problem: Problem, both: bool) -> Callable[[], object]:
    """One call: forward without gradients, or forward and the gradients of inputs and parameters."""
    if not both:

        def forward() -> object:
            with torch.no_grad():
                return prepared.call(*problem.inputs)

        return forward
    inputs = [x.detach().requires_grad_() for x in problem.inputs]
    wanted = [*inputs, *prepared.parameters]
    return lambda: torch.autograd.grad(prepared.call(*inputs), wanted, problem.grad_out)


def _check(cases: Sequence[_Case], problem: Problem, slowest: float) -> None:
    """Hold every open case against float64, note its first call, and estimate its time from the next one if
    that is bearable.
    """
    if not any(case.open for case in cases):
        return
    checked, prepared = Checked(problem), dict[str, Prepared]()
    for case in filter(lambda case: case.open, cases):
        try:
            start = time.perf_counter()
            ready = prepared.get(case.method.name) or case.method.prepare(problem)
            prepared[case.method.name] = ready
            verdict = checked.verdict(ready, case.both)
            first = time.perf_counter() - start
            case.call = _call_of(ready, problem, case.both)
            case.estimate = first if first > 2.0 and not case.method.keeps else _seconds_of(case.call)
        except Exception as error:
            case.close("failed", process.one_line(error))
            continue
        errors = {"output_error": verdict.output, "gradient_error": verdict.gradient, "first_s": first}
        if case.method.name == AUTO and not case.both:
            errors["new_graph_s"] = _seconds_on_a_new_graph(case, problem)
        if not verdict.passed:
            case.close("wrong", str(verdict))
        elif case.estimate > slowest:
            case.close(
                "too slow by estimate", f"a call took {case.estimate:.2g} s, the limit is {slowest:.2g}"
            )
        case.found |= errors


def _seconds_on_a_new_graph(case: _Case, problem: Problem) -> float:
    """The first call along a graph of which nothing is known: the choice, the plan and the call itself."""
    new = replace(problem, graph=replace(problem.graph))
    return _seconds_of(_call_of(case.method.prepare(new), new, case.both))


def _seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _time(
    cases: Sequence[_Case], problem: Problem, settings: Settings, guard: Guard, found: dict[str, float]
) -> None:
    """Interleaved rounds over all open cases of a pass."""
    calls = {case.method.name: case.call for case in cases if case.call is not None}
    estimates = {case.method.name: case.estimate for case in cases}
    timings = timed_rounds(calls, settings, guard, estimates)
    for case in cases:
        timing = timings[case.method.name]
        if timing.error is not None:
            refused = isinstance(timing.error, NotImplementedError)
            case.close("refused" if refused else "failed", process.one_line(timing.error))
            continue
        share = problem.flops(PASSES[case.both]) / timing.median / (1e9 * found["gemm_gflops"])
        case.found |= {
            "status": "measured",
            **_figures(timing),
            "ratio": _against(timings.get(AUTO), timing),
            "roofline": share,
        }


def _figures(timing: Timing) -> dict[str, Any]:
    fastest, counts = min(timing.seconds.values()), {"retries": timing.retries, "noisy": timing.noisy}
    return {"seconds": timing.median, "fastest": fastest, "samples": len(timing.seconds), **counts}


def _against(auto: Timing | None, timing: Timing) -> float | None:
    return None if auto is None or auto.error is not None else paired_ratio(auto, timing)
