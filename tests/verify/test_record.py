"""What may be said of GPUs, from the newest record and the sources of today; docs/guarantees.md agrees."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gnn_attention import verify
from gnn_attention.__main__ import main
from gnn_attention.verify import record
from gnn_attention.verify.record import COMPILED, UNTESTED, VERIFIED
from gnn_attention.verify.report import Report, Result, label
from tests.guarantees import gpu

PAGE = Path(__file__).parents[2] / "docs" / "guarantees.md"
ENVIRONMENT = {
    "device": "NVIDIA H200",
    "cuda": "13.0",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "commit": "0123456789abcdef",
    "date": "2026-12-01T10:00:00+00:00",
    "interpreted": False,
}
RESULTS = (
    Result("memory", "triton-rows", "float32", "c", passed=True),
    Result("attend", "triton-rows", "bfloat16", "a", passed=True, output=1.25, gradient=2.5),
    Result("attend", "triton-rows", "bfloat16", "b", passed=True, output=0.5),
)
SKIPPED = Result("attend", "flex", "float64", "a", passed=False, skipped="flex: no float64")
COMPUTED = ["backends/gpu/csr.py", "backends/gpu/kernels/rows.py", "edges.py", "graph/tiling.py"]
JUDGED = ["tests/guarantees/gpu_core.py", "verify/measure.py"]


@pytest.fixture(autouse=True)
def _core(monkeypatch):
    """As if these were the checks of the core."""
    monkeypatch.setattr(record, "CORE", record.digest(label(result) for result in RESULTS))


@pytest.fixture
def package(tmp_path):
    """A package of two kernels, whose hashes the record below holds."""
    for name in (*COMPUTED, "cli.py", *JUDGED, "verify/report.py"):
        file = (tmp_path if name.startswith("tests") else tmp_path / "package") / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("one\n", encoding="utf-8")
    return tmp_path / "package"


def recorded(folder, package, results=RESULTS, not_started=0, name="2026-12-01-nvidia-h200.json", **changed):
    """A record in a folder of records."""
    environment = {**ENVIRONMENT, "sources": record.sources(package), **changed}
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(Report(results, environment, not_started).to_json(), encoding="utf-8")
    return folder


def test_sources_are_what_computes_and_judges_by_their_sha256(package):
    """As sha256sum gives it; commands and what shows a report are not among them."""
    found = record.sources(package)
    assert list(found) == [*COMPUTED, *JUDGED]
    assert (
        found["backends/gpu/kernels/rows.py"]
        == "2c8b08da5ce60398e1f19af0e5dccc744df274b826abe585eaba68c525434806"
    )


LOADED = """
import sys
import gnn_attention.backends.triton, gnn_attention.attend
print(*(x.__file__ for name, x in sys.modules.items() if name.startswith("gnn_attention") and x.__file__))
"""


@pytest.mark.slow
def test_everything_that_computes_is_hashed():
    """All that is imported with it, but for what chooses among kernels or makes graphs and heads."""
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    places = {Path(file).relative_to(record.PACKAGE).as_posix() for file in done.stdout.split()}
    elsewhere = ("__init__.py", "algebra/", "analyse/", "convert/", "heads/", "patterns/")
    computing = {place for place in places if not place.startswith(elsewhere)}
    assert {place for place in computing if Path(place).name not in record.CHOICE} <= record.sources().keys()


def unverified(status, why):
    return all(word in status for word in (f"**{COMPILED}**", f"**{UNTESTED}**", why))


def test_without_a_record_it_is_untested(tmp_path):
    found = verify.status(tmp_path / "nowhere")
    assert unverified(found, "no machine with one has run it yet")
    assert gpu.markdown(tmp_path / "nowhere") == found


def test_a_record_with_the_hashes_of_today_verifies(tmp_path, package):
    """It is named, with device, versions and counts; what neither computes nor judges may change since."""
    folder = recorded(tmp_path / "records", package)
    for name in ("cli.py", "verify/report.py"):
        (package / name).write_text("changed\n", encoding="utf-8")
    found = verify.status(folder, package)
    assert f"On a GPU it is **{VERIFIED}**: " in found
    where = "NVIDIA H200 (2026-12-01, 0123456789ab; torch 2.11.0, triton 3.6.0)"
    assert f"3 checks on {where}, 0 failed, 0 skipped (`tests/records/2026-12-01-nvidia-h200.json`)" in found


@pytest.mark.parametrize("name", [*COMPUTED, *JUDGED])
@pytest.mark.parametrize("change", ["edited", "removed", "new"])
def test_what_computes_or_judges_must_be_as_it_was(tmp_path, package, change, name):
    folder = recorded(tmp_path / "records", package)
    file = (package.parent if name.startswith("tests") else package) / name
    if change == "removed":
        file.unlink()
    elif change == "edited":
        file.write_text("edited\n", encoding="utf-8")
    elif "/" in name:
        file.with_name("gpu_new.py").write_text("two\n", encoding="utf-8")
    else:
        return
    why = "kernels, forms or checks changed since the last GPU verification (2026-12-01, 0123456789ab)"
    assert unverified(verify.status(folder, package), why)


FAILED = replace(RESULTS[0], passed=False)


HOLLOW = {
    "one failed": ({"results": (FAILED, *RESULTS[1:])}, "does not stand: 1 failed, 0 skipped"),
    "some not started": ({"not_started": 7}, "does not stand: 0 failed, 0 skipped, 7 not started"),
    "nothing ran": ({"results": ()}, "does not stand"),
    "all skipped": ({"results": (SKIPPED,)}, "does not stand"),
    "one skipped": ({"results": (replace(FAILED, skipped="no memory"), *RESULTS[1:])}, "1 skipped"),
    "one missing": ({"results": RESULTS[1:]}, "was not of the core of checks"),
    "one more": ({"results": (*RESULTS, replace(RESULTS[0], name="d"))}, "was not of the core of checks"),
    "another name": ({"results": (replace(RESULTS[0], name="d"), *RESULTS[1:])}, "was not of the core"),
    "one twice": ({"results": (*RESULTS, RESULTS[0])}, "was not of the core of checks"),
    "one check of dense": ({"results": (replace(RESULTS[0], backend="dense"),)}, "was not of the core"),
    "interpreted": ({"interpreted": True}, "was a rehearsal, whose kernels were interpreted"),
    "unknown whether": ({"interpreted": None}, "was a rehearsal"),
    "a trial": ({"trial": True}, "was a rehearsal"),
    "no hashes": ({"sources": None}, "kernels, forms or checks changed"),
    "no GPU": ({"cuda": None}, "no machine with one has run it yet"),
}


@pytest.mark.parametrize(("changed", "why"), HOLLOW.values(), ids=HOLLOW)
def test_a_hollow_record_verifies_nothing(tmp_path, package, changed, why):
    assert unverified(verify.status(recorded(tmp_path / "records", package, **changed), package), why)


def test_the_newest_record_counts(tmp_path, package):
    """By its date, not by its name; records of CPUs and of benchmarks are none."""
    folder = recorded(tmp_path / "records", package)
    recorded(folder, package, name="a-later.json", date="2026-12-02T00:00:00+00:00", device="NVIDIA B200")
    recorded(folder, package, name="z-cpu.json", date="2027-01-01T00:00:00+00:00", cuda=None)
    (folder / "2027-02-01-bench.json").write_text(json.dumps({"runs": []}), encoding="utf-8")
    file, report = record.newest(folder)
    assert file.name == "a-later.json"
    assert report.results == RESULTS


def test_the_table_shows_the_record(tmp_path, package):
    """By backend and dtype: how many ran, failed, were skipped, and the worst errors."""
    folder = recorded(tmp_path / "records", package, (*RESULTS, SKIPPED))
    text = gpu.markdown(folder, package)
    assert "| triton-rows | bfloat16 | 2 | 0 | 0 | 1.25 | 2.50 |" in text
    assert "| flex | float64 | 0 | 0 | 1 | - | - |" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_the_page_says_of_gpus_what_the_newest_record_says():
    """To the word, and no word more: every number in its table is in a record."""
    text, found = " ".join(PAGE.read_text(encoding="utf-8").split()), gpu.markdown()
    assert " ".join(found.split()) in text
    for word in (UNTESTED, VERIFIED):
        assert text.count(f"**{word}**") == found.count(f"**{word}**")


def test_the_commands_say_it_and_run_nothing(capsys):
    for command in (lambda: main(["verify", "--status"]), lambda: gpu.main(["--status"])):
        assert command() == 0
        assert capsys.readouterr().out.strip() == verify.status()
