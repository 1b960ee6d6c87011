"""Checks, their results, the report of them and its JSON, and where it was made."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gnn_attention import patterns
from gnn_attention.backends import RefusalError
from gnn_attention.verify.measure import Outcome, badness

PACKAGE = Path(__file__).resolve().parent.parent
COMMIT = "GNN_ATTENTION_COMMIT"  # the commit of a copy that holds no repository
FORWARD = "forward alone"
SHOWN = 20  # failures
COMPARED = """
Attention along the edges of such graphs, compared with dense attention in float64.
Allowed: 1e-12 of the largest number; below float64 2 times the error of torch's SDPA, 3 for gradients."""
NUMBERS = ("output", "gradient", "share")
TEXTS = ("group", "backend", "dtype", "name")
SAME = ("device", "torch", "triton", "sources")  # where these differ, a record is not carried on


@dataclass(frozen=True)
class Result:
    """One check: whether it passed, and its worst errors, None where it measures none.

    ``output`` and ``gradient`` are in units of the yardstick (:mod:`gnn_attention.verify.measure`); ``share``
    is the worst error of all over what is allowed for it. ``skipped`` is the reason why it was not run; a
    skipped check has not passed.
    """

    group: str
    backend: str
    dtype: str
    name: str
    passed: bool
    output: float | None = None
    gradient: float | None = None
    share: float | None = None
    skipped: str | None = None
    message: str = ""

    @property
    def label(self) -> str:
        """Unique among all checks."""
        return f"{self.group}: {self.name} [{self.backend}, {self.dtype}]"


@dataclass(frozen=True, eq=False)
class Check:
    """One named check; call it to run it. Whatever goes wrong inside it is a failure with a message.

    Several processes need a ``run`` that can be pickled. Where the backend refuses a call, the output alone
    is tried, since a backend may have no backward pass; what it refuses then, too, is skipped with the
    reason. By ``factors``, backend and dtype a covering selection chooses; ``skipped`` says why the check
    cannot be run.
    """

    group: str
    backend: str
    dtype: str
    name: str
    run: Callable[[], Outcome]
    factors: Mapping[str, str] = field(default_factory=dict)
    skipped: str | None = None

    @property
    def label(self) -> str:
        """Unique among all checks; ``--only LABEL`` runs it alone."""
        return self.result().label

    def __call__(self) -> Result:
        if self.skipped is not None:
            return self.result(skipped=self.skipped)
        try:
            outcome = self._outcome()
        except RefusalError as refusal:
            return self.result(skipped=f"{self.backend}: {refusal.reason}")
        # a crash is a failed check
        except Exception as error:
            return self.result(message=f"{type(error).__name__}: {error}")
        numbers = {name: getattr(outcome, name) for name in NUMBERS}
        return self.result(passed=outcome.passed, message=outcome.where, **numbers)

    def result(self, passed: bool = False, **fields: float | str | None) -> Result:
        """A result of this check with these fields."""
        return Result(self.group, self.backend, self.dtype, self.name, passed, **fields)  # type: ignore[arg-type]

    def _outcome(self) -> Outcome:
        if self.factors.get("direction") != FORWARD:
            with suppress(RefusalError):
                return self.run()
        with torch.no_grad():
            return self.run()

    def forward_alone(self) -> Check:
        """The same without gradients: the path that a kernel takes when nothing is to be learned."""
        factors = {**self.factors, "direction": FORWARD}
        return replace(self, name=f"{self.name}, {FORWARD}", factors=factors)


@dataclass(frozen=True)
class Report:
    """All results of a run and its environment; ``not_started`` counts the checks that an interrupt left."""

    results: tuple[Result, ...]
    environment: dict[str, Any] = field(default_factory=dict)
    not_started: int = 0

    @property
    def ok(self) -> bool:
        """True if something was checked, nothing failed, and nothing was left."""
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
        """A graph, how near attention along such graphs came to dense attention, and what failed."""
        ran, about = [r for r in self.results if r.skipped is None], self.environment
        lines = [str(patterns.window(4, 2) | patterns.sinks(4, 1)), COMPARED]
        for dtype in dict.fromkeys(r.dtype for r in ran):
            shares = [r.share for r in ran if r.dtype == dtype and r.share is not None]
            lines += [f"  {dtype}: the worst error is {max(shares, key=badness):.2f} of it"] if shares else []
        for r in self.failures[:SHOWN]:
            alone = f"gnn-attention verify --only {shlex.quote(r.label)}"
            lines += [f"FAILED {r.label}", f"  {r.message or 'it does not hold'}", f"  alone: {alone}"]
        reasons = Counter(r.skipped for r in self.skipped)
        lines += [f"skipped {count}: {reason}" for reason, count in reasons.items()]
        verdict = f"{len(self.failures)} FAILED" if self.failures or not ran else "all equal"
        left = f", {self.not_started} NOT STARTED" if self.not_started else ""
        where = ", ".join(f"{key} {about[key]}" for key in ("device", "torch") if key in about)
        every = "; every check: gnn-attention verify --all" if about.get("selection") == "pairs" else ""
        return "\n".join([*lines, f"{len(ran)} checks, {verdict}{left} ({where}){every}"])

    def to_json(self) -> str:
        """Every result, one a line without what is empty, and the environment."""
        head = {"environment": self.environment, "summary": self.summary}
        lines = ",\n".join(json.dumps(fields_of(result)) for result in self.results)
        return json.dumps(head, indent=1)[:-2] + ',\n "results": [\n' + lines + "\n ]\n}"

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Report:
        """Read a file that :meth:`to_json` wrote. ValueError that names it for anything else."""
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
            results = tuple(map(result_of, record["results"]))
            return cls(results, dict(record["environment"]), int(record["summary"]["not_started"]))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            expected = "expected a record that verify --json wrote"
            raise ValueError(f"{os.fspath(path)}: {expected}, got {error!r:.80}") from None


def fields_of(result: Result) -> dict[str, Any]:
    """The fields of a result for JSON: four digits of every number, "nan" and "inf" as strings."""
    fields = {key: x for key, x in asdict(result).items() if x is not None and (x or key != "message")}
    for key in NUMBERS & fields.keys():
        fields[key] = float(f"{fields[key]:.3e}") if math.isfinite(fields[key]) else str(fields[key])
    return fields


def result_of(fields: dict[str, Any]) -> Result:
    """The result that :func:`fields_of` described. TypeError for other fields."""
    result = Result(**fields | {key: float(x) for key, x in fields.items() if key in NUMBERS})
    if not isinstance(result.passed, bool) or not all(isinstance(getattr(result, key), str) for key in TEXTS):
        raise TypeError(fields)
    return result


def environment(device: str) -> dict[str, Any]:
    """The device, the versions, the commit and the date of a run.

    >>> environment("cpu")["cuda"] is None
    True
    """
    versions: dict[str, str | None] = {"torch": torch.__version__, "triton": None, "numpy": None}
    for package in ("triton", "numpy"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    on_gpu, commit = device.startswith("cuda"), os.environ.get(COMMIT) or _git("rev-parse", "HEAD")
    status = None if COMMIT in os.environ else _git("status", "--porcelain", "--", str(PACKAGE))
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu,
        "cuda": torch.version.cuda if on_gpu else None,
        **versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "interpreted": os.environ.get("TRITON_INTERPRET") == "1",
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "commit": commit,
        "dirty": None if status is None else bool(status),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _git(*arguments: str) -> str | None:
    """The output of git, None where there is no repository or no git."""
    command = ["git", "-C", str(PACKAGE), *arguments]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return None


def sources() -> str:
    """The sha256 of all Python files of the package."""
    files = [(str(file.relative_to(PACKAGE)), file.read_bytes()) for file in sorted(PACKAGE.rglob("*.py"))]
    return hashlib.sha256(repr(files).encode()).hexdigest()
