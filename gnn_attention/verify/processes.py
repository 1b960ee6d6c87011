"""Checks run one after another, or by several processes at once.

On a GPU a process takes all checks of one backend in one dtype, so that no two compile the same kernels; on a CPU some checks
that follow each other, which share what they are held against, with one thread: threads that wait for each other beside other
work cost twenty times as much. Every result is written to a file at once. A check that kills its process has failed, and no
other: what ran beside it runs again, each alone. A process whose GPU is lost to it (after an illegal access every call fails)
ends, and others carry on.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from gnn_attention.verify.check import Check
from gnn_attention.verify.report import Result

__all__ = ["results"]

Make = Callable[[], Iterator[Check]]
LOST = ("CUDA error", "AcceleratorError")
NOWHERE = -1
EVERY = 1.0  # seconds, after which files are looked into
TOGETHER = 12  # checks that a process takes at a time


def results(make: Make, numbers: Sequence[int], jobs: int, deadline: float) -> Iterator[tuple[int, Result]]:
    """Run the checks with these numbers, ascending, of all that ``make`` yields; none is begun after ``deadline`` (time.time()).

    With more than one job, ``make`` must be picklable: a function of a module, or a partial of one. RuntimeError if processes die
    before their first check.
    """
    if jobs == 1:
        yield from _run(make(), numbers, deadline)
        return
    left = list(numbers)
    while left and time.time() < deadline:
        done: set[int] = set()
        suspects: set[int] = set()
        for number, result in _one_pool(make, left, jobs, deadline, suspects):
            done.add(number)
            yield number, result
        if not done and not suspects and time.time() < deadline:
            raise RuntimeError("processes that check die before their first check; try jobs=1")
        for number in sorted(suspects - done):
            done.add(number)
            yield number, _alone(make, number)
        left = [number for number in left if number not in done]


def _run(checks: Iterator[Check], numbers: Sequence[int], deadline: float) -> Iterator[tuple[int, Result]]:
    wanted = set(numbers)
    for number, check in enumerate(checks):
        if number in wanted:
            if time.time() > deadline:
                return
            yield number, check()


def _one_pool(make: Make, numbers: Sequence[int], jobs: int, deadline: float, suspects: set[int]) -> Iterator[tuple[int, Result]]:
    """What fresh processes come to until one of them dies, if one does: the checks they were at are the ``suspects``."""
    context, threads = multiprocessing.get_context("spawn"), max(1, (os.cpu_count() or 1) // jobs)
    at, born = context.Array("q", [NOWHERE] * jobs), context.Value("i", 0)
    with tempfile.TemporaryDirectory() as folder:
        with ProcessPoolExecutor(jobs, context, _start, (make, threads, at, born, folder)) as pool:
            groups, read = _groups(make, numbers), dict[Path, int]()
            with _ended_early(), _deaf_to_interrupts():
                left = {pool.submit(_some, group, deadline) for group in groups}
            with _ended_early():
                while left:
                    ended, left = wait(left, EVERY)
                    yield from _written(Path(folder), read)
                    if any(isinstance(future.exception(), BrokenProcessPool) for future in ended):
                        suspects.update(number for number in at[:] if number != NOWHERE)
                        break
                    for future in ended:
                        future.result()
        yield from _written(Path(folder), read)


@contextmanager
def _ended_early() -> Iterator[None]:
    """Whoever stops inside, by Ctrl-C for one, does not wait for the checks that the processes are at, and those to come."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes that are started inside never hear Ctrl-C: a terminal tells all of them, and we end them. For us it waits."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if hasattr(signal, "pthread_sigmask") else None
    try:
        yield
    finally:
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _groups(make: Make, numbers: Sequence[int]) -> list[list[int]]:
    """The numbers in groups, each for one process at a time, in the order of their first."""
    wanted, groups = set(numbers), defaultdict[Hashable, list[int]](list)
    chosen = [(number, check) for number, check in enumerate(make()) if number in wanted]
    for number, check in chosen if torch.cuda.is_available() else ():
        groups[check.backend, check.dtype].append(number)
    if groups:
        return list(groups.values())
    sharing = [[number for number, _ in found] for _, found in itertools.groupby(chosen, lambda entry: _problem(entry[1]))]
    return [list(itertools.chain(*part)) for part in _batches(sharing, TOGETHER)]


def _problem(check: Check) -> tuple[str, str, str]:
    """Checks of one problem follow each other, and share the truth about it."""
    return check.group, check.dtype, check.name.removesuffix(", forward alone")


def _batches(parts: Sequence[Sequence[int]], least: int) -> Iterator[list[Sequence[int]]]:
    """Whole parts together, until they hold ``least`` numbers."""
    batch: list[Sequence[int]] = []
    for part in parts:
        batch.append(part)
        if sum(map(len, batch)) >= least:
            yield batch
            batch = []
    if batch:
        yield batch


def _written(folder: Path, read: dict[Path, int]) -> Iterator[tuple[int, Result]]:
    """The whole lines that have come since; ``read`` says how far each file was."""
    for file in sorted(folder.glob("*.jsonl")):
        with file.open("rb") as lines:
            lines.seek(read.get(file, 0))
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                read[file] = read.get(file, 0) + len(line)
                number, told = json.loads(line)
                yield number, Result(**told)


def _alone(make: Make, number: int) -> Result:
    """One check in a process of its own, whose death is its failure."""
    for _, result in _one_pool(make, [number], 1, math.inf, set()):
        return result
    check = next(islice(make(), number, None))
    return Result(check.group, check.backend, check.dtype, check.name, passed=False, message="the process that ran it died")


class _Worker:
    """What a process is told once: how to make the checks, where to say what it is at, where to write."""

    checks: dict[int, Check]
    at: Any
    slot: int
    file: Path


def _start(make: Make, threads: int, at: Any, born: Any, folder: str) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    with born.get_lock():
        slot = born.value
        born.value += 1
    _Worker.checks, _Worker.at, _Worker.slot, _Worker.file = dict(enumerate(make())), at, slot, Path(folder) / f"{slot}.jsonl"


def _some(numbers: Sequence[int], deadline: float) -> None:
    """A group of checks, ascending."""
    for number in numbers:
        if time.time() > deadline:
            return
        check = _Worker.checks.pop(number)
        _Worker.at[_Worker.slot] = number
        result = check()
        with _Worker.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps([number, asdict(result)]) + "\n")
        _Worker.at[_Worker.slot] = NOWHERE
        if any(word in result.message for word in LOST):
            os._exit(1)
