"""What a GPU run leaves: a page that sums it up, the record of the core, and one file that holds everything."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu import processes, table
from benchmarks.gpu.running import read_bench
from gnn_attention._support import atomic_files
from gnn_attention.verify import Check, Result
from gnn_attention.verify.report import label
from tests.guarantees import gpu_record

__all__ = ["BENCH", "PLACE", "failures", "pack", "results", "summary", "unpack", "write_record"]

PLACE, BENCH, SUMMARY = "place.json", "bench.json", "summary.txt"
DAMAGES = (OSError, EOFError, zlib.error, tarfile.TarError)
SHOWN = 40  # failures in full


def results(out: Path) -> list[Result]:
    """The results of all checks of a run."""
    return list(processes.results(sorted(out.glob("core.*.jsonl"))))


def failures(out: Path) -> list[Result]:
    """The checks that were run and did not pass."""
    return [result for result in results(out) if not result.passed and result.skipped is None]


def write_record(out: Path, trial: bool) -> Path | None:
    """The record of the core, as tests/records holds it; None if nothing was checked or it is a rehearsal."""
    place = json.loads((out / PLACE).read_text(encoding="utf-8"))
    done = results(out)
    if trial or not done:
        return None
    return gpu_record.write_record(done, place, out)


def summary(out: Path, core: Sequence[Check]) -> str:
    """One page: what passed in each cell, what failed, and the table of workloads; also in ``summary.txt``."""
    place = json.loads((out / PLACE).read_text(encoding="utf-8"))
    versions = f"torch {place['torch']}, triton {place['triton']}, ptxas {place['ptxas']}"
    lines = [f"{place['device']}, {versions}, commit {place['commit']}, {place['date']}", ""]
    record = read_bench(out / BENCH)
    bench = "no workload was measured" if record is None else table.report(record)
    lines += [*_cells(results(out), core), "", bench]
    text = "\n".join(lines) + "\n"
    atomic_files.write(str(out / SUMMARY), text)
    return text


def _cells(done: Sequence[Result], core: Sequence[Check]) -> Iterator[str]:
    due = defaultdict[tuple[str, str], list[str]](list)
    for check in core:
        due[check.backend, check.dtype].append(check.label)
    answers = {label(result): result for result in done}
    for (backend, dtype), names in due.items():
        mine = [answers[name] for name in names if name in answers]
        failed = [result for result in mine if not result.passed and result.skipped is None]
        skipped = sum(result.skipped is not None for result in mine)
        counts = f"{len(failed)} FAILED, {skipped} skipped" if failed or skipped else "all passed"
        shares = [result.share for result in mine if result.share is not None]
        worst = f", worst {max(shares):.2f} of what is allowed" if shares else ""
        yield f"{backend} {dtype}: {len(mine)} of {len(names)} checks, {counts if mine else 'not run'}{worst}"
        for result in failed[:SHOWN]:
            yield f"  FAILED {label(result)}\n    {result.message[:300]}"
    yield f"{len(done)} of {len(core)} checks have a result"


def pack(out: Path, archive: Path) -> None:
    """Write everything that is in a folder by now into one file, whole or not at all."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for file in sorted(out.iterdir()):
            if file.is_file() and not file.name.startswith("."):
                tar.add(file, file.name)
    atomic_files.write(str(archive), data.getvalue())


def unpack(archive: Path, out: Path) -> None:
    """Put what an earlier call left into a folder. ValueError if the archive is damaged or holds no run."""
    try:
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(archive.read_bytes()))) as tar:
            members = [member for member in tar.getmembers() if member.isfile()]
            files = {Path(member.name).name: tar.extractfile(member) for member in members}
            texts = {name: file.read() for name, file in files.items() if file is not None}
    except DAMAGES as error:
        raise ValueError(f"--earlier: {archive} cannot be read ({type(error).__name__}: {error})") from error
    if PLACE not in texts:
        raise ValueError(f"--earlier: {archive} holds nothing of an earlier call; leave it out")
    # the place comes last: a folder that has it has everything
    for name in sorted(texts, key=lambda name: name == PLACE):
        atomic_files.write(str(out / name), texts[name])
