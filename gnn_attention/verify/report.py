"""What came of the checks: one record each, a table to read at a glance, and JSON."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from gnn_attention import patterns
from gnn_attention._support import json_files

__all__ = ["Report", "Result"]

SHOWN = 20  # failures
NUMBERS = ("output", "gradient", "error", "unit", "share")


@dataclass(frozen=True)
class Result:
    """One check: where it stands, whether it passed, and its worst errors as shares of what is allowed.

    ``output`` and ``gradient`` are errors in units of the yardstick (SDPA's own error in the same dtype, or one rounding of the
    largest number where that is more); allowed are 2 and 3. In float64 the unit is 1e-12 of the largest number, allowed 1.
    ``error`` and ``unit`` are the output's two numbers themselves; ``share`` is the worst error of all over what is allowed for
    it. None where the check measures no error. ``skipped`` gives the reason why it was not run; a skipped check has not passed.
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


@dataclass(frozen=True)
class Report:
    """All results of a run, with the circumstances; ``not_started`` counts the checks for which there was no time left."""

    results: tuple[Result, ...]
    environment: dict[str, Any] = field(default_factory=dict)
    not_started: int = 0

    @property
    def ok(self) -> bool:
        """True if something was checked, nothing failed, and nothing was left for want of time."""
        return any(r.passed for r in self.results) and not self.failures and not self.not_started

    @property
    def summary(self) -> dict[str, Any]:
        """The counts."""
        counts = {"checks": len(self.results), "failed": len(self.failures), "skipped": len(self.skipped)}
        return {"ok": self.ok, **counts, "not_started": self.not_started}

    @property
    def failures(self) -> list[Result]:
        """Checks that were run and did not hold."""
        return [r for r in self.results if not r.passed and r.skipped is None]

    @property
    def skipped(self) -> list[Result]:
        """Checks that were not run, each with its reason."""
        return [r for r in self.results if r.skipped is not None]

    def __str__(self) -> str:
        """A graph, what was compared along such graphs and how near it came, what failed, and one sentence."""
        return "\n".join([*self._picture(), *self._comparison(), *self._failure_lines(), self._verdict()])

    def _picture(self) -> list[str]:
        example = patterns.window(4, 2) | patterns.sinks(4, 1)
        return [*str(example).splitlines(), ""]

    def _comparison(self) -> list[str]:
        """What was compared, and the worst error of each dtype."""
        counts = self.environment.get("covered", {})
        shares = {dtype: self._worst_share(dtype) for dtype in dict.fromkeys(r.dtype for r in self.results)}
        exact, others = shares.pop("float64", None), {dtype: share for dtype, share in shares.items() if share is not None}
        lines = ["Attention along the edges of such graphs, compared with dense attention written out in float64:"]
        if counts and self.environment.get("selection") != "only":
            found = "{graph} graphs, {option} options, {form} forms of the weights, {backend} backends".format(**counts)
            pairs = ": every pair of them" if self.environment.get("selection") == "pairs" else ""
            lines.append(f"  {found}, forward and gradients{pairs}")
        if exact is not None:
            lines.append(f"  float64: the worst error is {exact:.2f} of what is allowed, 1e-12 of the largest number")
        if others:
            worst = ", ".join(f"{dtype} {share:.2f}" for dtype, share in others.items())
            lines.append(f"  {worst} of what is allowed: 2 times the error of torch's attention, 3 for gradients")
        return lines

    def _worst_share(self, dtype: str) -> float | None:
        shares = [r.share for r in self.results if r.dtype == dtype and r.share is not None]
        return max(shares, key=_badness, default=None)

    def _verdict(self) -> str:
        ran = len(self.results) - len(self.skipped)
        verdict = f"{len(self.failures)} FAILED" if self.failures or not ran else "all equal"
        verdict += f", {self.not_started} NOT STARTED for want of time" if self.not_started else ""
        skipped = f", {len(self.skipped)} skipped" if self.skipped else ""
        where = ", ".join(f"{key} {value}" for key, value in self.environment.items() if key in ("device", "torch"))
        every = "; every check: gnn-attention verify --all" if self.environment.get("selection") == "pairs" else ""
        return f"{ran} checks, {verdict}{skipped} ({where}){every}"

    def table(self) -> str:
        """Errors by group, backend and dtype, then what was skipped and why."""
        return "\n".join([*self._table(), *self._skip_lines()])

    def _table(self) -> list[str]:
        head = (
            f"{'checks of':<10}{'backend':<11}{'dtype':<10}{'checks':>6}{'failed':>7}"
            f"{'output error':>14}{'SDPA':>9}{'ratio':>7}{'gradient':>10}"
        )
        lines = [
            "The worst output error beside SDPA's own in the same dtype, their ratio (allowed: 2), and the worst ratio of any",
            "gradient (allowed: 3). In float64 the stick is 1e-12 of the largest number instead (allowed: 1).",
            "",
            head,
            "-" * len(head),
        ]
        groups: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
        for r in self.results:
            if r.skipped is None:
                groups[r.group, r.backend, r.dtype].append(r)
        return lines + [_row(*key, rows) for key, rows in groups.items()]

    def _failure_lines(self) -> list[str]:
        shown = [line for r in self.failures[:SHOWN] for line in _failure(r)]
        more = len(self.failures) - SHOWN
        return ["", *shown, *([f"... and {more} more"] if more > 0 else [])] if shown else []

    def _skip_lines(self) -> list[str]:
        reasons: dict[str, int] = defaultdict(int)
        for r in self.skipped:
            reasons[str(r.skipped)] += 1
        return ["", *(f"skipped {count}: {reason}" for reason, count in reasons.items())] if reasons else []

    def to_json(self) -> str:
        """Every case, one a line without what is empty, and the circumstances; numbers that are not finite become strings."""
        head = {"environment": self.environment, "summary": self.summary}
        lines = ",\n".join(json.dumps(_told(result)) for result in self.results)
        return json.dumps(head, indent=1)[:-2] + ',\n "results": [\n' + lines + "\n ]\n}"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """What :meth:`to_json` wrote. ValueError, in one short sentence, for anything else.

        >>> result = Result("attend", "dense", "float64", "causal, plain", passed=True, output=0.25)
        >>> Report.from_json(Report((result,), {"device": "x86_64 CPU"}).to_json()).results == (result,)
        True
        """
        found = json_files.parsed(text)
        json_files.check_fields(found, _RECORD, "the record")
        results = (_read(number, result) for number, result in enumerate(found["results"]))
        return cls(tuple(results), found["environment"], found["summary"].get("not_started", 0))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Report:
        """The record in a file. ValueError that names it where it holds none, OSError where it cannot be read."""
        try:
            return cls.from_json(json_files.text(path))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: expected a record that verify --json wrote; {error}") from None


def _failure(result: Result) -> list[str]:
    """What was expected and what came, and how to run that check alone."""
    label = f"{result.group}: {result.name} [{result.backend}, {result.dtype}]"
    return [
        f"FAILED {label}",
        f"  {result.message or 'it does not hold'}",
        f"  alone: gnn-attention verify --only {shlex.quote(label)}",
    ]


def _told(result: Result) -> dict[str, Any]:
    """Four digits of every number, "nan" and "inf" for what JSON cannot say."""
    told: dict[str, Any] = {}
    for key, value in asdict(result).items():
        if isinstance(value, float):
            value = float(f"{value:.3e}") if math.isfinite(value) else str(value)
        if key in _NEEDED or (value is not None and value != ""):
            told[key] = value
    return told


def _read(number: int, told: Any) -> Result:
    what = f"results[{number}]"
    json_files.check_fields(told, {name: _FIELDS[name] for name in _NEEDED}, what)
    json_files.check_fields(told, {name: fits for name, fits in _FIELDS.items() if name in told}, what)
    if other := told.keys() - _FIELDS.keys():
        raise ValueError(f"{what} has a field {min(other)[:40]!r}, which no result has")
    fields: dict[str, Any] = {key: float(value) if key in NUMBERS else value for key, value in told.items()}
    return Result(**fields)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    """Of JSON, within a float; or the string that stands for one that JSON cannot say."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e308
    return number or value in ("nan", "inf", "-inf")


_NEEDED = ("group", "backend", "dtype", "name", "passed")
_FIELDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("group", "backend", "dtype", "name", "message"), _is_text),
    "skipped": lambda value: isinstance(value, str) and value != "",  # a reason
    **dict.fromkeys(NUMBERS, _is_number),
    "passed": lambda value: isinstance(value, bool),
}
_RECORD: dict[str, Callable[[Any], bool]] = {
    "environment": lambda value: isinstance(value, dict),
    "summary": lambda value: isinstance(value, dict) and _is_count(value.get("not_started", 0)),
    "results": lambda value: isinstance(value, list),
}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**9


def _row(group: str, backend: str, dtype: str, rows: list[Result]) -> str:
    """One line of the table: the check whose output is worst by its own stick, and the worst gradient."""
    failed = sum(not r.passed for r in rows)
    worst = max((r for r in rows if r.output is not None), key=lambda r: _badness(r.output), default=None)
    gradient = max((r.gradient for r in rows if r.gradient is not None), key=_badness, default=None)
    numbers = [None, None, None] if worst is None else [worst.error, worst.unit, worst.output]
    shown = [_shown(number, form) for number, form in zip([*numbers, gradient], ("9.1e", "9.1e", "6.2f", "6.2f"), strict=True)]
    return (
        f"{group:<10}{backend:<11}{dtype:<10}{len(rows):>6}{failed or '-':>7}"
        f"{shown[0]:>14}{shown[1]:>9}{shown[2]:>7}{shown[3]:>10}"
    )


def _badness(ratio: float | None) -> float:
    return math.inf if ratio is None or math.isnan(ratio) else ratio


def _shown(number: float | None, form: str) -> str:
    return "-" if number is None else f"{number:{form}}".strip()
