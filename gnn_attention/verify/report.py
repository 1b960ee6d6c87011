"""Results of checks: one record each, a summary, a table, and JSON."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gnn_attention import patterns
from gnn_attention.verify.measure import badness

SHOWN = 20  # failures
UNITS = """Worst errors in units of SDPA's in the same dtype (allowed: outputs 2, gradients 3), in float64
of 1e-12 of the largest number (allowed: 1)."""
NUMBERS = ("output", "gradient", "error", "unit", "share")
TEXTS = ("group", "backend", "dtype", "name")


@dataclass(frozen=True)
class Result:
    """One check: whether it passed, and its worst errors as shares of what is allowed.

    ``output`` and ``gradient`` are errors in units of the yardstick (SDPA's own error in the same dtype, or
    one rounding of the largest number where that is more); allowed are 2 and 3. In float64 the unit is 1e-12
    of the largest output or gradient, allowed 1. ``error`` and ``unit`` are the output's two numbers
    themselves; ``share`` is the worst error of all over what is allowed for it. None where the check measures
    no error. ``skipped`` is the reason why it was not run; a skipped check has not passed.
    """

    group: str
    backend: str
    dtype: str
    name: str
    passed: bool
    output: float | None = None
    gradient: float | None = None
    error: float | None = None
    unit: float | None = None
    share: float | None = None
    skipped: str | None = None
    message: str = ""


def label(check: Any) -> str:
    """Of a check or its result: unique among all checks."""
    return f"{check.group}: {check.name} [{check.backend}, {check.dtype}]"


@dataclass(frozen=True)
class Report:
    """All results of a run and its environment; ``not_started`` counts the checks left when time was up."""

    results: tuple[Result, ...]
    environment: dict[str, Any] = field(default_factory=dict)
    not_started: int = 0

    @property
    def ok(self) -> bool:
        """True if something was checked, nothing failed, and nothing was left for want of time."""
        return any(r.passed for r in self.results) and not self.failures and not self.not_started

    @property
    def summary(self) -> dict[str, Any]:
        counts = {"checks": len(self.results), "failed": len(self.failures), "skipped": len(self.skipped)}
        return {"ok": self.ok, **counts, "not_started": self.not_started}

    @property
    def failures(self) -> list[Result]:
        """Checks that were run and did not pass."""
        return [r for r in self.results if not r.passed and r.skipped is None]

    @property
    def skipped(self) -> list[Result]:
        """Checks that were not run, each with its reason."""
        return [r for r in self.results if r.skipped is not None]

    def __str__(self) -> str:
        """A graph, what was compared along such graphs and how near it came, what failed, and a sentence."""
        example = patterns.window(4, 2) | patterns.sinks(4, 1)
        lines = [str(example), "", *self._comparison()]
        lines += ["", *map(_failure, self.failures[:SHOWN])] if self.failures else []
        lines += [f"... and {more} more"] if (more := len(self.failures) - SHOWN) > 0 else []
        return "\n".join([*lines, self._verdict()])

    def _comparison(self) -> Iterator[str]:
        counts, selection = self.environment.get("covered"), self.environment.get("selection")
        yield "Attention along the edges of such graphs, compared with dense attention in float64:"
        if counts and selection != "only":
            found = "{graph} graphs, {option} options, {form} forms of the weights, {backend} backends"
            every = ": every pair of them" if selection == "pairs" else ""
            yield f"  {found.format(**counts)}, forward and gradients{every}"
        worst = dict[str, float]()
        for r in self.results:
            if r.share is not None:
                worst[r.dtype] = max(worst.get(r.dtype, 0.0), r.share, key=badness)
        exact = worst.pop("float64", None)
        if exact is not None:
            yield f"  float64: the worst error is {exact:.2f} of what is allowed, 1e-12 of the largest number"
        if worst:
            errors = ", ".join(f"{dtype} {share:.2f}" for dtype, share in worst.items())
            yield f"  {errors} of what is allowed: 2 times the error of torch's attention, 3 for gradients"

    def _verdict(self) -> str:
        ran, about = len(self.results) - len(self.skipped), self.environment
        verdict = f"{len(self.failures)} FAILED" if self.failures or not ran else "all equal"
        late = f", {self.not_started} NOT STARTED for want of time" if self.not_started else ""
        skipped = f", {len(self.skipped)} skipped" if self.skipped else ""
        where = ", ".join(f"{key} {about[key]}" for key in ("device", "torch") if key in about)
        every = "; every check: gnn-attention verify --all" if about.get("selection") == "pairs" else ""
        return f"{ran} checks, {verdict}{late}{skipped} ({where}){every}"

    def table(self) -> str:
        """Counts and worst errors by group, backend and dtype, then the reasons of skipped checks."""
        groups = defaultdict[tuple[str, ...], list[Result]](list)
        for r in self.results:
            if r.skipped is None:
                groups[r.group, r.backend, r.dtype].append(r)
        head: tuple[str, ...] = "checks of", "backend", "dtype", "checks", "failed", "output", "gradient"
        rows = [head, *((*key, *_cells(found)) for key, found in groups.items())]
        lines = ["{:<10}{:<11}{:<10}{:>6}{:>7}{:>9}{:>10}".format(*row) for row in rows]
        reasons = Counter(r.skipped for r in self.skipped)
        skips = [f"skipped {count}: {reason}" for reason, count in reasons.items()]
        return "\n".join([UNITS, "", *lines, "", *skips]).rstrip()

    def to_json(self) -> str:
        """Every result, one a line without what is empty, and the environment."""
        head = {"environment": self.environment, "summary": self.summary}
        lines = ",\n".join(json.dumps(fields_of(result)) for result in self.results)
        return json.dumps(head, indent=1)[:-2] + ',\n "results": [\n' + lines + "\n ]\n}"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """What :meth:`to_json` wrote. ValueError for anything else.

        >>> result = Result("attend", "dense", "float64", "causal, plain", passed=True, output=0.25)
        >>> Report.from_json(Report((result,), {"device": "x86_64 CPU"}).to_json()).results == (result,)
        True
        """
        try:
            found = json.loads(text)
            results = tuple(result_of(fields) for fields in found["results"])
            return cls(results, dict(found["environment"]), int(found["summary"]["not_started"]))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"expected a record that verify --json wrote, got {error!r:.80}") from None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Report:
        """The record in a file. ValueError that names it where it holds none."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None


def _failure(result: Result) -> str:
    """What was expected and what came, and how to run that check alone."""
    alone = f"gnn-attention verify --only {shlex.quote(label(result))}"
    return f"FAILED {label(result)}\n  {result.message or 'it does not hold'}\n  alone: {alone}"


def fields_of(result: Result) -> dict[str, Any]:
    """Four digits of every number, "nan" and "inf" for what JSON cannot say."""
    found = {key: x for key, x in asdict(result).items() if x is not None and (x or key != "message")}
    for key in NUMBERS & found.keys():
        found[key] = float(f"{found[key]:.3e}") if math.isfinite(found[key]) else str(found[key])
    return found


def result_of(fields: dict[str, Any]) -> Result:
    numbers: dict[str, Any] = {key: float(x) for key, x in fields.items() if key in NUMBERS}
    result = Result(**fields | numbers)
    if not isinstance(result.passed, bool) or not all(isinstance(getattr(result, key), str) for key in TEXTS):
        raise TypeError(fields)
    return result


def _cells(results: list[Result]) -> Iterator[str]:
    yield from (str(len(results)), str(sum(not r.passed for r in results) or "-"))
    for name in ("output", "gradient"):
        errors = [error for r in results if (error := getattr(r, name)) is not None]
        yield f"{max(errors, key=badness):.2f}" if errors else "-"
