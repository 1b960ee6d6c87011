"""A process that times calls whenever it is asked: the other side of :mod:`benchmarks.compare`.

It runs with the package of another commit, and so imports little of it.
"""

from __future__ import annotations

import sys

from benchmarks.measure import seconds_of
from benchmarks.methods import along_graph, timed_call
from benchmarks.workloads import WORKLOADS

__all__ = ["time_calls"]

SHORTEST = 0.02  # seconds of a sample


def time_calls(name: str) -> None:
    """Print the seconds of a call for each pass that is read, "forward" or "both"."""
    problem = WORKLOADS[name].problem()
    prepared = along_graph("auto", problem)
    calls = {which: timed_call(prepared, problem, which == "both") for which in ("forward", "both")}
    many: dict[str, int] = {}
    for line in sys.stdin:
        which = line.strip()
        seconds = seconds_of(calls[which], many.get(which, 1))
        # the first call plans; a later one says how many make a sample
        many[which] = 1 if which not in many else max(many[which], int(SHORTEST / seconds))
        print(seconds, flush=True)
