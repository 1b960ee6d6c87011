"""How long a GPU run should take: from kernels and seconds that were measured, before anything is started.

Compiling: kernels and seconds of each group as :mod:`benchmarks.gpu_cache` measured them, none where the archive
brought them. A check: what the checks of its phase took so far, until then ``CHECK`` seconds of yardsticks. A
workload of the benchmark: its graph as it was built and counted on one core, and each of its methods ``METHOD``
seconds, those of FlexAttention ``FLEX`` for each pass that is compiled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.groups import Group, Lines
from benchmarks.gpu.methods import methods_of
from benchmarks.gpu.workloads import WORKLOADS
from benchmarks.workloads import FLEX as PEER_FLEX

__all__ = ["Step", "checked_step", "measured_kernels", "plan", "timed_step"]

CHECK, SANITIZED, METHOD, FLEX, COMPILED = 0.15, 60.0, 3.0, 10.0, 0.9
FEWEST = 5  # results from which a pace is taken
KERNELS = Path(__file__).parent / "kernels.json"
# seconds of building a graph and counting its edges and tiles, on one slow core
BUILT = {"bigbird131k": 5.0, "bigbird65k": 14.0, "random131k": 1.0, "random1m": 7.0, "barabasi1m": 17.0}
BUILT |= {"uniform2m": 34.0}
COMPILES_GRAPHS = ("flex", PEER_FLEX)


@dataclass(frozen=True)
class Step:
    """What is left of a phase: processes, checks or methods, kernels to compile, and seconds."""

    name: str
    groups: int
    units: int
    kernels: int
    seconds: float


def measured_kernels() -> dict[str, Any]:
    """Kernels of each group and seconds of compiling them, as :mod:`benchmarks.gpu_cache` counted them."""
    return dict(json.loads(KERNELS.read_text())) if KERNELS.exists() else {}


def checked_step(phase: str, found: Sequence[Group], jobs: int, ready: float) -> Step:
    """A phase of checks; ``ready`` kernels are there already. Each group gets what it should take."""
    pace = _pace(phase, found)
    left = [group for group in found if group.waiting]
    kernels = {group.name: _kernels(phase, group, ready) for group in left}
    for group in left:
        group.seconds = kernels[group.name][1] + sum(_seconds(check, pace) for check in group.waiting)
    longest = max((group.seconds for group in left), default=0.0)
    shared = sum(group.seconds for group in left) / jobs
    checks = sum(len(group.waiting) for group in left)
    compiled = sum(count for count, _ in kernels.values())
    return Step(phase, len(left), checks, compiled, max(longest, shared))


def _pace(phase: str, found: Sequence[Group]) -> float:
    """Seconds of a check of this phase."""
    taken = [seconds for group in found for seconds in Lines.read(group.file).seconds.values()]
    if len(taken) >= FEWEST:
        return sum(taken) / len(taken)
    return SANITIZED if phase == "sanitizer" else CHECK


def _seconds(check: Any, pace: float) -> float:
    if check.skipped is not None:
        return 0.0
    return pace + (2 * FLEX if check.backend in COMPILES_GRAPHS else 0.0)


def _kernels(phase: str, group: Group, ready: float) -> tuple[int, float]:
    """How many kernels of the group are not there yet, and seconds of compiling them."""
    known = measured_kernels()
    counted = known.get(group.name.removeprefix(f"{phase} "))
    if phase != "core" or counted is None or ready >= sum(entry["kernels"] for entry in known.values()):
        return 0, 0.0
    share = len(group.waiting) / len(group.checks)
    return round(share * counted["kernels"]), share * float(counted["seconds"])


def timed_step(
    name: str, workloads: Sequence[str], with_peers: bool, done: Collection[tuple[str, str]]
) -> Step:
    """A benchmark of these workloads, of which ``done`` are the (workload, method) that have been run."""
    seconds, methods = 0.0, 0
    for workload in workloads:
        found = methods_of(WORKLOADS[workload].peers, with_peers)
        waiting = [method.name for method in found if (workload, method.name) not in done]
        methods += len(waiting)
        if waiting:
            seconds += BUILT.get(workload, 0.0) + sum(map(_of_method, waiting))
    return Step(name, 1 if methods else 0, methods, 0, seconds)


def _of_method(name: str) -> float:
    return METHOD + (2 * FLEX if name in COMPILES_GRAPHS else 0.0)


def plan(steps: Sequence[Step], seconds: float) -> str:
    """A line for each step, and in which call of so many seconds it should end."""
    head = ("phase", "processes", "checks", "kernels", "seconds", "ends at", "call")
    rows, end = [], 0.0
    for step in steps:
        end += step.seconds
        call = max(1, math.ceil(end / seconds))
        about = step.groups, step.units, step.kernels, f"{step.seconds:.0f}", f"{end:.0f}", call
        rows.append((step.name, *map(str, about)))
    lines = ["{:<11}{:>10}{:>8}{:>9}{:>9}{:>9}{:>6}".format(*row) for row in [head, *rows]]
    return "\n".join([*lines, f"in all about {end:.0f} s: {rows[-1][-1]} calls of {seconds:.0f} s"])
