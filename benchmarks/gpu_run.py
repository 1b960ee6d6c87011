"""Everything that is owed on a GPU, in one call of eight minutes: ``python3 -m benchmarks.gpu_run --out FOLDER``.

1. The core of checks (:mod:`tests.guarantees.gpu_core`) in 16 processes, at most 280 s; then what ran out of
   memory beside others, and the sizes that need 64-bit offsets, each alone.
2. The workloads, irregular graphs first, each with its peers (:mod:`benchmarks.gpu.workloads`).

The call ends by itself. Each result is a line of a file in FOLDER as soon as it is there; ``summary.txt`` says
what came of all, and ``<date>-<device>.json`` is the record of the core: put it and ``bench.json``, as
``<date>-bench-gpu.json``, under ``tests/records``. ``--archive FILE.tar.gz`` holds all of that in one file,
written anew every 15 s, and ``--earlier FILE.tar.gz`` carries it on. ``--plan`` prints how long each part should
take and needs no device. ``--trial`` rehearses the whole on a CPU: interpreted kernels, small sizes, few checks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from benchmarks.gpu import outcome, processes, running
from benchmarks.gpu.processes import Group
from benchmarks.gpu.workloads import WORKLOADS
from gnn_attention._support import atomic_files
from gnn_attention.verify import Check
from tests.guarantees import gpu_core, gpu_record

SECONDS, SECOND_CALL = 470.0, 180.0  # of a first call, and of one after it
MOST_OF_CORE = 280.0
SPARE = 40.0  # seconds that the plan leaves
PACKED_EVERY, LAST_SECONDS = 15.0, 5.0  # the last seconds are those of the summary and the archive
BENCH_PATIENCE = 150.0  # seconds without a method's case after which the process of the workloads is ended
FAR = "far"
# kernels of rows that the core compiles, of which Triton 3.6 takes 0.74 CPU seconds each on a busy core: 260 s, or
# 16 s on 16 cores; the process of float64 has most of them, 77
KERNELS = 352
START = 15.0  # seconds of a process with torch on the device machine, or of the ceilings
# seconds of a workload: its graph as it was built on a CPU, 2 for each method that is not refused, and 15 for
# each that Inductor compiles anew
SECONDS_OF_WORKLOAD = {"random1m": 20, "narrow1m": 32, "clusters": 28, "mesh": 30, "bigbird131k": 45}
SECONDS_OF_WORKLOAD |= {"fill8": 12, "fill16": 12, "chosen32k": 10, "window131k": 30, "documents131k": 30}
SECONDS_OF_WORKLOAD |= {"causal8k": 30, "clusters1": 25, "fill4": 12, "fill32": 12}
TRIAL_WORKLOADS = ("random1m", "mesh", "chosen32k", "fill8")
TRIAL_BACKENDS = ("rows", "dense", "reference", gpu_core.MESSAGE_PASSING)
# what the interpreter of the kernel does in seconds: few receivers, and a check of each other kind in one dtype
TRIAL_ROWS = ("one token",)
TRIAL_DTYPE, TRIAL_PROCESSES = "bfloat16", 4
# a run is carried on only where these are the same
SAME = ("device", "cuda", "torch", "triton", "triton_key", "core", "digests", "trial")


Part = tuple[str, float]  # a part of a call, and its seconds


@dataclass(frozen=True)
class Run:
    """Where, for how long, and whether it is a rehearsal."""

    out: Path
    device: str
    trial: bool
    jobs: int
    until: float

    @property
    def left(self) -> float:
        """Seconds until the call ends."""
        return self.until - time.time()

    @property
    def options(self) -> list[str]:
        """The command line of a process that does a part of the run."""
        trial = ["--trial"] if self.trial else []
        return ["--out", str(self.out), "--device", self.device, "--jobs", str(self.jobs), *trial]

    @property
    def workloads(self) -> tuple[str, ...]:
        return TRIAL_WORKLOADS if self.trial else tuple(WORKLOADS)

    @cached_property
    def core(self) -> list[Check]:
        """The checks of the core; of a rehearsal a few of each kind that a CPU can run."""
        if not self.trial:
            return gpu_core.core_checks(self.device)
        kinds = defaultdict[tuple[str, str, str], list[Check]](list)
        for check in gpu_core.core_checks(self.device, gpu_core.TRIAL):
            if check.backend in TRIAL_BACKENDS and check.skipped is None and _is_quick(check):
                kinds[check.group, check.backend, check.dtype].append(check)
        # another one of each kind, so that the rehearsal meets many graphs and options
        return [checks[number * 7 % len(checks)] for number, checks in enumerate(kinds.values())]

    @cached_property
    def groups(self) -> dict[str, Group]:
        """The groups of the core by the name of their process."""
        parts = gpu_core.parts(self.core, TRIAL_PROCESSES if self.trial else gpu_core.PROCESSES)
        return {name: self._group(name, checks) for name, checks in parts.items()}

    def _group(self, name: str, checks: Sequence[Check], alone: bool = False) -> Group:
        def command(until: float) -> list[str]:
            work = ["--work", "core", "--group", name, "--until", str(until)]
            return processes.python(
                "-m", "benchmarks.gpu_run", *work, *(["--alone"] if alone else []), *self.options
            )

        file = self.out / f"core.{name.replace(' ', '-')}.jsonl"
        return Group(name, file, checks, command, alone)

    def short_of_memory(self) -> list[Group]:
        """The groups with checks that ran out of memory beside others, to be run one at a time."""
        groups = [self._group(name, group.checks, alone=True) for name, group in self.groups.items()]
        return [group for group in groups if group.waiting]


def _is_quick(check: Check) -> bool:
    """Whether a rehearsal has time for a check: the interpreter takes a second for a few edges."""
    if check.backend != "rows" or any(name in check.name for name in TRIAL_ROWS):
        return True
    return check.dtype == TRIAL_DTYPE and check.group in ("large", "far")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what there is time for: 0 if all that is done passed, 1 if not, 2 for wrong arguments."""
    args = _parser().parse_args(arguments)
    device = "cpu" if args.trial else args.device
    until = args.until or time.time() + args.seconds
    run = Run(Path(args.out), device, args.trial, args.jobs, until)
    if args.plan:
        print(plan())
        return 0
    if args.work:
        return _work(run, args.work, args.group, args.alone)
    try:
        _begin(run, args.earlier)
    except (OSError, ValueError) as error:
        print(f"gpu_run: {error}", file=sys.stderr)
        return 2
    with _packing(run, args.archive):
        _run_core(run)
        if not args.core_only:
            _run_bench(run)
        print(outcome.summary(run.out, run.core), flush=True)
    return 1 if outcome.failures(run.out) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu_run", description=__doc__)
    add = parser.add_argument
    add("--out", default="gpu/run", metavar="FOLDER", help="where results are written (default: gpu/run)")
    add("--archive", metavar="FILE.tar.gz", help="all that is in FOLDER as one file")
    add("--earlier", metavar="FILE.tar.gz", help="the archive of an earlier call, to be carried on")
    add("--seconds", type=float, default=SECONDS, help=f"of this call (default: {SECONDS:.0f})")
    add("--core-only", action="store_true", help="leave the workloads out, as after a repair")
    add("--plan", action="store_true", help="print what each call should take; needs no device")
    add("--device", default="cuda")
    add("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    add("--trial", action="store_true", help="a rehearsal on a CPU: small, and no record")
    for internal in ("--work", "--group"):
        add(internal, help=argparse.SUPPRESS)
    add("--alone", action="store_true", help=argparse.SUPPRESS)
    add("--until", type=float, help=argparse.SUPPRESS)
    return parser


# ---- the plan


def plan() -> str:
    """What both calls do and how long each part should take, from measured parts."""
    checks = gpu_core.core_checks("cuda")
    parts = gpu_core.parts(checks)
    far = START + gpu_core.seconds_of(parts.pop(FAR))
    longest = START + max(gpu_core.seconds_of(part) for part in parts.values())
    core = [
        (f"core: {len(checks) - 1} checks in {len(parts)} processes, {KERNELS} kernels", longest),
        ("far offsets, alone", far),
    ]
    bench = [("ceilings of the device", START)]
    for name, workload in WORKLOADS.items():
        bench.append((f"{name}: {workload.title}", float(SECONDS_OF_WORKLOAD[name])))
    lines, rest = _timeline(f"first call, {SECONDS:.0f} s", core + bench, SECONDS)
    lines += _timeline(f"second call, {SECOND_CALL:.0f} s, the rest", [bench[0], *rest], SECOND_CALL)[0]
    lines += _timeline(f"or, after a repair, {SECOND_CALL:.0f} s", core, SECOND_CALL)[0]
    return "\n".join(lines)


def _timeline(title: str, parts: Sequence[Part], seconds: float) -> tuple[list[str], list[Part]]:
    """Each part that fits with the second of its end, and the parts that a later call does."""
    lines, end = [title], 0.0
    for number, (name, duration) in enumerate(parts):
        if end + duration > seconds - SPARE:
            left = f"  {seconds - end:.0f} s are left; {len(parts) - number} parts wait for the next call"
            return [*lines, left, ""], list(parts[number:])
        end += duration
        lines.append(f"  {end:4.0f} s  {name}, {duration:.0f} s")
    return [*lines, f"  {seconds - end:.0f} s are left", ""], []


# ---- the steps


def _begin(run: Run, earlier: str | None) -> None:
    """Describe the machine, and take over what an earlier call left; ValueError if that was elsewhere."""
    if run.trial and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("--trial interprets the kernel: set TRITON_INTERPRET=1 before Python starts")
    run.out.mkdir(parents=True, exist_ok=True)
    if earlier is not None:
        outcome.unpack(Path(earlier), run.out)
        for file in run.out.glob("core.*.jsonl"):
            processes.forget_deaths(file)
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "gnn_attention-triton"))
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    if (assembler := _tritons_ptxas()) is not None:
        # Inductor with one worker would set another one in the middle of a process
        os.environ.setdefault("TRITON_PTXAS_PATH", assembler)
    before = run.out / outcome.PLACE
    known = json.loads(before.read_text(encoding="utf-8")) if before.exists() else None
    code = subprocess.run(
        processes.python("-m", "benchmarks.gpu_run", "--work", "place", *run.options), check=False
    )
    here = run.out / "here.json"
    if code.returncode or not here.exists():
        raise ValueError(
            f"--device: {run.device} cannot be used (exit code {code.returncode} of a first process)"
        )
    place = json.loads(here.read_text(encoding="utf-8"))
    different = [name for name in SAME if known is not None and known.get(name) != place[name]]
    if different:
        raise ValueError(
            f"--earlier was made with another {different[0]}; begin a new folder and leave it out"
        )
    here.replace(before)


def _tritons_ptxas() -> str | None:
    """The assembler that comes with Triton, by name."""
    spec = importlib.util.find_spec("triton")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    file = None if folder is None else folder / "backends" / "nvidia" / "bin" / "ptxas"
    return str(file) if file is not None and file.exists() else None


def _run_core(run: Run) -> None:
    """Several groups at once, then one at a time what ran out of memory, then far offsets."""
    environment = dict(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    patience = processes.PATIENCE * (10 if run.trial else 1)
    together = [group for name, group in run.groups.items() if name != FAR]
    until = min(run.until, time.time() + MOST_OF_CORE)
    processes.run_groups(together, run.jobs, until, patience=patience)
    processes.run_groups(run.short_of_memory(), 1, run.until, patience=patience)
    processes.run_groups([run.groups[FAR]] if FAR in run.groups else [], 1, run.until, patience=patience)
    outcome.write_record(run.out, run.trial)
    outcome.summary(run.out, run.core)
    os.environ.clear()
    os.environ.update(environment)


def _run_bench(run: Run) -> None:
    """The workloads in a process of their own, alone on the device; in a new one where that dies.

    Three deaths with no new case between them end it.
    """
    deaths, file = 0, run.out / outcome.BENCH
    while run.left > START and deaths < processes.MOST_DEATHS:
        before = running.read_bench(file)
        code = _bench_process(run)
        outcome.summary(run.out, run.core)
        if code in (running.DONE, running.LATE, None):
            return
        print(f"the process of the workloads ended with {code}", flush=True)
        now = running.read_bench(file)
        is_further = now is not None and (before is None or len(now["cases"]) > len(before["cases"]))
        deaths = 0 if is_further else deaths + 1


def _bench_process(run: Run) -> int | None:
    """Its exit code; None where time was up."""
    command = processes.python(
        "-m", "benchmarks.gpu_run", "--work", "bench", "--until", str(run.until - 10.0)
    )
    log_file, record = run.out / "bench.log", run.out / outcome.BENCH
    with log_file.open("ab") as log:
        os.utime(log_file)
        process = subprocess.Popen([*command, *run.options], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            while run.left > LAST_SECONDS:
                time.sleep(0.2)
                newest = max((file for file in (log_file, record) if file.exists()), key=os.path.getmtime)
                code = processes.exit_code_of(process, newest, BENCH_PATIENCE)
                if code is not None:
                    return code
        finally:
            process.kill()
            process.wait()
    return None


def _work(run: Run, name: str, group: str | None, alone: bool) -> int:
    """What a process of its own does."""
    if run.trial:
        processes.patch_interpreter()
    if name == "place":
        core = gpu_core.digest(check.label for check in run.core)
        place = gpu_record.gpu_environment(run.device)
        place |= {"core": core, "digests": gpu_record.digests(), "trial": run.trial}
        atomic_files.write(str(run.out / "here.json"), json.dumps(place))
        return 0
    if name == "bench":
        file = run.out / outcome.BENCH
        return running.run_workloads(file, run.workloads, run.device, run.trial, run.until)
    # float32 is judged as float32, whatever an image of the machine sets
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    wanted = run.groups[str(group)]
    return processes.run_checks(wanted.checks, wanted.file, run.until, alone)


@contextmanager
def _packing(run: Run, archive: str | None) -> Iterator[None]:
    """Write the archive anew every 15 s, and once at the end."""
    if archive is None:
        yield
        return
    over = threading.Event()

    def pack_repeatedly() -> None:
        outcome.pack(run.out, Path(archive))
        while not over.wait(PACKED_EVERY):
            outcome.pack(run.out, Path(archive))

    thread = threading.Thread(target=pack_repeatedly, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        outcome.pack(run.out, Path(archive))


if __name__ == "__main__":
    # what ends this process ends those that it started
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
