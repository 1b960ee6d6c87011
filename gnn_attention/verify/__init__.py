"""Equal to dense attention, on your machine: named public checks against a float64 formula, and their report.

``gnn-attention verify`` runs a selection that covers every pair of backend, graph, dtype, option, form and direction, in about a
minute; ``--all`` runs every check. :func:`run` does so from Python, and with ``backends=[Backend("mine", my_run)]`` it checks a
backend of your own. :func:`checks` yields them one by one, for pytest:
``@pytest.mark.parametrize("check", verify.checks(backends=[mine]), ids=lambda c: c.name)``.

The rule by which all are judged stands in :mod:`gnn_attention.verify.measure`.
"""

from __future__ import annotations

import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from gnn_attention import patterns
from gnn_attention._support import checks as support_checks
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.backends.call import Call
from gnn_attention.verify import processes, record
from gnn_attention.verify.attend_checks import attend_checks
from gnn_attention.verify.cases import FEATURES, GRAPHS
from gnn_attention.verify.check import DIM, DTYPES, FORMS, GPU_ONLY, Check, Settings
from gnn_attention.verify.circumstances import environment
from gnn_attention.verify.dropout_checks import dropout_checks
from gnn_attention.verify.gpu_checks import OWN, gpu_checks
from gnn_attention.verify.large_checks import large_checks
from gnn_attention.verify.layer_checks import form_checks, layer_checks
from gnn_attention.verify.record import status
from gnn_attention.verify.report import Report, Result
from gnn_attention.verify.rule_checks import rule_checks
from gnn_attention.verify.selection import SELECTIONS, pairs
from gnn_attention.verify.trained_checks import trained_checks

__all__ = ["Check", "Report", "Result", "checks", "environment", "run", "status"]

KEPT_EVERY = 10.0  # seconds, of which a killed run loses no more


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
    progress: Callable[[int, int, Result], None] | None = None,
    jobs: int = 1,
    budget: float | None = None,
    resumed: Report | None = None,
    keep: Callable[[Report], None] | None = None,
    selection: str = "pairs",
    only: str | None = None,
) -> Report:
    """Run the checks and return their :class:`Report`; None means all there are, and a GPU if there is one.

    On a CPU backends that are compiled, or that run on GPUs alone, are checked only if they are named.

    ``selection`` "pairs" takes few checks that cover every pair of values, "all" takes every check; ``only`` takes those whose
    label, ``group: name [backend, dtype]``, holds a text, whatever the selection. ``progress(done, due, result)`` is called after
    each check, ``keep(report_so_far)`` every ten seconds and on Ctrl-C. ``jobs`` processes run checks at once (backends by name
    then), each with one thread unless ``OMP_NUM_THREADS`` is set. ``budget`` seconds later no more are begun; ``resumed`` is the
    report of an earlier run, whose results stay and are not run again, whatever they were.

    ValueError for an unknown name, a device that is not there, an earlier report from elsewhere, a text that no label holds.
    """
    given = (_device(device), dtypes, backends, graphs, features, forms, tuple(sizes), trained, seed)
    _check_amounts(jobs, budget, backends)
    began = time.time()
    make = functools.partial(checks, *given)
    every = list(make())
    chosen = _chosen(every, support_checks.choice("selection", selection, SELECTIONS), only)
    described = {"seed": seed, "selection": "only" if only else selection, "covered": _covered(every, chosen)}
    book = record.Book(environment(given[0]) | described, resumed, began)
    missing = [number for number in chosen if not book.holds(every[number])]
    kept_at = began
    try:
        for number, result in processes.results(make, missing, jobs, math.inf if budget is None else began + budget):
            book.add(number, result)
            if progress is not None:
                progress(book.new, len(missing), result)
            if keep is not None and time.time() > kept_at + KEPT_EVERY:
                keep(book.report(len(missing)))
                kept_at = time.time()
    except KeyboardInterrupt:
        if keep is not None:
            keep(book.report(len(missing)))
        raise
    return book.report(len(missing))


def _chosen(every: Sequence[Check], selection: str, only: str | None) -> Sequence[int]:
    """Numbers of the checks to run, ascending."""
    if only is None:
        return pairs(every) if selection == "pairs" else range(len(every))
    found = [number for number, check in enumerate(every) if only in check.label]
    if not found:
        example = every[0].label if every else "attend: causal, plain, inputs x1 [dense, float32]"
        raise ValueError(f"only: no check holds {support_checks.quoted(only)} in its label; a label is like {example!r}")
    return found


def _covered(every: Sequence[Check], chosen: Sequence[int]) -> dict[str, int]:
    """How many values of each factor the chosen checks have."""
    values = defaultdict[str, set[str]](set)
    for number in chosen:
        for name, value in {"backend": every[number].backend, **every[number].factors}.items():
            values[name].add(value)
    return {name: len(values[name]) for name in ("graph", "option", "form", "backend", "rule")}


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
    """All checks of which :func:`run` chooses, one by one; arguments as there.

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


def _all_checks(settings: Settings, trained: bool) -> Iterator[Check]:
    """What needs no compilation first, then our own kernels, and last what is compiled longest."""
    own = [backend for backend in settings.backends if backend.name.startswith(OWN)]
    eager, slow = ([b for b in settings.backends if b not in own and b.compiled is compiled] for compiled in (False, True))
    parts = [tuple(part) for part in (eager, own, slow)]
    for number, part in enumerate(parts):
        if part or (number == 0 and settings.walk):
            yield from _checks_of(replace(settings, backends=part, walk=settings.walk and number == 0), trained)


def _checks_of(settings: Settings, trained: bool) -> Iterator[Check]:
    yield from attend_checks(settings)
    yield from layer_checks(settings)
    yield from form_checks(settings)
    yield from rule_checks(settings)
    yield from dropout_checks(settings)
    if settings.device.startswith("cuda"):
        yield from large_checks(settings)
        yield from gpu_checks(settings)
    if trained:
        yield from trained_checks(replace(settings, sizes=(1.0,)))


def _usual_backends(device: str) -> list[str]:
    """On a CPU all but those that compile for seconds, and those that would refuse everything there."""
    if not device.startswith("cpu"):
        return list(BACKENDS)
    return [name for name, backend in BACKENDS.items() if not backend.compiled and _holds_something(backend, device)]


def _holds_something(backend: Backend, device: str) -> bool:
    """True if it takes a plain call in one dtype or another."""
    graph = patterns.causal(2)
    tried = (torch.zeros(1, 1, 2, DIM, dtype=dtype, device=device) for dtype in DTYPES.values())
    return any(backend.refusal(Call.checked(x, x, x, graph)) is None for x in tried)


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
    return tuple(known) if given is None else tuple(support_checks.choice(argument, name, known) for name in given)


def _backend(backend: str | Backend) -> Backend:
    return backend if isinstance(backend, Backend) else BACKENDS[support_checks.choice("backends", backend, BACKENDS)]


def _check_amounts(jobs: int, budget: float | None, backends: Sequence[str | Backend] | None) -> None:
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if budget is not None and budget <= 0:
        raise ValueError(f"budget must be a number of seconds above 0, got {budget}; leave it out for no limit")
    if jobs > 1 and any(isinstance(backend, Backend) for backend in backends or ()):
        raise ValueError(f"jobs: {jobs} processes take backends by name; give names, or jobs=1")
