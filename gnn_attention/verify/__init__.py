"""Equal to dense attention, on your machine: named checks against a float64 formula, and their report.

``gnn-attention verify`` runs a selection that covers every pair of backend, graph, dtype, option, form and
direction, in about a minute; ``--all`` runs every check. :func:`run` does so from Python, and with
``backends=[Backend("mine", my_run)]`` it checks a backend of your own. :func:`checks` yields them one by one,
for pytest: ``@pytest.mark.parametrize("check", verify.checks(backends=[mine]), ids=lambda c: c.name)``.

The rule by which all are judged stands in :mod:`gnn_attention.verify.measure`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import product

import torch

from gnn_attention._support.checks import choice, quote, size
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.verify import processes
from gnn_attention.verify.groups import GROUPS, checks_of, covering, unsupported_reason
from gnn_attention.verify.report import Check, Report, Result, environment

__all__ = ["Check", "Report", "Result", "checks", "environment", "run"]

FEW = 8  # checks that are not worth another process


def run(
    device: str | None = None,
    *,
    backends: Sequence[str | Backend] | None = None,
    selection: str = "pairs",
    only: str | None = None,
    jobs: int = 1,
    progress: Callable[[Report], None] = lambda report: None,
    resumed: Report | None = None,
) -> Report:
    """Run the checks that :func:`checks` yields, or some of them, and return their :class:`Report`.

    ``selection`` "pairs" takes few checks that cover every pair of values, "all" takes every check; ``only``
    takes those whose label, ``group: name [backend, dtype]``, has a text in it, whatever the selection.
    ``progress(report)`` is called before the first check and after each, with all results so far. ``jobs``
    processes run checks at once (backends by name then), each with one thread unless ``OMP_NUM_THREADS`` is
    set. ``resumed`` is the report of an earlier run, whose results stay and are not run again, whatever they
    were.

    ValueError for an unknown name, an absent device, a report from elsewhere, a text that no label has.
    """
    if size("jobs", jobs, 1) > 1 and any(isinstance(backend, Backend) for backend in backends or ()):
        raise ValueError(f"jobs: {jobs} processes take backends by name; give names, or jobs=1")
    device, selection = _device(device), choice("selection", selection, ("pairs", "all"))
    chosen = _choose(list(checks(device, backends)), selection, only)
    is_tf32 = device.startswith("cuda") and torch.backends.cuda.matmul.fp32_precision == "tf32"
    if is_tf32 and any(check.dtype == "float32" for check in chosen):
        raise ValueError(
            f"'float32' cannot be checked on {device!r}: its products are rounded to TensorFloat-32 here; "
            "set torch.backends.cuda.matmul.fp32_precision = 'ieee', or choose checks of another dtype"
        )
    here = environment(device)
    report = Report((), here) if resumed is None else resumed
    different = [name for name, x in here.items() if report.environment.get(name) != x]
    if different:
        raise ValueError(f"the earlier record was made with other {', '.join(different)}; begin a new record")
    known = {result.label for result in report.results}
    due = [check for check in chosen if check.label not in known]
    report = replace(report, not_started=len(due))
    progress(report)
    together = processes.results(due, jobs) if jobs > 1 and len(due) >= FEW else (check() for check in due)
    # a run that is interrupted ends its processes at once
    with closing(together):
        for result in together:
            report = replace(report, results=(*report.results, result), not_started=report.not_started - 1)
            progress(report)
    return report


def checks(device: str | None = None, backends: Sequence[str | Backend] | None = None) -> Iterator[Check]:
    """All checks of some backends, one by one; without a device on a GPU if there is one.

    Without backends all of a GPU, and on a CPU all but those that are compiled or run on GPUs alone.

    >>> next(checks("cpu")).name
    'full, plain, inputs x1'
    """
    device = _device(device)
    chosen = list(BACKENDS) if backends is None else backends
    named = [x if isinstance(x, Backend) else BACKENDS[choice("backends", x, BACKENDS)] for x in chosen]
    if backends is None and device.startswith("cpu"):
        named = [
            x for x in named if not x.compiled and unsupported_reason(x, device, "float32", "plain") is None
        ]
    # what is compiled for seconds comes last
    for compiled, (group, values) in product((False, True), GROUPS.items()):
        yield from checks_of(group, values, device, [x for x in named if x.compiled == compiled])


def _choose(every: Sequence[Check], selection: str, only: str | None) -> Sequence[Check]:
    if only is None:
        return _pairs(every) if selection == "pairs" else every
    chosen = [check for check in every if only in check.label]
    if not chosen:
        example = "attend: causal, plain, inputs x1 [dense, float32]"
        raise ValueError(f"only: no check has {quote(only)} in its label; a label is like {example!r}")
    return chosen


def _pairs(every: Sequence[Check]) -> list[Check]:
    """Few checks that cover in each group every pair of values, and one for each reason to skip."""
    rows = []
    for check in every:
        values = {"backend": check.backend, "dtype": check.dtype, **check.factors}
        of_group = {f"{check.group}, {name}": value for name, value in values.items()}
        rows.append(of_group if check.skipped is None else {"skipped": check.skipped})
    return [every[number] for number in covering(rows, 2)]


def _device(device: str | None) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        name = str(torch.device(device))
    except RuntimeError as error:
        raise ValueError(f"device must be one that torch knows, got {device!r}: {error}") from None
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {device!r}: torch sees no GPU; use device='cpu' or leave it out")
    return name
