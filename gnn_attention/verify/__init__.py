"""Compare backends with dense attention in float64 on your machine, and report the errors.

``gnn-attention verify`` takes about a minute: it selects checks so that any two values (of backend,
dtype, ...) occur together in a check. ``--all`` runs every check. :func:`run` does the same from Python,
and with ``backends=[Backend("mine", my_run)]`` it checks a backend of your own. :func:`checks`
yields single checks for pytest: ``@pytest.mark.parametrize("check", verify.checks(backends=[mine]),
ids=lambda c: c.name)``. :mod:`gnn_attention.verify.measure` explains when a check passes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import product

import torch

from gnn_attention._support.checks import choice, quote, size
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.verify import processes
from gnn_attention.verify.groups import GROUPS, build_checks, cover_values, unsupported_reason
from gnn_attention.verify.report import Check, Report, Result, environment

__all__ = ["Check", "Report", "Result", "checks", "environment", "run"]

# Fewer checks run in one process, because starting other processes would take longer.
MIN_PARALLEL_CHECKS = 8


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
    """Run a selection of :func:`checks` and return a :class:`Report`.

    The ``selection`` "pairs" runs a few checks that cover every pair of values, and "all" runs every check.
    If ``only`` is given, all checks with this text in ``group: name [backend, dtype]`` run. ``progress`` is
    called with the report so far, before the first check and after each check. ``jobs`` is the number of
    processes, each with one thread unless ``OMP_NUM_THREADS`` is set. Several need the names of backends. The
    new report includes the results of the earlier report ``resumed``, and those checks do not run again.

    Raises ValueError for an unknown name, device or label, or a ``resumed`` of another machine or version.
    """
    if size("jobs", jobs, 1) > 1 and any(isinstance(backend, Backend) for backend in backends or ()):
        raise ValueError(f"jobs must be 1 for a Backend value, got {jobs}: use 1, or name the backends")
    device = _resolve_device(device)
    selection = choice("selection", selection, ("pairs", "all"))
    selected = _select_checks(list(checks(device, backends)), selection, only)
    is_tf32 = device.startswith("cuda") and torch.backends.cuda.matmul.fp32_precision == "tf32"
    if is_tf32 and any(check.dtype == "float32" for check in selected):
        raise ValueError(
            f"'float32' cannot be checked on {device!r}: its products are rounded to TensorFloat-32; "
            "set torch.backends.cuda.matmul.fp32_precision = 'ieee', or choose checks of another dtype"
        )
    current = environment(device)
    report = Report((), current) if resumed is None else resumed
    keys = [key for key, value in current.items() if report.environment.get(key) != value]
    if keys:
        raise ValueError(f"the earlier record has another {', '.join(keys)}: begin a new record")
    finished_labels = {result.label for result in report.results}
    pending_checks = [check for check in selected if check.label not in finished_labels]
    report = replace(report, not_started=len(pending_checks))
    progress(report)
    is_parallel = jobs > 1 and len(pending_checks) >= MIN_PARALLEL_CHECKS
    results = processes.run_checks(pending_checks, jobs) if is_parallel else (c() for c in pending_checks)
    # Closing the generator of an interrupted run ends its processes at once.
    with closing(results):
        for result in results:
            report = replace(report, results=(*report.results, result), not_started=report.not_started - 1)
            progress(report)
    return report


def checks(device: str | None = None, backends: Sequence[str | Backend] | None = None) -> Iterator[Check]:
    """Yield all checks of ``backends`` on a device, by default on a GPU if there is one.

    By default, all backends are checked on a GPU, and those that run without compilation on a CPU.

    >>> next(checks("cpu")).name
    'full, plain, inputs x1'
    """
    device = _resolve_device(device)
    names = list(BACKENDS) if backends is None else backends
    selected = [x if isinstance(x, Backend) else BACKENDS[choice("backends", x, BACKENDS)] for x in names]
    if backends is None and device.startswith("cpu"):
        selected = [x for x in selected if not x.compiled]
        selected = [x for x in selected if unsupported_reason(x, device, "float32", "plain") is None]
    # Backends that take seconds to compile come last.
    for compiled, (group, values) in product((False, True), GROUPS.items()):
        yield from build_checks(group, values, device, [x for x in selected if x.compiled == compiled])


def _select_checks(all_checks: Sequence[Check], selection: str, only: str | None) -> Sequence[Check]:
    if only is None:
        return _cover_pairs(all_checks) if selection == "pairs" else all_checks
    selected = [check for check in all_checks if only in check.label]
    if not selected:
        label = all_checks[0].label if all_checks else "attend: causal, plain, inputs x1 [dense, float32]"
        raise ValueError(f"only must be in a label like {label!r}, got {quote(only)}")
    return selected


def _cover_pairs(all_checks: Sequence[Check]) -> list[Check]:
    """Select a few checks that cover all pairs of values in each group and all reasons to skip."""
    rows = []
    for check in all_checks:
        values = {"backend": check.backend, "dtype": check.dtype, **check.factors}
        row = {f"{check.group}, {name}": value for name, value in values.items()}
        rows.append(row if check.skipped is None else {"skipped": check.skipped})
    return [all_checks[index] for index in cover_values(rows, 2)]


def _resolve_device(device: str | None) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        name = str(torch.device(device))
    except RuntimeError as error:
        raise ValueError(f"device must be one that torch knows, got {device!r}: {error}") from None
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device must be 'cpu' or None where torch sees no GPU, got {device!r}")
    return name
