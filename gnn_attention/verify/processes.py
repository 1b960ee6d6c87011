"""Checks in several processes. One that ends its process has failed, and no other.

What was not finished when a process died runs again check by check in one process, which is made anew where
it dies.
"""

import itertools
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch

from gnn_attention.verify.check import FORWARD, Check
from gnn_attention.verify.report import Result

DIED = "the process that ran it died"


def results(checks: Sequence[Check], jobs: int) -> Iterator[Result]:
    """Run checks in so many processes; those of one problem follow each other in one, and share its truth.

    A caller that stops early, by Ctrl-C too, ends the processes.
    """
    problems = itertools.groupby(checks, lambda c: (c.group, c.dtype, c.name.removesuffix(f", {FORWARD}")))
    lost = yield from _run_in_pool([list(checks) for _, checks in problems], jobs)
    while lost:
        lost = yield from _run_in_pool([[check] for check in lost], 1)
        if lost:
            check = lost.pop(0)
            yield Result(check.group, check.backend, check.dtype, check.name, passed=False, message=DIED)


def _run_in_pool(parts: list[list[Check]], jobs: int) -> Generator[Result, None, list[Check]]:
    """Yield the results of parts, and return the checks that were lost with a process.

    RuntimeError if a process dies before its first check.
    """
    lost: list[Check] = []
    threads, before = max(1, (os.cpu_count() or 1) // jobs), set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin, (threads,))
    try:
        try:
            pool.submit(int).result()
        except BrokenProcessPool:
            raise RuntimeError("a process for checks died before its first check; try jobs=1") from None
        for part, future in [(part, pool.submit(_run, part)) for part in parts]:
            try:
                yield from future.result()
            except BrokenProcessPool:
                lost += part
    finally:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        pool.shutdown(cancel_futures=True)
    return lost


def _begin(threads: int) -> None:
    # Ctrl-C reaches all processes of a terminal; the first one ends the others
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))


def _run(checks: Sequence[Check]) -> list[Result]:
    return [check() for check in checks]
