"""Checks in processes, whose results are lines of JSON in a file as soon as they are there.

A process that dies, or loses its GPU (after an illegal access every call fails), costs the check that it was at:
that check has failed, and the group goes on behind it in a new process. After :data:`MOST_DEATHS` at checks of
one backend its other checks of the group are not run; those of other backends are. A check that runs out of memory
beside others is begun once more at the end, alone.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.process import is_out_of_memory
from gnn_attention._support import atomic_files
from gnn_attention.verify import Check, Result
from gnn_attention.verify.report import fields_of, label, result_of

__all__ = ["Group", "Lines", "exit_code_of", "forget_deaths", "python", "results", "run_checks", "run_groups"]

LOST = ("CUDA error", "AcceleratorError", "Triton Error [CUDA]")  # after which every call fails
PATIENCE = 150.0  # seconds without a line after which a process is ended
MOST_DEATHS = 3
MOST_RESERVED = 2**30  # bytes that a process may hold on to between two checks
FINISHED, LATE, GONE = 0, 3, 75  # exit codes of a process: all done, no time left, its GPU is lost


@dataclass
class Lines:
    """The file of a group: what was begun, what came of it, what ran out of memory, and where it died."""

    file: Path
    results: dict[str, Result] = field(default_factory=dict)
    begun: Counter[str] = field(default_factory=Counter)
    short_of_memory: list[str] = field(default_factory=list)
    deaths: Counter[str | None] = field(default_factory=Counter)  # by backend; None: before any check
    last: str | None = None

    @classmethod
    def read(cls, file: Path) -> Lines:
        """What stands in the file; a line that a death cut off counts for nothing."""
        lines = cls(file)
        for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            with suppress(ValueError):
                lines._take(json.loads(text))
        return lines

    def _take(self, line: dict[str, Any]) -> None:
        if "begin" in line:
            self.last = line["begin"]
            self.begun[line["begin"]] += 1
        elif "short of memory" in line:
            self.short_of_memory.append(line["short of memory"])
        elif "death" in line:
            self.deaths[line["backend"]] += 1
            self.last = None
        else:
            line.pop("seconds", None)
            result = result_of(line)
            self.results[label(result)] = result

    @property
    def unanswered(self) -> str | None:
        """The check that was begun last, if nothing came of it."""
        answered = self.last in self.results or self.last in self.short_of_memory
        return None if answered else self.last

    def leaves_out(self, check: Check) -> bool:
        """Whether checks of its backend, or none at all, ended too many processes to begin this one."""
        return max(self.deaths[check.backend], self.deaths[None]) >= MOST_DEATHS

    def write(self, line: dict[str, Any]) -> None:
        """Append a line at once: the next moment may be the last."""
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def fail(self, check: Check, message: str) -> None:
        """Write that a check gave no result."""
        result = Result(check.group, check.backend, check.dtype, check.name, passed=False, message=message)
        self.write(fields_of(result))


def run_checks(checks: Sequence[Check], file: Path, until: float, alone: bool = False) -> int:
    """Run in this process what the file does not hold yet, and return an exit code.

    ``alone``: only the checks that ran out of memory beside others.
    """
    lines = Lines.read(file)
    with uninitialised_memory_is_nan():
        for check in checks:
            name = check.label
            if (
                name in lines.results
                or (name in lines.short_of_memory) is not alone
                or lines.leaves_out(check)
            ):
                continue
            if time.time() > until:
                return LATE
            if lines.begun[name] > 1 + alone:
                lines.fail(check, "begun twice without a result")
                continue
            lines.write({"begin": name})
            start = time.monotonic()
            result = check()
            is_short = is_out_of_memory(result.message)
            if is_short and not alone:
                lines.write({"short of memory": name})
            else:
                note = "run again alone: memory was short beside others. " if alone else ""
                result = replace(result, message=note + result.message)
                lines.write({**fields_of(result), "seconds": round(time.monotonic() - start, 3)})
            _release_memory()
            if not is_short and any(word in result.message for word in LOST):
                return GONE
    return FINISHED


def _release_memory() -> None:
    """Give other processes the memory that a large check leaves to the allocator of this one."""
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > MOST_RESERVED:
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


@contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    """Fill every tensor that is made without values with NaN.

    A kernel that forgets some of its results cannot pass by what lay there before.
    """
    utilities: Any = torch.utils.deterministic  # its attributes are made at run time
    deterministic = torch.are_deterministic_algorithms_enabled()
    before = utilities.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    utilities.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        utilities.fill_uninitialized_memory = before


def patch_interpreter() -> None:
    """Halve the time of interpreted kernels: Triton patches its language anew for each function of a kernel.

    A launch patches what our modules see; what is patched for those of Triton stays so.
    """
    interpreted: Any = importlib.import_module("triton.runtime.interpreter").InterpretedFunction
    patch_and_call, patched = interpreted.__call__, set[str]()

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        module = self.fn.__module__
        if module.startswith("gnn_attention.") or module in patched:
            return self.rewrite()(*arguments, **options)
        patched.add(module)
        return patch_and_call(self, *arguments, **options)

    interpreted.__call__ = call


@dataclass
class Group:
    """Some checks of one process, which ``command(until)`` starts."""

    name: str
    file: Path
    checks: Sequence[Check]
    command: Callable[[float], Sequence[str]]
    alone: bool = False

    @property
    def waiting(self) -> list[Check]:
        """The checks that this group still has to run."""
        lines = Lines.read(self.file)
        short = set(lines.short_of_memory)
        return [
            check
            for check in self.checks
            if check.label not in lines.results
            and (check.label in short) is self.alone
            and not lines.leaves_out(check)
        ]


@dataclass
class _Running:
    group: Group
    process: subprocess.Popen[bytes]


def run_groups(
    groups: Sequence[Group],
    jobs: int,
    until: float,
    log: Callable[[str], None] = print,
    patience: float = PATIENCE,
) -> None:
    """Run groups in ``jobs`` processes at once until then; a silent process is ended after ``patience``."""
    queue = deque(group for group in groups if group.waiting)
    running: list[_Running] = []
    try:
        while (queue or running) and time.time() < until:
            while queue and len(running) < jobs:
                running.append(_start(queue.popleft(), until))
            time.sleep(0.1)
            for entry in list(running):
                code = exit_code_of(entry.process, entry.group.file, patience)
                if code is not None:
                    running.remove(entry)
                    if _goes_on(entry.group, code, log):
                        queue.append(entry.group)
    finally:
        for entry in running:
            entry.process.kill()
            entry.process.wait()


def _start(group: Group, until: float) -> _Running:
    group.file.touch()
    os.utime(group.file)
    with group.file.with_suffix(".log").open("ab") as log:
        command = group.command(until)
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    return _Running(group, process)


def forget_deaths(file: Path) -> None:
    """Let the next call begin the checks that this file's deaths would leave out."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    atomic_files.write(str(file), "".join(line for line in lines if not line.startswith('{"death"')))


def exit_code_of(process: subprocess.Popen[bytes], file: Path, patience: float) -> int | None:
    """The exit code, or None while it runs; a process whose file has not changed for long is ended."""
    code = process.poll()
    if code is None and time.time() - file.stat().st_mtime > patience:
        process.kill()
        return process.wait()
    return code


def _goes_on(group: Group, code: int, log: Callable[[str], None]) -> bool:
    """Whether the group needs another process; the check that a dead one was at has failed."""
    if code in (FINISHED, LATE):
        return False
    lines = Lines.read(group.file)
    check = next((check for check in group.checks if check.label == lines.last), None)
    log(f"{group.name}: its process ended with {code}" + (f" at {check.label}" if check else ""))
    lines.write({"death": code, "backend": check.backend if check else None})
    if check is not None and lines.unanswered is not None:
        lines.fail(check, f"its process ended with {code}")
    return bool(group.waiting)


def python(*arguments: str) -> list[str]:
    """A command of this Python."""
    return [sys.executable, "-W", "ignore", *arguments]


def results(files: Sequence[Path]) -> Iterator[Result]:
    """The results of all files."""
    for file in files:
        yield from Lines.read(file).results.values()
