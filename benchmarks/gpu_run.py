"""Everything that is owed on a GPU, in one call of eight minutes: ``python3 -m benchmarks.gpu_run --out FOLDER``.

1. The core of checks (:mod:`tests.guarantees.gpu_core`) in 16 processes, at most 280 s; then the sizes that need
   64-bit offsets, alone.
2. The workloads, irregular graphs first, each with its peers (:mod:`benchmarks.gpu.workloads`).

The call ends by itself. Each result is a line of ``results.jsonl`` in FOLDER as soon as it is there;
``summary.txt`` says what came of all, and ``<date>-<device>.json`` is the record of the core: put it and
``bench.json``, as ``<date>-bench-gpu.json``, under ``tests/records``. A further call with the same FOLDER, or
with a copy of it, carries it on. ``--trial`` rehearses the whole on a CPU: interpreted kernels, small sizes, few
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
LAST_SECONDS = 10.0  # are those of the summary
PATIENCE = 150.0  # seconds that a task may take
FAR, BENCH = "far", "bench"
SHOWN = 40  # failures in full
# a run is carried on only where these are the same
SAME = ("device", "cuda", "torch", "triton", "triton_key", "core", "sources", "trial")
# what the interpreter of the kernel does in seconds: sixteen tokens, and a check of each backend and dtype
TRIAL_WORKLOADS: tuple[str, ...] = ("fill8",)
TRIAL_SIZES: dict[str, Any] = {"tokens": 16, "heads": 2, "dim": 16}
TRIAL_BACKENDS, TRIAL_DTYPES = ("rows", "dense", gpu_core.MESSAGE_PASSING), ("bfloat16", "float32")


@dataclass(frozen=True)
class Run:
    """Where, for how long, and whether it is a rehearsal."""

    out: Path
    trial: bool
    jobs: int
    until: float

    @cached_property
    def core(self) -> list[Check]:
        """The checks of the core; of a rehearsal few, which a CPU can run."""
        if not self.trial:
            return gpu_core.core_checks(self.device)
        few: dict[tuple[str, str], Check] = {}
        for check in gpu_core.core_checks(self.device, gpu_core.TRIAL):
            is_quick = check.group in ("large", "layer") and check.skipped is None
            if is_quick and check.backend in TRIAL_BACKENDS and check.dtype in TRIAL_DTYPES:
                few.setdefault((check.backend, check.dtype), check)
        return list(few.values())

    @property
    def device(self) -> str:
        """Where all is run."""
        return "cpu" if self.trial else "cuda"

    @property
    def file(self) -> Path:
        """Where all results are written."""
        return self.out / "results.jsonl"

    @cached_property
    def bench(self) -> Tasks:
        """The tasks of the workloads, small ones for a rehearsal."""
        device, workloads = torch.device(self.device), list(WORKLOADS.values())
        if not self.trial:
            return Tasks(workloads, device, MEASUREMENT, self.file)
        small = (replace(WORKLOADS[name], **TRIAL_SIZES) for name in TRIAL_WORKLOADS)
        return Tasks(list(small), device, REHEARSAL, self.file)

    @cached_property
    def groups(self) -> dict[str, Group]:
        """The groups of the core by name, and that of the workloads."""
        parts = gpu_core.parts(self.core, 2 if self.trial else gpu_core.PROCESSES)
        tasks = {
            name: [Task(c.label, c.backend, lambda c=c: asdict(c())) for c in checks]  # type: ignore[misc]
            for name, checks in parts.items()
        }
        tasks[BENCH] = list(self.bench.all())
        return {name: Group(self.file, some, self._command(name)) for name, some in tasks.items()}

    def _command(self, name: str) -> list[str]:
        options = ["--work", name, "--out", str(self.out)]
        # the checks of the core run side by side
        threads = [] if name == BENCH else ["env", "OMP_NUM_THREADS=1"]
        command = [*threads, sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_run", *options]
        return [*command, "--trial"] if self.trial else command

    def results(self) -> dict[str, Result]:
        """The results of the core by the label of their check."""
        answers = Lines.read(self.file).results
        return {c.label: _result_of(c, answers[c.label]) for c in self.core if c.label in answers}


def _result_of(check: Check, answer: dict[str, Any]) -> Result:
    """The result that a task wrote; a check that ended its process has failed."""
    if "death" not in answer:
        return Result(**answer)
    return Result(check.group, check.backend, check.dtype, check.name, passed=False, message=answer["death"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what there is time for: 0 if all that is done passed, 1 if not, 2 for wrong arguments."""
    args = _parser().parse_args(arguments)
    run = Run(Path(args.out), args.trial, args.jobs, time.time() + args.seconds - LAST_SECONDS)
    if args.work:
        if args.work != BENCH:
            # every tensor that is made without values is full of NaN: a kernel that forgets some cannot pass
            torch.use_deterministic_algorithms(True, warn_only=True)
            # float32 is judged as float32, whatever an image of the machine sets
            torch.backends.cuda.matmul.fp32_precision = "ieee"
        return run_tasks(run.groups[args.work], PATIENCE * (10 if run.trial else 1))
    try:
        place = _begin(run)
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        print(f"gpu_run: {error}", file=sys.stderr)
        return 2
    core = {name: group for name, group in run.groups.items() if name != BENCH}
    far = [core.pop(FAR)] if FAR in core else []
    run_groups(list(core.values()), run.jobs, min(run.until, time.time() + MOST_OF_CORE))
    run_groups(far, 1, run.until)
    results = run.results()
    if results and not run.trial:
        gpu_record.write_record(results.values(), place, run.out)
    _summarize(run, place)
    if not args.core_only:
        run_groups([run.groups[BENCH]], 1, run.until)
    print(_summarize(run, place), flush=True)
    return int(any(not result.passed and result.skipped is None for result in results.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu_run", description=__doc__)
    add = parser.add_argument
    add("--out", default="gpu/run", metavar="FOLDER", help="where results are written (default: gpu/run)")
    add("--seconds", type=float, default=SECONDS, help=f"of this call (default: {SECONDS:.0f})")
    add("--core-only", action="store_true", help="leave the workloads out, as after a repair")
    add("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    add("--trial", action="store_true", help="a rehearsal on a CPU: small, and no record")
    add("--work", help=argparse.SUPPRESS)
    return parser


def _begin(run: Run) -> dict[str, Any]:
    """Describe the machine, and begin a call; ValueError if an earlier call was made elsewhere."""
    if run.trial and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("--trial interprets the kernel: set TRITON_INTERPRET=1 before Python starts")
    run.out.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        # Inductor with one worker would set another assembler in the middle of a process
        ptxas = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
        os.environ.setdefault("TRITON_PTXAS_PATH", str(ptxas))
    core = gpu_core.digest(check.label for check in run.core)
    place = {
        **gpu_record.gpu_environment(run.device),
        "core": core,
        "trial": run.trial,
    }
    file = run.out / "place.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else place
    different = [name for name in SAME if known.get(name) != place[name]]
    if different:
        raise ValueError(f"--out {run.out} was made with another {different[0]}; begin a new folder")
    atomic_files.write(file, json.dumps(place))
    append(run.file, task=None)
    return place


def _summarize(run: Run, place: dict[str, Any]) -> str:
    """Write the record of the workloads, and one page: what passed in each cell, what failed, and the workloads."""
    versions = f"torch {place['torch']}, triton {place['triton']}, ptxas {place['ptxas']}"
    head = f"{place['device']}, {versions}, commit {place['commit']}, {place['date']}"
    record = run.bench.record(place, measurement=run.device != "cpu")
    if record is not None:
        write(run.out / "bench.json", record)
    bench = "no workload was measured" if record is None else table.report(record)
    text = "\n".join([head, "", *_cells(run), "", bench, ""])
    atomic_files.write(run.out / "summary.txt", text)
    return text


def _cells(run: Run) -> Iterator[str]:
    results, due = run.results(), defaultdict[tuple[str, str], list[str]](list)
    for check in run.core:
        due[check.backend, check.dtype].append(check.label)
    for (backend, dtype), labels in due.items():
        own = [results[label] for label in labels if label in results]
        failed = [result for result in own if not result.passed and result.skipped is None]
        skipped = sum(result.skipped is not None for result in own)
        counts = f"{len(failed)} FAILED, {skipped} skipped" if failed or skipped else "all passed"
        shares = [result.share for result in own if result.share is not None]
        worst = f", worst {max(shares):.2f} of what is allowed" if shares else ""
        yield f"{backend} {dtype}: {len(own)} of {len(labels)} checks, {counts if own else 'not run'}{worst}"
        for result in failed[:SHOWN]:
            yield f"  FAILED {result.group}: {result.name} [{backend}, {dtype}]\n    {result.message[:300]}"
    yield f"{len(results)} of {len(run.core)} checks have a result"


if __name__ == "__main__":
    # what ends this process ends those that it started
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
