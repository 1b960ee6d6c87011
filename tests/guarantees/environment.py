"""A record states its environment: device, versions, commit and date."""

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
COMMIT = "GNN_ATTENTION_COMMIT"  # the variable that names the commit of a copy without a repository
PACKAGES = ("torch_geometric", "networkx", "transformers", "triton", "numpy")


def environment(device: str) -> dict[str, Any]:
    """Return the environment of ``verify``, with further versions, the commit, ``dirty`` and the date.

    >>> environment("cpu")["cuda"] is None
    True
    """
    git, on_gpu = ("git", "-C", str(ROOT)), device.startswith("cuda")
    status = None if COMMIT in os.environ else output(*git, "status", "--porcelain", "--", "gnn_attention")
    versions = {package.name.replace("-", "_"): package.version for package in metadata.distributions()}
    return {
        **verify.environment(device),
        "cuda": torch.version.cuda if on_gpu else None,
        **{package: versions.get(package) for package in PACKAGES},
        "platform": platform.platform(),
        "interpreted": os.environ.get("TRITON_INTERPRET") == "1",
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "commit": os.environ.get(COMMIT) or output(*git, "rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def output(*command: str) -> str | None:
    """Return what a program prints, or None if it is missing or fails."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return None
