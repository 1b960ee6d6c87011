"""Run checks in several processes; if a check kills its process, only that check fails."""

import itertools
import multiprocessing
import os
import signal
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch

from gnn_attention.verify.report import FORWARD, Check, Result

PROCESS_DIED = "the check ended its process"


def run_checks(checks: Sequence[Check], jobs: int) -> Generator[Result]:
    """Run checks in ``jobs`` processes and yield their results, in order unless a process dies.

    Checks of one problem share a process and the problem's truth. If a process dies, all unfinished
    checks run again, one at a time. RuntimeError if a process dies before its first check.
    """
    groups = itertools.groupby(checks, lambda c: (c.group, c.dtype, c.name.removesuffix(f", {FORWARD}")))
    batches = [list(batch) for _, batch in groups]
    earlier_children = set(multiprocessing.active_children())
    while batches:
        unfinished_checks: list[Check] = []
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _initialise_process)
        try:
            try:
                # The first batch is empty and only shows that a process can start.
                empty_future, *futures = _submit(pool, [[], *batches])
                empty_future.result()
            except BrokenProcessPool:
                raise RuntimeError("a process for checks died before its first check; try jobs=1") from None
            for batch, future in zip(batches, futures, strict=True):
                try:
                    yield from future.result()
                except BrokenProcessPool:
                    unfinished_checks += batch
        finally:
            # A caller that stops early, for example by Ctrl-C, does not wait for running checks.
            for child in set(multiprocessing.active_children()) - earlier_children:
                child.terminate()
            pool.shutdown(cancel_futures=True)
        # With one process and batches of one check, the first unfinished check killed the process.
        if unfinished_checks and jobs == 1:
            yield unfinished_checks.pop(0).result(message=PROCESS_DIED)
        batches = [[check] for check in unfinished_checks]
        jobs = 1


def _submit(pool: ProcessPoolExecutor, batches: Sequence[list[Check]]) -> list[Future[list[Result]]]:
    """Start processes that ignore Ctrl-C, so that only the parent process ends them."""
    if not hasattr(signal, "pthread_sigmask"):
        return [pool.submit(_run_batch, batch) for batch in batches]
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return [pool.submit(_run_batch, batch) for batch in batches]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _initialise_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def _run_batch(checks: Sequence[Check]) -> list[Result]:
    return [check() for check in checks]
