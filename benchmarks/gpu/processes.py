"""Tasks in processes, whose results are lines of JSON in a file as soon as they are there.

A process that dies, or loses its GPU (after an illegal access every call fails), costs the task that it was at:
the group goes on behind it in a new process. After :data:`MOST_DEATHS` at tasks of one kind its other tasks of
the group are left out; those of other kinds are not. A task that runs out of memory beside others is run once
more at the end, alone. A process is ended together with all that it started.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import torch

from benchmarks.process import is_out_of_memory

__all__ = ["STOPPED", "Group", "Lines", "Task", "run_groups", "run_tasks"]

PATIENCE = 150.0  # seconds without a line after which a process is ended
MOST_DEATHS = 3
MOST_RESERVED = 2**30  # bytes that a process may hold on to between two tasks
FINISHED, LOST = 0, 75  # exit codes of a process: all done, its GPU is lost
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
STOPPED = Event()  # set where this program ends before its time


@dataclass(frozen=True)
class Task:
    """Work with a name, whose result is a dictionary; ``kind`` groups the tasks that die of one fault."""

    name: str
    kind: str
    run: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Group:
    """Tasks that one process does after another, started by ``command``; ``alone``: those short of memory."""

    file: Path
    tasks: Sequence[Task]
    command: Sequence[str]
    alone: bool = False

    @property
    def waiting(self) -> list[Task]:
        """The tasks that are still to be done."""
        lines = Lines.read(self.file)
        return [
            task
            for task in self.tasks
            if task.name not in lines.results
            and (task.name in lines.short_of_memory) is self.alone
            and max(lines.deaths[task.kind], lines.deaths[None]) < MOST_DEATHS
        ]


@dataclass
class Lines:
    """What stands in the file of a group: results, what ran out of memory, and deaths by kind of task.

    The result of a task that ended its process is ``{"death": why}``.
    """

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    short_of_memory: set[str] = field(default_factory=set)
    deaths: Counter[str | None] = field(default_factory=Counter)  # None: before any task
    begun: str | None = None  # the last one, if nothing came of it

    @classmethod
    def read(cls, file: Path) -> Lines:
        """Read a file; a line that a death cut off counts for nothing, and deaths only since the last call."""
        lines = cls()
        for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            with suppress(ValueError):
                lines._take(json.loads(text))
        return lines

    def _take(self, line: dict[str, Any]) -> None:
        match line:
            case {"call": _}:
                self.deaths.clear()
                self.begun = None
            case {"begin": name}:
                self.begun = name
            case {"short of memory": name}:
                self.short_of_memory.add(name)
                self.begun = None
            case {"death": reason, "kind": kind}:
                self.deaths[kind] += 1
                if self.begun is not None:
                    self.results[self.begun] = {"death": reason}
                self.begun = None
            case {"task": name, "result": result}:
                self.results[name] = result
                self.begun = None


def append(file: Path, line: dict[str, Any]) -> None:
    """Append a line at once: the next moment may be the last."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def run_tasks(group: Group) -> int:
    """Do in this process what the file of the group does not hold yet, and return an exit code."""
    _die_with_parent()
    for task in group.waiting:
        append(group.file, {"begin": task.name})
        start = time.monotonic()
        result = task.run()
        if not group.alone and is_out_of_memory(str(result.get("message", ""))):
            append(group.file, {"short of memory": task.name})
        else:
            took = round(time.monotonic() - start, 3)
            append(group.file, {"task": task.name, "result": result, "seconds": took})
        if _gpu_is_lost():
            append(group.file, {"death": "its GPU is lost", "kind": task.kind})
            return LOST
    return FINISHED


def _gpu_is_lost() -> bool:
    """Whether no call succeeds any more; else give other processes what a large task left to the allocator."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
        if torch.cuda.memory_reserved() > MOST_RESERVED:
            torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False


def _die_with_parent() -> None:
    """Let the system kill this process when its parent is killed, where it can (Linux)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_groups(groups: Sequence[Group], jobs: int, until: float, patience: float = PATIENCE) -> None:
    """Run groups in ``jobs`` processes at once until then; a silent process is ended after ``patience``."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(_run_group, group, until, patience) for group in groups]
        try:
            for future in futures:
                future.result()
        except BaseException:
            STOPPED.set()
            raise


def _run_group(group: Group, until: float, patience: float) -> None:
    append(group.file, {"call": time.time()})
    kinds = {task.name: task.kind for task in group.tasks}
    while group.waiting:
        code = _run_process(group, until, patience)
        if code in (FINISHED, None):
            return
        begun = Lines.read(group.file).begun or ""
        print(f"{group.file.stem}: its process ended with {code} {begun}", file=sys.stderr, flush=True)
        if code != LOST:
            append(group.file, {"death": f"its process ended with {code}", "kind": kinds.get(begun)})


def _run_process(group: Group, until: float, patience: float) -> int | None:
    """Its exit code; None where time was up."""
    os.utime(group.file)
    with group.file.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            group.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, process_group=0
        )
    try:
        while not STOPPED.wait(0.1) and time.time() < until:
            code = process.poll()
            silent = time.time() - group.file.stat().st_mtime > patience
            if code is not None or silent:
                return code if code is not None else -signal.SIGKILL
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
