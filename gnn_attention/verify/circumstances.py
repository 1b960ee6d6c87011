"""Where something was run: what a record must say so that it can be run there again."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

COMMIT = "GNN_ATTENTION_COMMIT"  # the commit of a copy that holds no repository
HERE = Path(__file__).resolve().parent


def environment(device: str) -> dict[str, Any]:
    """Device, versions, flags, commit and date; flags as they are outside of the checks, each of which sets
    tf32.

    >>> environment("cpu")["cuda"] is None
    True
    """
    cuda, matmul = device.startswith("cuda"), torch.backends.cuda.matmul
    name = (
        torch.cuda.get_device_name(device)
        if cuda
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
    capability = ".".join(map(str, torch.cuda.get_device_capability(device))) if cuda else None
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None
    return {
        "device": name,
        "driver": driver,
        "cuda": torch.version.cuda if cuda else None,
        "capability": capability,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "numpy": _version("numpy"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "interpreted": os.environ.get("TRITON_INTERPRET") == "1",
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "allow_tf32": matmul.allow_tf32,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        **_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _commit() -> dict[str, Any]:
    """The commit and whether files differ from it; None where that is unknown."""
    git = ("git", "-C", str(HERE))
    found = _output(*git, "rev-parse", "HEAD")
    if found is None:
        return {"commit": os.environ.get(COMMIT), "dirty": None}
    return {
        "commit": found,
        "dirty": _output(*git, "status", "--porcelain", "--", str(HERE.parent)) is not None,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a program prints, None where it prints nothing, is not there or fails."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
