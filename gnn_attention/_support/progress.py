"""How far a long command has come, on stderr: a bar on a terminal, a line every 5 s elsewhere.

``verify:  30%|███       | 123/410 [00:21<00:49, 5.86 checks/s, attend, float32]`` is the form of tqdm. A
thread of its own shows it, so that a step of any length is followed. What cannot be written is left out.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time

from tqdm import tqdm

EVERY = 5.0  # seconds between lines
DELAY = 1.0  # seconds before the bar of a terminal
REFRESH = 0.2  # seconds between its pictures


def on_terminal() -> bool:
    """Whether stderr is a terminal."""
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
    """

    def __init__(
        self, name: str, total: int | None = None, unit: str = "steps", *, before: int = 0, shown: bool = True
    ) -> None:
        self.name, self.unit, self.shown = name, unit, shown
        self._count, self._output, self._over = threading.Lock(), threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)
        self._erasure = ""  # what removes the bar that is drawn
        self.expect(total, before)

    def expect(self, total: int | None, before: int = 0, note: str = "") -> None:
        """From here on ``total`` steps are counted, ``before`` of which are done."""
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
        """A step begins, which ends the one before."""
        self.advance(int(self.note != ""), note)

    def write(self, text: str) -> None:
        """A line on stderr, above the bar if there is one; also where progress itself is not shown."""
        self._put(f"{self._erasure}{text}\n")

    def __str__(self) -> str:
        return self._meter(None)

    def _meter(self, columns: int | None) -> str:
        options = {"initial": self.before, "prefix": self.name, "unit": f" {self.unit}", "postfix": self.note}
        elapsed = time.monotonic() - self.since
        return str(tqdm.format_meter(self.done, self.total, elapsed, ncols=columns, **options))

    def __enter__(self) -> Progress:
        self.since = time.monotonic()
        if self.shown and sys.stderr is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread.ident is not None:
            # A pipe that is full and not read blocks the thread for ever.
            self._thread.join(1.0)

    def _show(self) -> None:
        show, wait, pause = (self._draw, DELAY, REFRESH) if on_terminal() else (self._print, EVERY, EVERY)
        while not self._over.wait(wait) and show():
            wait = pause
        self._put(self._erasure)

    def _print(self) -> bool:
        return self._put(f"{self}\n")

    def _draw(self) -> bool:
        columns = shutil.get_terminal_size().columns - 1
        erasure, self._erasure = self._erasure, f"\r{' ' * columns}\r"
        return self._put(erasure + self._meter(columns))

    def _put(self, text: str) -> bool:
        """Whether it could be written: stderr may be None, closed, broken or replaced at any time."""
        with self._output:
            try:
                sys.stderr.write(text)
                sys.stderr.flush()
            except (OSError, ValueError, AttributeError):
                return False
        return True
