"""Where checks were run: what a record must say so that they can be run there again."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

__all__ = ["environment"]

COMMIT = "GNN_ATTENTION_COMMIT"  # the commit of a copy that holds no repository
HERE = Path(__file__).resolve().parent


def environment(device: str) -> dict[str, Any]:
    """Device, versions, flags, commit and date.

    >>> environment("cpu")["cuda"] is None
    True
    """
    cuda = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "driver": _said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))) if cuda else None,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "numpy": _version("numpy"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "interpreted": os.environ.get("TRITON_INTERPRET") == "1",
        **_flags(),
        **_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _flags() -> dict[str, Any]:
    """As they are outside of the checks, each of which sets TensorFloat-32 for itself."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
    }


def _commit() -> dict[str, Any]:
    """The commit and whether files differ from it; None where nobody knows."""
    found = _said_by("git", "-C", str(HERE), "rev-parse", "HEAD")
    if found is None:
        return {"commit": os.environ.get(COMMIT), "dirty": None}
    return {
        "commit": found,
        "dirty": _said_by("git", "-C", str(HERE), "status", "--porcelain", "--", str(HERE.parent)) is not None,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _said_by(*command: str) -> str | None:
    """What a program prints, None where it prints nothing, is not there or fails."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
