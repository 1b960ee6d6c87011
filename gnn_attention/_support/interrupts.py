"""Ctrl-C while a command of this package is loading: one line and exit code 130, as later on, and no traceback.

Nothing is open then, so the process ends at once; and once a command has ended, all being written, it is not heard any more.
A program that imports the package is not concerned, nor is a command that was started with interrupts ignored.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import PurePath

__all__ = ["deliverable", "is_command", "quiet"]

CODE = 130


def is_command(arguments: Sequence[str], original: Sequence[str]) -> bool:
    """Whether ``sys.argv`` and ``sys.orig_argv`` are those of ``gnn-attention`` or ``python -m gnn_attention``.

    >>> is_command(["-m", "graphs"], ["python", "-m", "gnn_attention", "graphs"]), is_command(["a.py"], ["python", "a.py"])
    (True, False)
    """
    name = arguments[0] if arguments else ""
    if PurePath(name).stem == "gnn-attention":
        return True
    after = [two for one, two in pairwise(original) if one == "-m"] or [""]
    own = PurePath(name).name == "__main__.py" and PurePath(name).parent.name == "gnn_attention"
    return (name == "-m" or own) and (after[0] == "gnn_attention" or "-mgnn_attention" in original)


def quiet() -> None:
    """From here on Ctrl-C ends a command at once; nothing changes in other programs, or where someone handles it."""
    if (
        is_command(sys.argv, sys.orig_argv)
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _end)


@contextmanager
def deliverable() -> Iterator[None]:
    """Inside, Ctrl-C is a KeyboardInterrupt again, and afterwards nothing, if :func:`quiet` had changed that."""
    if signal.getsignal(signal.SIGINT) is not _end:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end(number: int, frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(CODE)


quiet()  # before anything else is loaded
