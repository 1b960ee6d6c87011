"""What a GPU run consists of: its phases, the checks of each, and the processes that run them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.gpu import groups
from benchmarks.gpu.groups import Group
from benchmarks.gpu.sanitizer import sanitizer_checks
from gnn_attention import verify
from gnn_attention.verify import Check
from gnn_attention.verify.selection import pairs
from tests.guarantees.gpu_core import FORMS, TRIAL, core_checks

__all__ = ["CHECKED", "Run", "groups_of", "phase_checks"]

CHECKED = ("first", "core", "sanitizer", "others")
OTHERS = ("triton", "varlen", "dense", "split", "flex")
# of a rehearsal: an interpreted program takes a tenth of a second, and there is one for each token or block,
# which are small in wide dtypes
TRIAL_DTYPES = ("bfloat16",)
TRIAL_NAMES = (
    "decode rows, ",
    "the weights dropped on decode rows",
    "isolated rows are exactly 0",
    "causal of ",
    "window of ",
)
TRIAL_ROWS = ("one token, ", "causal of ")
# each takes tens of gigabytes: together in one process, one after another
ALONE = "far"


@dataclass(frozen=True)
class Run:
    """Where, for how long, and whether it is a rehearsal."""

    out: Path
    device: str
    trial: bool
    jobs: int
    until: float

    @property
    def left(self) -> float:
        """Seconds."""
        return self.until - time.time()

    @property
    def options(self) -> list[str]:
        """Of the command line, for a process that does a part of it."""
        return ["--out", str(self.out), "--device", self.device, *(["--trial"] if self.trial else [])]


def phase_checks(run: Run, phase: str) -> list[Check]:
    """The checks of a phase, in the order of a process."""
    found = PHASES[phase](run)
    reason = unable() if run.trial else None
    if reason is None:
        return found
    return [replace(c, skipped=reason) if c.backend in FORMS else c for c in found]


def unable() -> str | None:
    """Why no kernel can be interpreted here; None if they can."""
    from benchmarks.gpu.interpreted import unable

    return unable()


def _first(run: Run) -> list[Check]:
    names = [*FORMS, *(("dense",) if run.trial else ("varlen", "flex", "dense"))]
    graph = "one token" if run.trial else "causal"
    found = verify.checks(run.device, ["bfloat16"], names, [graph], ["plain"], trained=False)
    call = f"{graph}, plain, inputs x1"
    return [check for check in found if check.group == "attend" and check.name == call]


def _core(run: Run) -> list[Check]:
    if not run.trial:
        return core_checks(run.device)
    return few([check for check in core_checks(run.device, TRIAL) if _rehearsed(check)])


def _rehearsed(check: Check) -> bool:
    """A few calls of every form, and of tiles also what takes longest."""
    if check.dtype not in TRIAL_DTYPES:
        return False
    if check.backend == "triton-rows":
        return check.dtype == "bfloat16" and check.name.startswith(TRIAL_ROWS)
    if check.backend == "triton-windows":
        return check.group in ("attend", "shapes", "large") and check.name.startswith(TRIAL_NAMES)
    return check.name.startswith(TRIAL_NAMES) or "new process" in check.name


def _sanitizer(run: Run) -> list[Check]:
    return sanitizer_checks(run.device, run.trial)


def _others(run: Run) -> list[Check]:
    checks = partial(verify.checks, run.device, trained=False)
    if run.trial:
        return few(list(checks(TRIAL_DTYPES, ["dense"])))
    every = list(checks(["tf32"], FORMS)), list(checks(backends=OTHERS))
    return [group[n] for group in every for n in pairs(group)]


PHASES = {"first": _first, "core": _core, "sanitizer": _sanitizer, "others": _others}


def few(checks: Sequence[Check]) -> list[Check]:
    """One of each kind for every backend and dtype, each time another: on other graphs, with other options."""
    kinds = defaultdict[tuple[object, ...], list[Check]](list)
    for check in checks:
        kinds[check.group, check.backend, check.dtype, "new process" in check.name].append(check)
    return [found[number * 7 % len(found)] for number, found in enumerate(kinds.values())]


def groups_of(run: Run, phase: str) -> dict[str, Group]:
    """The checks of a phase by process: one for each backend and dtype."""
    found = defaultdict[str, list[Check]](list)
    for check in phase_checks(run, phase):
        found[_process_of(phase, check)].append(check)
    return {name: _group(run, phase, name, checks) for name, checks in found.items()}


def _process_of(phase: str, check: Check) -> str:
    if phase == "first":
        return "all"
    if phase == "sanitizer":
        return "none" if check.skipped else f"{check.backend}.{check.name.partition(':')[0]}"
    return ALONE if check.group == ALONE else f"{check.backend}.{check.dtype}"


def _group(run: Run, phase: str, name: str, checks: Sequence[Check]) -> Group:
    def command(until: float) -> list[str]:
        given = ["--work", phase, "--group", name, "--until", str(until)]
        return groups.python("-m", "benchmarks.gpu_run", *given, *run.options)

    return Group(f"{phase} {name}", run.out / f"{phase}.{name}.jsonl", checks, command)
