"""The status of GPUs follows from the newest record and today's sources, and docs/guarantees.md states it."""

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
    """Return the results of a run of the whole core in which every check passes."""
    return [Result(c.group, c.backend, c.dtype, c.name, passed=True, share=0.75) for c in core_checks()]


@pytest.fixture
def status_of(tmp_path):
    """Return a function that writes the record of some results and returns the status."""

    def write(results, **place):
        write_record(results, {**PLACE, **place}, tmp_path)
        return status(tmp_path)

    return write


def test_a_record_of_the_whole_core_verifies_every_cell(status_of, results, tmp_path):
    text = status_of(results)
    assert text.startswith(f"The library is **verified** on {WHEN}, for ")
    backends = text.split(", for every dtype of ")[1].split(": ")[0]
    expected = {result.backend for result in results} | {"edge_attr/normaliser"}
    assert set(backends.split(", ")) == expected > {MESSAGE_PASSING, "rows"}
    assert (
        f": {len(results):,} checks passed. The record is `tests/records/2026-12-01T1000-nvidia-h100" in text
    )
    assert gpu_record.newest(tmp_path)[1].results == tuple(results)
    table = gpu_record.markdown(tmp_path)
    count = sum((result.backend, result.dtype) == ("flex", "float32") for result in results)
    assert f"| flex | float32 | {count} | 0 | 0 | 0.75 |" in table


def test_a_cell_that_failed_is_named_and_no_other(status_of, results, tmp_path):
    labels = {r.label for r in results if (r.backend, r.dtype) == ("varlen", "float16")}
    label, count = min(labels), len(labels)
    message = f'"{gpu_record.ROOT}/a.py", "/x/site-packages/b.py"'
    text = status_of([replace(r, passed=r.label != label, message=message) for r in results])
    assert r"\"a.py\", \"b.py\"" in next(tmp_path.iterdir()).read_text(encoding="utf-8")
    assert (
        f": {len(results) - count:,} checks passed. 1 check failed for varlen (float16). The record" in text
    )
    new_results = [replace(r, passed=False, skipped="no kernel") if r.label in labels else r for r in results]
    assert f" {count} checks skipped for varlen (float16). The" in status_of(new_results)
    assert " 1 check not run for varlen (float16). The" in status_of([r for r in results if r.label != label])


HOLLOW = {
    "nothing ran": ([], {}, "ran no check that passed"),
    "all failed": (["failed"], {}, "ran no check that passed"),
    "interpreted": (["all"], {"interpreted": True}, "was a rehearsal"),
    "unknown whether": (["all"], {"interpreted": None}, "was a rehearsal"),
    "a trial": (["all"], {"trial": True}, "was a rehearsal"),
    "no GPU": (["all"], {"cuda": None}, "no machine with one has run the checks yet"),
}


@pytest.mark.parametrize(("outcomes", "place", "why"), HOLLOW.values(), ids=HOLLOW)
def test_a_hollow_record_verifies_nothing(status_of, results, outcomes, place, why):
    passed = outcomes == ["all"]
    text = status_of([replace(result, passed=passed) for result in results] if outcomes else [], **place)
    assert "**untested**" in text
    assert why in text


def test_the_newest_record_that_says_something_counts(status_of, results, tmp_path):
    """Records are ordered by date. A later rehearsal, and records of CPUs and benchmarks, do not count."""
    status_of(results)
    text = status_of(results, date="2026-12-02T00:00:00+00:00", device="NVIDIA H200")
    assert "NVIDIA H200 at" in text
    assert status_of(results, date="2026-12-03T00:00:00+00:00", trial=True) == text
    assert status_of(results, date="2026-12-04T00:00:00+00:00", cuda=None) == text
    (tmp_path / "2027-02-01-bench.json").write_text(json.dumps({"runs": []}), encoding="utf-8")
    assert status(tmp_path) == text


def test_a_change_of_the_package_marks_a_record_and_erases_nothing(status_of, results):
    assert " The package has changed since. " in status_of(results, sources="0123")
    assert "changed" not in status_of(results)


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
