"""Two commits, workload by workload, in one run: ``python -m benchmarks compare CHECKOUT``.

For each workload two processes hold the same inputs, one with the package of this checkout, one with that of the
other; calls of ``backend="auto"`` are timed in turns. The record, as ``--json`` writes it:

- ``bench``: "compare"; ``other``: the other checkout; date, commit, processor, threads, versions, ...
- ``cases``: one for each workload and pass: ``seconds`` and ``other_seconds``, the least times, ``median`` and
  ``other_median``, ``samples``, and ``ratio``, the least time over that of the other
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
from benchmarks.records import Record, circumstances
from benchmarks.table import markdown
from benchmarks.workloads import TWELVE, select

__all__ = ["add_options", "run", "text"]

WARM = 3  # rounds before those that count
# The package of a checkout, then the workloads of this one. Each line that is read is answered by the least
# seconds of the calls that fit into 20 ms.
PROGRAM = """
import sys, time, torch
sys.path.insert(0, sys.argv[1])
import gnn_attention
sys.path.insert(0, sys.argv[2])
from benchmarks.methods import along_graph
from benchmarks.workloads import WORKLOADS
problem = WORKLOADS[sys.argv[3]].problem()
prepared = along_graph("auto", problem)
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
    """The options of the suite."""
    parser.add_argument("checkout", type=Path, help="of another commit, such as a git worktree")
    parser.add_argument("--workloads", metavar="A,B,...", default=TWELVE)
    parser.add_argument("--rounds", type=int, default=20, help="samples of each (default: 20)")


def run(args: argparse.Namespace) -> Record:
    """Both checkouts on every workload; ValueError for a folder that holds no package, or an unknown workload."""
    if not (args.checkout / "gnn_attention").is_dir():
        raise ValueError(f"{args.checkout} holds no package gnn_attention: give another checkout")
    cases = []
    for workload in select(args.workloads.split(",")):
        print(workload.title, file=sys.stderr, flush=True)
        with _timer(ROOT, workload.name) as ours, _timer(args.checkout, workload.name) as theirs:
            for which in ("forward", "both"):
                turns = [(ours(which), theirs(which)) for _ in range(args.rounds + WARM)]
                own, other = zip(*turns[WARM:], strict=True)
                case = {"workload": workload.name, "pass": which, "samples": len(own)}
                case |= {"seconds": min(own), "median": statistics.median(own)}
                case |= {"other_seconds": min(other), "other_median": statistics.median(other)}
                cases.append({**case, "ratio": min(own) / min(other)})
    return {"bench": "compare", "schema": 1, "other": str(args.checkout), **circumstances(), "cases": cases}


@contextmanager
def _timer(checkout: Path, workload: str) -> Iterator[Callable[[str], float]]:
    """A function that gives the seconds of a call of a pass, timed in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(checkout.resolve()), str(ROOT), workload]
    environment = {**os.environ, **BOUND_THREADS, "PYTHONPATH": ""}  # but for the checkouts
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd="/", stdin=pipe, stdout=pipe, text=True, env=environment) as process:

        def ask(which: str) -> float:
            assert process.stdin is not None
            assert process.stdout is not None
            print(which, file=process.stdin, flush=True)
            return float(process.stdout.readline() or "nan")

        yield ask
        process.kill()


def text(record: Record) -> str:
    """The record as a table: milliseconds, least and median, here and in the other checkout."""
    names = ("seconds", "other_seconds", "median", "other_median")
    rows = []
    for case in record["cases"]:
        times = (f"{case[name] * 1e3:.3f}" for name in names)
        rows.append([case["workload"], case["pass"], *times, f"{case['ratio']:.3f}"])
    head = ["workload", "pass", "least, ms", "other", "median, ms", "other", "ratio of the least"]
    title = f"{record['commit']} against {record['other']}, {record['processor']}"
    return f"{title}\n\n{markdown(head, rows)}"
