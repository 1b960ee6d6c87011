"""Guarantees are measured each in a process of its own, whose memory or death does not reach another."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.guarantees.guarantee import Guarantee, Measured
from tests.guarantees.record import Result
from tests.guarantees.registry import GUARANTEES

Say = Callable[[str, str], None]
FIRST = ("soak",)  # an hour on any machine: all others are measured meanwhile


def run(
    names: Sequence[str], count: int | None = None, jobs: int = 1, say: Say | None = None
) -> Iterator[Result]:
    """Measure the guarantees of these names and yield each result as it comes.

    ``count`` cases each, None for as many as the guarantee states; ``jobs`` processes at once;
    ``say(name, text)`` reports progress. A process that dies is a failure of its guarantee. A caller that
    stops early (Ctrl-C too) ends the processes.
    """
    processes: list[multiprocessing.process.BaseProcess] = []
    pool = ThreadPoolExecutor(jobs)
    try:
        work = [pool.submit(_one, GUARANTEES[name], count, jobs, say, processes) for name in in_turn(names)]
        for future in as_completed(work):
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        pool.shutdown()


def in_turn(names: Sequence[str]) -> list[str]:
    """The order to begin them in: what takes longest first, else as they came.

    >>> in_turn(["F1", "soak", "threads"])
    ['soak', 'F1', 'threads']
    """
    return sorted(names, key=lambda name: name not in FIRST)


def _one(guarantee: Guarantee, count: int | None, jobs: int, say: Say | None, processes: list[Any]) -> Result:
    cases, began = guarantee.full if count is None else count, time.time()
    measured = _alone(guarantee.name, cases, jobs, say, processes)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Result(
        name=guarantee.name,
        promise=guarantee.promise,
        bar=guarantee.bar,
        count=cases,
        full=cases >= guarantee.full,
        value=measured.value,
        holds=measured.holds,
        failures=measured.failures,
        skipped=measured.skipped,
        seconds=round(time.time() - began, 1),
        date=date,
    )


def _alone(name: str, count: int, jobs: int, say: Say | None, processes: list[Any]) -> Measured:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    threads = max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // jobs))
    process = context.Process(target=_measure, args=(name, count, threads, theirs))
    processes.append(process)
    process.start()
    theirs.close()
    found: Measured | None = None
    try:
        while found is None:
            message = ours.recv()
            if isinstance(message, Measured):
                found = message
            elif say is not None:
                say(name, message)
    except EOFError:
        pass
    process.join()
    return found or Measured(
        "not measured", (f"the process that measured it ended with exit code {process.exitcode}",)
    )


def _measure(name: str, count: int, threads: int, out: Connection) -> None:
    """In the process: measure, and send what came of it. What a guarantee raises is its failure."""
    torch.set_num_threads(threads)
    try:
        found = GUARANTEES[name].measure(count, out.send)
    except KeyboardInterrupt:
        return
    except Exception as error:
        found = Measured("not measured", (f"{type(error).__name__}: {error}",))
    out.send(found)
