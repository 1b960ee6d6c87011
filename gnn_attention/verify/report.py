"""What came of the checks: one record each, a table to read at a glance, and JSON."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Report", "Result"]


@dataclass(frozen=True)
class Result:
    """One check: where it stands, whether it passed, and its worst errors as shares of what is allowed.

    ``output`` and ``gradient`` are errors in units of the yardstick (SDPA's own error in the same dtype, or one rounding of the
    largest number where that is more); allowed are 2 and 3. In float64 the unit is 1e-12 of the largest number, allowed 1.
    None where the check measures no error. ``skipped`` gives the reason why it was not run; a skipped check has not passed.
    """

    group: str
    backend: str
    dtype: str
    name: str
    passed: bool
    output: float | None = None
    gradient: float | None = None
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
        head = f"{'checks of':<10}{'backend':<12}{'dtype':<10}{'checks':>7}{'failed':>8}{'output':>9}{'gradient':>10}"
        lines = ["errors: 1.00 = that of SDPA in the same dtype (allowed: output 2, gradient 3); float64: 1.00 = 1e-12 (allowed)"]
        lines += [head, "-" * len(head)]
        groups: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
        for r in self.results:
            if r.skipped is None:
                groups[r.group, r.backend, r.dtype].append(r)
        for (group, backend, dtype), rows in groups.items():
            failed = sum(not r.passed for r in rows)
            worst = [_worst(r.output for r in rows), _worst(r.gradient for r in rows)]
            shown = [f"{w:.2f}" if w is not None else "-" for w in worst]
            lines.append(f"{group:<10}{backend:<12}{dtype:<10}{len(rows):>7}{failed or '-':>8}{shown[0]:>9}{shown[1]:>10}")
        return lines

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


def _worst(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return max(known, key=lambda v: math.inf if math.isnan(v) else v) if known else None
