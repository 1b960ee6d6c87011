"""Figures measured each in a process of its own, some at once: what one leaves in memory, or dies of, is no other's."""

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

from gnn_attention.figures._figure import Figure, Measured
from gnn_attention.figures._table import FIGURES
from gnn_attention.figures.results import Result

__all__ = ["in_turn", "run"]

Say = Callable[[str, str], None]
FIRST = ("soak",)  # an hour on any machine: all others are measured beside it


def run(names: Sequence[str], count: int | None = None, jobs: int = 1, say: Say | None = None) -> Iterator[Result]:
    """Measure the figures of these names and yield each result as it comes.

    ``count`` cases each, None for as many as the figure asks for; ``jobs`` processes at once; ``say(name, text)`` hears what they
    are at. A process that dies is a failure of its figure. A caller that stops early (Ctrl-C too) ends the processes.
    """
    processes: list[multiprocessing.process.BaseProcess] = []
    pool = ThreadPoolExecutor(jobs)
    try:
        work = [pool.submit(_one, FIGURES[name], count, jobs, say, processes) for name in in_turn(names)]
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


def _one(figure: Figure, count: int | None, jobs: int, say: Say | None, processes: list[Any]) -> Result:
    cases, began = figure.full if count is None else count, time.time()
    measured = _alone(figure.name, cases, jobs, say, processes)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Result(
        name=figure.name,
        promise=figure.promise,
        bar=figure.bar,
        count=cases,
        full=cases >= figure.full,
        value=measured.value,
        holds=measured.holds,
        failures=measured.failures,
        skipped=measured.skipped,
        seconds=round(time.time() - began, 1),
        date=date,
    )


def _alone(name: str, count: int, jobs: int, say: Say | None, processes: list[Any]) -> Measured:
    """What a fresh process measures."""
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
            told = ours.recv()
            if isinstance(told, Measured):
                found = told
            elif say is not None:
                say(name, told)
    except EOFError:
        pass
    process.join()
    return found or Measured("not measured", (f"the process that measured it ended with exit code {process.exitcode}",))


def _measure(name: str, count: int, threads: int, out: Connection) -> None:
    """In the process: measure, and send what came of it. What a figure raises is its failure."""
    torch.set_num_threads(threads)
    try:
        found = FIGURES[name].measure(count, out.send)
    except KeyboardInterrupt:
        return
    except Exception as error:
        found = Measured("not measured", (f"{type(error).__name__}: {error}",))
    out.send(found)
