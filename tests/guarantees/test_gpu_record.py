"""What may be said of GPUs, from the newest record and the sources of today; docs/guarantees.md agrees."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gnn_attention.verify.report import Report, Result, label
from tests.guarantees import gpu, gpu_record
from tests.guarantees.gpu_core import CORE_BACKENDS, MESSAGE_PASSING, core_checks
from tests.guarantees.gpu_record import digests, source_digest, status, write_record

PAGE = Path(__file__).parents[2] / "docs" / "guarantees.md"
PLACE = {
    "device": "NVIDIA H100 80GB HBM3",
    "cuda": "13.0",
    "commit": "0123456789abcdef",
    "date": "2026-12-01T10:00:00+00:00",
    "interpreted": False,
}
WHEN = "NVIDIA H100 80GB HBM3 at 0123456789ab, 2026-12-01"


@pytest.fixture(scope="module")
def results():
    """Of a run of the whole core that passes."""
    errors = {"output": 1.25, "gradient": 2.5}
    return [Result(c.group, c.backend, c.dtype, c.name, passed=True, **errors) for c in core_checks()]


@pytest.fixture
def written(tmp_path):
    """Writes the record of some results, and returns what may be said of it."""

    def write(results, **place):
        write_record(results, {**PLACE, **place}, tmp_path)
        return status(tmp_path)

    return write


def changed(results, condition, **fields):
    """The results of which some have other fields."""
    return [replace(result, **fields) if condition(result) else result for result in results]


def test_a_record_of_the_whole_core_verifies_every_cell(written, results, tmp_path):
    backends = f"flex, varlen, rows, dense, reference, {MESSAGE_PASSING} in 3, 2, 4, 4, 4, 4 dtypes"
    file = "(`tests/records/2026-12-01T1000-nvidia-h100-80gb-hbm3.json`)"
    said = f"The library is **verified** on {WHEN}: {backends}, {len(results):,} checks {file}."
    assert written(results) == said
    assert gpu_record.newest(tmp_path)[1].results == tuple(results)


def test_a_cell_that_failed_is_named_and_no_other(written, results):
    def in_varlen(result):
        return (result.backend, result.dtype) == ("varlen", "float16")

    first = next(label(result) for result in results if in_varlen(result))
    failed = changed(results, lambda result: label(result) == first, passed=False)
    said = written(failed)
    checks = len(results) - sum(map(in_varlen, results))
    assert f"in 3, 1, 4, 4, 4, 4 dtypes, {checks:,} checks; varlen float16: 1 failed (" in said
    skipped = changed(results, in_varlen, passed=False, skipped="no such kernel")
    assert f"; varlen float16: {sum(map(in_varlen, results))} skipped (" in written(skipped)
    missing = [result for result in results if label(result) != first]
    assert "; varlen float16: 1 not run (" in written(missing)


def test_nothing_passed_in_any_cell(written, results):
    """One check of each cell failed."""
    firsts = {(result.backend, result.dtype): label(result) for result in results}
    failed = changed(results, lambda result: label(result) in firsts.values(), passed=False)
    assert f"**untested**: the last run ({WHEN}) verified nothing; flex bfloat16: 1 failed; " in written(
        failed
    )


HOLLOW = {
    "nothing ran": ([], {}, "ran no check that passed"),
    "all failed": (["failed"], {}, "ran no check that passed"),
    "all skipped": (["skipped"], {}, "ran no check that passed"),
    "one twice": (["twice"], {}, "holds the result of a check twice"),
    "of another backend": (["other"], {}, "holds checks that are not of the core"),
    "interpreted": (["all"], {"interpreted": True}, "was a rehearsal"),
    "unknown whether": (["all"], {"interpreted": None}, "was a rehearsal"),
    "a trial": (["all"], {"trial": True}, "was a rehearsal"),
    "no GPU": (["all"], {"cuda": None}, "no machine with one has run the checks yet"),
}


@pytest.mark.parametrize(("which", "place", "why"), HOLLOW.values(), ids=HOLLOW)
def test_a_hollow_record_verifies_nothing(written, results, which, place, why):
    made = {
        "all": results,
        "failed": [replace(result, passed=False) for result in results],
        "skipped": [replace(result, passed=False, skipped="no memory") for result in results],
        "twice": [*results, results[0]],
        "other": [replace(results[0], backend="tiles"), *results],
    }
    said = written(made[which[0]] if which else [], **place)
    assert "**untested**" in said
    assert why in said


def edit(record):
    """A record of one check whose counts were made to fit."""
    result = record["results"][0]
    cell = f"{result['backend']} {result['dtype']}"
    labels = gpu_record.digest([label(Result(**result))])
    record["results"] = [result]
    record["environment"]["cells"] = {cell: {"checks": 1, "labels": labels}}


EDITED = {
    "counts that fit": (edit, "was not of the core of checks"),
    "no cells": (lambda record: record["environment"].pop("cells"), "does not say which sources and checks"),
    "no digests": (lambda record: record["environment"].pop("digests"), "does not say which sources"),
}


@pytest.mark.parametrize(("change", "why"), EDITED.values(), ids=EDITED)
def test_an_edited_record_verifies_nothing(results, tmp_path, change, why):
    file = write_record(results, PLACE, tmp_path)
    record = json.loads(file.read_text(encoding="utf-8"))
    change(record)
    file.write_text(json.dumps(record), encoding="utf-8")
    said = status(tmp_path)
    assert "**untested**" in said
    assert why in said


def test_a_result_of_another_name_takes_its_cell_out(written, results):
    def is_first(result):
        return label(result) == label(results[0])

    said = written(changed(results, is_first, name="another"))
    assert f"; {results[0].backend} {results[0].dtype}: other checks than those of the core (" in said


def test_the_newest_record_that_says_something_counts(written, results, tmp_path):
    """By its date; a later rehearsal, and records of CPUs and benchmarks, do not count."""
    written(results)
    said = written(results, date="2026-12-02T00:00:00+00:00", device="NVIDIA H200")
    assert "NVIDIA H200 at" in said
    assert written(results, date="2026-12-03T00:00:00+00:00", trial=True) == said
    assert written(results, date="2026-12-04T00:00:00+00:00", cuda=None) == said
    (tmp_path / "2027-02-01-bench.json").write_text(json.dumps({"runs": []}), encoding="utf-8")
    assert status(tmp_path) == said


# ---- what changed since


@pytest.fixture
def tree(tmp_path):
    """Sources with one file for each backend, and one that judges."""
    files = {
        **{f"gnn_attention/backends/{name}.py": name for name in CORE_BACKENDS},
        "gnn_attention/backends/gpu/kernels/rows.py": "kernel",
        "gnn_attention/backends/gpu/flash_varlen.py": "flash",
        "gnn_attention/backends/_flex_block_mask.py": "mask",
        "gnn_attention/layer/attention.py": "layer",
        "gnn_attention/verify/measure.py": "measure",
        "gnn_attention/verify/report.py": "report",
    }
    for name, word in files.items():
        file = tmp_path / "tree" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"def {word}(x):\n    return x + 1\n", encoding="utf-8")
    return tmp_path / "tree"


CHANGED = {
    "backends/rows.py": ["rows"],
    "backends/gpu/kernels/rows.py": ["rows"],
    "backends/gpu/flash_varlen.py": ["varlen"],
    "backends/_flex_block_mask.py": ["flex"],
    "layer/attention.py": [MESSAGE_PASSING],
    "verify/measure.py": ["checks"],
    "verify/report.py": [],
}


@pytest.mark.parametrize(("name", "cells"), CHANGED.items(), ids=CHANGED)
def test_an_operator_marks_what_runs_it_and_a_comment_nothing(tree, name, cells):
    before, file = digests(tree), tree / "gnn_attention" / name
    text = file.read_text(encoding="utf-8")
    file.write_text(f"# a comment\n{text.replace('    return', '    # another' + chr(10) + '    return')}")
    assert digests(tree) == before
    file.write_text(text.replace("+", "-"), encoding="utf-8")
    now = digests(tree)
    assert [cell for cell in now if now[cell] != before[cell]] == cells


def test_a_change_marks_the_record_and_does_not_erase_it(results, tmp_path, tree):
    file = write_record(results, PLACE, tmp_path)
    record = json.loads(file.read_text(encoding="utf-8"))
    record["environment"]["digests"] = digests(tree)
    file.write_text(json.dumps(record), encoding="utf-8")
    assert "changed" not in status(tmp_path, tree)
    for name in ("backends/rows.py", "verify/measure.py"):
        (tree / "gnn_attention" / name).write_text("def other(x):\n    return x\n", encoding="utf-8")
    said = status(tmp_path, tree)
    assert said.startswith(f"The library is **verified** on {WHEN}: ")
    assert "; changed since: rows, the checks (" in said


SOURCE = '''
"""Doc."""
from m import _first, second

class _Rows:
    """Doc."""
    def run(self, x):
        return _first(x) + self._scale * second(x, "text")
'''


def test_a_digest_is_that_of_what_is_computed():
    same = [
        SOURCE.replace("_first", "_other").replace("_scale", "_factor").replace("_Rows", "_Lines"),
        SOURCE.replace('"""Doc."""', ""),
        SOURCE.replace('"""Doc."""', '"""Another."""'),
        SOURCE.replace("    def", "    # why\n    def"),
    ]
    other = [
        SOURCE.replace("+", "-"),
        SOURCE.replace("second", "third"),
        SOURCE.replace("text", "word"),
        SOURCE.replace("return _first(x)", "return _scale(x)"),
        SOURCE.replace("run", "walk"),
    ]
    assert {source_digest(text) for text in same} == {source_digest(SOURCE)}
    assert source_digest(SOURCE) not in {source_digest(text) for text in other}


# ---- pages and commands


def test_the_table_shows_the_record(results, tmp_path):
    """By backend and dtype: how many ran, failed, were skipped, and the worst errors."""
    write_record(results, PLACE, tmp_path)
    text = gpu_record.markdown(tmp_path)
    count = sum((result.backend, result.dtype) == ("flex", "float32") for result in results)
    assert text.startswith(status(tmp_path))
    assert f"| flex | float32 | {count} | 0 | 0 | 1.25 | 2.50 |" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_the_page_says_of_gpus_what_the_newest_record_says():
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert " ".join(gpu_record.markdown().split()) in text


def test_the_command_says_it_and_runs_nothing(capsys):
    assert gpu.main(["--status"]) == 0
    assert capsys.readouterr().out.strip() == status()


def test_a_record_is_a_report(results, tmp_path):
    """With the number of checks of the core that were not run."""
    report = Report.from_file(write_record(results[5:], PLACE, tmp_path))
    assert report.summary == {
        "ok": False,
        "checks": len(results) - 5,
        "failed": 0,
        "skipped": 0,
        "not_started": 5,
    }
