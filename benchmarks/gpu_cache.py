"""Kernels of the core, compiled for a GPU that is not there: ``python -m benchmarks.gpu_cache --out ARCHIVE``.

Every launch that the checks of :mod:`tests.guarantees.gpu_core` make is compiled as it is launched there, by
the Triton and Python of this process (those of the GPU's machine must be the same), and none is started. The
archive holds machine code and metadata alone, at most 20 MB. Then each group is launched once more, in fresh
processes, from the archive unpacked in another folder: they must compile nothing. Counts and seconds of
compiling, by the share of a CPU that a process had, go into ``benchmarks/gpu/kernels.json``, by which
:mod:`benchmarks.gpu_run` plans.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu import archives, groups

LEFT_OUT = ("far", "memory", "operators")  # too large for a CPU, or for a device alone
MOST = 20 * 10**6  # bytes of the archive
PLACE = re.compile(r"[A-Z2-7]+/[\w.]+\.(?:cubin|json)")
COUNTS = Path(__file__).parent / "gpu" / "kernels.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, pack, and compile again from the archive; 1 if the archive is too large or misses a kernel."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_cache", description=__doc__)
    parser.add_argument("--out", required=True, metavar="ARCHIVE", help="where to write it, as .tar.gz")
    parser.add_argument("--gpu", default="sm_90", help="which GPU (default: sm_90)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument("--groups", help="only these, separated by commas")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.work:
        print(json.dumps(compiled(args.work, args.gpu)))
        return 0
    names = args.groups.split(",") if args.groups else _names()
    with TemporaryDirectory() as made, TemporaryDirectory() as elsewhere:
        counts = _compiled_in_processes(names, args, Path(made))
        size = packed(Path(made), Path(args.out))
        unpacked(Path(args.out), Path(elsewhere))
        again = _compiled_in_processes(names, args, Path(elsewhere))
    missed = sum(group["compiled"] for group in again.values())
    kernels = sum(group["kernels"] for group in counts.values())
    print(f"{kernels} kernels, {size / 1e6:.1f} MB, {missed} compiled again from the archive")
    if not args.groups:
        COUNTS.write_text(json.dumps(counts, indent=1) + "\n")
    return 1 if missed or size > MOST else 0


def _names() -> list[str]:
    from tests.guarantees.gpu_core import CORE_DTYPES, FORMS

    return [f"{form}.{dtype}" for form in FORMS for dtype in CORE_DTYPES]


def environment(folder: Path) -> dict[str, str]:
    """What makes processes look for kernels there, and key them as :func:`packed` has them."""
    return {"TRITON_CACHE_DIR": str(folder), "TRITON_DISABLE_LINE_INFO": "1"}


def _compiled_in_processes(
    names: Sequence[str], args: argparse.Namespace, folder: Path
) -> dict[str, dict[str, Any]]:
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    inside = outside | environment(folder) | {"OMP_NUM_THREADS": "1"}

    def one(name: str) -> dict[str, Any]:
        given = ["--out", args.out, "--work", name, "--gpu", args.gpu]
        command = groups.python("-m", "benchmarks.gpu_cache", *given)
        done = subprocess.run(command, env=inside, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        print(name, found, flush=True)
        return found

    with ThreadPoolExecutor(args.jobs) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def compiled(name: str, gpu: str) -> dict[str, Any]:
    """Launch the core's checks of a group on tensors of a CPU, and compile what they launch.

    How many kernels there are, how many were not there before, and the seconds of a CPU that compiling them took.
    """
    import triton

    from benchmarks.gpu.sanitizer import OverError, launches_alone
    from gnn_attention.backends import BACKENDS
    from tests.guarantees.gpu_core import core_checks
    from tests.support.compile_gate import without_gpu

    backend, dtype = name.split(".")
    found = BACKENDS[backend]
    here = replace(found, capabilities=replace(found.capabilities, devices=("cuda", "cpu")))
    every = [c for c in core_checks("cpu", backends=[here]) if c.dtype == dtype]
    # a new process launches what the one before it did
    checks = [c for c in every if c.group not in LEFT_OUT and "new process" not in c.name]
    kernels: dict[str, float] = {}

    def count(*, metadata: Any, times: Any, cache_hit: bool, **others: Any) -> None:
        kernels[metadata["hash"]] = 0.0 if cache_hit else times.total / 1e6

    triton.knobs.compilation.listener = count
    used, began = sum(os.times()[:4]), time.perf_counter()
    with without_gpu(gpu), launches_alone():
        ended = [check() for check in checks]
    # of a busy machine a process has a part
    share = min(1.0, (sum(os.times()[:4]) - used) / (time.perf_counter() - began))
    slow = [seconds * share for seconds in kernels.values() if seconds > 0]
    counts = {"checks": len(checks), "kernels": len(kernels), "compiled": len(slow)}
    errors = sorted(
        {r.message[:200] for r in ended if "Error" in r.message and OverError.__name__ not in r.message}
    )
    return {**counts, "seconds": round(sum(slow), 1), **({"errors": errors} if errors else {})}


def packed(folder: Path, archive: Path) -> int:
    """Write the machine code and metadata of a folder into the archive, and return its bytes."""
    files = [file for file in sorted(folder.rglob("*")) if file.suffix in (".cubin", ".json")]
    return archives.pack(folder, files, archive)


def unpacked(archive: Path, folder: Path) -> int:
    """Put the kernels of an archive into a folder, and return how many there are.

    ValueError if the archive is not there, damaged, or holds something else: nothing is written then.
    """
    found = archives.members(archive)
    strange = [place for place in found if not PLACE.fullmatch(place)]
    if strange:
        raise ValueError(f"{archive} holds {strange[0]!r}, which belongs to no kernel")
    for place, data in found.items():
        file = folder / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(_moved(data, file.parent) if file.name.startswith("__grp__") else data)
    return sum(place.endswith(".cubin") for place in found)


def _moved(data: bytes, folder: Path) -> bytes:
    """The list of a kernel's files, whose absolute paths Triton notes, in another folder."""
    names = json.loads(data)["child_paths"]
    return json.dumps({"child_paths": {name: str(folder / name) for name in names}}).encode()


if __name__ == "__main__":
    began = time.time()
    code = main()
    print(f"{time.time() - began:.0f} s", file=sys.stderr)
    sys.exit(code)
