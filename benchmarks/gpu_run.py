"""Run all checks and benchmarks of a GPU in eight minutes: ``python3 -m benchmarks.gpu_run --out FOLDER``.

1. The core of the checks (:mod:`tests.guarantees.gpu_core`) runs in parallel processes for at most 280 s, then the
   sizes that need 64-bit offsets run alone.
2. The workloads run, irregular graphs first, each with its peers (:mod:`benchmarks.gpu.workloads`).

The command stops by itself when its time is up. Each result is appended to ``results.jsonl`` in FOLDER at once;
``summary.txt`` summarizes all results, and ``<date>-<device>.json`` is the record of the core. Copy this record and
``bench.json``, renamed ``<date>-bench-gpu.json``, to ``tests/records``. Another call with the same FOLDER, or with a
copy of it, resumes the run. ``--trial`` rehearses everything on a CPU, with interpreted kernels, small sizes and few
checks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import table
from benchmarks.gpu.processes import Group, Lines, Task, append, run_groups, run_tasks
from benchmarks.gpu.tasks import MEASUREMENT, REHEARSAL, Tasks
from benchmarks.gpu.workloads import WORKLOADS
from benchmarks.records import write
from gnn_attention._support import atomic_files
from gnn_attention.verify import Check, Result
from tests.guarantees import gpu_core, gpu_record

__all__ = ["Run", "main"]

SECONDS, MOST_OF_CORE = 470.0, 280.0
LAST_SECONDS = 10.0  # reserved for the summary
PATIENCE = 150.0  # seconds that a task may take
FAR, BENCH = "far", "bench"
SHOWN = 40  # failures that the summary prints in full
# A folder is resumed only if these are the same as in the call that began it.
IDENTITY = ("device", "cuda", "torch", "triton", "triton_key", "core", "sources", "trial")
# Interpreted kernels are slow, so a rehearsal has sixteen tokens and one check for each backend and dtype.
TRIAL_WORKLOADS: tuple[str, ...] = ("fill8",)
TRIAL_SIZES: dict[str, Any] = {"tokens": 16, "heads": 2, "dim": 16}
TRIAL_BACKENDS, TRIAL_DTYPES = ("rows", "dense", gpu_core.MESSAGE_PASSING), ("bfloat16", "float32")


@dataclass(frozen=True)
class Run:
    """One call: its folder, its processes, its deadline, and whether it is a rehearsal."""

    out: Path
    trial: bool
    jobs: int
    until: float

    @cached_property
    def core(self) -> list[Check]:
        """The checks of the core; for a rehearsal, a few that a CPU can run."""
        if not self.trial:
            return gpu_core.core_checks(self.device)
        selection: dict[tuple[str, str], Check] = {}
        for check in gpu_core.core_checks(self.device, gpu_core.TRIAL):
            is_quick = check.group in ("large", "layer") and check.skipped is None
            if is_quick and check.backend in TRIAL_BACKENDS and check.dtype in TRIAL_DTYPES:
                selection.setdefault((check.backend, check.dtype), check)
        return list(selection.values())

    @property
    def device(self) -> str:
        """The device on which everything runs."""
        return "cpu" if self.trial else "cuda"

    @property
    def file(self) -> Path:
        """The file to which all results are written."""
        return self.out / "results.jsonl"

    @cached_property
    def bench(self) -> Tasks:
        """The tasks of the workloads, which are small in a rehearsal."""
        device, workloads = torch.device(self.device), list(WORKLOADS.values())
        if not self.trial:
            return Tasks(workloads, device, MEASUREMENT, self.file)
        small = (replace(WORKLOADS[name], **TRIAL_SIZES) for name in TRIAL_WORKLOADS)
        return Tasks(list(small), device, REHEARSAL, self.file)

    @cached_property
    def groups(self) -> dict[str, Group]:
        """The groups of the core and the group of the workloads, by name."""
        checks_by_group = gpu_core.parts(self.core, 2 if self.trial else gpu_core.PROCESSES)
        tasks = {
            name: [Task(c.label, c.backend, lambda c=c: asdict(c())) for c in checks]  # type: ignore[misc]
            for name, checks in checks_by_group.items()
        }
        tasks[BENCH] = list(self.bench.all())
        return {name: Group(self.file, group, self._command(name)) for name, group in tasks.items()}

    def _command(self, name: str) -> list[str]:
        options = ["--work", name, "--out", str(self.out)]
        # The groups of the core run in parallel, so each gets one thread.
        threads = [] if name == BENCH else ["env", "OMP_NUM_THREADS=1"]
        command = [*threads, sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_run", *options]
        return [*command, "--trial"] if self.trial else command

    def results(self) -> dict[str, Result]:
        """Return the results of the core by the label of their check."""
        results: dict[str, Result] = {}
        entries = Lines.read(self.file).results
        for c in (check for check in self.core if check.label in entries):
            entry = entries[c.label]
            if "death" in entry:
                # A check that ended its process counts as failed.
                entry = {"passed": False, "message": entry["death"]}
                entry |= {"group": c.group, "backend": c.backend, "dtype": c.dtype, "name": c.name}
            results[c.label] = Result(**entry)
        return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tasks until time is up; return 0 if all finished checks passed, 1 if not, 2 for wrong arguments."""
    args = _parser().parse_args(arguments)
    run = Run(Path(args.out), args.trial, args.jobs, time.time() + args.seconds - LAST_SECONDS)
    if args.work:
        if args.work != BENCH:
            # Uninitialized tensors are filled with NaN, so a kernel that leaves some values unwritten fails.
            torch.use_deterministic_algorithms(True, warn_only=True)
            # float32 must not mean TF32, whatever the environment of the machine sets.
            torch.backends.cuda.matmul.fp32_precision = "ieee"
        return run_tasks(run.groups[args.work], PATIENCE * (10 if run.trial else 1))
    try:
        environment = _begin(run)
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        print(f"gpu_run: {error}", file=sys.stderr)
        return 2
    core = {name: group for name, group in run.groups.items() if name != BENCH}
    far = [core.pop(FAR)] if FAR in core else []
    run_groups(list(core.values()), run.jobs, min(run.until, time.time() + MOST_OF_CORE))
    run_groups(far, 1, run.until)
    results = run.results()
    if results and not run.trial:
        gpu_record.write_record(results.values(), environment, run.out)
    _summarize(run, environment)
    if not args.core_only:
        run_groups([run.groups[BENCH]], 1, run.until)
    print(_summarize(run, environment), flush=True)
    return int(any(not result.passed and result.skipped is None for result in results.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu_run", description=__doc__)
    add = parser.add_argument
    add("--out", default="gpu/run", metavar="FOLDER", help="folder for all results (default: gpu/run)")
    add("--seconds", type=float, default=SECONDS, help=f"duration of this call (default: {SECONDS:.0f})")
    add("--core-only", action="store_true", help="skip the workloads, for example after a fix")
    add("--jobs", type=int, default=os.cpu_count(), help="number of parallel processes")
    add("--trial", action="store_true", help="rehearse on a CPU with small sizes, and write no record")
    add("--work", help=argparse.SUPPRESS)
    return parser


def _begin(run: Run) -> dict[str, Any]:
    """Describe the machine and begin a call; ValueError if the folder was begun in another environment."""
    if run.trial and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("--trial interprets the kernel: set TRITON_INTERPRET=1 before Python starts")
    run.out.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        # With one worker, Inductor would otherwise switch to another assembler in the middle of a process.
        ptxas = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
        os.environ.setdefault("TRITON_PTXAS_PATH", str(ptxas))
    core = gpu_core.digest(check.label for check in run.core)
    environment = {**gpu_record.gpu_environment(run.device), "core": core, "trial": run.trial}
    file = run.out / "place.json"
    first = json.loads(file.read_text(encoding="utf-8")) if file.exists() else environment
    changes = [name for name in IDENTITY if first.get(name) != environment[name]]
    if changes:
        raise ValueError(f"--out {run.out} was made with another {changes[0]}; begin a new folder")
    atomic_files.write(file, json.dumps(environment))
    append(run.file, task=None)
    return environment


def _summarize(run: Run, environment: dict[str, Any]) -> str:
    """Write the record of the workloads and a page with the checks of each cell, failures and workloads."""
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton", "ptxas"))
    head = f"{environment['device']}, {versions}, commit {environment['commit']}, {environment['date']}"
    record = run.bench.record(environment, measurement=run.device != "cpu")
    if record is not None:
        write(run.out / "bench.json", record)
    bench = "no workload was measured" if record is None else table.report(record)
    text = "\n".join([head, "", *_cells(run), "", bench, ""])
    atomic_files.write(run.out / "summary.txt", text)
    return text


def _cells(run: Run) -> Iterator[str]:
    results = run.results()
    labels_by_cell = defaultdict[tuple[str, str], list[str]](list)
    for check in run.core:
        labels_by_cell[check.backend, check.dtype].append(check.label)
    for (backend, dtype), labels in labels_by_cell.items():
        finished = [results[label] for label in labels if label in results]
        failed = [result for result in finished if not result.passed and result.skipped is None]
        skipped = sum(result.skipped is not None for result in finished)
        counts = f"{len(failed)} FAILED, {skipped} skipped" if failed or skipped else "all passed"
        shares = [result.share for result in finished if result.share is not None]
        largest_share = f", worst {max(shares):.2f} of what is allowed" if shares else ""
        outcome = f"{counts if finished else 'not run'}{largest_share}"
        yield f"{backend} {dtype}: {len(finished)} of {len(labels)} checks, {outcome}"
        for result in failed[:SHOWN]:
            yield f"  FAILED {result.group}: {result.name} [{backend}, {dtype}]\n    {result.message[:300]}"
    yield f"{len(results)} of {len(run.core)} checks have a result"


if __name__ == "__main__":
    # SIGTERM becomes an exception, so that this process also ends those that it started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
