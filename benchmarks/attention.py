"""Attention workloads, every backend and every peer: ``python -m benchmarks attention``.

Each workload runs in a fresh process: every method and pass is held against float64, then its peak memory is
measured, then all are timed in interleaved rounds. The record, as ``--json`` writes it:

- ``bench``: "attention"; ``quick`` true or false; date, commit, processor, threads, versions, ...
- ``settings``: how long was measured, see :class:`~benchmarks.measure.Settings`
- ``workloads``: one for each graph: ``workload, title, tokens, edges, heads, dim``, ``plan_s`` (graph built) and
  ``limits`` (``gemm_gflops``, measured in the same process)
- ``cases``: one for each workload, method and pass ("forward", "both" = forward and backward): ``status``
  "measured" or why not ("missing", "refused", "out of memory", "too slow", "failed", "wrong") with its
  ``reason``; of a measured one ``seconds`` (median), ``fastest``, ``first_s`` (its first call: plans, compilers),
  ``samples``, ``ratio`` (median paired ratio to "auto": how many times faster auto is), ``memory_mb`` (peak of a
  call, outputs and gradients included), ``roofline`` (share of the matrix-product rate), ``output_error`` and
  ``gradient_error`` (of SDPA's own); of auto ``new_graph_s``, the first call along a graph
- ``targets``: :mod:`benchmarks.targets` with the measured value of each, met or not

``allocator`` is "default" throughout; older records may hold others.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from benchmarks import process, targets
from benchmarks.checked import Checked
from benchmarks.measure import Settings, paired_ratio, product_rate, seconds_of, timed_rounds
from benchmarks.methods import AUTO, PEERS, Method, ours, refusal, timed_call
from benchmarks.records import Record, circumstances
from benchmarks.workloads import FAMILIES, WORKLOADS, Problem, Workload, select

__all__ = ["PASSES", "add_options", "measure_problem", "measure_workload", "run"]

PASSES = ("forward", "both")
QUICK = Settings(budget=0.3, most=9, slowest=4.0)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the suite."""
    add, default = parser.add_argument, Settings()
    letters = ", ".join(f"{letter} {family}" for letter, family in FAMILIES.items())
    add("--workloads", metavar="A,B,...", help=f"letters ({letters}) or names such as b8192")
    add("--quick", action="store_true", help="the small workloads, few samples (about 3 minutes)")
    add("--no-peers", action="store_true", help="ours alone")
    add("--memory", type=float, metavar="GIB", default=14.0, help="leave out what needs more (default: 14)")
    add("--budget", type=float, help=f"seconds for each method and pass (default: {default.budget:g})")
    add("--slowest", type=float, help=f"leave out what takes more seconds (default: {default.slowest:g})")


def run(args: argparse.Namespace) -> Record:
    """All chosen workloads as one record, after Ctrl-C those that were measured; ValueError for wrong options."""
    names = [name.strip() for name in args.workloads.split(",")] if args.workloads else None
    workloads, settings = select(names, args.quick), QUICK if args.quick else Settings()
    given = {"memory": args.memory * 2**30, "budget": args.budget, "slowest": args.slowest}
    for option, value in given.items():
        if value is not None and not value > 0:
            raise ValueError(f"--{option} must be above 0, got {getattr(args, option)}")
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    start, measured, threads = time.perf_counter(), [], torch.get_num_threads()
    # compiled by one child, used by the next, and by no other process
    with tempfile.TemporaryDirectory() as kernels:
        variables = {**process.BOUND_THREADS, "TORCHINDUCTOR_CACHE_DIR": kernels}
        try:
            for number, workload in enumerate(workloads, 1):
                print(f"{number} of {len(workloads)}: {workload.title}", file=sys.stderr, flush=True)
                measured.append(_in_a_child(workload, settings, not args.no_peers, threads, variables))
        except KeyboardInterrupt:
            if not measured:
                raise
    record = {
        "bench": "attention",
        "schema": 1,
        "quick": args.quick,
        "interrupted": len(measured) < len(workloads),
        **circumstances(),
        "took_s": round(time.perf_counter() - start, 1),
        "settings": asdict(settings),
        "workloads": [result["workload"] for result in measured],
        "cases": [case for result in measured for case in result["cases"]],
    }
    return {**record, "targets": targets.judged(record)}


def _in_a_child(
    workload: Workload, settings: Settings, with_peers: bool, threads: int, variables: dict[str, str]
) -> dict[str, Any]:
    """A workload in a fresh process; if that dies, all its methods have failed."""
    arguments = {"name": workload.name, "settings": asdict(settings)}
    arguments |= {"with_peers": with_peers, "threads": threads}
    try:
        result: dict[str, Any] = process.in_a_process(__name__, "measure_workload", arguments, variables)
    except RuntimeError as error:
        place = {"workload": workload.name, "allocator": "default"}
        failed = {**place, "status": "failed", "reason": process.one_line(error)}
        methods = _methods(workload, with_peers)
        cases = [
            {**failed, "method": m.name, "ours": m.ours, "pass": which} for m in methods for which in PASSES
        ]
        return {"workload": {**failed, "title": workload.title, "tokens": workload.tokens}, "cases": cases}
    return result


def _methods(workload: Workload, with_peers: bool) -> list[Method]:
    return [*ours(), *(PEERS[name] for name in workload.peers if with_peers)]


def measure_workload(name: str, settings: dict[str, Any], with_peers: bool, threads: int) -> Record:
    """Measure a workload of the table in this process."""
    workload, limited = WORKLOADS[name], Settings(**settings)
    process.limit_memory(int(limited.memory) + 3 * 2**30)
    torch.set_num_threads(threads)
    start = time.perf_counter()
    problem = workload.problem()
    place = {"workload": name, "allocator": "default"}
    about = {**place, "title": workload.title, "tokens": workload.tokens}
    about["plan_s"] = time.perf_counter() - start
    more, cases = measure_problem(problem, _methods(workload, with_peers), limited)
    return {"workload": {**about, **more}, "cases": [{**place, **case} for case in cases]}


@dataclass
class Case:
    """One method and pass: what is known of it, and its call while it is to be timed."""

    method: Method
    which: str
    known: Record = field(default_factory=dict)
    call: Callable[[], object] | None = None
    estimate: float = 0.0

    def close(self, status: str, reason: str) -> None:
        """Leave the case out, with the reason."""
        self.known |= {"status": status, "reason": reason}
        self.call = None


def measure_problem(
    problem: Problem, methods: Sequence[Method], settings: Settings
) -> tuple[Record, list[Record]]:
    """Correctness, memory and time of every method on a problem: the workload's description, and its cases."""
    cases = [Case(method, which) for method in methods for which in PASSES]
    checked, rate = Checked(problem), product_rate()
    for forward, both in zip(cases[::2], cases[1::2], strict=True):
        for case in (forward, both):
            if case is both and forward.call is None:
                both.known = {name: forward.known[name] for name in ("status", "reason")}
            else:
                _attempt(case, problem, checked, settings)
    for which in PASSES:
        _time([case for case in cases if case.call and case.which == which], problem, settings, rate)
    graph = problem.graph
    about = {"edges": graph.num_edges, "heads": problem.heads, "dim": problem.dim}
    about |= {"layer": problem.layer is not None, "limits": {"gemm_gflops": rate}}
    return about, [
        {"method": case.method.name, "ours": case.method.ours, "pass": case.which, **case.known}
        for case in cases
    ]


def _attempt(case: Case, problem: Problem, checked: Checked, settings: Settings) -> None:
    """Hold a case against float64 and measure the memory of a call, or say why not."""
    refused = refusal(case.method, problem, case.which)
    if refused is not None:
        return case.close(**refused)
    backward = case.which == "both"
    try:
        start = time.perf_counter()
        prepared = case.method.prepare(problem)
        verdict = checked.verdict(prepared, backward)
        case.known["first_s"] = time.perf_counter() - start
        case.known |= {"output_error": verdict.output, "gradient_error": verdict.gradient}
        if not verdict.passed:
            return case.close("wrong", str(verdict))
        case.call = timed_call(prepared, problem, backward)
        start = time.perf_counter()
        case.known["memory_mb"] = process.peak_memory(case.call)
        case.estimate = time.perf_counter() - start
        if case.estimate > settings.slowest:
            reason = f"a call took {case.estimate:.2g} s, the limit is {settings.slowest:.2g}"
            return case.close("too slow", reason)
        if case.method.name == AUTO and not backward:
            # the choice, the plan and the call along a graph of which nothing is known
            new = replace(problem, graph=replace(problem.graph))
            case.known["new_graph_s"] = seconds_of(timed_call(case.method.prepare(new), new, backward))
    except Exception as error:
        _fail(case, error)


def _fail(case: Case, error: Exception) -> None:
    message = process.one_line(error)
    refused = isinstance(error, NotImplementedError)
    short = process.is_out_of_memory(message)
    case.close("refused" if refused else "out of memory" if short else "failed", message)


def _time(cases: Sequence[Case], problem: Problem, settings: Settings, rate: float) -> None:
    """Time the cases of a pass in interleaved rounds."""
    calls = {case.method.name: case.call for case in cases if case.call is not None}
    timings = timed_rounds(calls, settings, {case.method.name: case.estimate for case in cases})
    auto = timings.get(AUTO)
    for case in cases:
        timing = timings[case.method.name]
        if timing.error is not None:
            _fail(case, timing.error)
            continue
        case.known |= {
            "status": "measured",
            "seconds": timing.median,
            "fastest": min(timing.seconds.values()),
            "samples": len(timing.seconds),
            "ratio": None if auto is None or auto.error else paired_ratio(auto, timing),
            "roofline": problem.flops(case.which) / timing.median / (1e9 * rate),
        }
