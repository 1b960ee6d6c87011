"""A dozen small launches of every form, forward and backward, under ``compute-sanitizer``: memcheck and racecheck.

They are calls that the core makes, so that their kernels are compiled already, and their results are not
looked at: the tool reports what lies outside of memory, and what races. Where it is not installed, or does not
take the device, the checks are skipped by name. ``python -m benchmarks.gpu.sanitizer --form NAME`` makes the
launches of a form alone.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu import groups
from gnn_attention.verify import Check
from tests.guarantees.gpu_core import FORMS, TRIAL, Sizes, core_checks

__all__ = ["LAUNCHES", "SECONDS", "OverError", "launches_alone", "program", "sanitizer_checks", "verdict_of"]

PROGRAM = "compute-sanitizer"
OPTIONS = {
    # torch asks the driver for what it may not have: such answers are no faults
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": (),
}
LAUNCHES, SECONDS = 12, 240.0
DTYPES = ("bfloat16", "float32")
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)", re.MULTILINE)
REPORT = re.compile(
    r"^=+ ((?:Invalid|Error:|Warning:|Program hit|Uninitialized|Misaligned).*)$", re.MULTILINE
)
PLACE = re.compile(r"^=+ +at (?:[\w:<> ]+::)?([\w<>:, ]+?)(?:\(.*\))?\+0x", re.MULTILINE)
REFUSED = ("Device not supported", "not supported on this device", "Unable to find injection library")


def program() -> str | None:
    """Where the tool is; None if it is not installed."""
    known = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [*known, *sorted(Path("/usr/local").glob("cuda*"), reverse=True)]
    places = [str(folder / part) for folder in folders for part in ("bin", "compute-sanitizer")]
    return shutil.which(PROGRAM) or shutil.which(PROGRAM, path=os.pathsep.join(places))


def sanitizer_checks(device: str, trial: bool = False) -> list[Check]:
    """One for each form and tool."""
    missing = None if program() else f"{PROGRAM} is not installed"
    return [
        Check(
            "sanitizer",
            form,
            " and ".join(DTYPES),
            f"{tool}: {LAUNCHES} launches, forward and backward",
            partial(_watched, tool, form, device, trial),
            skipped=missing,
        )
        for form, tool in product(FORMS, OPTIONS)
    ]


def _watched(tool: str, form: str, device: str, trial: bool) -> Mapping[str, Any]:
    """The launches of a form under the tool."""
    given = ["--form", form, "--device", device, *(["--trial"] if trial else [])]
    own = groups.python("-m", "benchmarks.gpu.sanitizer", *given)
    command = [str(program()), "--tool", tool, *OPTIONS[tool], *own]
    # an allocator that keeps memory hides what lies between two tensors
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    code, output = _ended(command, environment)
    if any(words in output for words in REFUSED):
        reason = f"{PROGRAM} does not take this device: {output.strip()[-200:]}"
        return {"passed": False, "skipped": reason}
    return verdict_of(code, output)


def _ended(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Exit code and output; what is not done in time is ended, with all that it started."""
    given: dict[str, Any] = {"env": environment, "stdin": subprocess.DEVNULL, "start_new_session": True}
    given |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **given) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def verdict_of(code: int, output: str) -> Mapping[str, Any]:
    """The fields of a result: passed if the tool finished, found nothing, and so did the launches.

    >>> verdict_of(0, "========= ERROR SUMMARY: 0 errors")
    {'passed': True, 'message': ''}
    >>> verdict_of(0, "12 launches")
    {'passed': False, 'message': 'no summary: 12 launches'}
    """
    counts = [int(count) for count in SUMMARY.findall(output)]
    if not counts:
        return {"passed": False, "message": f"no summary: {output.strip()[-400:]}"}
    if sum(counts):
        reports, places = REPORT.findall(output), sorted(set(PLACE.findall(output)))
        what = f"{sum(counts)} reports, in {', '.join(places) or 'a kernel without a name'}: "
        return {"passed": False, "message": what + "; ".join(dict.fromkeys(reports))[:400]}
    return {
        "passed": code == 0,
        "message": "" if code == 0 else f"ended with {code}: {output.strip()[-400:]}",
    }


class OverError(Exception):
    """All launches of a check are done."""


@contextmanager
def launches_alone() -> Iterator[None]:
    """Checks end before the truth is worked out."""
    from gnn_attention.verify import truth
    from tests.guarantees import gpu_large

    def over(*given: Any) -> Any:
        raise OverError

    with (
        patch.object(truth.Formula, "truth", over),
        patch.object(gpu_large.LargeCase, "truth", property(over)),
    ):
        yield


def chosen(form: str, device: str, sizes: Sizes) -> list[Check]:
    """A dozen calls of a form from all over the core: graphs, options and shapes, forward and backward."""
    found = [
        check
        for check in core_checks(device, sizes)
        if check.backend == form
        and check.dtype in DTYPES
        and check.with_gradients
        and check.group in ("attend", "shapes")
    ]
    return [found[len(found) * number // LAUNCHES] for number in range(LAUNCHES)]


def launch(form: str, device: str, sizes: Sizes) -> list[str]:
    """Make the launches; what went wrong."""
    with launches_alone():
        ended = [check() for check in chosen(form, device, sizes)]
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return [result.message for result in ended if OverError.__name__ not in result.message]


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch; 1 if a call failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.sanitizer", description=__doc__)
    parser.add_argument("--form", required=True, choices=FORMS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--trial", action="store_true", help="small, on a CPU")
    args = parser.parse_args(arguments)
    failed = launch(args.form, args.device, TRIAL if args.trial else Sizes())
    print("\n".join([*failed, f"{LAUNCHES} launches, {len(failed)} failed"]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
