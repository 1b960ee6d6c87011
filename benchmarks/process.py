"""Run measurements in fresh processes, and read their resident memory from /proc."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "is_out_of_memory", "limit_memory", "one_line", "peak_memory", "run_in_process", "seconds"]

ROOT = Path(__file__).resolve().parent.parent
# Two unbound OpenMP workers may share a core, and every parallel region then costs 8 ms.
BOUND_THREADS = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}


def run_in_process(
    module: str, function: str, arguments: Mapping[str, Any], variables: Mapping[str, str] | None = None
) -> Any:
    """Call ``function(**arguments)`` of a module in a fresh interpreter; arguments and result are passed as JSON.

    If the process fails, raises RuntimeError with the last line of its stderr, or with its exit code.
    """
    program = (
        f"import json, sys; from {module} import {function} as f; "
        "result = f(**json.loads(sys.stdin.read())); print(); print(json.dumps(result))"
    )
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **(variables or {})},
    )
    if process.returncode:
        reason = process.stderr.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        raise RuntimeError(f"{function}({dict(arguments)}) failed: {reason[0]}")
    return json.loads(process.stdout.splitlines()[-1])


def seconds(work: Callable[[], object]) -> float:
    """Return the run time of ``work``."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def peak_memory(work: Callable[[], object]) -> float:
    """Return by how many MB the resident memory grows at most while ``work`` runs.

    Raises OSError on systems other than Linux.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        # Return freed memory to the system, so that it is counted when it is used again.
        trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    start = _status("VmRSS")
    work()
    return max(_status("VmHWM") - start, 0.0)


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def limit_memory(limit: int) -> None:
    """Limit the data of this process to ``limit`` bytes, so that a method that needs more fails alone."""
    # Windows has no module `resource`, and the command line must start there too.
    resource = importlib.import_module("resource")
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def one_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, at most 300 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def is_out_of_memory(message: str) -> bool:
    """Return whether a message reports too little memory, an error after which a device can still be used.

    >>> errors = ["CUDA error: out of memory", "CUDA error: an illegal memory access was encountered"]
    >>> [is_out_of_memory(error) for error in errors]
    [True, False]
    """
    phrases = ("OutOfMemoryError", "MemoryError", "out of memory", "ALLOC_FAILED", "can't allocate memory")
    return any(phrase in message for phrase in phrases)
