"""Long commands show their progress on a terminal and in a pipe, which never disturbs their work."""

from __future__ import annotations

import contextlib
import io
import os
import re
import struct
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from gnn_attention.__main__ import main
from gnn_attention._support import progress as support_progress
from gnn_attention._support.progress import Progress
from gnn_attention.cli import bench


@pytest.fixture
def short_intervals(monkeypatch):
    """Show progress every millisecond instead of every 5 s or 0.5 s."""
    for name in ("LINE_SECONDS", "BAR_SECONDS"):
        monkeypatch.setattr(support_progress, name, 0.001)


def wait_for(condition, seconds=30.0):
    """Return whether ``condition()`` becomes true within ``seconds``."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def test_the_estimate_is_that_of_the_steps_so_far(monkeypatch):
    """The speed counts neither the time before these steps nor the steps of an earlier run."""
    now = iter([0.0, 60.0, 80.0])
    monkeypatch.setattr(support_progress, "time", SimpleNamespace(monotonic=lambda: next(now)))
    progress = Progress("verify", unit="checks")
    progress.expect(500, done_before=90)
    progress.begin("dense")
    progress.advance(99)
    # This ends the step before.
    progress.begin("rows")
    assert progress.meter() == "verify:  38%|███▊      | 190/500 [00:20<01:02,  5.00 checks/s, rows]"


def test_one_long_step_is_followed_in_a_pipe(short_intervals, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Progress("verify", 410, "checks") as progress:
        progress.advance(123, note="attend, float32")
        assert wait_for(lambda: sys.stderr.getvalue().count("\n") >= 3)
    form = r"verify: +\d+%\|.{10}\| \d+/410 \[00:\d\d<.*(, attend, float32)?\]"
    assert all(re.fullmatch(form, line) for line in sys.stderr.getvalue().splitlines())


def closed_stream():
    stream = io.StringIO()
    stream.close()
    return stream


class Broken(io.TextIOBase):
    """A stream like a pipe without a reader."""

    def write(self, text):
        raise BrokenPipeError


@pytest.mark.parametrize(
    "stream", [lambda: None, closed_stream, Broken, lambda: io.TextIOWrapper(io.BytesIO(), encoding="ascii")]
)
def test_a_stderr_that_takes_nothing_is_no_error(stream, short_intervals, monkeypatch, capsys):
    failures = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream())
        with Progress("verify", 2) as progress:
            progress.advance(note="window | sinks, ±, ■")
            time.sleep(0.02)
    assert (progress.done, failures, capsys.readouterr().out) == (1, [], "")


@contextlib.contextmanager
def terminal():
    """Make stderr a terminal of 100 columns; the value is a function that returns what was written."""
    pty, termios, fcntl, tty = (pytest.importorskip(name) for name in ("pty", "termios", "fcntl", "tty"))
    master, slave = pty.openpty()
    tty.setraw(slave)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    os.set_blocking(master, False)
    received = bytearray()

    def read_terminal():
        with contextlib.suppress(BlockingIOError):
            received.extend(os.read(master, 1 << 16))
        return received.decode("utf-8", "ignore")

    with open(slave, "w", encoding="utf-8") as stream, pytest.MonkeyPatch.context() as patch:  # noqa: PTH123
        patch.setattr(sys, "stderr", stream)
        yield read_terminal
    os.close(master)


def test_a_bar_leaves_a_clean_line_on_a_terminal(short_intervals):
    with terminal() as read_terminal:
        with Progress("verify", 410, "checks") as progress:
            progress.advance(123, note="attend, {float32}")
            assert wait_for(lambda: re.search(r"verify:  30%\|█+.*\| 123/410 \[00:0", read_terminal()))
            assert wait_for(lambda: "checks/s, attend, {float32}]" in read_terminal())
        assert wait_for(lambda: [part.strip(" ") for part in read_terminal().split("\r")[-2:]] == ["", ""])


COMMANDS = {
    "audit": ["audit", "window(8, 2)"],
    "explore": ["explore", "a b", "-o", "{}/page.html"],
    "draw": ["draw", "causal(8)", "-o", "{}/graph.svg"],
    "bench": ["bench"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_long_command_is_followed_in_a_pipe(name, short_intervals, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "measure", lambda *arguments: time.sleep(0.02))
    monkeypatch.setattr(bench, "table", lambda record: "the record")
    assert main([word.format(tmp_path) for word in COMMANDS[name]]) in (0, 1)
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if line.startswith(f"{name}: ")]
    assert lines
    assert all(re.search(r"\[\d+:\d\d(<|, )", line) for line in lines), lines
    assert f"{name}: " not in output.out
