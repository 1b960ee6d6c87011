"""Everything that is owed on a GPU, in a few calls of some minutes: ``python -m benchmarks.gpu_run --out FOLDER``.

Call it again and again with what the last call left (``--earlier FOLDER``): it goes on where that ended, on
the same kind of machine. In this order, as far as the time reaches:

1. ``first``: versions, ceilings, and one call of every form, of varlen, flex and SDPA against the formula
2. ``core``: the checks of :mod:`tests.guarantees.gpu_core`, one process for each backend and dtype
3. ``bench``: our kernels on the workloads that decide designs
4. ``others``: the other backends, and TF32, by checks that cover every pair of values
5. ``peers``: the same workloads with everything that is installed

Each result is a line of a file in FOLDER as soon as it is there; ``summary.txt`` says what came of all, and
``<date and time>-<device>.json`` is the record of the core once it is complete: put both under ``tests/records``.
``--cache ARCHIVE`` holds kernels that were compiled elsewhere (:mod:`benchmarks.gpu_cache`). ``--trial``
rehearses the whole on a CPU, by Triton's interpreter, with small sizes and fewer checks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_cache
from benchmarks.gpu import groups, machine
from benchmarks.gpu.groups import Group
from gnn_attention import verify
from gnn_attention._support import atomic_files
from gnn_attention.verify import Check, Report, Result, record
from gnn_attention.verify.record import digest
from gnn_attention.verify.report import label
from gnn_attention.verify.selection import pairs
from tests.guarantees.gpu_core import FORMS, TRIAL, core_checks

CACHE = Path(tempfile.gettempdir()) / "gnn_attention-triton"
# a folder is carried on where these are
SAME = ("device", "cuda", "torch", "triton", "triton_key", "sources", "core", "trial")
WORKLOADS = "random1m,random131k,barabasi1m,window131k,bigbird131k,documents131k,causal8k"
QUICK_WORKLOADS = "random131k"
SMALL_CALL = "causal, plain, inputs x1"
OTHERS = ("triton", "varlen", "dense", "split", "flex")


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
        """Seconds."""
        return self.until - time.time()


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what there is time for; 0 if all that is done passed, 1 if not, 2 for wrong arguments."""
    args = _parsed(arguments)
    device = "cpu" if args.trial else args.device
    run = Run(Path(args.out), device, args.trial, args.jobs, args.until or time.time() + args.seconds)
    if args.work:
        return _work(run, args.work, args.group)
    try:
        run.out.mkdir(parents=True, exist_ok=True)
        _carry(run.out, args.earlier)
        print(f"kernels compiled before: {_unpacked(args.cache)}", flush=True)
        _begun(run)
        print(_plan(run), flush=True)
    except (OSError, ValueError) as error:
        print(f"gpu_run: {error}", file=sys.stderr)
        return 2
    for name, step in STEPS.items():
        if run.left > 0:
            print(f"{name}: {run.left:.0f} s left", flush=True)
            step(run)
            _write_summary(run)
    print(_write_summary(run), flush=True)
    return 1 if Report(tuple(_results(run, *CHECKED))).failures else 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_run", description=__doc__)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where results are written")
    parser.add_argument("--earlier", metavar="FOLDER", help="what an earlier call left, to be carried on")
    parser.add_argument("--seconds", type=float, default=520.0, help="of this call (default: 520)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument("--cache", metavar="ARCHIVE", help="kernels compiled before")
    parser.add_argument("--trial", action="store_true", help="a rehearsal on a CPU: small, and no record")
    for internal in ("--work", "--group"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _carry(out: Path, earlier: str | None) -> None:
    for file in Path(earlier).iterdir() if earlier else ():
        if file.is_file() and not (out / file.name).exists():
            shutil.copy(file, out)


def _unpacked(archive: str | None) -> str:
    """Put the kernels of the archive where processes look for them, and say what came of it."""
    os.environ |= gpu_cache.environment(CACHE)
    if archive is None:
        return "none was given; all are compiled here"
    try:
        return f"{gpu_cache.unpacked(Path(archive), CACHE)} from {archive}"
    except (OSError, tarfile.TarError) as error:
        return f"none: {archive}: {error}; all are compiled here"


def _begun(run: Run) -> None:
    """Write what is known of this place; ValueError if the folder comes from another."""
    code = _python("--work", "place", *_options(run))
    here = json.loads((run.out / "here.json").read_text()) if code == 0 else {}
    if not here:
        raise ValueError(f"{run.device} cannot be used: a process that describes it ended with {code}")
    file = run.out / "place.json"
    earlier = json.loads(file.read_text()) if file.exists() else here
    for name in SAME:
        if earlier.get(name) != here.get(name):
            raise ValueError(f"the earlier results were made with another {name}; begin a new folder")
    atomic_files.write(str(file), json.dumps(earlier | {"calls": [*earlier.get("calls", []), here["date"]]}))


def _python(*arguments: str) -> int:
    """Run a part of all this in another process."""
    command = groups.python("-m", "benchmarks.gpu_run", *arguments)
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode


def _options(run: Run) -> list[str]:
    return ["--out", str(run.out), "--device", run.device, *(["--trial"] if run.trial else [])]


def _work(run: Run, name: str, group: str | None) -> int:
    """What a process of its own does."""
    if name == "place":
        core = digest(check.label for check in phase_checks(run, "core"))
        place = verify.environment(run.device) | {
            "sources": record.sources(),
            "core": core,
            "trial": run.trial,
        }
        atomic_files.write(str(run.out / "here.json"), json.dumps(place))
        return 0
    if name == "ceilings":
        found = machine.ceilings(torch.device(run.device))
        atomic_files.write(str(run.out / "ceilings.json"), json.dumps(asdict(found)))
        return 0
    wanted = _groups(run, name)[str(group)]
    return groups.work(wanted.checks, wanted.file, run.until)


def phase_checks(run: Run, phase: str) -> list[Check]:
    """The checks of a phase, in the order of a process."""
    if phase == "core":
        every = core_checks(run.device, TRIAL) if run.trial else core_checks(run.device)
        return [every[n] for n in pairs(every) if every[n].group != "memory"] if run.trial else every
    checks = partial(verify.checks, run.device, trained=False)
    if phase == "first":
        names = [*FORMS, *(("dense",) if run.trial else ("varlen", "flex", "dense"))]
        found = checks(["bfloat16"], names, ["causal"], ["plain"])
        return [check for check in found if check.group == "attend" and check.name == SMALL_CALL]
    own = [] if run.trial else list(checks(["tf32"], FORMS))
    others = list(checks(backends=("dense",) if run.trial else OTHERS))
    return [group[n] for group in (own, others) for n in pairs(group)]


def _groups(run: Run, phase: str) -> dict[str, Group]:
    """The checks of a phase by backend and dtype."""
    found: dict[str, list[Check]] = {}
    for check in phase_checks(run, phase):
        name = "all" if phase == "first" else f"{check.backend}.{check.dtype}"
        found.setdefault(name, []).append(check)
    return {name: _group(run, phase, name, checks) for name, checks in found.items()}


def _group(run: Run, phase: str, name: str, checks: Sequence[Check]) -> Group:
    def command(until: float) -> list[str]:
        given = ["--work", phase, "--group", name, "--until", str(until)]
        return groups.python("-m", "benchmarks.gpu_run", *given, *_options(run))

    file = run.out / f"{phase}.{name}.jsonl"
    return Group(f"{phase} {name}", file, checks, command, _seconds(name, len(checks)))


def _measured() -> dict[str, Any]:
    """Kernels of each group and seconds of compiling them, as :mod:`benchmarks.gpu_cache` counted them."""
    file = Path(__file__).parent / "gpu" / "kernels.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def _seconds(name: str, checks: int) -> float:
    """Expected: a check takes about 0.15 s of yardsticks, a kernel that is not there yet what it took elsewhere."""
    known = _measured().get(name, {"kernels": 100, "seconds": 90.0})
    ready = len(list(CACHE.glob("*/*.cubin"))) >= sum(group["kernels"] for group in _measured().values()) > 0
    return 0.15 * checks + (0.0 if ready else float(known["seconds"]))


def _plan(run: Run) -> str:
    """What is left to do in each phase, and how long it should take."""
    lines = [f"{'phase':<10}{'groups':>8}{'checks':>8}{'expected':>10}"]
    for phase in CHECKED:
        waiting = [(group, len(group.waiting)) for group in _groups(run, phase).values()]
        left = [(group.seconds, count) for group, count in waiting if count]
        longest = max((seconds for seconds, _ in left), default=0.0)
        shared = sum(seconds for seconds, _ in left) / run.jobs
        checks = sum(count for _, count in left)
        lines.append(f"{phase:<10}{len(left):>8}{checks:>8}{max(longest, shared):>8.0f} s")
    return "\n".join(lines)


def _checks(phase: str, run: Run) -> None:
    if phase == "first" and not (run.out / "ceilings.json").exists():
        _python("--work", "ceilings", *_options(run))
    found = list(_groups(run, phase).values())
    # an interpreted check may take minutes
    patience = groups.PATIENCE * (10 if run.trial else 1)
    finished = groups.run(found, 1 if phase == "first" else run.jobs, run.until, patience=patience)
    if phase == "core" and finished and not run.trial:
        write_record(run)


def _bench(name: str, run: Run) -> None:
    """In a process of its own, alone on the device."""
    file = run.out / f"{name}.json"
    workloads = QUICK_WORKLOADS if run.trial else WORKLOADS
    given = ["--workloads", workloads, "--json", str(file), "--budget", str(max(run.left - 20, 1))]
    given += ["--resume", str(file)] if file.exists() else []
    given += ["--no-peers"] if name == "bench" else []
    given += ["--device", "cpu", "--quick"] if run.trial else ["--device", run.device]
    with (run.out / f"{name}.log").open("ab") as log:
        command = groups.python("-m", "benchmarks", "gpu", *given)
        try:
            subprocess.run(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, timeout=run.left, check=False
            )
        except subprocess.TimeoutExpired:
            log.write(b"no time left\n")


CHECKED = ("first", "core", "others")
STEPS: dict[str, Callable[[Run], None]] = {
    "first": partial(_checks, "first"),
    "core": partial(_checks, "core"),
    "bench": partial(_bench, "bench"),
    "others": partial(_checks, "others"),
    "peers": partial(_bench, "peers"),
}


def _results(run: Run, *phases: str) -> Iterator[Result]:
    for phase in phases:
        yield from groups.results(sorted(run.out.glob(f"{phase}.*.jsonl")))


def write_record(run: Run) -> Path:
    """The record of the core, as ``gnn-attention verify --status`` reads it."""
    place = json.loads((run.out / "place.json").read_text())
    found = {label(result): result for result in _results(run, "core")}
    report = Report(tuple(found[check.label] for check in phase_checks(run, "core")), place)
    # two of a day have two names: 2026-11-23T0914
    when = place["date"][:16].replace(":", "")
    name = f"{when}-{place['device'].replace(' ', '-')}.json"
    atomic_files.write(str(run.out / name), report.to_json() + "\n")
    return run.out / name


def _write_summary(run: Run) -> str:
    text = _summary(run)
    atomic_files.write(str(run.out / "summary.txt"), text)
    return text


def _summary(run: Run) -> str:
    """One page: what was run in each phase, what failed, where."""
    place = json.loads((run.out / "place.json").read_text())
    lines = [
        f"{place['device']}, torch {place['torch']}, triton {place['triton']}, core {place['core'][:12]}"
    ]
    for phase in CHECKED:
        due, found = len(phase_checks(run, phase)), Report(tuple(_results(run, phase)))
        shares = [result.share for result in found.results if result.share is not None]
        worst = f", worst {max(shares):.2f} of what is allowed" if shares else ""
        counts = f"{len(found.failures)} FAILED, {len(found.skipped)} skipped"
        lines.append(f"{phase}: {len(found.results)} of {due} checks, {counts}{worst}")
        lines += [f"  FAILED {label(r)}\n    {r.message[:300]}" for r in found.failures]
    for name in ("bench", "peers"):
        file = run.out / f"{name}.json"
        cases = json.loads(file.read_text()) if file.exists() else {"cases": [], "waiting": "all"}
        lines.append(f"{name}: {len(cases['cases'])} cases, {cases['waiting']} methods waiting")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
