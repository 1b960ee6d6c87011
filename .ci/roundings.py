"""Run `gnn-attention verify` under every setting by which the same wheels round differently.

    python .ci/roundings.py                       # four paths with the default checks, as in CI
    python .ci/roundings.py --every --all --tests # all paths, every check and the tests, as at night

Every path gets the default checks, which cover all pairs. If several paths have bitwise equal errors there, only the
first of them gets all checks and the tests. For each path the program prints whether it changes numbers on this
machine, compared with the first path, the worst error as a share of the allowed one, its group, and the time. The
exit code is 1 if a path fails, or if the worst share of a group is above 0.8.
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
    "OMP_NUM_THREADS=2": {"GOMP_SPINCOUNT": "0"},  # waiting threads do not spin
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
    """The results of one path."""

    path: str
    value: str
    code: int
    digest: str
    shares: dict[tuple[str, str], tuple[float, str]]
    seconds: float
    note: str = ""


def main() -> int:
    """Run the paths one after another, because each uses all processors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", action="store_true", help="run every path (default: four)")
    parser.add_argument("--all", action="store_true", help="run every check on paths with new numbers")
    parser.add_argument(
        "--tests", action="store_true", help="run the default tests on paths with new numbers"
    )
    parser.add_argument("--path", action="append", choices=list(PATHS), help="run this path; may be repeated")
    args = parser.parse_args()
    outcomes: list[Outcome] = []
    for path in args.path or (PATHS if args.every else QUICK):
        outcome = run(path)
        same = next((other.path for other in outcomes if other.digest == outcome.digest), None)
        if same is not None:
            outcome = replace(outcome, note=f"same numbers as {same}")
        else:
            outcome = run_all_checks(outcome) if args.all else outcome
            outcome = run_tests(outcome) if args.tests else outcome
        outcomes.append(outcome)
        report(outcome, outcomes[0])
    worst = max((share for outcome in outcomes for share, _ in outcome.shares.values()), default=0.0)
    print(f"worst share of what is allowed: {worst:.2f} (at most {HEADROOM})")
    failed = [outcome.path for outcome in outcomes if outcome.code]
    print(f"{len(outcomes)} paths, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
    return 0 if not failed and worst <= HEADROOM else 1


def environment(path: str) -> dict[str, str]:
    """Return the environment of this process with the variables of the path."""
    setting = {} if "=" not in path else dict([path.split("=")])
    return {**os.environ, **setting, **PATHS[path]}


def run(path: str, *options: str) -> Outcome:
    """Run `gnn-attention verify` with the variables of a path."""
    env = environment(path)
    start = time.time()
    value = subprocess.run(
        [sys.executable, "-c", VALUE], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "record.json"
        command = [sys.executable, "-m", "gnn_attention", "verify", "--json", str(file), *options]
        process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        results = json.loads(file.read_text())["results"] if file.exists() else []
    if process.returncode:
        print(process.stdout[-3000:] + process.stderr[-2000:])
    seconds = time.time() - start
    return Outcome(path, value, process.returncode, digest(results), shares(results), seconds)


def run_all_checks(outcome: Outcome) -> Outcome:
    """Run every check on the path, and keep the digest of the default checks."""
    full = run(outcome.path, "--all")
    code = outcome.code or full.code
    seconds = outcome.seconds + full.seconds
    return replace(full, code=code, digest=outcome.digest, seconds=seconds, note="all checks")


def run_tests(outcome: Outcome) -> Outcome:
    """Run the default tests on the path, and add their exit code and last line."""
    env = environment(outcome.path)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "-p", "no:cacheprovider"]
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    lines = process.stdout.strip().splitlines() or ["nothing"]
    if process.returncode:
        print("\n".join(line for line in lines if line.startswith(("FAILED", "ERROR", "E  "))))
    note = f"{outcome.note}; tests: {lines[-1].strip('= ')}".removeprefix("; ")
    return replace(outcome, code=outcome.code or process.returncode, note=note)


def digest(results: list[dict[str, Any]]) -> str:
    """Hash all measured numbers; two digests are equal if no number differs."""
    numbers = [
        [r["group"], r["backend"], r["dtype"], r["name"], r.get("share"), r.get("error")] for r in results
    ]
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:8]


def shares(results: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[float, str]]:
    """Return the worst share of each group and dtype, with the name of its check."""
    worst: dict[tuple[str, str], tuple[float, str]] = defaultdict(lambda: (0.0, ""))
    for r in results:
        if "share" in r:
            key = r["group"], r["dtype"]
            worst[key] = max(worst[key], (float(r["share"]), f"{r['name']} [{r['backend']}]"))
    return dict(worst)


def report(outcome: Outcome, first: Outcome) -> None:
    """Print the outcome of one path."""
    effect = "changes nothing" if outcome.digest == first.digest else "changes numbers"
    effect = "the first" if outcome is first else effect
    group, (share, name) = max(
        outcome.shares.items(), key=lambda entry: entry[1], default=(("-", "-"), (0.0, ""))
    )
    verdict = "FAILED" if outcome.code else "passed"
    print(
        f"{outcome.path}: {verdict}, {effect} ({outcome.digest}; {outcome.value}), {outcome.seconds:.0f} s "
        f"{outcome.note}"
    )
    print(f"  worst {share:.2f} of what is allowed: {' '.join(group)}: {name}", flush=True)
    for key, (share, name) in outcome.shares.items():
        if share > HEADROOM:
            print(f"  above {HEADROOM}: {' '.join(key)} {share:.2f}: {name}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
