"""Everything that is owed on a GPU, in a few calls of some minutes: ``python -m benchmarks.gpu_run --out FOLDER``.

Call it again and again with what the last call left (``--earlier``, a folder or an archive): it goes on where
that ended, on the same kind of machine. In this order, as far as the time reaches:

1. ``first``: versions, ceilings, and one call of every form, of varlen, flex and SDPA against the formula
2. ``core``: the checks of :mod:`tests.guarantees.gpu_core`, one process for each backend and dtype
3. ``bench``: our kernels on the workloads that decide designs
4. ``sanitizer``: a dozen launches of every form under memcheck and racecheck, where that tool is installed
5. ``others``: the other backends, and TF32, by checks that cover every pair of values
6. ``peers``: the same workloads with everything that is installed or carried

Before it starts it prints how long each should take. Each result is a line of a file in FOLDER as soon as it
is there; ``summary.txt`` says what came of all, and ``<date and time>-<device>.json`` is the record of the core:
put it and ``bench.json`` under ``tests/records``. ``--archive FILE`` holds all of that in one file, written anew
every few seconds. ``--cache ARCHIVE`` holds kernels that were compiled elsewhere (:mod:`benchmarks.gpu_cache`).
``--trial`` rehearses the whole on a CPU, by Triton's interpreter, with small sizes and fewer checks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from benchmarks import gpu_cache
from benchmarks.gpu import groups, machine, outcome, plan, sanitizer
from benchmarks.gpu.phases import CHECKED, Run, groups_of, phase_checks
from gnn_attention import verify
from gnn_attention._support import atomic_files
from gnn_attention.verify import circumstances, record
from gnn_attention.verify.record import digest

CACHE = Path(tempfile.gettempdir()) / "gnn_attention-triton"
# a folder is carried on where these are
SAME = ("device", "cuda", "torch", "triton", "triton_key", "sources", "core", "trial")
WORKLOADS = "random1m,random131k,barabasi1m,window131k,bigbird131k,documents131k,causal8k"
QUICK_WORKLOADS = "uniform2m"
PACKED_EVERY = 15.0
# seconds that a benchmark leaves at the end of a call, and without a method after which it is ended
SPARE, BENCH_PATIENCE = 20.0, 240.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what there is time for; 0 if all that is done passed, 1 if not, 2 for wrong arguments."""
    args = _parsed(arguments)
    device = "cpu" if args.trial else args.device
    run = Run(Path(args.out), device, args.trial, args.jobs, args.until or time.time() + args.seconds)
    if args.work:
        return _work(run, args.work, args.group)
    # processes share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        if run.trial and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("a trial interprets its kernels: set TRITON_INTERPRET=1 before Python starts")
        run.out.mkdir(parents=True, exist_ok=True)
        if args.earlier:
            outcome.carry(Path(args.earlier), run.out)
        ready = _unpacked(args.cache)
        _begun(run, ready)
        _print_plan(run, args.seconds)
    except (OSError, ValueError) as error:
        print(f"gpu_run: {error}", file=sys.stderr)
        return 2
    with _packing(run, args.archive):
        for name, step in STEPS.items():
            if run.left > 0:
                print(f"{name}: {run.left:.0f} s left", flush=True)
                step(run)
                outcome.write_summary(run)
        _ended(run, args.seconds, ready)
        print(outcome.write_summary(run), flush=True)
    return 1 if outcome.failures(run) else 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_run", description=__doc__)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where results are written")
    parser.add_argument("--archive", metavar="FILE", help="all that is in FOLDER as one file, .tar.gz")
    parser.add_argument(
        "--earlier", metavar="FOLDER|FILE", help="what an earlier call left, to be carried on"
    )
    parser.add_argument("--seconds", type=float, default=520.0, help="of this call (default: 520)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument("--cache", metavar="ARCHIVE", help="kernels compiled before")
    parser.add_argument("--trial", action="store_true", help="a rehearsal on a CPU: small, and no record")
    for internal in ("--work", "--group"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _unpacked(archive: str | None) -> int:
    """Put the kernels of the archive where processes look for them, and say what came of it."""
    os.environ |= gpu_cache.environment(CACHE)
    try:
        count = gpu_cache.unpacked(Path(archive), CACHE) if archive else 0
        found = f"{count} from {archive}" if archive else "none was given"
    except (OSError, ValueError) as error:
        count, found = 0, f"none: {error}"
    print(f"kernels compiled before: {found}{'' if count else '; all are compiled here'}", flush=True)
    return count


def _compiled() -> int:
    """Kernels that are there now."""
    return len(list(CACHE.glob("*/*.cubin")))


def _ready(run: Run) -> float:
    """Kernels that need no compiling: all of them where they are interpreted."""
    return math.inf if run.trial else _compiled()


def _begun(run: Run, ready: int) -> None:
    """Write what is known of this place; ValueError if the folder comes from another."""
    code = _python("--work", "place", *run.options)
    here = json.loads((run.out / "here.json").read_text()) if code == 0 else {}
    if not here:
        raise ValueError(f"{run.device} cannot be used: a process that describes it ended with {code}")
    file = run.out / outcome.PLACE
    earlier = json.loads(file.read_text()) if file.exists() else here
    for name in SAME:
        if earlier.get(name) != here.get(name):
            raise ValueError(f"the earlier results were made with another {name}; begin a new folder")
    call = {"date": here["date"], "command": shlex.join(sys.argv), "clocks": here["clocks"], "ready": ready}
    call |= {"compiled_before": _compiled()}
    atomic_files.write(str(file), json.dumps(earlier | {"calls": [*earlier.get("calls", []), call]}))


def _ended(run: Run, seconds: float, ready: int) -> None:
    """Note how long this call took, its kernels, and the clocks after it."""
    place = json.loads((run.out / outcome.PLACE).read_text())
    call = place["calls"][-1]
    call["compiled"] = _compiled() - call.pop("compiled_before")
    call |= {"seconds": round(seconds - run.left, 1)}
    call |= {"clocks_after": circumstances.clocks() if run.device.startswith("cuda") else None}
    atomic_files.write(str(run.out / outcome.PLACE), json.dumps(place))


@contextmanager
def _packing(run: Run, archive: str | None) -> Iterator[None]:
    """Write the archive anew every few seconds, and once at the end."""
    if archive is None:
        yield
        return
    over = threading.Event()

    def pack_now_and_then() -> None:
        outcome.pack(run, Path(archive))
        while not over.wait(PACKED_EVERY):
            outcome.pack(run, Path(archive))

    thread = threading.Thread(target=pack_now_and_then, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        outcome.pack(run, Path(archive))


def _python(*arguments: str) -> int:
    """Run a part of all this in another process."""
    command = groups.python("-m", "benchmarks.gpu_run", *arguments)
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode


def _work(run: Run, name: str, group: str | None) -> int:
    """What a process of its own does."""
    if name == "place":
        core = digest(check.label for check in phase_checks(run, "core"))
        place = verify.environment(run.device)
        place |= {"sources": record.sources(), "core": core, "trial": run.trial}
        atomic_files.write(str(run.out / "here.json"), json.dumps(place))
        return 0
    if name == "ceilings":
        found = machine.ceilings(torch.device(run.device))
        atomic_files.write(str(run.out / "ceilings.json"), json.dumps(asdict(found)))
        return 0
    wanted = groups_of(run, name)[str(group)]
    # none of these is begun that could not end
    until = run.until - (sanitizer.SECONDS if name == "sanitizer" and not run.trial else 0.0)
    return groups.work(wanted.checks, wanted.file, until)


def _print_plan(run: Run, seconds: float) -> None:
    """What is left to do in each phase, and how long it should take; also a file for each call."""
    steps = [_expected(run, name) for name in STEPS]
    text = plan.plan(steps, seconds)
    print(text, flush=True)
    calls = len(json.loads((run.out / outcome.PLACE).read_text())["calls"])
    atomic_files.write(str(run.out / f"plan-{calls}.txt"), text + "\n")


def _expected(run: Run, name: str) -> plan.Step:
    if name in CHECKED:
        return plan.checked_step(name, list(groups_of(run, name).values()), _jobs(run, name), _ready(run))
    done = {(case["workload"], case["method"]) for case in outcome.read_benchmark(run, name)["cases"]}
    return plan.timed_step(name, _workloads(run).split(","), name == "peers", done)


def _jobs(run: Run, phase: str) -> int:
    return 1 if phase == "first" else run.jobs


def _workloads(run: Run) -> str:
    return QUICK_WORKLOADS if run.trial else WORKLOADS


def _checks(phase: str, run: Run) -> None:
    if phase == "first" and not (run.out / "ceilings.json").exists():
        _python("--work", "ceilings", *run.options)
    found = list(groups_of(run, phase).values())
    # the longest is begun first
    plan.checked_step(phase, found, run.jobs, _ready(run))
    groups.run(found, _jobs(run, phase), run.until, patience=_patience(run, phase))
    if phase == "core" and not run.trial:
        outcome.write_record(run)


def _patience(run: Run, phase: str) -> float:
    """Seconds without a line after which a process is ended; an interpreted check may take minutes."""
    usual = sanitizer.SECONDS + 60 if phase == "sanitizer" else groups.PATIENCE
    return usual * (10 if run.trial else 1)


def _bench(name: str, run: Run) -> None:
    """In a process of its own, alone on the device; in another one where that is lost or dies."""
    while run.left > SPARE:
        before = outcome.read_benchmark(run, name)
        code = _bench_once(name, run)
        now = outcome.read_benchmark(run, name)
        if code in (0, None) or now == before or now["waiting"] == 0:
            return
        print(f"{name}: its process ended with {code}", flush=True)


def _bench_once(name: str, run: Run) -> int | None:
    """Its exit code; None where time was up."""
    file = run.out / f"{name}.json"
    given = ["--workloads", _workloads(run), "--json", str(file), "--budget", str(run.left - SPARE)]
    given += ["--resume", str(file)] if file.exists() else []
    given += ["--no-peers"] if name == "bench" else []
    given += ["--device", "cpu", "--quick"] if run.trial else ["--device", run.device]
    threads = {"OMP_NUM_THREADS": str(run.jobs)}
    log_file = run.out / f"{name}.log"
    with log_file.open("ab") as log:
        os.utime(log_file)
        process = subprocess.Popen(
            groups.python("-m", "benchmarks", "gpu", *given),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=os.environ | threads,
        )
        try:
            while run.left > 0:
                time.sleep(0.2)
                seen = file if file.exists() else log_file
                code = groups.ended(process, seen, BENCH_PATIENCE)
                if code is not None:
                    return code
        finally:
            process.kill()
            process.wait()
    return None


STEPS: dict[str, Callable[[Run], None]] = {
    "first": partial(_checks, "first"),
    "core": partial(_checks, "core"),
    "bench": partial(_bench, "bench"),
    "sanitizer": partial(_checks, "sanitizer"),
    "others": partial(_checks, "others"),
    "peers": partial(_bench, "peers"),
}


if __name__ == "__main__":
    # what ends this process ends those that it started
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
