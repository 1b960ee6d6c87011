"""Where something was run: what a record must say so that it can be run there again."""

from __future__ import annotations

import datetime
import hashlib
import importlib
import importlib.metadata
import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

COMMIT = "GNN_ATTENTION_COMMIT"  # the commit of a copy that holds no repository
HERE = Path(__file__).resolve().parent


def environment(device: str) -> dict[str, Any]:
    """Device, versions, flags outside of the checks (each of which sets tf32), commit and date.

    >>> environment("cpu")["cuda"] is None
    True
    """
    gpu, matmul, cudnn = device.startswith("cuda"), torch.backends.cuda.matmul, torch.backends.cudnn
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else cpu,
        "driver": _of_driver("driver_version") if gpu else None,
        "clocks": _of_driver("clocks.sm,clocks.max.sm,clocks.mem,power.limit") if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
        "cudnn": str(torch.backends.cudnn.version()) if gpu else None,  # type: ignore[no-untyped-call]
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))) if gpu else None,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "triton_key": _triton_key() if gpu else None,
        "numpy": _version("numpy"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "interpreted": os.environ.get("TRITON_INTERPRET") == "1",
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": matmul.fp32_precision,
        "cudnn_benchmark": cudnn.benchmark,
        **_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _of_driver(query: str) -> str | None:
    return _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")


def _triton_key() -> str | None:
    """A digest of Triton's own sources and compiler: kernels compiled by another are others."""
    with suppress(ImportError):
        cache = importlib.import_module("triton.runtime.cache")
        return hashlib.sha256(cache.triton_key().encode()).hexdigest()
    return None


def _commit() -> dict[str, Any]:
    """The commit and whether files differ from it; None where that is unknown."""
    git = ("git", "-C", str(HERE))
    found = _output(*git, "rev-parse", "HEAD")
    if found is None:
        return {"commit": os.environ.get(COMMIT), "dirty": None}
    changes = _output(*git, "status", "--porcelain", "--", str(HERE.parent))
    return {"commit": found, "dirty": changes is not None}


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _output(*command: str) -> str | None:
    """What a program prints, None where it prints nothing, is not there or fails."""
    with suppress(OSError, subprocess.TimeoutExpired):
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        return found.stdout.strip() or None
    return None
