"""What may be said of GPUs, from the newest record and the sources of today; docs/guarantees.md agrees."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gnn_attention.verify.report import Result
from tests.guarantees import gpu, gpu_record
from tests.guarantees.environment import environment
from tests.guarantees.gpu_core import MESSAGE_PASSING, core_checks
from tests.guarantees.gpu_record import status, write_record

PAGE = Path(__file__).parents[2] / "docs" / "guarantees.md"
PLACE = {
    "device": "NVIDIA H100 80GB HBM3",
    "cuda": "13.0",
    "commit": "0123456789abcdef",
    "date": "2026-12-01T10:00:00+00:00",
    "interpreted": False,
    "sources": environment("cpu")["sources"],
}
WHEN = "NVIDIA H100 80GB HBM3 at 0123456789ab, 2026-12-01"


@pytest.fixture(scope="module")
def results():
    """Of a run of the whole core that passes."""
    return [Result(c.group, c.backend, c.dtype, c.name, passed=True, share=0.75) for c in core_checks()]


@pytest.fixture
def written(tmp_path):
    """Writes the record of some results, and returns what may be said of it."""

    def write(results, **place):
        write_record(results, {**PLACE, **place}, tmp_path)
        return status(tmp_path)

    return write


def test_a_record_of_the_whole_core_verifies_every_cell(written, results, tmp_path):
    said = written(results)
    assert said.startswith(f"The library is **verified** on {WHEN}, for ")
    backends = said.split(", for every dtype of ")[1].split(": ")[0]
    assert set(backends.split(", ")) == {result.backend for result in results} > {MESSAGE_PASSING, "rows"}
    assert (
        f": {len(results):,} checks passed. The record is `tests/records/2026-12-01T1000-nvidia-h100" in said
    )
    assert gpu_record.newest(tmp_path)[1].results == tuple(results)
    table = gpu_record.markdown(tmp_path)
    count = sum((result.backend, result.dtype) == ("flex", "float32") for result in results)
    assert f"| flex | float32 | {count} | 0 | 0 | 0.75 |" in table


def test_a_cell_that_failed_is_named_and_no_other(written, results, tmp_path):
    mine = {r.label for r in results if (r.backend, r.dtype) == ("varlen", "float16")}
    first, count = min(mine), len(mine)
    where = f'"{gpu_record.ROOT}/a.py", "/x/site-packages/b.py"'
    said = written([replace(r, passed=r.label != first, message=where) for r in results])
    assert r"\"a.py\", \"b.py\"" in next(tmp_path.iterdir()).read_text(encoding="utf-8")
    assert (
        f": {len(results) - count:,} checks passed. 1 check failed for varlen (float16). The record" in said
    )
    skipped = [replace(r, passed=False, skipped="no kernel") if r.label in mine else r for r in results]
    assert f" {count} checks skipped for varlen (float16). The" in written(skipped)
    assert " 1 check not run for varlen (float16). The" in written([r for r in results if r.label != first])


HOLLOW = {
    "nothing ran": ([], {}, "ran no check that passed"),
    "all failed": (["failed"], {}, "ran no check that passed"),
    "interpreted": (["all"], {"interpreted": True}, "was a rehearsal"),
    "unknown whether": (["all"], {"interpreted": None}, "was a rehearsal"),
    "a trial": (["all"], {"trial": True}, "was a rehearsal"),
    "no GPU": (["all"], {"cuda": None}, "no machine with one has run the checks yet"),
}


@pytest.mark.parametrize(("which", "place", "why"), HOLLOW.values(), ids=HOLLOW)
def test_a_hollow_record_verifies_nothing(written, results, which, place, why):
    passed = which == ["all"]
    said = written([replace(result, passed=passed) for result in results] if which else [], **place)
    assert "**untested**" in said
    assert why in said


def test_the_newest_record_that_says_something_counts(written, results, tmp_path):
    """By its date; a later rehearsal, and records of CPUs and benchmarks, do not count."""
    written(results)
    said = written(results, date="2026-12-02T00:00:00+00:00", device="NVIDIA H200")
    assert "NVIDIA H200 at" in said
    assert written(results, date="2026-12-03T00:00:00+00:00", trial=True) == said
    assert written(results, date="2026-12-04T00:00:00+00:00", cuda=None) == said
    (tmp_path / "2027-02-01-bench.json").write_text(json.dumps({"runs": []}), encoding="utf-8")
    assert status(tmp_path) == said


def test_a_change_of_the_package_marks_a_record_and_erases_nothing(written, results):
    assert " The package has changed since. " in written(results, sources="0123")
    assert "changed" not in written(results)


def test_the_assembler_in_use_is_named_by_its_release(tmp_path, monkeypatch):
    program = tmp_path / "ptxas"
    program.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.3, V13.3.73\n")
    program.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(program))
    assert gpu_record.ptxas_release() == "13.3.73"
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "nowhere"))
    assert gpu_record.ptxas_release() is None


def test_the_page_and_the_command_say_of_gpus_what_the_newest_record_says(capsys):
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert " ".join(gpu_record.markdown().split()) in text
    assert gpu.main(["--status"]) == 0
    assert capsys.readouterr().out.strip() == status()
