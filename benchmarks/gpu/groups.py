"""Checks in processes, one for each backend and dtype, whose results are lines of JSON in a file as they come.

A process that dies, or loses its GPU (after an illegal access every call fails), costs the check it was at:
that has failed, and the group goes on behind it in a new process. A check that answers nothing for a while
is ended in the same way. Nothing is run again but what a death of everything left open: a check that was
begun twice without a result has failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gnn_attention.verify import Check, Result
from gnn_attention.verify.processes import LOST
from gnn_attention.verify.report import fields_of, label, result_of

PATIENCE = 150.0
MOST_RESERVED = 2**30  # bytes that a process may hold on to between two checks
FINISHED, LATE, GONE = 0, 3, 75  # exit codes of a process: all done, no time left, its GPU is lost


@dataclass
class Lines:
    """The file of a group: what was begun, and what came of it."""

    file: Path
    results: dict[str, Result] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    begun: Counter[str] = field(default_factory=Counter)
    last: str | None = None

    @classmethod
    def read(cls, file: Path) -> Lines:
        """What stands there; a line that a death cut off counts for nothing."""
        found = cls(file)
        for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if "begin" in line:
                found.last = line["begin"]
                found.begun[found.last] += 1
            else:
                found._add(line)
        return found

    def _add(self, line: dict[str, Any]) -> None:
        seconds = line.pop("seconds", None)
        result = result_of(line)
        self.results[label(result)] = result
        if seconds is not None:
            self.seconds[label(result)] = seconds

    @property
    def unanswered(self) -> str | None:
        """The check that was begun last, if nothing came of it."""
        return None if self.last in self.results else self.last

    def begin(self, name: str) -> None:
        """Write at once that this check is begun: the next moment may be the last."""
        self._write({"begin": name})

    def end(self, result: Result, seconds: float | None = None) -> None:
        """Write at once what came of a check, and how long it took."""
        self._write(fields_of(result) | ({} if seconds is None else {"seconds": round(seconds, 3)}))

    def _write(self, line: dict[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def failed(check: Check, message: str) -> Result:
    """Of a check that gave no result."""
    return Result(check.group, check.backend, check.dtype, check.name, passed=False, message=message)


def work(checks: Sequence[Check], file: Path, until: float) -> int:
    """Run in this process what the file does not hold yet, and return an exit code."""
    lines = Lines.read(file)
    with poisoned_memory():
        for check in checks:
            name = check.label
            if name in lines.results:
                continue
            if time.time() > until:
                return LATE
            if lines.begun[name] > 1:
                lines.end(failed(check, "begun twice without a result"))
                continue
            lines.begin(name)
            start = time.monotonic()
            result = check()
            lines.end(result, time.monotonic() - start)
            _give_back()
            if any(word in result.message for word in LOST):
                return GONE
    return FINISHED


def _give_back() -> None:
    """Other processes need the memory that a large check leaves to this one's allocator."""
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > MOST_RESERVED:
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def _fill() -> Any:
    # its attributes are made at run time
    return torch.utils.deterministic


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every tensor that is made without values is filled with NaN.

    A kernel that forgets some of its results cannot pass by what lay there before.
    """
    deterministic, fill = torch.are_deterministic_algorithms_enabled(), _fill()
    before = fill.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    fill.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        fill.fill_uninitialized_memory = before


@dataclass
class Group:
    """Some checks of one process; ``command(until)`` starts it. The longest group is begun first."""

    name: str
    file: Path
    checks: Sequence[Check]
    command: Callable[[float], Sequence[str]]
    seconds: float = 0.0

    @property
    def waiting(self) -> list[Check]:
        """Those without a result."""
        done = Lines.read(self.file).results
        return [check for check in self.checks if check.label not in done]


@dataclass
class _Running:
    group: Group
    process: subprocess.Popen[bytes]
    waiting: int


def run(
    groups: Sequence[Group],
    jobs: int,
    until: float,
    log: Callable[[str], None] = print,
    patience: float = PATIENCE,
) -> bool:
    """Run groups in ``jobs`` processes at once until then; True if all of them are finished.

    A process that writes no line for ``patience`` seconds is ended.
    """
    queue = deque(sorted((g for g in groups if g.waiting), key=lambda group: -group.seconds))
    running: list[_Running] = []
    try:
        while (queue or running) and time.time() < until:
            while queue and len(running) < jobs:
                running.append(_start(queue.popleft(), until))
            time.sleep(0.1)
            for entry in list(running):
                code = ended(entry.process, entry.group.file, patience)
                if code is None:
                    continue
                running.remove(entry)
                if _goes_on(entry, code, log):
                    queue.append(entry.group)
    finally:
        for entry in running:
            entry.process.kill()
            entry.process.wait()
    return not any(group.waiting for group in groups)


def _start(group: Group, until: float) -> _Running:
    group.file.touch()
    os.utime(group.file)
    with group.file.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(group.command(until), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    return _Running(group, process, len(group.waiting))


def ended(process: subprocess.Popen[bytes], file: Path, patience: float) -> int | None:
    """The exit code; of a process whose file has not changed for long, that of its end."""
    code = process.poll()
    if code is None and time.time() - file.stat().st_mtime > patience:
        process.kill()
        return process.wait()
    return code


def _goes_on(entry: _Running, code: int, log: Callable[[str], None]) -> bool:
    """Whether the group needs another process; the check that a dead one was at has failed."""
    if code in (FINISHED, LATE):
        return False
    group, lines = entry.group, Lines.read(entry.group.file)
    check = next((check for check in group.checks if check.label == lines.unanswered), None)
    if code != GONE:
        log(f"{group.name}: its process ended with {code}" + (f" at {check.label}" if check else ""))
    if check is not None:
        lines.end(failed(check, f"its process ended with {code}"))
    return 0 < len(group.waiting) < entry.waiting


def python(*arguments: str) -> list[str]:
    """A command of this Python."""
    return [sys.executable, "-W", "ignore", *arguments]


def results(files: Sequence[Path]) -> Iterator[Result]:
    """Of all files."""
    for file in files:
        yield from Lines.read(file).results.values()
