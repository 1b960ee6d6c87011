"""The GPU run rehearsed on a CPU: ``python -m benchmarks.gpu.rehearsal --out FOLDER``.

``whole``: in three calls, each with the archive of the last. ``killed``: every process of it ended at ten
random points of the work, and carried on each time, to the same verdicts. ``wrong``: with a fault in the kernels
of a copy, which it must name. ``cache``: with archives of kernels that are missing or damaged. Needs
TRITON_INTERPRET=1, and takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.gpu import groups
from benchmarks.gpu.groups import Lines
from benchmarks.gpu.outcome import BENCHES
from tests.guarantees.gpu_core import FORMS

__all__ = ["main", "ripe", "verdicts"]

ROOT = Path(__file__).resolve().parents[2]
CALLS, KILLS, LATER = 3, 10, 5.0
TIME_UP = 1800.0
# the sign of the gradient of q, in tiles and windows
FAULT = ("gnn_attention/backends/gpu/kernels/_tiled_backward.py", "tl.dot(ds, k, acc", "tl.dot(-ds, k, acc")
BAD = ("FAILED", "failed", "wrong")
COPIED = ("gnn_attention", "benchmarks", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Stage:
    """Where a rehearsal takes place, and how long a call of it lasts."""

    folder: Path
    seconds: float
    jobs: int
    tree: Path = ROOT

    def call(self, number: int, *options: str, seconds: float | None = None) -> subprocess.Popen[bytes]:
        """Begin a call whose results lie in a folder of this number, and in an archive beside it."""
        out = self.out(number)
        given = ["--trial", "--out", str(out), "--archive", f"{out}.tar.gz", "--jobs", str(self.jobs)]
        given += ["--seconds", str(self.seconds if seconds is None else seconds), *options]
        with (self.folder / "calls.log").open("ab") as log:
            return subprocess.Popen(
                groups.python("-m", "benchmarks.gpu_run", *given),
                cwd=self.tree,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(self.tree), *_more_paths()])},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def out(self, number: int) -> Path:
        """The folder of a call."""
        return self.folder / str(number)


def _more_paths() -> list[str]:
    """Those of ``PYTHONPATH`` that are not this checkout."""
    found = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [path for path in found if path and Path(path).resolve() != ROOT]


def verdicts(out: Path) -> dict[str, str]:
    """What came of every check and of every case of a benchmark, without numbers."""
    found = {}
    for file in sorted(out.glob("*.jsonl")):
        for name, result in Lines.read(file).results.items():
            outcome = "passed" if result.passed else "FAILED" if result.skipped is None else "skipped"
            found[f"{file.name.partition('.')[0]} {name}"] = outcome
    for name in BENCHES:
        record = json.loads((out / f"{name}.json").read_text()) if (out / f"{name}.json").exists() else {}
        for case in record.get("cases", ()):
            found[f"{name} {case['workload']}, {case['method']}, {case['pass']}"] = case["status"]
    return found


def ripe(out: Path) -> bool:
    """Whether a death of everything now would hit no check a second time: that one would have failed."""
    for file in out.glob("*.jsonl"):
        lines = Lines.read(file)
        if any(count > 1 and name not in lines.results for name, count in lines.begun.items()):
            return False
    for name in BENCHES:
        file = out / f"{name}.json"
        record = json.loads(file.read_text()) if file.exists() else {}
        done = {f"{case['workload']}: {case['method']}" for case in record.get("cases", ())}
        if any(count > 1 and method not in done for method, count in record.get("begun", {}).items()):
            return False
    return True


def whole(stage: Stage) -> str | None:
    """Three calls; what is wrong with how they end."""
    code = 0
    for number in range(1, CALLS + 1):
        earlier = ["--earlier", f"{stage.out(number - 1)}.tar.gz"] if number > 1 else []
        code = stage.call(number, *earlier).wait(TIME_UP)
    summary = (stage.out(CALLS) / "summary.txt").read_text()
    found = verdicts(stage.out(CALLS))
    bad = {name: verdict for name, verdict in found.items() if verdict in BAD}
    return f"ended with {code}: {bad}" if code or bad else _incomplete(summary)


def _incomplete(summary: str) -> str | None:
    """The line of a phase that has something left."""
    for line in summary.splitlines():
        words = line.split()
        if "checks," in words and words[1] != words[3]:
            return line
        if "waiting" in words and ", 0 methods waiting" not in line:
            return line
    return None


def killed(stage: Stage, expected: Path) -> str | None:
    """Ten deaths of all processes, each at another point, then a call to the end; verdicts that differ."""
    rng, earlier = random.Random(0), None
    for number, goal in enumerate(sorted(rng.sample(range(len(verdicts(expected))), KILLS)), 1):
        process = stage.call(number, *(["--earlier", str(earlier)] if earlier else []), seconds=TIME_UP)
        _wait_for(process, stage.out(number), goal, rng.uniform(0, LATER))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # a death before anything was carried leaves the folder before it
        earlier = stage.out(number) if (stage.out(number) / "place.json").exists() else earlier
        print(f"death {number}: {len(verdicts(stage.out(number)))} results", flush=True)
    last = KILLS + 1
    code = stage.call(last, "--earlier", str(earlier), seconds=TIME_UP).wait(TIME_UP)
    here, there = verdicts(stage.out(last)), verdicts(expected)
    differing = {name: (there.get(name), here.get(name)) for name in here.keys() | there.keys()}
    differing = {name: pair for name, pair in differing.items() if pair[0] != pair[1]}
    return f"ended with {code}, differs in {differing}" if code or differing else None


def _wait_for(process: subprocess.Popen[bytes], out: Path, goal: int, later: float) -> None:
    """Until a call has so many results, on slow machines too, and some seconds more; or it has ended."""
    while process.poll() is None and len(verdicts(out)) < goal:
        time.sleep(0.2)
    moment = time.time() + later
    while process.poll() is None and (time.time() < moment or not ripe(out)):
        time.sleep(0.1)


def wrong(stage: Stage) -> str | None:
    """A fault that is not named, or one that is where there is none."""
    tree, (file, right, faulty) = stage.folder / "tree", FAULT
    tree.mkdir()
    for name in COPIED:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tree / name)
    text = (tree / file).read_text()
    if right not in text:
        return f"{file} holds no {right!r}"
    (tree / file).write_text(text.replace(right, faulty))
    code = Stage(stage.folder, TIME_UP, stage.jobs, tree).call(1).wait(TIME_UP)
    summary = (stage.out(1) / "summary.txt").read_text()
    named = [line.strip() for line in summary.splitlines() if line.strip().startswith(("FAILED", "WRONG"))]
    print("\n".join(named), flush=True)
    blamed = sorted(form for form in FORMS if any(f"[{form}," in line for line in named))
    right_ones = ["triton-tiles", "triton-windows"]
    return None if code == 1 and blamed == right_ones else f"ended with {code}, blamed {blamed}"


def cache(stage: Stage) -> str | None:
    """What is said of archives of kernels that are missing or damaged; each call goes on without one."""
    archive = stage.folder / "kernels.tar.gz"
    for number, data in enumerate((None, b"", b"no archive", bytes(range(256)) * 99), 1):
        archive.unlink(missing_ok=True)
        if data is not None:
            archive.write_bytes(data)
        code = stage.call(number, "--cache", str(archive), seconds=1.0).wait(TIME_UP)
        summary = (stage.out(number) / "summary.txt").read_text() if code == 0 else ""
        if "first: " not in summary:
            return f"call {number} ended with {code}"
    said = (stage.folder / "calls.log").read_text().count("all are compiled here")
    return None if said == 4 else f"said {said} times that nothing was compiled before"


def main(arguments: Sequence[str] | None = None) -> int:
    """Rehearse; 1 if something is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.rehearsal", description=__doc__)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="an empty one")
    parser.add_argument("--only", help="some of whole, killed, wrong, cache, separated by commas")
    parser.add_argument("--seconds", type=float, default=200.0, help="of each of the three calls")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args(arguments)
    out = Path(args.out).resolve()
    steps: dict[str, Callable[[Stage], str | None]] = {
        "whole": whole,
        "killed": partial(killed, expected=out / "whole" / str(CALLS)),
        "wrong": wrong,
        "cache": cache,
    }
    failed = False
    for name in args.only.split(",") if args.only else steps:
        start = time.time()
        (out / name).mkdir(parents=True)
        problem = steps[name](Stage(out / name, args.seconds, args.jobs))
        failed = failed or problem is not None
        print(f"{name}: {problem or 'as it must be'}, {time.time() - start:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
