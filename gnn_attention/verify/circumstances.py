"""Where something was run: what a record must say so that it can be run there again."""

import datetime
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
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
    only_of_gpus = ("driver", "clocks", "cuda", "cudnn", "capability", "triton_key", "ptxas")
    about: dict[str, Any] = dict.fromkeys(only_of_gpus)
    about["device"] = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if gpu:
        about["device"], about["cuda"] = torch.cuda.get_device_name(device), torch.version.cuda
        about["driver"] = _of_driver("driver_version")
        about["clocks"] = clocks()
        about["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        about["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        about["triton_key"] = _triton_key()
        about["ptxas"] = ptxas_release()
    commit, dirty = _commit()
    return about | {
        "torch": torch.__version__,
        "triton": _version("triton"),
        "numpy": _version("numpy"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "interpreted": os.environ.get("TRITON_INTERPRET") == "1",
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": matmul.fp32_precision,
        "cudnn_benchmark": cudnn.benchmark,
        "commit": commit,
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _commit() -> tuple[str | None, bool | None]:
    """The commit, and whether files differ from it (None: unknown).

    The variable comes first: a copy without a repository may lie inside another repository.
    """
    if os.environ.get(COMMIT):
        return os.environ[COMMIT], None
    git = ("git", "-C", str(HERE))
    commit = _output(*git, "rev-parse", "HEAD")
    if commit is None:
        return None, None
    return commit, _output(*git, "status", "--porcelain", "--", str(HERE.parent)) is not None


def clocks() -> str | None:
    """Clocks, the limit of power and uncorrected errors of memory, as the driver gives them now."""
    return _of_driver("clocks.sm,clocks.max.sm,clocks.mem,power.limit,ecc.errors.uncorrected.volatile.total")


def _of_driver(query: str) -> str | None:
    return _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")


def _triton_key() -> str | None:
    """A digest of Triton's own sources and compiler: kernels compiled by another are others."""
    with suppress(ImportError, AttributeError):
        cache = importlib.import_module("triton.runtime.cache")
        return hashlib.sha256(cache.triton_key().encode()).hexdigest()
    return None


def ptxas_release() -> str | None:
    """The release of the assembler in use, that of ``TRITON_PTXAS_PATH`` or Triton's own, or None."""
    spec = importlib.util.find_spec("triton")
    own = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas" if spec and spec.origin else None
    program = os.environ.get("TRITON_PTXAS_PATH") or own
    release = re.search(r"V[0-9.]+", _output(str(program), "--version") or "")
    return release[0].removeprefix("V") if release else None


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
