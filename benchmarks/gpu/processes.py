"""Run tasks in processes that append each result to one file as a line of JSON.

If a process dies or loses its GPU (after an illegal access every call fails), its current task has failed, and a new
process continues with the next task of the group. After :data:`MOST_DEATHS` deaths at tasks of one kind, the group
skips its other tasks of this kind. A task that runs out of memory while other processes run is retried a little
later. When a process is ended, all processes that it started end too.
"""

from __future__ import annotations

import ctypes
import faulthandler
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

__all__ = ["STOPPED", "Group", "Lines", "Task", "append", "run_groups", "run_tasks"]

MOST_DEATHS = 3
WAITS = (5.0, 20.0)  # seconds to wait until other processes may have released memory
MOST_RESERVED = 2**30  # bytes that the allocator of a process may keep between two tasks
FINISHED, LOST = 0, 75  # exit codes of a process: all tasks are done, or its GPU is lost
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
STOPPED = Event()  # set when this program ends early


@dataclass(frozen=True)
class Task:
    """A named function that returns a dictionary; tasks of one ``kind`` are likely to die of the same fault."""

    name: str
    kind: str
    run: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Group:
    """Tasks that a process, which ``command`` starts, runs one after another."""

    file: Path
    tasks: Sequence[Task]
    command: Sequence[str]

    @property
    def waiting(self) -> list[Task]:
        """The tasks that still have to run."""
        lines = Lines.read(self.file)
        deaths = Counter(task.kind for task in self.tasks if task.name in lines.deaths)
        unfinished = (task for task in self.tasks if task.name not in lines.results)
        return [task for task in unfinished if deaths[task.kind] < MOST_DEATHS]


@dataclass
class Lines:
    """The contents of a file: results by task, and the names of tasks that began or died.

    The result of a task that ended its process is ``{"death": reason}``. ``begun`` has the tasks that began but have
    no result yet, ``deaths`` those at which a process or its GPU was lost during this call.
    """

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    deaths: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, file: Path) -> Lines:
        """Read a file; a line that a death cut off is ignored."""
        lines = cls()
        for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            with suppress(ValueError):
                lines._add(json.loads(text))
        return lines

    def _add(self, line: dict[str, Any]) -> None:
        name = line["task"]
        if name is None:  # a new call begins
            self.deaths.clear()
            self.begun.clear()
        elif "begin" in line:
            self.begun.add(name)
            return
        elif "death" in line:
            self.deaths.add(name)
            self.results.setdefault(name, {"death": line["death"]})
        else:
            self.results[name] = line["result"]
        self.begun.discard(name)


def append(file: Path, **line: object) -> None:
    """Append a line in one system call, because the process may die at any moment."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def run_tasks(group: Group, patience: float) -> int:
    """Run the tasks of a group that have no result yet in this process, and return an exit code.

    A task that takes more than ``patience`` seconds ends the process.
    """
    _die_with_parent()
    for task in group.waiting:
        append(group.file, task=task.name, begin=True)
        faulthandler.dump_traceback_later(patience, exit=True)
        start = time.monotonic()
        result = task.run()
        for seconds in WAITS:
            if is_out_of_memory(str(result.get("message", ""))):
                torch.cuda.empty_cache()
                time.sleep(seconds)
                result = task.run()
        faulthandler.cancel_dump_traceback_later()
        append(group.file, task=task.name, result=result, seconds=round(time.monotonic() - start, 3))
        if _gpu_is_lost():
            append(group.file, task=task.name, death="its GPU was lost")
            return LOST
    return FINISHED


def _gpu_is_lost() -> bool:
    """Return whether the GPU no longer works; if it does, release memory that a large task left cached."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
        if torch.cuda.memory_reserved() > MOST_RESERVED:
            torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False


def _die_with_parent() -> None:
    """On Linux, ask the kernel to kill this process when its parent dies."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_groups(groups: Sequence[Group], jobs: int, until: float) -> None:
    """Run groups in up to ``jobs`` parallel processes until the time ``until``."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(_run_group, group, until) for group in groups]
        try:
            for future in futures:
                future.result()
        except BaseException:
            STOPPED.set()
            raise


def _run_group(group: Group, until: float) -> None:
    failures = 0  # successive processes that began no task
    while group.waiting and failures < MOST_DEATHS:
        code = _run_process(group.command, group.file.with_suffix(".log"), until)
        if code in (FINISHED, None):
            return
        begun = Lines.read(group.file).begun & {task.name for task in group.tasks}
        print(f"a process ended with {code}", *begun, file=sys.stderr, flush=True)
        for name in begun:
            append(group.file, task=name, death=f"its process ended with {code}")
        failures = 0 if begun or code == LOST else failures + 1


def _run_process(command: Sequence[str], log: Path, until: float) -> int | None:
    """Run a command and return its exit code, or None if time ran out."""
    with log.open("ab") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, process_group=0
        )
    try:
        while not STOPPED.wait(0.1) and time.time() < until:
            if (code := process.poll()) is not None:
                return code
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
