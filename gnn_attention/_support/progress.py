"""Progress of a long command on stderr: a bar on a terminal, a line every 5 s elsewhere.

tqdm formats the line: ``verify:  30%|███       | 123/410 [00:21<00:49, 5.86 checks/s, attend, float32]``.
A separate thread prints it, so that it is also updated during a long step.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from contextlib import suppress

from tqdm import tqdm

LINE_SECONDS = 5.0  # A line is printed this often if stderr is not a terminal.
BAR_SECONDS = 0.5  # The bar on a terminal is updated this often.


class Progress:
    """Context manager that shows how many of ``total`` steps (None: unknown) are done.

    With ``show=False`` it shows nothing.

    >>> with Progress("verify", total=2, unit="checks") as progress:
    ...     progress.advance(note="attend, float32")
    """

    def __init__(self, name: str, total: int | None = None, unit: str = "steps", show: bool = True) -> None:
        self.name, self.unit, self.show = name, unit, show
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)
        self.expect(total)

    def expect(self, total: int | None, done_before: int = 0, note: str = "") -> None:
        """Start to count ``total`` steps, of which ``done_before`` were done earlier."""
        self.total, self.done, self.done_before, self.note = total, done_before, done_before, note
        self.start_time = time.monotonic()

    def advance(self, num_steps: int = 1, note: str | None = None) -> None:
        """Count ``num_steps`` more as done; ``note`` names the step that follows."""
        self.done += num_steps
        self.note = self.note if note is None else note

    def reach(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    def begin(self, note: str) -> None:
        """Start the step that ``note`` names; the previous step then counts as done."""
        self.advance(int(self.note != ""), note)

    def meter(self, width: int | None = None) -> str:
        """Return the line to show; the bar makes it ``width`` characters wide."""
        options = {"prefix": self.name, "unit": f" {self.unit}", "postfix": self.note}
        state = self.done, self.total, time.monotonic() - self.start_time
        return str(tqdm.format_meter(*state, width, initial=self.done_before, **options))

    def __enter__(self) -> Progress:
        if self.show:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._finished.set()
        if self.show:
            # The wait is limited, since the thread blocks forever on a full pipe that nobody reads.
            self._thread.join(1.0)

    def _show(self) -> None:
        # stderr may be None, closed, or a pipe without a reader; then nothing is shown.
        with suppress(AttributeError, OSError, ValueError):
            stderr = sys.stderr
            width = shutil.get_terminal_size().columns - 1 if stderr.isatty() else 0
            end = "\r" if width else "\n"
            while not self._finished.wait(BAR_SECONDS if width else LINE_SECONDS):
                print(self.meter(width or None).ljust(width), end=end, file=stderr, flush=True)
            if width:
                print(" " * width, end=end, file=stderr, flush=True)
