"""Equal to dense attention, on your machine: named checks against a float64 formula, and their report.

``gnn-attention verify`` runs a selection that covers every pair of backend, graph, dtype, option, form and
direction, in about a minute; ``--all`` runs every check. :func:`run` does so from Python, and with
``backends=[Backend("mine", my_run)]`` it checks a backend of your own. :func:`checks` yields them one by one,
for pytest: ``@pytest.mark.parametrize("check", verify.checks(backends=[mine]), ids=lambda c: c.name)``.

The rule by which all are judged stands in :mod:`gnn_attention.verify.measure`.
"""

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gnn_attention._support.checks import choice, quoted, size
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.verify import processes, record
from gnn_attention.verify.attend_checks import attend_checks, dropout_checks
from gnn_attention.verify.cases import FEATURES, GRAPHS
from gnn_attention.verify.check import DTYPES, FORMS, GPU_ONLY, Check, Settings, unsupported
from gnn_attention.verify.circumstances import environment
from gnn_attention.verify.layer_checks import form_checks, layer_checks, trained_checks
from gnn_attention.verify.report import Report, Result, label
from gnn_attention.verify.rule_checks import rule_checks
from gnn_attention.verify.selection import SELECTIONS, pairs

__all__ = ["Check", "Report", "Result", "checks", "environment", "run"]

WRITTEN_EVERY = 10.0  # seconds, of which an interrupted run loses no more

Group = Callable[[Settings], Iterable[Check]]
GROUPS: list[Group] = [attend_checks, layer_checks, form_checks, rule_checks, dropout_checks]


def run(
    device: str | None = None,
    dtypes: Sequence[str] | None = None,
    backends: Sequence[str | Backend] | None = None,
    graphs: Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    forms: Sequence[str] | None = None,
    trained: bool = True,
    seed: int = 0,
    more: Sequence[Group] = (),
    *,
    progress: Callable[[int, int, Result], None] | None = None,
    jobs: int = 1,
    budget: float = math.inf,
    resumed: Report | None = None,
    keep: Callable[[Report], None] = lambda report: None,
    selection: str = "pairs",
    only: str | None = None,
) -> Report:
    """Run the checks that :func:`checks` yields, or some of them, and return their :class:`Report`.

    ``selection`` "pairs" takes few checks that cover every pair of values, "all" takes every check; ``only``
    takes those whose label, ``group: name [backend, dtype]``, has a text in it, whatever the selection.
    ``progress(done, due, result)`` is called after each check, ``keep(report_so_far)`` every ten seconds and
    on Ctrl-C. ``jobs`` processes run checks at once (backends by name then), each with one thread unless
    ``OMP_NUM_THREADS`` is set. ``budget`` seconds later no more are begun; ``resumed`` is the report of an
    earlier run, whose results stay and are not run again, whatever they were.

    ValueError for an unknown name, an absent device, a report from elsewhere, a text that no label has.
    """
    jobs = size("jobs", jobs, 1)
    if not budget > 0:
        raise ValueError(
            f"budget must be a number of seconds above 0, got {budget}; leave it out for no limit"
        )
    if jobs > 1 and any(isinstance(backend, Backend) for backend in backends or ()):
        raise ValueError(f"jobs: {jobs} processes take backends by name; give names, or jobs=1")
    began, device = time.time(), _device(device)
    make = functools.partial(checks, device, dtypes, backends, graphs, features, forms, trained, seed, more)
    every = list(make())
    chosen = _chosen(every, choice("selection", selection, SELECTIONS), only)
    described = {"seed": seed, "selection": "only" if only else selection, "covered": _covered(every, chosen)}
    earlier = record.begin(environment(device) | described, resumed)
    known = {label(result) for result in earlier.results}
    missing = [number for number in chosen if every[number].label not in known]
    found, written = dict[int, Result](), began
    report = functools.partial(record.add, earlier, found, len(missing), began)
    try:
        for number, result in processes.results(make, missing, jobs, began + budget):
            found[number] = result
            if progress is not None:
                progress(len(found), len(missing), result)
            if time.time() > written + WRITTEN_EVERY:
                keep(report())
                written = time.time()
    except KeyboardInterrupt:
        keep(report())
        raise
    return report()


def checks(
    device: str | None = None,
    dtypes: Sequence[str] | None = None,
    backends: Sequence[str | Backend] | None = None,
    graphs: Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    forms: Sequence[str] | None = None,
    trained: bool = True,
    seed: int = 0,
    more: Sequence[Group] = (),
) -> Iterator[Check]:
    """All checks, one by one; None means all values there are, and a GPU if there is one.

    On a CPU backends that are compiled, or that run on GPUs alone, are checked only if they are named.
    ``trained`` adds the layers of the shipped model, ``more`` further groups of checks.

    >>> next(checks(device="cpu", trained=False)).name
    'full, plain, inputs x1'
    """
    device = _device(device)
    settings = Settings(
        device=device,
        dtypes=_dtypes(dtypes, device),
        backends=tuple(_backend(b) for b in (_usual_backends(device) if backends is None else backends)),
        graphs=_names("graphs", graphs, GRAPHS),
        features=_names("features", features, FEATURES),
        forms=_names("forms", forms, FORMS),
        walk=backends is None,
        seed=seed,
    )
    return _in_order(settings, [*GROUPS, *more, *([trained_checks] if trained else [])])


def _in_order(settings: Settings, groups: Sequence[Group]) -> Iterator[Check]:
    """First all checks of what needs no compilation, then those of what is compiled for seconds."""
    for compiled in (False, True):
        backends = tuple(backend for backend in settings.backends if backend.compiled == compiled)
        walk = settings.walk and not compiled
        if backends or walk:
            for group in groups:
                yield from group(replace(settings, backends=backends, walk=walk))


def _chosen(every: Sequence[Check], selection: str, only: str | None) -> Sequence[int]:
    if only is None:
        return pairs(every) if selection == "pairs" else range(len(every))
    found = [number for number, check in enumerate(every) if only in check.label]
    if not found:
        example = "attend: causal, plain, inputs x1 [dense, float32]"
        raise ValueError(f"only: no check has {quoted(only)} in its label; a label is like {example!r}")
    return found


def _covered(every: Sequence[Check], chosen: Sequence[int]) -> dict[str, int]:
    """How many values of each factor the chosen checks have."""
    rows = [{"backend": every[number].backend, **every[number].factors} for number in chosen]
    names = ("graph", "option", "form", "backend", "rule")
    return {name: len({row[name] for row in rows if name in row}) for name in names}


def _usual_backends(device: str) -> list[str]:
    """On a CPU all but those that compile for seconds, and those that take no plain call in any dtype."""

    def usual(backend: Backend) -> bool:
        takes = (unsupported(backend, device, dtype, "plain") is None for dtype in DTYPES.values())
        return not backend.compiled and any(takes)

    return [name for name, found in BACKENDS.items() if not device.startswith("cpu") or usual(found)]


def _device(device: str | None) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {device!r}: torch sees no GPU; use device='cpu' or leave it out")
    try:
        return str(torch.device(device))
    except RuntimeError:
        known = "'cpu', 'cuda' or 'cuda:1'"
        raise ValueError(f"device must be one that torch knows, such as {known}, got {device!r}") from None


def _dtypes(names: Sequence[str] | None, device: str) -> tuple[str, ...]:
    here = [name for name in DTYPES if device.startswith("cuda") or name not in GPU_ONLY]
    chosen = _names("dtypes", here if names is None else names, DTYPES)
    if missing := set(chosen).difference(here):
        raise ValueError(
            f"dtypes: {missing.pop()!r} is a mode of GPUs, and the device is {device!r}; leave it out"
        )
    return chosen


def _names(argument: str, names: Sequence[str] | None, known: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(known) if names is None else tuple(choice(argument, name, known) for name in names)


def _backend(backend: str | Backend) -> Backend:
    return backend if isinstance(backend, Backend) else BACKENDS[choice("backends", backend, BACKENDS)]
