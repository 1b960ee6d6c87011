"""Processes of their own for measurements, and their resident memory, read from /proc."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "in_a_process", "is_out_of_memory", "limit_memory", "one_line", "peak_memory"]

ROOT = Path(__file__).resolve().parent.parent  # of the repository, where this package lies
# Two workers of OpenMP that are not bound may land on one core: every parallel region then costs 8 ms.
BOUND_THREADS = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}


def in_a_process(
    module: str, function: str, arguments: Mapping[str, Any], variables: Mapping[str, str] | None = None
) -> Any:
    """Return what ``function(**arguments)`` of a module returns in a fresh interpreter; both ways as JSON.

    RuntimeError with the last line of its stderr, or with its exit code, if it fails.
    """
    program = (
        f"import json, sys; from {module} import {function} as f; "
        "result = f(**json.loads(sys.stdin.read())); print(); print(json.dumps(result))"
    )
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **(variables or {})},
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise RuntimeError(f"{function}({dict(arguments)}) failed: {last[0]}")
    return json.loads(done.stdout.splitlines()[-1])


def peak_memory(work: Callable[[], object]) -> float:
    """The most resident memory while ``work`` runs, in MB beyond what was resident before.

    OSError where this is not Linux.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        # freed memory goes back to the system, so that it is counted when it is used again
        trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status("VmRSS")
    work()
    return max(_status("VmHWM") - before, 0.0)


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def limit_memory(limit: int) -> None:
    """Let this process get no more than ``limit`` bytes of data: a method that wants more fails, not the machine."""
    resource = importlib.import_module("resource")  # not on Windows, whose command line must still start
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    wanted = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def one_line(error: BaseException) -> str:
    """The type of an error and the first line of what it says, at most 300 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def is_out_of_memory(message: str) -> bool:
    """Whether a device, or this process, had too little memory; after this error it can still be used.

    >>> errors = ["CUDA error: out of memory", "CUDA error: an illegal memory access was encountered"]
    >>> [is_out_of_memory(error) for error in errors]
    [True, False]
    """
    words = ("OutOfMemoryError", "MemoryError", "out of memory", "ALLOC_FAILED", "can't allocate memory")
    return any(word in message for word in words)
