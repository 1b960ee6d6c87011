"""Checks run one after another, or several at once, each of them in one of ``jobs`` processes.

A check that ends its process has failed, and no other: every process is a pool of its own, given one check at
a time, and made anew where it broke. A process whose GPU is lost to it (after an illegal access every call
fails) is replaced as well.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch

from gnn_attention.verify.check import FORWARD, Check
from gnn_attention.verify.report import Result

Make = Callable[[], Iterator[Check]]
Numbered = tuple[int, Result]
Batch = list[tuple[int, Check]]

LOST = ("CUDA error", "AcceleratorError")
TOGETHER = 12  # checks at least that a process takes at a time
DIED = "the process that ran it died"


def results(make: Make, numbers: Sequence[int], jobs: int, deadline: float) -> Iterator[Numbered]:
    """Run the checks with these numbers, ascending, of all that ``make`` yields; none is begun after
    ``deadline``.

    With more than one job, ``make`` must be picklable: a function of a module, or a partial of one.
    """
    wanted = set(numbers)
    chosen = ((number, check) for number, check in enumerate(make()) if number in wanted)
    if jobs > 1:
        yield from _Workers(make, jobs, deadline).run(list(chosen))
        return
    for number, check in chosen:
        if time.time() > deadline:
            return
        yield number, check()


class _Workers:
    """``jobs`` threads, each of which gives the checks of a batch one by one to a process of its own."""

    def __init__(self, make: Make, jobs: int, deadline: float) -> None:
        self.make, self.jobs, self.deadline = make, jobs, deadline
        self.batches: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        self.found: queue.SimpleQueue[Numbered | BaseException | None] = queue.SimpleQueue()
        self.stopped = threading.Event()

    def run(self, chosen: Sequence[tuple[int, Check]]) -> Iterator[Numbered]:
        """Results as they come. A caller that stops early (Ctrl-C too) ends the processes."""
        for batch in _batches(chosen):
            self.batches.put(batch)
        before = set(multiprocessing.active_children())
        with ThreadPoolExecutor(self.jobs, initializer=_block_interrupts) as threads:
            try:
                for _ in range(self.jobs):
                    threads.submit(self._work)
                yield from self._results()
            finally:
                self.stopped.set()
                for child in set(multiprocessing.active_children()) - before:
                    child.terminate()

    def _results(self) -> Iterator[Numbered]:
        ended = 0
        while ended < self.jobs:
            found = self.found.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                ended += 1
            else:
                yield found

    def _work(self) -> None:
        """In a thread."""
        try:
            self._run_batches()
        except queue.Empty:
            self.found.put(None)
        except BaseException as error:
            self.found.put(error)

    def _run_batches(self) -> None:
        """Until queue.Empty."""
        pool = self._process()
        try:
            while True:
                for number, check in self.batches.get_nowait():
                    if self.stopped.is_set() or time.time() > self.deadline:
                        raise queue.Empty
                    result, broken = self._result(pool, number, check)
                    self.found.put((number, result))
                    if broken:
                        pool.shutdown()
                        pool = self._process()
        finally:
            pool.shutdown()

    def _result(self, pool: ProcessPoolExecutor, number: int, check: Check) -> tuple[Result, bool]:
        """What came of a check, and whether its process is of no more use."""
        try:
            result = pool.submit(_run, number).result()
        except BrokenProcessPool:
            return Result(
                check.group, check.backend, check.dtype, check.name, passed=False, message=DIED
            ), True
        return result, any(word in result.message for word in LOST)

    def _process(self) -> ProcessPoolExecutor:
        """A pool of one process that has made the checks. RuntimeError if it dies meanwhile."""
        if self.stopped.is_set():
            raise queue.Empty
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(1, context, _start, (self.make, threads))
        try:
            pool.submit(int).result()
        except BrokenProcessPool:
            pool.shutdown()
            raise RuntimeError("a process for checks died before its first check; try jobs=1") from None
        return pool


def _block_interrupts() -> None:
    """A terminal sends Ctrl-C to all processes: those started by this thread inherit its mask, and are ended
    by us.
    """
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _batches(chosen: Sequence[tuple[int, Check]]) -> list[Batch]:
    """Checks for one process at a time, in the order of their first.

    On a GPU all of one backend in one dtype, so that no two processes compile the same kernels; on a CPU some
    that follow each other, checks of one problem together: they share the truth about it.
    """
    if torch.cuda.is_available():
        groups: dict[tuple[str, str], Batch] = {}
        for number, check in chosen:
            groups.setdefault((check.backend, check.dtype), []).append((number, check))
        return list(groups.values())
    batches: list[Batch] = [[]]
    for _, problem in itertools.groupby(chosen, lambda entry: _problem(entry[1])):
        batches[-1] += problem
        if len(batches[-1]) >= TOGETHER:
            batches.append([])
    return [batch for batch in batches if batch]


def _problem(check: Check) -> tuple[str, str, str]:
    return check.group, check.dtype, check.name.removesuffix(f", {FORWARD}")


_checks: dict[int, Check] = {}


def _start(make: Make, threads: int) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    _checks.update(enumerate(make()))


def _run(number: int) -> Result:
    return _checks.pop(number)()
