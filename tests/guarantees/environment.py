"""Where a record was made: the device, the versions, the commit and the date."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gnn_attention import verify

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "GNN_ATTENTION_COMMIT"  # the commit of a copy that holds no repository
PACKAGES = ("torch_geometric", "networkx", "transformers", "triton", "numpy")


def environment(device: str) -> dict[str, Any]:
    """What ``verify`` says of a device and its versions, and the commit, whether files differ, and the date.

    >>> environment("cpu")["cuda"] is None
    True
    """
    git, on_gpu = ("git", "-C", str(ROOT)), device.startswith("cuda")
    status = None if COMMIT in os.environ else output(*git, "status", "--porcelain", "--", "gnn_attention")
    installed = {package.name.replace("-", "_"): package.version for package in metadata.distributions()}
    return {
        **verify.environment(device),
        "cuda": torch.version.cuda if on_gpu else None,
        **{package: installed.get(package) for package in PACKAGES},
        "platform": platform.platform(),
        "interpreted": os.environ.get("TRITON_INTERPRET") == "1",
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "commit": os.environ.get(COMMIT) or output(*git, "rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def output(*command: str) -> str | None:
    """What a program prints; None where it is not there or fails."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return None
