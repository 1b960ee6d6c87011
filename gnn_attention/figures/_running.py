"""Figures measured each in a process of its own, some at once: what one leaves in memory, or dies of, is no other's."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import Any

import torch

from gnn_attention._support.progress import Progress
from gnn_attention.figures._figure import Figure, Measured
from gnn_attention.figures._table import FIGURES
from gnn_attention.figures.results import Result

__all__ = ["Shares", "in_turn", "run"]

Say = Callable[[str, str], None]
FIRST = ("soak",)  # an hour on any machine: all others are measured beside it
USUAL = 130.0  # seconds that a whole figure takes on two cores, but for these
SECONDS = {"F1": 1900.0, "F9": 16.0, "F11": 210.0, "soak": 3600.0, "interrupts": 760.0}


def run(names: Sequence[str], count: int | None = None, jobs: int = 1, say: Say | None = None) -> Iterator[Result]:
    """Measure the figures of these names and yield each result as it comes.

    ``count`` cases each, None for as many as the figure asks for; ``jobs`` processes at once; ``say(name, text)`` is called with
    what they are at. A process that dies is a failure of its figure. A caller that stops early (Ctrl-C too) ends the processes.
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


class Shares:
    """How much of all figures is done, in percent: each weighs what it usually takes.

    >>> shares = Shares(["F2", "F3"], None, Progress("figures", 100, "%"))
    >>> shares.say("F2", "case 5 of 10")
    >>> shares.shown.done, shares.shown.note
    (25, 'F2: case 5 of 10')
    """

    def __init__(self, names: Sequence[str], count: int | None, shown: Progress) -> None:
        self.weights = {name: _usual_seconds(name, count) for name in names}
        self.done, self.began, self.shown = dict.fromkeys(names, 0.0), dict[str, float](), shown

    def say(self, name: str, text: str | None) -> None:
        """A figure is at ``text``, or done where that is None."""
        passed = time.monotonic() - self.began.setdefault(name, time.monotonic())
        self.done[name] = 1.0 if text is None else _share(text, passed / self.weights[name])
        done = sum(self.weights[one] * share for one, share in self.done.items()) / sum(self.weights.values())
        self.shown.reach(int(100 * done), 100)
        self.shown.advance(0, self.shown.note if text is None else f"{name}: {text}")


def _usual_seconds(name: str, count: int | None) -> float:
    full = SECONDS.get(name, USUAL)
    return full if count is None else full * max(min(count / FIGURES[name].full, 1.0), 0.01)


def _share(text: str, of_time: float) -> float:
    """How much of a figure is done, by what it says it is at, or else by its time.

    >>> _share("case 1,200 of 10,000", 0.5), _share("12 s, 345 operations", 0.25)
    (0.12, 0.25)
    """
    found = re.search(r"([\d,]+) of ([\d,]+)", text)
    if found is None:
        return min(of_time, 0.99)
    done, count = (int(number.replace(",", "") or 0) for number in found.groups())
    return done / count if 0 <= done < count else 0.99


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
