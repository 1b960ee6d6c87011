"""Progress of long commands: what is shown when, on a terminal and in a pipe; it never disturbs the work."""

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
def clock(monkeypatch):
    """A clock that stands: the test sets ``clock.now``."""
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(support_progress, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.fixture
def fast(monkeypatch):
    """What is shown every 5 s is shown at once."""
    for name in ("EVERY", "DELAY", "REFRESH"):
        monkeypatch.setattr(support_progress, name, 0.001)


def waited_for(found, seconds=30.0):
    """Whether ``found()`` becomes true in this time."""
    end = time.monotonic() + seconds
    while not found() and time.monotonic() < end:
        time.sleep(0.002)
    return found()


class TestText:
    def test_the_estimate_is_that_of_the_steps_so_far(self, clock):
        """The time before them, and those of an earlier run, say nothing of the speed."""
        progress = Progress("verify", unit="checks")
        clock.now = 60.0
        progress.expect(500, before=90)
        clock.now = 80.0
        progress.advance(100, note="attend")
        assert str(progress) == "verify:  38%|███▊      | 190/500 [00:20<01:02,  5.00 checks/s, attend]"

    def test_a_step_that_begins_ends_the_one_before(self):
        progress = Progress("bench graphs", 3, "cases")
        seen = []
        for name in "abc":
            progress.begin(name)
            seen.append((progress.done, progress.note))
        assert seen == [(0, "a"), (1, "b"), (2, "c")]


class TestPipe:
    def test_what_is_quick_shows_nothing(self, capfd):
        with Progress("verify", 1) as progress:
            progress.advance()
        assert capfd.readouterr() == ("", "")

    def test_one_long_step_is_followed(self, fast, monkeypatch):
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        with Progress("verify", 410, "checks") as progress:
            progress.advance(123, note="attend, float32")
            assert waited_for(lambda: sys.stderr.getvalue().count("\n") >= 3)
        form = r"verify: +\d+%\|.{10}\| \d+/410 \[00:\d\d<.*(, attend, float32)?\]"
        assert all(re.fullmatch(form, line) for line in sys.stderr.getvalue().splitlines())

    @pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
    def test_an_error_ends_it(self, error, fast, capsys):
        def interrupted():
            with Progress("verify"):
                time.sleep(0.02)
                raise error

        with pytest.raises(error):
            interrupted()
        capsys.readouterr()
        assert "progress" not in [thread.name for thread in threading.enumerate()]
        time.sleep(0.01)
        assert capsys.readouterr().err == ""


def closed():
    made = io.StringIO()
    made.close()
    return made


class Broken(io.TextIOBase):
    """A pipe without a reader."""

    def write(self, text):
        raise BrokenPipeError


def ascii_only():
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii")


@pytest.mark.parametrize("stream", [lambda: None, closed, Broken, ascii_only])
def test_a_stderr_that_takes_nothing_is_no_error(stream, fast, monkeypatch, capsys):
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    given = stream()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", given)
        with Progress("verify", 2) as progress:
            progress.advance(note="window | sinks, ±, ■")
            time.sleep(0.02)
            progress.write("a line with ■")
    assert (progress.done, failed, capsys.readouterr().out) == (1, [], "")


@contextlib.contextmanager
def terminal():
    """stderr is a terminal of 100 columns; the value says what it was sent so far."""
    pty, termios, fcntl, tty = (pytest.importorskip(name) for name in ("pty", "termios", "fcntl", "tty"))
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    os.set_blocking(ours, False)
    seen = bytearray()

    def sent():
        with contextlib.suppress(BlockingIOError):
            seen.extend(os.read(ours, 1 << 16))
        return seen.decode("utf-8", "ignore")

    with open(theirs, "w", encoding="utf-8") as stream, pytest.MonkeyPatch.context() as patch:  # noqa: PTH123
        patch.setattr(sys, "stderr", stream)
        yield sent
    os.close(ours)


class TestTerminal:
    def test_a_bar_that_leaves_a_clean_line(self, fast):
        with terminal() as sent:
            with Progress("verify", 410, "checks") as progress:
                progress.advance(123, note="attend, {float32}")
                assert waited_for(lambda: re.search(r"verify:  30%\|█+.*\| 123/410 \[00:0", sent()))
                assert waited_for(lambda: "checks/s, attend, {float32}]" in sent())
                progress.write("a line")
                assert waited_for(lambda: "\ra line\n" in sent())
                assert waited_for(lambda: "verify" in sent().split("a line\n")[1])
            assert waited_for(lambda: [part.strip(" ") for part in sent().split("\r")[-2:]] == ["", ""])

    def test_a_terminal_that_goes_away_is_no_error(self, fast, monkeypatch):
        failed = []
        monkeypatch.setattr(threading, "excepthook", failed.append)
        progress = Progress("verify", 2)
        with terminal() as sent:
            progress.__enter__()
            assert waited_for(lambda: "verify" in sent())
        progress.write("a line")
        progress.__exit__(None, None, None)
        assert failed == []


LONG = {
    "audit": ["audit", "window(8, 2)"],
    "explore": ["explore", "a b", "-o", "{}/page.html"],
    "draw": ["draw", "causal(8)", "-o", "{}/graph.svg"],
    "bench": ["bench"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_every_long_command_is_followed_in_a_pipe(name, fast, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "measure", lambda *arguments: time.sleep(0.02))
    monkeypatch.setattr(bench, "table", lambda record: "the record")
    assert main([word.format(tmp_path) for word in LONG[name]]) in (0, 1)
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if line.startswith(f"{name}: ")]
    assert lines
    assert all(re.search(r"\[\d+:\d\d(<|, )", line) for line in lines), lines
    assert f"{name}: " not in shown.out
