"""Equal to dense attention, on your machine: named checks against a float64 formula, and their report.

``gnn-attention verify`` runs a selection that covers every pair of backend, graph, dtype, option, form and
direction, in about a minute; ``--all`` runs every check. :func:`run` does so from Python, and with
``backends=[Backend("mine", my_run)]`` it checks a backend of your own. :func:`checks` yields them one by one,
for pytest: ``@pytest.mark.parametrize("check", verify.checks(backends=[mine]), ids=lambda c: c.name)``.

The rule by which all are judged stands in :mod:`gnn_attention.verify.measure`.
"""

import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch

from gnn_attention._support.checks import choice, quoted, size
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.verify import processes, rules
from gnn_attention.verify.groups import GROUPS, covering, unsupported
from gnn_attention.verify.report import SAME, Check, Report, Result, environment, sources

__all__ = ["Check", "Report", "Result", "checks", "environment", "run"]

FEW = 8  # checks that are not worth another process
KEPT_EVERY = 10.0  # seconds, of which a run that is killed loses no more


def run(
    device: str | None = None,
    *,
    backends: Sequence[str | Backend] | None = None,
    selection: str = "pairs",
    only: str | None = None,
    jobs: int = 1,
    progress: Callable[[int, int, Result], None] | None = None,
    resumed: Report | None = None,
    keep: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Run the checks that :func:`checks` yields, or some of them, and return their :class:`Report`.

    ``selection`` "pairs" takes few checks that cover every pair of values, "all" takes every check; ``only``
    takes those whose label, ``group: name [backend, dtype]``, has a text in it, whatever the selection.
    ``progress(done, due, result)`` is called after each check, ``keep(report_so_far)`` every ten seconds and
    on Ctrl-C. ``jobs`` processes run checks at once (backends by name then), each with one thread unless
    ``OMP_NUM_THREADS`` is set. ``resumed`` is the report of an earlier run, whose results stay and are not
    run again, whatever they were.

    ValueError for an unknown name, an absent device, a report from elsewhere, a text that no label has.
    """
    if size("jobs", jobs, 1) > 1 and any(isinstance(backend, Backend) for backend in backends or ()):
        raise ValueError(f"jobs: {jobs} processes take backends by name; give names, or jobs=1")
    device, selection = _device(device), choice("selection", selection, ("pairs", "all"))
    chosen = _choose(list(checks(device, backends)), selection, only)
    _refuse_tf32(device, chosen)
    about = {**environment(device), "sources": sources(), "command": shlex.join(sys.argv)}
    about["selection"] = "only" if only else selection
    results = {} if resumed is None else _results_of(resumed, about)
    due, written = [check for check in chosen if check.label not in results], time.monotonic()

    def report() -> Report:
        not_started = sum(check.label not in results for check in due)
        return Report(tuple(results.values()), about, not_started)

    one_by_one = (check() for check in due)
    try:
        together = one_by_one if jobs == 1 or len(due) < FEW else processes.results(due, jobs)
        for done, result in enumerate(together, 1):
            results[result.label] = result
            if progress is not None:
                progress(done, len(due), result)
            if time.monotonic() - written > KEPT_EVERY:
                keep(report())
                written = time.monotonic()
    except KeyboardInterrupt:
        keep(report())
        raise
    return report()


def checks(device: str | None = None, backends: Sequence[str | Backend] | None = None) -> Iterator[Check]:
    """All checks of some backends, one by one; without a device on a GPU if there is one.

    Without backends all of a GPU, and on a CPU all but those that are compiled or run on GPUs alone.

    >>> next(checks("cpu")).name
    'full, plain, inputs x1'
    """
    device = _device(device)
    chosen = _usual_backends(device) if backends is None else backends
    named = [x if isinstance(x, Backend) else BACKENDS[choice("backends", x, BACKENDS)] for x in chosen]
    # what is compiled for seconds comes last
    for compiled, group in product((False, True), (*GROUPS, rules.GROUP)):
        yield from group.checks(device, [backend for backend in named if backend.compiled == compiled])


def _choose(every: Sequence[Check], selection: str, only: str | None) -> Sequence[Check]:
    if only is None:
        return _pairs(every) if selection == "pairs" else every
    chosen = [check for check in every if only in check.label]
    if not chosen:
        example = "attend: causal, plain, inputs x1 [dense, float32]"
        raise ValueError(f"only: no check has {quoted(only)} in its label; a label is like {example!r}")
    return chosen


def _pairs(every: Sequence[Check]) -> list[Check]:
    """Few checks that cover in each group every pair of values, and one for each reason to skip."""
    groups, reasons = defaultdict[str, list[int]](list), dict[str, int]()
    for number, check in enumerate(every):
        if check.skipped is None:
            groups[check.group].append(number)
        else:
            reasons.setdefault(check.skipped, number)
    chosen = list(reasons.values())
    for numbers in groups.values():
        checks = [every[number] for number in numbers]
        rows = [{"backend": check.backend, "dtype": check.dtype, **check.factors} for check in checks]
        chosen += [numbers[row] for row in covering(rows, 2)]
    return [every[number] for number in sorted(chosen)]


def _refuse_tf32(device: str, chosen: Sequence[Check]) -> None:
    is_tf32 = device.startswith("cuda") and torch.backends.cuda.matmul.fp32_precision == "tf32"
    if is_tf32 and any(check.dtype == "float32" for check in chosen):
        reason = "its products are rounded to TensorFloat-32 here, whose errors are not those of float32"
        advice = "set torch.backends.cuda.matmul.fp32_precision = 'ieee', or choose checks of another dtype"
        raise ValueError(f"'float32' cannot be checked on {device!r}: {reason}; {advice}")


def _results_of(resumed: Report, about: Mapping[str, Any]) -> dict[str, Result]:
    """The earlier results by label. ValueError if their device, versions or sources were others."""
    for name in SAME:
        earlier, now = resumed.environment.get(name), about.get(name)
        if earlier != now:
            what = "" if name == "sources" else f": {earlier!r}, now {now!r}"
            raise ValueError(f"the earlier record was made with other {name}{what}; begin a new record")
    return {result.label: result for result in resumed.results}


def _usual_backends(device: str) -> list[Backend]:
    """On a CPU all but those that compile for seconds, and those that take no plain call in float32."""
    if not device.startswith("cpu"):
        return list(BACKENDS.values())
    quick = [backend for backend in BACKENDS.values() if not backend.compiled]
    return [backend for backend in quick if unsupported(backend, device, torch.float32, "plain") is None]


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
