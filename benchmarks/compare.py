"""Compare two commits, workload by workload, in one run: ``python -m benchmarks compare CHECKOUT``.

For each workload two processes hold the same inputs, one with the package of this checkout and one with that of the
other; their calls of ``backend="auto"`` are timed alternately. The record that ``--json`` writes has the keys

- ``bench``: "compare"; ``other``: the other checkout; date, commit, processor, threads, versions, ...
- ``cases``: one for each workload and pass: ``seconds`` and ``other_seconds``, the least times, ``median`` and
  ``other_median``, ``samples``, and ``ratio``, our least time divided by that of the other checkout
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.process import BOUND_THREADS, ROOT
from benchmarks.records import Record, describe_machine
from benchmarks.table import markdown
from benchmarks.workloads import TWELVE, select

__all__ = ["add_options", "run", "text"]

WARM_UP = 3  # rounds that are not counted
# The program imports the package of a checkout, then the workloads of this one. It answers each line of input with
# the least seconds of the calls that fit into 20 ms.
PROGRAM = """
import sys, time, torch
sys.path.insert(0, sys.argv[1])
import gnn_attention
sys.path.insert(0, sys.argv[2])
from benchmarks.methods import prepare_ours
from benchmarks.workloads import WORKLOADS
problem = WORKLOADS[sys.argv[3]].problem()
prepared = prepare_ours("auto", problem)
leaves = [x.detach().requires_grad_() for x in problem.inputs]
def forward():
    with torch.no_grad():
        prepared.call(*problem.inputs)
def both():
    torch.autograd.grad(prepared.call(*leaves), [*leaves, *prepared.parameters], problem.grad_out)
for line in sys.stdin:
    call, times = {"forward": forward, "both": both}[line.strip()], []
    while sum(times) < 0.02:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    print(min(times), flush=True)
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the suite."""
    parser.add_argument("checkout", type=Path, help="checkout of another commit, such as a git worktree")
    parser.add_argument("--workloads", metavar="A,B,...", default=TWELVE)
    parser.add_argument("--rounds", type=int, default=20, help="samples of each checkout (default: 20)")


def run(args: argparse.Namespace) -> Record:
    """Time both checkouts on every workload; ValueError for a folder without the package or an unknown workload."""
    if not (args.checkout / "gnn_attention").is_dir():
        raise ValueError(f"{args.checkout} holds no package gnn_attention: give another checkout")
    cases = []
    for workload in select(args.workloads.split(",")):
        print(workload.title, file=sys.stderr, flush=True)
        with _timer(ROOT, workload.name) as ours, _timer(args.checkout, workload.name) as theirs:
            for which in ("forward", "both"):
                rounds = [(ours(which), theirs(which)) for _ in range(args.rounds + WARM_UP)]
                our_times, their_times = zip(*rounds[WARM_UP:], strict=True)
                case = {"workload": workload.name, "pass": which, "samples": len(our_times)}
                case |= {"seconds": min(our_times), "median": statistics.median(our_times)}
                case |= {"other_seconds": min(their_times), "other_median": statistics.median(their_times)}
                cases.append({**case, "ratio": min(our_times) / min(their_times)})
    return {
        "bench": "compare",
        "schema": 1,
        "other": str(args.checkout),
        **describe_machine(),
        "cases": cases,
    }


@contextmanager
def _timer(checkout: Path, workload: str) -> Iterator[Callable[[str], float]]:
    """Start a process and yield a function that returns the seconds of one call of a pass in it."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(checkout.resolve()), str(ROOT), workload]
    # Without PYTHONPATH, the package can only come from the checkouts.
    environment = {**os.environ, **BOUND_THREADS, "PYTHONPATH": ""}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd="/", stdin=pipe, stdout=pipe, text=True, env=environment) as process:

        def time_pass(which: str) -> float:
            assert process.stdin is not None
            assert process.stdout is not None
            print(which, file=process.stdin, flush=True)
            return float(process.stdout.readline() or "nan")

        yield time_pass
        process.kill()


def text(record: Record) -> str:
    """Format the record as a table of milliseconds, least and median, of this and the other checkout."""
    names = ("seconds", "other_seconds", "median", "other_median")
    rows = []
    for case in record["cases"]:
        times = (f"{case[name] * 1e3:.3f}" for name in names)
        rows.append([case["workload"], case["pass"], *times, f"{case['ratio']:.3f}"])
    head = ["workload", "pass", "least, ms", "other", "median, ms", "other", "ratio of the least"]
    title = f"{record['commit']} against {record['other']}, {record['processor']}"
    return f"{title}\n\n{markdown(head, rows)}"
