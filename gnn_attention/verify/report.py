"""What came of the checks: one record each, a table to read at a glance, and JSON."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Report", "Result"]


@dataclass(frozen=True)
class Result:
    """One check: where it stands, whether it passed, and its worst errors as shares of what is allowed.

    ``output`` and ``gradient`` are errors in units of the yardstick (SDPA's own error in the same dtype, or one rounding of the
    largest number where that is more); allowed are 2 and 3. In float64 the unit is 1e-12 of the largest number, allowed 1.
    ``error`` and ``unit`` are the output's two numbers themselves. None where the check measures no error. ``skipped`` gives the
    reason why it was not run; a skipped check has not passed.
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
    skipped: str | None = None
    message: str = ""


@dataclass(frozen=True)
class Report:
    """All results of a run, with the circumstances."""

    results: tuple[Result, ...]
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if something was checked and nothing failed."""
        return any(r.passed for r in self.results) and not self.failures

    @property
    def failures(self) -> list[Result]:
        """Checks that were run and did not hold."""
        return [r for r in self.results if not r.passed and r.skipped is None]

    @property
    def skipped(self) -> list[Result]:
        """Checks that were not run, each with its reason."""
        return [r for r in self.results if r.skipped is not None]

    def __str__(self) -> str:
        """The table, then what failed, then what was skipped and why, then one sentence."""
        ran = len(self.results) - len(self.skipped)
        lines = [*self._table(), *self._failure_lines(), *self._skip_lines(), ""]
        verdict = "all held" if self.ok else f"{len(self.failures)} FAILED"
        where = ", ".join(f"{key} {value}" for key, value in self.environment.items() if key in ("device", "torch"))
        return "\n".join([*lines, f"{ran} checks, {verdict}, {len(self.skipped)} skipped ({where})"])

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
        shown = [f"FAILED {r.group}: {r.name} [{r.backend}, {r.dtype}] {r.message}" for r in self.failures[:20]]
        more = len(self.failures) - len(shown)
        return ["", *shown, *([f"... and {more} more"] if more else [])] if shown else []

    def _skip_lines(self) -> list[str]:
        reasons: dict[str, int] = defaultdict(int)
        for r in self.skipped:
            reasons[str(r.skipped)] += 1
        return ["", *(f"skipped {count}: {reason}" for reason, count in reasons.items())] if reasons else []

    def to_json(self) -> str:
        """Every case and the circumstances; numbers that are not finite become strings, so that any reader can load it."""
        results = [
            {
                key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in asdict(r).items()
            }
            for r in self.results
        ]
        summary = {"ok": self.ok, "checks": len(self.results), "failed": len(self.failures), "skipped": len(self.skipped)}
        return json.dumps({"environment": self.environment, "summary": summary, "results": results}, indent=1)


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
