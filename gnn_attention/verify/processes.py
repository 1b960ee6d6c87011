"""Checks in several processes. One that ends its process has failed, and no other."""

import itertools
import multiprocessing
import os
import signal
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch

from gnn_attention.verify.report import FORWARD, Check, Result

DIED = "the process that ran it died"


def results(checks: Sequence[Check], jobs: int) -> Generator[Result]:
    """Run checks in so many processes; those of one problem follow each other in one, and share its truth.

    What was not finished when a process died runs again check by check in one process, which is made anew
    where it dies. RuntimeError if a process dies before its first check.
    """
    problems = itertools.groupby(checks, lambda c: (c.group, c.dtype, c.name.removesuffix(f", {FORWARD}")))
    parts = [list(part) for _, part in problems]
    others = set(multiprocessing.active_children())
    while parts:
        lost: list[Check] = []
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin)
        try:
            try:
                # a part without checks, which comes first, shows that a process can begin
                first, *futures = _submit(pool, [[], *parts])
                first.result()
            except BrokenProcessPool:
                raise RuntimeError("a process for checks died before its first check; try jobs=1") from None
            for part, future in zip(parts, futures, strict=True):
                try:
                    yield from future.result()
                except BrokenProcessPool:
                    lost += part
        finally:
            # a caller that stops early, by Ctrl-C too, waits for no check
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
            pool.shutdown(cancel_futures=True)
        if lost and jobs == 1:
            yield lost.pop(0).result(message=DIED)
        parts, jobs = [[check] for check in lost], 1


def _submit(pool: ProcessPoolExecutor, parts: Sequence[list[Check]]) -> list[Future[list[Result]]]:
    """Start the processes with Ctrl-C blocked: it reaches all of a terminal, and this one ends the others."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        return [pool.submit(_run, part) for part in parts]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return [pool.submit(_run, part) for part in parts]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def _run(checks: Sequence[Check]) -> list[Result]:
    return [check() for check in checks]
