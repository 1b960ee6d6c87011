"""Checks run one after another, or by several processes at once: on a GPU most of their time is compilation, by one core each.

A process takes all checks of one backend in one dtype, so that no two compile the same kernels, and writes every result to a file
at once. A check that kills its process has failed, and no other: what ran beside it runs again, each alone. A process whose GPU
is lost to it (after an illegal access every call fails) ends, and others carry on.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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
    """The numbers by backend and dtype, in the order of their first."""
    wanted, groups = set(numbers), defaultdict[tuple[str, str], list[int]](list)
    for number, check in enumerate(make()):
        if number in wanted:
            groups[check.backend, check.dtype].append(number)
    return list(groups.values())


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

    make: Make
    at: Any
    slot: int
    file: Path


def _start(make: Make, threads: int, at: Any, born: Any, folder: str) -> None:
    torch.set_num_threads(threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    with born.get_lock():
        slot = born.value
        born.value += 1
    _Worker.make, _Worker.at, _Worker.slot, _Worker.file = make, at, slot, Path(folder) / f"{slot}.jsonl"


def _some(numbers: Sequence[int], deadline: float) -> None:
    """A group of checks, ascending."""
    checks, position = _Worker.make(), 0
    for number in numbers:
        if time.time() > deadline:
            return
        check = next(islice(checks, number - position, None))
        position, _Worker.at[_Worker.slot] = number + 1, number
        result = check()
        with _Worker.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps([number, asdict(result)]) + "\n")
        _Worker.at[_Worker.slot] = NOWHERE
        if any(word in result.message for word in LOST):
            os._exit(1)
