"""Measure every backend and every peer on the attention workloads: ``python -m benchmarks attention``.

Each workload runs in a fresh process. Every method and pass is first compared with float64, then its peak memory
is measured, and finally all methods are timed in interleaved rounds. The record that ``--json`` writes has the keys

- ``bench``: "attention"; ``quick`` true or false; date, commit, processor, threads, versions, ...
- ``settings``: how long to measure, see :class:`~benchmarks.measuring.Settings`
- ``workloads``: one entry for each graph: ``workload, title, tokens, edges, heads, dim``, ``plan_s`` (seconds to
  build the graph) and ``limits`` (``gemm_gflops``, measured in the same process)
- ``cases``: one entry for each workload, method and pass ("forward", "both" = forward and backward), with the fields
  of :mod:`benchmarks.measuring` (the least time is ``fastest``), and ``ratio`` (median paired ratio to "auto": how
  many times faster auto is), ``memory_mb`` (peak memory of a call, outputs and gradients included), ``roofline``
  (share of the matrix-product rate)
- ``targets``: the rows of :mod:`benchmarks.targets`, each with its measured value and whether it is met
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
from benchmarks.measuring import Bench, Settings, Trial, paired_ratio, time_rounds
from benchmarks.methods import AUTO, PEERS, Method, ours
from benchmarks.records import Record, describe_machine
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
ALLOCATOR = {"allocator": "default"}  # docs/make.py selects cases by this field
QUICK = Settings(budget=0.3, most=9)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the suite."""
    add = parser.add_argument
    add("--workloads", metavar="A,B,...", help="names such as b8192, or their first letters")
    add("--quick", action="store_true", help="measure small workloads with few samples (about 3 minutes)")
    add("--no-peers", action="store_true", help="measure only the backends of this library")
    add("--memory", type=float, metavar="GIB", default=14.0, help="skip methods that need more (default: 14)")
    add("--slowest", type=float, default=20.0, help="skip calls that take more seconds (default: 20)")


def run(args: argparse.Namespace) -> Record:
    """Measure the selected workloads; Ctrl-C keeps those already measured, an unknown name raises ValueError."""
    names = [name.strip() for name in args.workloads.split(",")] if args.workloads else None
    workloads = select(names, args.quick)
    settings = replace(QUICK if args.quick else Settings(), memory=args.memory * 2**30, slowest=args.slowest)
    start = time.perf_counter()
    results: list[Record] = []
    arguments: Record = {"settings": asdict(settings), "with_peers": not args.no_peers}
    arguments["threads"] = torch.get_num_threads()
    # The child processes share compiled kernels with each other but with no other run.
    with tempfile.TemporaryDirectory() as kernels:
        variables = {**process.BOUND_THREADS, "TORCHINDUCTOR_CACHE_DIR": kernels}
        try:
            for number, workload in enumerate(workloads, 1):
                print(f"{number} of {len(workloads)}: {workload.title}", file=sys.stderr, flush=True)
                results.append(_measure_in_child(workload, arguments, variables))
        except KeyboardInterrupt:
            if not results:
                raise
    record = {
        "bench": "attention",
        "schema": 1,
        "quick": args.quick,
        "interrupted": len(results) < len(workloads),
        **describe_machine(),
        "took_s": round(time.perf_counter() - start, 1),
        "settings": asdict(settings),
        "workloads": [result["workload"] for result in results],
        "cases": [case for result in results for case in result["cases"]],
    }
    return {**record, "targets": targets.judge_cpu(record)}


def _measure_in_child(workload: Workload, arguments: Record, variables: dict[str, str]) -> Record:
    """Measure a workload in a fresh process; if the process fails, the result gives the reason."""
    arguments = {"name": workload.name, **arguments}
    try:
        result: Record = process.run_in_process(__name__, "measure_workload", arguments, variables)
    except RuntimeError as error:
        about = {"workload": workload.name, "title": workload.title, "tokens": workload.tokens, **ALLOCATOR}
        return {"workload": {**about, "status": "failed", "reason": process.one_line(error)}, "cases": []}
    return result


def measure_workload(name: str, settings: dict[str, Any], with_peers: bool, threads: int) -> Record:
    """Measure the workload ``name`` in this process and return its description and its cases."""
    workload, limits = WORKLOADS[name], Settings(**settings)
    process.limit_memory(int(limits.memory) + 3 * 2**30)
    torch.set_num_threads(threads)
    peers = [PEERS[name] for name in workload.peers] if with_peers else []
    return measure(workload, [*ours(), *peers], limits)


def measure(workload: Workload, methods: Sequence[Method], settings: Settings) -> Record:
    """Measure every method: ``workload`` describes the workload, ``cases`` has both passes of each method."""
    bench = Bench(workload, torch.device("cpu"), settings)
    matrix = torch.ones(2048, 2048)
    # The rate of matrix products, in GFLOP/s, bounds every method on this machine.
    rate = bench.watch.rate(lambda: matrix @ matrix, 2e-9 * 2048**3)
    trials = [trial for method in methods for trial in _trials(bench, method)]
    problem = bench.problem
    for which in PASSES:
        trials_of_pass = [t for t in trials if t.case["pass"] == which and t.step is not None]
        auto = next((trial for trial in trials_of_pass if trial.case["method"] == AUTO), None)
        time_rounds(bench, trials_of_pass)
        for trial in trials_of_pass:
            if trial.step is not None:
                trial.case |= trial.figures()
                trial.case["fastest"] = trial.case.pop("least")
                trial.case["ratio"] = None if auto is None else paired_ratio(auto, trial)
                trial.case["roofline"] = problem.flops(which) / trial.case["seconds"] / (1e9 * rate)
    about: Record = {"workload": workload.name, "title": workload.title, "tokens": workload.tokens}
    about |= ALLOCATOR
    about |= {"plan_s": bench.build_s, "limits": {"gemm_gflops": rate}, "layer": workload.layer}
    about |= {"edges": problem.graph.num_edges, "heads": problem.heads, "dim": problem.dim}
    return {"workload": about, "cases": [{**ALLOCATOR, **trial.case} for trial in trials]}


def _trials(bench: Bench, method: Method) -> tuple[Trial, Trial]:
    """Prepare both passes of a method; a method that cannot run forward is not tried with backward."""
    forward = bench.trial(method, "forward")
    if forward.step is None:
        return forward, Trial({**forward.case, "pass": "both"})
    return forward, bench.trial(method, "both")


def text(record: Record) -> str:
    """Format a table of methods for each workload (forward / forward and backward), then the targets."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
    machine = f"{record['processor']}, {record['threads']} threads, {record['memory_gib']} GiB"
    parts = [f"{machine}; {versions}; {record['date']}, {record['took_s']:.0f} s"]
    for about in record["workloads"]:
        title = f"{about['workload']}: {about['title']}"
        if "limits" in about:
            title += f": {about['edges']:,} edges; {about['limits']['gemm_gflops']:.0f} GFLOP/s"
        parts.append(f"{title}\n{methods_table(record, about['workload'], PASSES, COLUMNS)}")
    return "\n\n".join([*parts, *targets_table(record)])
