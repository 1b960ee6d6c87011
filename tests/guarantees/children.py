"""Commands in processes of their own, ended by Ctrl-C at a chosen moment: in a fork of one that has loaded
all there is.

A fork starts at once. It leads a process group, as a command does that a shell starts; the whole group is
sent the interrupt, as by a terminal. ``serve`` is the program that forks, one case for each line of JSON that
it reads.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAM = "from tests.guarantees import children; children.serve(children.command)"
PATIENCE = 60.0  # seconds that a command may take, also to end after the interrupt
GRACE = 5.0  # seconds that its children may live longer
WRITES = {
    *("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree", "shutil.copymode"),
}  # of Python's audit events


def command(arguments: list[str]) -> int:
    """The exit code of ``gnn-attention``, or of the trainings in ``examples``."""
    of_training = arguments[:1] in (["train"], ["compare"])
    name = "examples.training.__main__" if of_training else "gnn_attention.__main__"
    code: int = importlib.import_module(name).main(arguments)
    return code


def serve(main: Callable[[list[str]], int]) -> None:
    """Answer each line ``{"arguments", "folder", "seconds" | "event"}`` with ``{"code", "left", ...}``."""
    small = (
        Path(sysconfig.get_path("stdlib")) / "email"
    )  # text to learn from: all of the library takes seconds to read
    for name in ("examples.training", "examples.training.compare"):
        module: Any = importlib.import_module(name)
        module.corpus = functools.partial(module.corpus, small)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(["generate", "a", "--tokens", "2"])  # what is loaded when it is first needed
    for line in sys.stdin:
        case = json.loads(line)
        begins, tells = os.pipe()
        child = os.fork()
        if child == 0:
            _become(case)
            os.close(tells)  # only now it has a group, and receives an interrupt
            code = main(case["arguments"])
            signal.signal(
                signal.SIGINT, signal.SIG_IGN
            )  # how an interpreter ends is for those that begin, too
            sys.exit(code)
        os.close(tells)
        os.read(begins, 1)  # until the other end is closed
        os.close(begins)
        print(json.dumps(_interrupted(child, case)), flush=True)


def _become(case: dict[str, Any]) -> None:
    """A command as from a shell, in its folder, with temporary files, input and output of its own."""
    os.setpgid(0, 0)
    os.chdir(case["folder"])
    os.environ["TMPDIR"] = tempfile.tempdir = str(Path(case["folder"]).with_suffix(".tmp"))
    files = (("in", os.O_RDONLY), ("out", os.O_WRONLY | os.O_TRUNC), ("err", os.O_WRONLY | os.O_TRUNC))
    for number, (name, mode) in enumerate(files):
        os.dup2(os.open(Path(case["folder"]).with_suffix(f".{name}"), mode | os.O_CREAT), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if case.get("event"):
        sys.addaudithook(_interrupting(case["event"], case["folder"]))


def _interrupting(event: int, folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    """A hook that interrupts this group just before its ``event``-th change of a file in ``folder``."""
    seen = 0

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        writes = name in WRITES or (
            name == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        )
        if (
            writes
            and seen < event
            and str(Path(os.fsdecode(_path(arguments[0]))).absolute()).startswith(folder)
        ):
            seen += 1
            if seen == event:
                os.killpg(0, signal.SIGINT)

    return hook


def _path(given: Any) -> Any:
    return given if isinstance(given, (str, bytes, os.PathLike)) else ""


def _interrupted(child: int, case: dict[str, Any]) -> dict[str, Any]:
    """Send the interrupt when it is time, wait for the end, and tell of it."""
    began, sent = time.monotonic(), False
    if case.get("seconds") is not None:
        ended = waited(child, case["seconds"])
        if ended is not None:
            return {"code": ended, "sent": False, "took": time.monotonic() - began, "left": left_over(child)}
        os.killpg(child, signal.SIGINT)
        began, sent = time.monotonic(), True
    code = waited(child, PATIENCE)
    if code is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return {"code": code, "sent": sent, "took": time.monotonic() - began, "left": left_over(child)}


def waited(child: int, seconds: float) -> int | None:
    """The exit code of a child that ends within so long, else None."""
    until = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            return None
        time.sleep(0.002)


def left_over(group: int) -> list[str]:
    """The commands of the processes that live on in a group after some grace; they are killed then."""
    until = time.monotonic() + GRACE
    while (there := _members(group)) and time.monotonic() < until:
        time.sleep(0.05)
    if there:
        os.killpg(group, signal.SIGKILL)
    return there


def _members(group: int) -> list[str]:
    """Who is alive in a process group, from /proc; where there is none, whether anybody is."""
    if not Path("/proc/self/stat").exists():
        try:
            os.killpg(group, 0)
        except OSError:
            return []
        return ["a process"]
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")
            state, _, leader, *_ = rest.split()
        except OSError:  # it ended meanwhile
            continue
        if int(leader) == group and state not in "ZX":
            found.append(name.replace("(", ""))
    return found
