"""Processes of their own: functions run in a fresh interpreter or in a fork, and resident memory from
/proc.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "environment",
    "forget_peak",
    "in_a_fork",
    "in_a_process",
    "is_out_of_memory",
    "limit_memory",
    "one_line",
    "peak",
]

ROOT = str(Path(__file__).resolve().parent.parent)  # of the repository, where this package lies
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
OWN_THREADS = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "OMP_NUM_THREADS": "1"}
# Two workers of OpenMP that are not bound may land on one core: every parallel region then costs 8 ms.


def forget_peak() -> float:
    """Resident memory now, in MB; from here on the peak is counted anew. OSError where this is not Linux."""
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        raise OSError("the benchmark reads a process's peak memory from /proc, which only Linux has")
    clear.write_text("5", encoding="ascii")
    return _status("VmRSS")


def peak() -> float:
    """The most resident memory since :func:`forget_peak`, in MB."""
    return _status("VmHWM")


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def limit_memory(limit: int) -> None:
    """From here on this process gets no more than ``limit`` bytes of data: a method that wants more fails,
    not the machine.
    """
    resource = importlib.import_module("resource")  # not on Windows, whose command line must still start
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    wanted = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def environment(allocator: str) -> dict[str, str]:
    """The variables of a child: threads bound to cores, and torch's tensors in huge pages
    (``allocator="thp"``) or not.

    It starts with one thread, so that no worker is there when it forks; the number to use comes with the
    work.
    """
    return {
        **OWN_THREADS,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "THP_MEM_ALLOC_ENABLE": "1" if allocator == "thp" else "0",
    }


def in_a_process(
    module: str,
    function: str,
    arguments: Mapping[str, Any],
    variables: Mapping[str, str] | None = None,
    timeout: float = 900,
) -> Any:
    """What ``function(**arguments)`` of a module returns in a fresh interpreter; both ways as JSON.

    RuntimeError with the last line of its stderr, or with the signal that ended it, if it fails.
    """
    program = (
        f"import json, sys; from {module} import {function} as f; "
        "result = f(**json.loads(sys.stdin.read())); print(); print(json.dumps(result))"
    )
    path = [ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **(variables or {})},
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [_ended(done.returncode)]
        raise RuntimeError(f"{function}({dict(arguments)}) failed: {last[0]}")
    return json.loads(done.stdout.splitlines()[-1])


def in_a_fork(work: Callable[[], Any], timeout: int = 120) -> Any:
    """What ``work()`` returns in a fork of this process, through JSON; RuntimeError if it raises, dies or
    takes too long.

    A fork starts with the imports and inputs of its parent at once, yet its memory is its own. The parent
    must never have started worker threads: a fork would wait for them for ever.
    """
    reading, writing = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:  # nothing may escape: the child must not go on with its parent's work
        signal.alarm(timeout)  # ends it, wherever it hangs
        _die_with(parent)
        try:
            answer = {"result": work()}
        except BaseException as error:
            answer = {"error": one_line(error)}
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(answer))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    answer = json.loads(text) if text else {"error": _ended(status)}
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["result"]


def _die_with(parent: int) -> None:
    """From here on this process is killed when its parent is, as Ctrl-C does to a workload; where the system
    can (Linux).
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def one_line(error: BaseException) -> str:
    """The error's type and the first line of what it says, at most 300 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def is_out_of_memory(message: str) -> bool:
    """Whether a device had too little memory; after this error it can still be used.

    >>> errors = ["CUDA error: out of memory", "CUDA error: an illegal memory access was encountered"]
    >>> [is_out_of_memory(error) for error in errors]
    [True, False]
    """
    return any(words in message for words in ("OutOfMemoryError", "out of memory", "ALLOC_FAILED"))


def _ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"killed by {signal.Signals(-code).name}" + (
        ", most likely out of memory" if code == -signal.SIGKILL else ""
    )
