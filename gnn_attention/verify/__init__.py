"""Equal to dense attention, on your machine: named public checks against a float64 formula, and their report.

``gnn-attention verify`` runs them all and prints a table; :func:`run` does so from Python, and with
``backends=[Backend("mine", my_run)]`` it checks a backend of your own. :func:`checks` yields them one by one, for pytest:
``@pytest.mark.parametrize("check", verify.checks(backends=[mine]), ids=lambda c: c.name)``.
"""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gnn_attention import _checks
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.verify.attend_checks import attend_checks
from gnn_attention.verify.cases import FEATURES, GRAPHS
from gnn_attention.verify.check import DTYPES, FORMS, GPU_ONLY, Check, Settings
from gnn_attention.verify.layer_checks import form_checks, layer_checks
from gnn_attention.verify.report import Report, Result
from gnn_attention.verify.rule_checks import rule_checks
from gnn_attention.verify.trained_checks import trained_checks

__all__ = ["Check", "Report", "Result", "checks", "environment", "run"]


def run(
    device: str | None = None,
    dtypes: Sequence[str] | None = None,
    backends: Sequence[str | Backend] | None = None,
    graphs: Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    forms: Sequence[str] | None = None,
    sizes: Sequence[float] = (1.0, 5.0),
    trained: bool = True,
    seed: int = 0,
    progress: Callable[[int, Result], None] | None = None,
) -> Report:
    """Run the checks and return their :class:`Report`; None means all there are, and a GPU if there is one.

    On a CPU the backend ``flex`` is checked only if it is named: it compiles for minutes, and holds forward passes alone.

    ``progress(number_so_far, result)`` is called after each check. ValueError for an unknown name, or a device
    that is not there.
    """
    results: list[Result] = []
    for check in checks(device, dtypes, backends, graphs, features, forms, sizes, trained, seed):
        results.append(check())
        if progress is not None:
            progress(len(results), results[-1])
    return Report(tuple(results), environment(_device(device)))


def checks(
    device: str | None = None,
    dtypes: Sequence[str] | None = None,
    backends: Sequence[str | Backend] | None = None,
    graphs: Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    forms: Sequence[str] | None = None,
    sizes: Sequence[float] = (1.0, 5.0),
    trained: bool = True,
    seed: int = 0,
) -> Iterator[Check]:
    """The checks that :func:`run` would run, one by one; arguments as there.

    >>> next(checks(device="cpu", trained=False)).name
    'full, plain, inputs x1'
    """
    settings = Settings(
        device=_device(device),
        dtypes=_dtypes(dtypes, _device(device)),
        backends=tuple(_backend(b) for b in (_usual_backends(_device(device)) if backends is None else backends)),
        graphs=_names("graphs", graphs, GRAPHS),
        features=_names("features", features, FEATURES),
        forms=_names("forms", forms, FORMS),
        sizes=tuple(float(size) for size in sizes),
        walk=backends is None,
        seed=seed,
    )
    return _all_checks(settings, trained)


def environment(device: str) -> dict[str, Any]:
    """What a record must say about where it was made."""
    cuda = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "driver": _said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "commit": _said_by("git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _all_checks(settings: Settings, trained: bool) -> Iterator[Check]:
    yield from attend_checks(settings)
    yield from layer_checks(settings)
    yield from form_checks(settings)
    yield from rule_checks(settings)
    if trained:
        yield from trained_checks(replace(settings, sizes=(1.0,)))


def _usual_backends(device: str) -> list[str]:
    """All but those whose every call would first be compiled for a CPU, which takes seconds and forward passes only."""
    return [name for name, backend in BACKENDS.items() if not (backend.compiled and device.startswith("cpu"))]


def _device(device: str | None) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was asked for, but torch sees no GPU; use device='cpu' or leave it out")
    try:
        return str(torch.device(device))
    except RuntimeError:
        raise ValueError(f"device must be one that torch knows, such as 'cpu', 'cuda' or 'cuda:1', got {device!r}") from None


def _dtypes(given: Sequence[str] | None, device: str) -> tuple[str, ...]:
    here = [name for name in DTYPES if device.startswith("cuda") or name not in GPU_ONLY]
    names = _names("dtypes", here if given is None else given, DTYPES)
    missing = [name for name in names if name not in here]
    if missing:
        raise ValueError(f"dtypes: {missing[0]!r} is a mode of GPUs, and the device is {device!r}; leave it out")
    return names


def _names(argument: str, given: Sequence[str] | None, known: dict[str, Any]) -> tuple[str, ...]:
    return tuple(known) if given is None else tuple(_checks.choice(argument, name, known) for name in given)


def _backend(backend: str | Backend) -> Backend:
    return backend if isinstance(backend, Backend) else BACKENDS[_checks.choice("backends", backend, BACKENDS)]


def _said_by(*command: str) -> str | None:
    """What a program prints, None where it is not there or fails."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
