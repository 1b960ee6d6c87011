"""How far a long command has come, on stderr: a bar on a terminal, a line every 5 s elsewhere.

``verify: 123 of 410 checks, 0:21 elapsed, about 0:40 left (attend, float32)``. A thread of its own shows it,
so that a step of any length is followed. What cannot be written (a closed or broken stderr) is left out.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

EVERY = 5.0  # seconds between lines
DELAY = 1.0  # seconds before the bar of a terminal
REFRESH = 0.2  # seconds between its pictures


def _minutes(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))).removeprefix("0:").removeprefix("0")


def on_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


class Progress:
    """A context that shows how many of ``total`` steps are done, counted from any thread.

    ``total`` may be None while it is unknown, ``before`` steps were done by an earlier run, ``shown=False``
    shows nothing.

    >>> with Progress("verify", total=2, unit="checks") as progress:
    ...     progress.advance(note="attend, float32")
    ...     progress.advance()
    >>> progress.done
    2
    """

    def __init__(
        self, name: str, total: int | None = None, unit: str = "steps", *, before: int = 0, shown: bool = True
    ) -> None:
        self.name, self.unit, self.shown = name, unit, shown
        self._count, self._output, self._over = threading.Lock(), threading.Lock(), threading.Event()
        self._poll: Callable[[], int] | None = None
        self._bar: Any = None
        self._thread: threading.Thread | None = None
        self._begun = False
        self.expect(total, before)
        self.began = self.since

    def expect(self, total: int | None, before: int = 0, note: str = "") -> None:
        self.total, self.done, self.before, self.note = total, before, before, note
        self.since = time.monotonic()

    def advance(self, steps: int = 1, note: str | None = None) -> None:
        """``steps`` more are done, 0 if only the ``note`` changes: what comes now."""
        with self._count:
            self.done += steps
            self.note = self.note if note is None else note

    def reach(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    def begin(self, note: str) -> None:
        self.advance(int(self._begun), note)
        self._begun = True

    def follow(self, done: Callable[[], int]) -> None:
        """From here on ``done()`` is the number of steps done, read whenever it is shown."""
        self._poll = done

    @property
    def left(self) -> float | None:
        if self.total is None or not self.before < self.done < self.total:
            return None
        return (time.monotonic() - self.since) / (self.done - self.before) * (self.total - self.done)

    def write(self, text: str) -> None:
        """A line on stderr, above the bar if there is one; also where progress itself is not shown."""
        with self._output:
            if self._bar is not None:
                self._attempt(self._bar.clear)
            self._attempt(lambda: _write(text))

    def __str__(self) -> str:
        self.done = self.done if self._poll is None else self._poll()
        of_total = "" if self.total is None else f" of {self.total}"
        count = f"{self.done}{of_total} {self.unit}, " if self.done or of_total else ""
        text = f"{self.name}: {count}{_minutes(time.monotonic() - self.began)} elapsed"
        left = self.left
        text += "" if left is None else f", about {_minutes(left)} left"
        return f"{text} ({self.note})" if self.note else text

    def __enter__(self) -> Progress:
        self.began = self.since = time.monotonic()
        if self.shown and sys.stderr is not None:
            self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(1.0)  # not for ever: a pipe that is full and not read blocks the thread

    def _follow(self) -> None:
        terminal = on_terminal()
        show, wait = (self._draw, DELAY) if terminal else (lambda: _write(str(self)), EVERY)
        while not self._over.wait(wait):
            with self._output:
                if not self._attempt(show):
                    break
            wait = REFRESH if terminal else EVERY
        with self._output:
            if self._bar is not None:
                self._attempt(self._bar.close)

    def _attempt(self, write: Callable[[], object]) -> bool:
        """Whether it could be written: stderr may be closed, broken or replaced at any time."""
        try:
            write()
        except (OSError, ValueError, AttributeError):
            return False
        return True

    def _draw(self) -> None:
        if self._bar is None:
            from tqdm import tqdm

            # without tqdm's own thread and lock between processes
            bar = type("Bar", (tqdm,), {"monitor_interval": 0, "_lock": threading.RLock()})
            self._bar = bar(bar_format="{desc}", file=sys.stderr, leave=False, dynamic_ncols=True)
        text = str(self)
        self._bar.n, self._bar.total = self.done, self.total
        self._bar.bar_format = "|{bar:10}| {desc}" if self.total else "{desc}"
        self._bar.set_description_str(text)


def _write(text: str) -> None:
    # where stderr is closed it is None, for which print would write to stdout
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
