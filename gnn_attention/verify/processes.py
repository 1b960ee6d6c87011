"""Checks run one after another, or several at once in processes.

A check that ends its process, or loses its GPU (after an illegal access every call fails), has failed, and no
other: what was not finished then runs check by check in one process, which is made anew where it dies.
"""

import itertools
import multiprocessing
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

import torch

from gnn_attention.verify.check import FORWARD, Check
from gnn_attention.verify.report import Result

Make = Callable[[], Iterator[Check]]
Numbered = tuple[int, Result]

LOST = ("CUDA error", "AcceleratorError", "Triton Error [CUDA]")
TOGETHER = 12  # checks at least that a process takes at a time
MASKS = hasattr(signal, "pthread_sigmask")
DIED = "the process that ran it died, or lost its GPU"


def results(make: Make, numbers: Sequence[int], jobs: int, deadline: float) -> Iterator[Numbered]:
    """Run the checks with these numbers of all that ``make`` yields; none is begun after ``deadline``.

    With more than one job, ``make`` must be picklable: a function of a module, or a partial of one. A caller
    that stops early (Ctrl-C too) ends the processes.
    """
    wanted = set(numbers)
    chosen = {number: check for number, check in enumerate(make()) if number in wanted}
    if jobs == 1:
        for number in itertools.takewhile(lambda _: time.time() <= deadline, chosen):
            yield number, chosen[number]()
        return
    lost = yield from _pooled(make, _batches(chosen), jobs, deadline)
    while lost:
        lost = yield from _pooled(make, [[number] for number in lost], 1, deadline)
        if lost:
            check = chosen[lost[0]]
            died = Result(check.group, check.backend, check.dtype, check.name, passed=False, message=DIED)
            yield lost.pop(0), died


def _pooled(
    make: Make, batches: list[list[int]], jobs: int, deadline: float
) -> Generator[Numbered, None, list[int]]:
    """Results in order; those that were lost with a process are returned, the first of one process first."""
    lost: list[int] = []
    with _pool(make, jobs) as pool:
        futures = [pool.submit(_run, batch, deadline) for batch in batches]
        for batch, future in zip(batches, futures, strict=True):
            try:
                yield from future.result()
            except BrokenProcessPool:
                lost += batch
    return lost


@contextmanager
def _pool(make: Make, jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that have made the checks, ended at the exit. RuntimeError if one dies before its first."""
    threads, before = max(1, (os.cpu_count() or 1) // jobs), set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start, (make, threads))
    try:
        # Ctrl-C reaches all processes of a terminal: those started inside inherit the mask; we end them
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if MASKS else set()
        try:
            for ready in [pool.submit(int) for _ in range(jobs)]:
                ready.result()
        except BrokenProcessPool:
            raise RuntimeError("a process for checks died before its first check; try jobs=1") from None
        finally:
            if MASKS:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield pool
    finally:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        pool.shutdown(cancel_futures=True)


def _batches(chosen: dict[int, Check]) -> list[list[int]]:
    """Checks for one process at a time, in the order of their first.

    On a GPU all of one backend in one dtype, so that no two processes compile the same kernels; on a CPU some
    that follow each other, checks of one problem together: they share the truth about it.
    """
    groups, gpu = defaultdict[tuple[str, ...], list[int]](list), torch.cuda.is_available()
    for number, check in chosen.items():
        problem = check.group, check.dtype, check.name.removesuffix(f", {FORWARD}")
        groups[(check.backend, check.dtype) if gpu else problem].append(number)
    batches: list[list[int]] = [[]]
    for group in groups.values():
        batches[-1] += group
        if gpu or len(batches[-1]) >= TOGETHER:
            batches.append([])
    return [batch for batch in batches if batch]


_checks: dict[int, Check] = {}


def _start(make: Make, threads: int) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    _checks.update(enumerate(make()))


def _run(numbers: Sequence[int], deadline: float) -> list[Numbered]:
    found = []
    for number in itertools.takewhile(lambda _: time.time() <= deadline, numbers):
        found.append((number, _checks.pop(number)()))
        if any(word in found[-1][1].message for word in LOST):
            os._exit(1)
    return found
