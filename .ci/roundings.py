"""Every way in which the same wheels round differently: run verify under each, and what else is asked for.

    python .ci/roundings.py                       # four paths, quick: what CI runs
    python .ci/roundings.py --every --all --tests # all paths, every check, the tests: for the night

Every path gets the default checks, which cover all pairs. Of paths whose errors are the same bits there, the
first alone gets all checks and the tests. Prints for each path whether it changes numbers on this machine
(against no setting at all), the worst error as a share of what is allowed, in which group, and how long it
took. Exit code 1 if a path fails, or if a group's worst share is above 0.8.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HEADROOM = 0.8
VALUE = "import torch; x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)); print((x @ x).exp().sum().item())"

PATHS: dict[str, dict[str, str]] = {
    "as it is": {},
    "ATEN_CPU_CAPABILITY=default": {},
    "ATEN_CPU_CAPABILITY=avx2": {},
    "ATEN_CPU_CAPABILITY=avx512": {},
    "MKL_ENABLE_INSTRUCTIONS=SSE4_2": {},
    "MKL_ENABLE_INSTRUCTIONS=AVX2": {},
    "MKL_ENABLE_INSTRUCTIONS=AVX512": {},
    "MKL_CBWR=COMPATIBLE": {},
    "ONEDNN_MAX_CPU_ISA=SSE41": {},
    "ONEDNN_MAX_CPU_ISA=AVX2": {},
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE": {},
    "OMP_NUM_THREADS=2": {"GOMP_SPINCOUNT": "0"},  # threads that wait for a processor do not spin
    "OMP_NUM_THREADS=3": {"GOMP_SPINCOUNT": "0"},
}
QUICK = (
    "ATEN_CPU_CAPABILITY=default",
    "ATEN_CPU_CAPABILITY=avx2",
    "MKL_CBWR=COMPATIBLE",
    "OMP_NUM_THREADS=2",
)


@dataclass(frozen=True)
class Outcome:
    """What one path came to."""

    path: str
    value: str
    code: int
    digest: str
    shares: dict[tuple[str, str], tuple[float, str]]
    seconds: float
    more: str = ""


def main() -> int:
    """Run the paths one after another, each with all processors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", action="store_true", help="every path (default: four)")
    parser.add_argument("--all", action="store_true", help="then every check, where numbers are new")
    parser.add_argument("--tests", action="store_true", help="then the default tests, where numbers are new")
    parser.add_argument("--path", action="append", choices=list(PATHS), help="only this one; may be repeated")
    args = parser.parse_args()
    found = []
    for path in args.path or (PATHS if args.every else QUICK):
        outcome = run(path)
        same = next((other.path for other in found if other.digest == outcome.digest), None)
        if same is not None:
            outcome = replace(outcome, more=f"the rest as {same}")
        else:
            outcome = checked(outcome) if args.all else outcome
            outcome = tested(outcome) if args.tests else outcome
        found.append(outcome)
        report(outcome, found[0])
    worst = max((share for outcome in found for share, _ in outcome.shares.values()), default=0.0)
    print(f"worst share of what is allowed: {worst:.2f} (at most {HEADROOM})")
    failed = [outcome.path for outcome in found if outcome.code]
    print(f"{len(found)} paths, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
    return 0 if not failed and worst <= HEADROOM else 1


def environment(path: str) -> dict[str, str]:
    """The variables of the process, and those of the path."""
    setting = {} if "=" not in path else dict([path.split("=")])
    return {**os.environ, **setting, **PATHS[path]}


def run(path: str, *options: str) -> Outcome:
    """Verify with these variables set."""
    env = environment(path)
    began = time.time()
    value = subprocess.run(
        [sys.executable, "-c", VALUE], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "record.json"
        command = [
            sys.executable,
            "-m",
            "gnn_attention",
            "verify",
            "--json",
            str(file),
            *options,
        ]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        results = json.loads(file.read_text())["results"] if file.exists() else []
    if done.returncode:
        print(done.stdout[-3000:] + done.stderr[-2000:])
    return Outcome(path, value, done.returncode, digest(results), shares(results), time.time() - began)


def checked(outcome: Outcome) -> Outcome:
    """With every check; the digest stays that of the default ones."""
    whole = run(outcome.path, "--all")
    code, seconds = outcome.code or whole.code, outcome.seconds + whole.seconds
    return replace(whole, code=code, digest=outcome.digest, seconds=seconds, more="all checks")


def tested(outcome: Outcome) -> Outcome:
    """With the exit code and the last line of the default tests."""
    env = environment(outcome.path)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or ["nothing"]
    if done.returncode:
        print("\n".join(line for line in lines if line.startswith(("FAILED", "ERROR", "E  "))))
    more = f"{outcome.more}; tests: {lines[-1].strip('= ')}".removeprefix("; ")
    return replace(outcome, code=outcome.code or done.returncode, more=more)


def digest(results: list[dict[str, Any]]) -> str:
    """Of all measured numbers: equal where not one differs."""
    numbers = [
        [r["group"], r["backend"], r["dtype"], r["name"], r.get("share"), r.get("error")] for r in results
    ]
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:8]


def shares(results: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[float, str]]:
    """The worst share of each group and dtype, and the check that has it."""
    worst: dict[tuple[str, str], tuple[float, str]] = defaultdict(lambda: (0.0, ""))
    for r in results:
        if "share" in r:
            key = r["group"], r["dtype"]
            worst[key] = max(worst[key], (float(r["share"]), f"{r['name']} [{r['backend']}]"))
    return dict(worst)


def report(outcome: Outcome, first: Outcome) -> None:
    """Some lines for one path."""
    changed = (
        "the first"
        if outcome is first
        else "changes numbers"
        if outcome.digest != first.digest
        else "changes nothing"
    )
    group, (share, name) = max(
        outcome.shares.items(), key=lambda entry: entry[1], default=(("-", "-"), (0.0, ""))
    )
    word = "FAILED" if outcome.code else "passed"
    print(
        f"{outcome.path}: {word}, {changed} ({outcome.digest}; {outcome.value}), {outcome.seconds:.0f} s "
        f"{outcome.more}"
    )
    print(f"  worst {share:.2f} of what is allowed: {' '.join(group)}: {name}", flush=True)
    for key, (share, name) in outcome.shares.items():
        if share > HEADROOM:
            print(f"  above {HEADROOM}: {' '.join(key)} {share:.2f}: {name}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
