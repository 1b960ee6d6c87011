"""Define checks, their results, and the report of a run, which also describes the environment."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gnn_attention import __version__, patterns
from gnn_attention.backends import RefusalError
from gnn_attention.verify.measure import Outcome

PACKAGE_DIR = Path(__file__).resolve().parent.parent
FORWARD = "forward alone"
MAX_FAILURES = 20
EXPLANATION = """
The checks compare attention along the edges of such graphs with dense attention in float64.
Errors in float64 may be 1e-12 of the largest number. Others may be 2 times SDPA's, 3 for gradients."""


@dataclass(frozen=True, eq=False)
class _CheckName:
    """The four strings that identify a check."""

    group: str
    backend: str
    dtype: str
    name: str

    @property
    def label(self) -> str:
        """The string that selects only this check with ``--only LABEL``."""
        return f"{self.group}: {self.name} [{self.backend}, {self.dtype}]"


@dataclass(frozen=True)
class Result(_CheckName):
    """The result of a check: whether it passed, or why it was skipped (``passed`` is then False).

    ``share`` is the largest error divided by the limit, or None if no finite error was measured.
    """

    passed: bool
    share: float | None = None
    skipped: str | None = None
    message: str = ""


@dataclass(frozen=True, eq=False)
class Check(_CheckName):
    """A named check; call it to run it. If ``run`` raises an exception, the check fails.

    If the backend refuses the call, it is called again without gradients, in case only the backward pass
    is missing. If it also refuses this, the check is skipped. Selections cover pairs of values
    of ``factors``, backend and dtype. ``skipped`` says why the check cannot run. ``run`` must be picklable.
    """

    run: Callable[[], Outcome]
    factors: Mapping[str, str] = field(default_factory=dict)
    skipped: str | None = None

    def __call__(self) -> Result:
        if self.skipped is not None:
            return self.result(skipped=self.skipped)
        try:
            outcome = self._run_with_or_without_gradients()
        except RefusalError as refusal:
            return self.result(skipped=f"{self.backend}: {refusal.reason}")
        except Exception as error:
            return self.result(message=f"{type(error).__name__}: {error}")
        share = outcome.share if math.isfinite(outcome.share) else None
        return self.result(outcome.passed, share=share, message=outcome.where)

    def result(self, passed: bool = False, **fields: float | str | None) -> Result:
        """Return a result of this check with these fields."""
        return Result(self.group, self.backend, self.dtype, self.name, passed, **fields)  # type: ignore[arg-type]

    def _run_with_or_without_gradients(self) -> Outcome:
        if self.factors.get("direction") != FORWARD:
            with suppress(RefusalError):
                return self.run()
        with torch.no_grad():
            return self.run()

    def forward_alone(self) -> Check:
        """Return the same check without gradients, because a kernel may then take another path."""
        factors = {**self.factors, "direction": FORWARD}
        return replace(self, name=f"{self.name}, {FORWARD}", factors=factors)


@dataclass(frozen=True)
class Report:
    """The results of a run and its environment; ``not_started`` counts checks that did not run."""

    results: tuple[Result, ...]
    environment: dict[str, Any] = field(default_factory=dict)
    not_started: int = 0

    @property
    def ok(self) -> bool:
        """True if at least one check passed, none failed, and all were started."""
        return any(r.passed for r in self.results) and not self.failures and not self.not_started

    @property
    def failures(self) -> list[Result]:
        """Results of the checks that ran and did not pass."""
        return [r for r in self.results if not r.passed and r.skipped is None]

    def __str__(self) -> str:
        """Return a picture of a graph, the largest error of each dtype, failures and skips as text."""
        results = [r for r in self.results if r.skipped is None]
        lines = [str(patterns.window(4, 2) | patterns.sinks(4, 1)), EXPLANATION]
        for dtype in dict.fromkeys(r.dtype for r in results):
            shares = [r.share for r in results if r.dtype == dtype and r.share is not None]
            lines += [f"  {dtype}: largest error {max(shares):.2f} of the limit"] if shares else []
        for r in self.failures[:MAX_FAILURES]:
            command = f"gnn-attention verify --only {shlex.quote(r.label)}"
            lines += [f"FAILED {r.label}", f"  {r.message or 'it does not hold'}", f"  again: {command}"]
        skip_counts = Counter(r.skipped for r in self.results if r.skipped is not None)
        lines += [f"skipped {count}: {reason}" for reason, count in skip_counts.items()]
        verdict = f"{len(self.failures)} FAILED" if self.failures or not results else "all equal"
        verdict += f", {self.not_started} NOT STARTED" if self.not_started else ""
        machine = ", ".join(f"{key} {x}" for key, x in self.environment.items() if key in ("device", "torch"))
        return "\n".join([*lines, f"{len(results)} checks, {verdict} ({machine})"])

    def to_json(self) -> str:
        """Return JSON with the environment and a line for each result, without empty fields."""
        rows = [{key: x for key, x in asdict(r).items() if x not in (None, "")} for r in self.results]
        header = {"environment": self.environment, "ok": self.ok, "not_started": self.not_started}
        lines = ",\n".join(map(json.dumps, rows))
        return json.dumps(header, indent=1)[:-2] + ',\n "results": [\n' + lines + "\n ]\n}"

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Report:
        """Read a file that :meth:`to_json` wrote; ValueError for any other file."""
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
            results = tuple(Result(**row) for row in record["results"])
            return cls(results, dict(record["environment"]), int(record["not_started"]))
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: expected a record of verify --json, got {error!r:.80}") from None


def environment(device: str) -> dict[str, str | None]:
    """Return the device, the versions, and one sha256 of all Python files in the package."""
    cpu_name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    files = [(str(p.relative_to(PACKAGE_DIR)), p.read_bytes()) for p in sorted(PACKAGE_DIR.rglob("*.py"))]
    return {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gnn_attention": __version__,
        "sources": hashlib.sha256(repr(files).encode()).hexdigest(),
    }
