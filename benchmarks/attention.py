"""Attention workloads, every backend and every peer: ``python -m benchmarks attention``.

Each workload runs in a fresh process: every method and pass is held against float64, then its peak memory is
measured, then all are timed in interleaved rounds. The record, as ``--json`` writes it:

- ``bench``: "attention"; ``quick`` true or false; date, commit, processor, threads, versions, ...
- ``settings``: how long was measured, see :class:`~benchmarks.measuring.Settings`
- ``workloads``: one for each graph: ``workload, title, tokens, edges, heads, dim``, ``plan_s`` (graph built) and
  ``limits`` (``gemm_gflops``, measured in the same process)
- ``cases``: one for each workload, method and pass ("forward", "both" = forward and backward), with the fields of
  :mod:`benchmarks.measuring` (the least is ``fastest``), and ``ratio`` (median paired ratio to "auto": how many
  times faster auto is), ``memory_mb`` (peak of a call, outputs and gradients included), ``roofline`` (share of the
  matrix-product rate)
- ``targets``: :mod:`benchmarks.targets` with the measured value of each, met or not
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks import process, targets
from benchmarks.measuring import Bench, Settings, Trial, paired_ratio, timed_rounds
from benchmarks.methods import AUTO, PEERS, Method, ours
from benchmarks.records import Record, circumstances
from benchmarks.table import Columns, methods_table, targets_table
from benchmarks.workloads import WORKLOADS, Workload, select

__all__ = ["PASSES", "add_options", "measure", "measure_workload", "run", "text"]

PASSES = ("forward", "both")
COLUMNS: Columns = {
    "ms": ("seconds", 1e3, ""),
    "least, ms": ("fastest", 1e3, ""),
    "of auto": ("ratio", 1.0, "x"),
    "MB": ("memory_mb", 1.0, ""),
    "roofline": ("roofline", 100.0, " %"),
    "samples": ("samples", 1.0, ""),
}
PLACE = {"allocator": "default"}  # a field of older records
QUICK = Settings(budget=0.3, most=9)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the suite."""
    add = parser.add_argument
    add("--workloads", metavar="A,B,...", help="names such as b8192, or their letters")
    add("--quick", action="store_true", help="the small workloads, few samples (about 3 minutes)")
    add("--no-peers", action="store_true", help="ours alone")
    add("--memory", type=float, metavar="GIB", default=14.0, help="leave out what needs more (default: 14)")
    add("--slowest", type=float, default=20.0, help="leave out what takes more seconds (default: 20)")


def run(args: argparse.Namespace) -> Record:
    """All chosen workloads as one record, after Ctrl-C those that were measured; ValueError for an unknown one."""
    names = [name.strip() for name in args.workloads.split(",")] if args.workloads else None
    workloads = select(names, args.quick)
    settings = replace(QUICK if args.quick else Settings(), memory=args.memory * 2**30, slowest=args.slowest)
    start, measured = time.perf_counter(), []
    arguments: Record = {"settings": asdict(settings), "with_peers": not args.no_peers}
    arguments["threads"] = torch.get_num_threads()
    # compiled by one child, used by the next, and by no other process
    with tempfile.TemporaryDirectory() as kernels:
        variables = {**process.BOUND_THREADS, "TORCHINDUCTOR_CACHE_DIR": kernels}
        try:
            for number, workload in enumerate(workloads, 1):
                print(f"{number} of {len(workloads)}: {workload.title}", file=sys.stderr, flush=True)
                measured.append(_in_a_child(workload, arguments, variables))
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


def _in_a_child(workload: Workload, arguments: Record, variables: dict[str, str]) -> Record:
    """A workload in a fresh process; if that dies, the record says why."""
    arguments = {"name": workload.name, **arguments}
    try:
        result: Record = process.in_a_process(__name__, "measure_workload", arguments, variables)
    except RuntimeError as error:
        about = {"workload": workload.name, "title": workload.title, "tokens": workload.tokens, **PLACE}
        return {"workload": {**about, "status": "failed", "reason": process.one_line(error)}, "cases": []}
    return result


def _methods(workload: Workload, with_peers: bool) -> list[Method]:
    return [*ours(), *(PEERS[name] for name in workload.peers if with_peers)]


def measure_workload(name: str, settings: dict[str, Any], with_peers: bool, threads: int) -> Record:
    """Measure a workload of the table in this process: its description, and its cases."""
    workload, limited = WORKLOADS[name], Settings(**settings)
    process.limit_memory(int(limited.memory) + 3 * 2**30)
    torch.set_num_threads(threads)
    return measure(workload, _methods(workload, with_peers), limited)


def measure(workload: Workload, methods: Sequence[Method], settings: Settings) -> Record:
    """Every method on a workload: ``workload`` describes it, ``cases`` are those of both passes."""
    bench, a = Bench(workload, torch.device("cpu"), settings), torch.ones(2048, 2048)
    # what this machine can do here and now, in GFLOP/s
    rate = bench.watch.rate(lambda: a @ a, 2e-9 * 2048**3)
    trials = [trial for method in methods for trial in _trials(bench, method)]
    problem = bench.problem
    for which in PASSES:
        own = [trial for trial in trials if trial.case["pass"] == which and trial.step is not None]
        auto = next((trial for trial in own if trial.case["method"] == AUTO), None)
        timed_rounds(bench, own)
        for trial in own:
            if trial.step is not None:
                trial.case |= trial.figures()
                trial.case["fastest"] = trial.case.pop("least")
                trial.case["ratio"] = None if auto is None else paired_ratio(auto, trial)
                trial.case["roofline"] = problem.flops(which) / trial.case["seconds"] / (1e9 * rate)
    about: Record = {"workload": workload.name, "title": workload.title, "tokens": workload.tokens, **PLACE}
    about |= {"plan_s": bench.build_s, "limits": {"gemm_gflops": rate}, "layer": workload.layer}
    about |= {"edges": problem.graph.num_edges, "heads": problem.heads, "dim": problem.dim}
    return {"workload": about, "cases": [{**PLACE, **trial.case} for trial in trials]}


def _trials(bench: Bench, method: Method) -> tuple[Trial, Trial]:
    """Both passes of a method; what cannot run forward is not tried with its backward pass."""
    forward = bench.trial(method, "forward")
    if forward.step is None:
        return forward, Trial({**forward.case, "pass": "both"})
    return forward, bench.trial(method, "both")


def text(record: Record) -> str:
    """Every workload with every method, forward / forward and backward, then the targets."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
    machine = f"{record['processor']}, {record['threads']} threads, {record['memory_gib']} GiB"
    parts = [f"{machine}; {versions}; {record['date']}, {record['took_s']:.0f} s"]
    for about in record["workloads"]:
        title = f"{about['workload']}: {about['title']}"
        if "limits" in about:
            title += f": {about['edges']:,} edges; {about['limits']['gemm_gflops']:.0f} GFLOP/s"
        parts.append(f"{title}\n{methods_table(record, about['workload'], PASSES, COLUMNS)}")
    return "\n\n".join([*parts, *targets_table(record)])
