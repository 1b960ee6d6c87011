"""Time how long commands take to start, compared with ``import gnn_attention``: ``python -m benchmarks start``.

Each program runs once a round in a fresh process; a ratio compares the least times of one run. No start can be
faster than ``import torch``. The record that ``--json`` writes has the keys

- ``bench``: "start"; ``schema`` 1; date, commit, processor, threads, versions, ...
- ``cases``: one for each ``program``: ``seconds``, the least time, ``median``, the number of ``samples``, and
  ``ratio``, the least time divided by that of ``import gnn_attention``
- ``targets``: the ratio of each command, which should be at most 1.3
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence

from benchmarks import process, table
from benchmarks.records import Record, describe_machine
from benchmarks.targets import target_row

__all__ = ["PROGRAMS", "add_options", "run", "seconds_of", "text"]

LIBRARY = "import gnn_attention"
COMMANDS = ("--help", "graphs", "draw causal(6)")
PROGRAMS: dict[str, Sequence[str]] = {name: ("-c", name) for name in ("import torch", LIBRARY)}
PROGRAMS |= {f"gnn-attention {command}": ("-m", "gnn_attention", *command.split()) for command in COMMANDS}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the suite."""
    parser.add_argument("--rounds", type=int, default=10, help="starts of each program (default: 10)")


def run(args: argparse.Namespace) -> Record:
    """Start every program in every round and return one record."""
    starts = [{name: seconds_of(program) for name, program in PROGRAMS.items()} for _ in range(args.rounds)]
    cases, targets = [], []
    for name in PROGRAMS:
        times = [seconds[name] for seconds in starts]
        ratio = min(times) / min(seconds[LIBRARY] for seconds in starts)
        figures = {"seconds": min(times), "median": statistics.median(times), "samples": len(times)}
        cases.append({"program": name, **figures, "ratio": ratio})
        if name.startswith("gnn-attention"):
            words = f"times the time of {LIBRARY}"
            targets.append(target_row(name, "start", "at most", 1.3, words, ratio))
    return {"bench": "start", "schema": 1, **describe_machine(), "cases": cases, "targets": targets}


def seconds_of(arguments: Sequence[str]) -> float:
    """Return the run time of a fresh interpreter with these arguments; CalledProcessError if it fails."""
    command = [sys.executable, *arguments]
    return process.seconds(lambda: subprocess.run(command, cwd=process.ROOT, capture_output=True, check=True))


def text(record: Record) -> str:
    """Format the record as two tables."""
    head = ["program", "least, s", "median, s", f"of {LIBRARY}"]
    rows = (
        [case["program"], *(f"{case[name]:.2f}" for name in ("seconds", "median", "ratio"))]
        for case in record["cases"]
    )
    title = f"{record['cases'][0]['samples']} rounds, {record['processor']}, {record['threads']} threads"
    return "\n\n".join([title, table.markdown(head, rows), *table.targets_table(record)])
