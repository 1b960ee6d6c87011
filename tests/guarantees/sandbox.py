"""Work on files of strangers in a process of its own: its death, its hunger and its detours are seen, and end
nothing else.

The process is a fork, which has every module at once. It may take so much more memory than it had, and it may
neither start programs, nor reach a network, nor change a file.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORBIDDEN = (
    *("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.startfile", "os.kill"),
    *("subprocess.Popen", "pty.spawn", "socket.connect", "socket.bind", "socket.getaddrinfo"),
    *("urllib.Request", "webbrowser.open", "ctypes.dlopen", "os.remove", "os.rename", "os.rmdir"),
    *("os.mkdir", "os.link", "os.symlink", "os.chmod", "os.truncate", "shutil.rmtree"),
)
Make = Callable[[int], Callable[[], str | None]]
LONGEST_WAIT = 120.0  # seconds without a word, after which a process is taken to hang


class Detour(BaseException):
    """A file made its reader do what no reader does."""


@dataclass(frozen=True)
class Seen:
    """What came of a case: seconds of the processor, and a complaint or none."""

    number: int
    seconds: float
    complaint: str | None


def available() -> str | None:
    """Why there is no such process here; None where there is.

    >>> available() is None or "fork" in available() or "/proc" in available()
    True
    """
    if not hasattr(os, "fork"):
        return "needs os.fork"
    return None if Path("/proc/self/statm").exists() else "needs /proc to limit memory"


def seen(make: Make, numbers: Sequence[int], memory: int, wait: float = LONGEST_WAIT) -> Iterator[Seen]:
    """Each case in turn, in as many processes as it takes; ``make(number)`` prepares what then gives a
    complaint, or None.

    ``memory``: bytes that a process may have beyond those that it begins with. A case that kills its process,
    takes longer than ``wait`` seconds or raises is a complaint itself. Only what ``make`` returns is timed,
    and watched.
    """
    done = 0
    while done < len(numbers):
        for found in _one_process(make, numbers[done:], memory, wait):
            yield found
            done += 1


def _one_process(make: Make, numbers: Sequence[int], memory: int, wait: float) -> Iterator[Seen]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # nothing may escape: the child must not go on with its parent's work
        try:
            os.close(reading)
            _inside(make, numbers, memory, writing)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        yield from _results(child, reading, numbers, wait)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _results(child: int, reading: int, numbers: Sequence[int], wait: float) -> Iterator[Seen]:
    """What the child says, a line for each case; of the one that it does not come to say, why."""
    left, text = list(numbers), b""
    while left:
        ready, _, _ = select.select([reading], [], [], wait)
        more = os.read(reading, 2**16) if ready else b""
        if not more:
            yield Seen(left[0], wait, _ended(child) if ready else f"hung: no answer within {wait:g} s")
            return
        *lines, text = (text + more).split(b"\n")
        for line in lines:
            yield Seen(left.pop(0), *json.loads(line))


def _ended(child: int) -> str:
    """Of what a process died; it stays to be waited for."""
    found = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    status = 0 if found is None else found.si_status
    killed = found is not None and found.si_code != os.CLD_EXITED
    return (
        f"its process was killed by {signal.Signals(status).name}"
        if killed
        else f"its process ended with code {status}"
    )


def _inside(make: Make, numbers: Sequence[int], memory: int, writing: int) -> None:
    gc.freeze()  # no collection, and so no copy, of what the parent has
    faulthandler.disable()  # a death is reported by the parent
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    warnings.simplefilter("ignore")
    detours: list[str] = []
    watching = _watch(detours)
    _limit(memory)
    for number in numbers:
        work = make(number)
        detours.clear()
        watching[0] = True
        began = time.process_time()
        complaint = _tried(work)
        seconds = time.process_time() - began
        watching[0] = False
        complaint = f"its reader did {detours[0]}" if detours else complaint
        os.write(writing, json.dumps([seconds, complaint]).encode() + b"\n")


def _tried(work: Callable[[], str | None]) -> str | None:
    try:
        return work()
    except BaseException as error:
        return f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _watch(detours: list[str]) -> list[bool]:
    """Stop every program, connection and change of a file that Python begins."""
    watching = [False]

    def refuse_event(event: str, arguments: tuple[Any, ...]) -> None:
        if watching[0] and _changes(event, arguments):
            detours.append(f"{event} {arguments!r:.100}")
            raise Detour(event)

    sys.addaudithook(refuse_event)
    return watching


def _changes(event: str, arguments: tuple[Any, ...]) -> bool:
    """True for a program, a connection or a change of a file; a folder that is there is not made."""
    if event == "open":
        changing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        return isinstance(arguments[2], int) and bool(arguments[2] & changing)
    return event.startswith(FORBIDDEN) and not (event == "os.mkdir" and Path(arguments[0]).is_dir())


def _limit(memory: int) -> None:
    """So much more memory, and no core file of several gigabytes for each death."""
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + memory
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(
        resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
    )
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
