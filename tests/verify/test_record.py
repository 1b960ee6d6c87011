"""What may be said of GPUs, from the newest record and the sources of today; docs/guarantees.md agrees."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gnn_attention import verify
from gnn_attention.__main__ import main
from gnn_attention.verify import record
from gnn_attention.verify.record import COMPILED, RECORDS, UNTESTED, VERIFIED
from gnn_attention.verify.report import Report, Result
from tests.guarantees import gpu

PAGE = Path(__file__).parents[2] / "docs" / "guarantees.md"
ENVIRONMENT = {
    "device": "NVIDIA H200",
    "cuda": "13.0",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "commit": "0123456789abcdef",
    "date": "2026-12-01T10:00:00+00:00",
}
RESULTS = (
    *(Result(group, "triton", "float32", group, passed=True) for group in sorted(record.GROUPS - {"attend"})),
    Result(
        "attend", "triton", "bfloat16", "a", passed=True, output=1.25, gradient=2.5, error=1e-3, unit=8e-4
    ),
    Result("attend", "triton", "bfloat16", "b", passed=True, output=0.5),
    Result("attend", "flex", "float64", "a", passed=False, skipped="flex: no float64"),
)


@pytest.fixture
def package(tmp_path):
    """A package of two kernels, whose hashes the record below holds."""
    (tmp_path / "package" / "backends" / "gpu" / "kernels").mkdir(parents=True)
    (tmp_path / "package" / "backends" / "gpu" / "kernels" / "rows.py").write_text("one\n", encoding="utf-8")
    (tmp_path / "package" / "backends" / "gpu" / "csr.py").write_text("two\n", encoding="utf-8")
    (tmp_path / "package" / "graph.py").write_text("no kernel\n", encoding="utf-8")
    return tmp_path / "package"


def recorded(folder, package, results=RESULTS, not_started=0, name="2026-12-01-nvidia-h200.json", **changed):
    """A record in a folder of records."""
    environment = {**ENVIRONMENT, "sources": record.sources(package), **changed}
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(Report(results, environment, not_started).to_json(), encoding="utf-8")
    return folder


def test_sources_are_the_kernels_by_their_sha256(package):
    """As sha256sum gives it; what is no kernel is not among them."""
    found = record.sources(package)
    assert list(found) == ["backends/gpu/csr.py", "backends/gpu/kernels/rows.py"]
    assert (
        found["backends/gpu/kernels/rows.py"]
        == "2c8b08da5ce60398e1f19af0e5dccc744df274b826abe585eaba68c525434806"
    )


def test_every_kernel_of_the_package_is_hashed():
    """Whatever the Triton backend imports of backends, and no module that only chooses among them."""
    loaded = imported_by("backends.triton")
    expected = {name for name in loaded if name.startswith("backends/")}
    assert {
        "backends/gpu/kernels/rows.py",
        "backends/gpu/csr.py",
        "backends/dropout.py",
        "backends/merge_lse.py",
    } <= expected
    assert {name for name in expected if Path(name).name not in record.CHOICE} <= record.sources().keys()
    assert {Path(name).name for name in record.sources()}.isdisjoint(record.CHOICE)


def imported_by(module, found=None):
    """The files of the package that a module imports, directly or not, also in functions, by their places."""
    found = set() if found is None else found
    here = Path(record.__file__).parent.parent
    for name in re.findall(
        r"^ *from gnn_attention\.([\w.]+) import ([\w, ]+)", source_of(here, module).read_text(), re.MULTILINE
    ):
        for part in (name[0], *(f"{name[0]}.{part.strip()}" for part in name[1].split(","))):
            file = source_of(here, part)
            if file.exists() and file.relative_to(here).as_posix() not in found:
                found.add(file.relative_to(here).as_posix())
                imported_by(part, found)
    return found


def source_of(here, module):
    """The file of a module, which need not be there."""
    file = here.joinpath(*module.split("."))
    return file / "__init__.py" if file.is_dir() else file.with_suffix(".py")


def unverified(status, why):
    return all(word in status for word in (f"**{COMPILED}**", f"**{UNTESTED}**", why))


def test_without_a_record_it_is_untested(tmp_path):
    found = verify.status(tmp_path / "nowhere")
    assert unverified(found, "no machine with one has run it yet")
    assert gpu.markdown(tmp_path / "nowhere") == found


def test_a_record_with_the_hashes_of_today_verifies(tmp_path, package):
    """It is named, with device, versions and counts; what is no kernel may change since."""
    folder = recorded(tmp_path / "records", package)
    (package / "graph.py").write_text("changed\n", encoding="utf-8")
    found = verify.status(folder, package)
    assert f"On a GPU it is **{VERIFIED}**: " in found
    assert (
        f"{len(RESULTS) - 1} checks on NVIDIA H200 (2026-12-01, 0123456789ab; torch 2.11.0, triton 3.6.0)"
        in found
    )
    assert "1 skipped with their reasons (`tests/records/2026-12-01-nvidia-h200.json`)" in found


@pytest.mark.parametrize("change", ["edited", "removed", "new"])
def test_a_kernel_that_changed_is_not_verified(tmp_path, package, change):
    folder, file = (
        recorded(tmp_path / "records", package),
        package / "backends" / "gpu" / "kernels" / "rows.py",
    )
    if change == "removed":
        file.unlink()
    else:
        (file if change == "edited" else file.with_name("new.py")).write_text("two\n", encoding="utf-8")
    why = "kernels changed since the last GPU verification (2026-12-01, 0123456789ab)"
    assert unverified(verify.status(folder, package), why)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"results": (*RESULTS, replace(RESULTS[0], name="c", passed=False))}, "does not stand: 1 failed"),
        ({"not_started": 7}, "does not stand: 0 failed, 7 not started"),
        ({"results": RESULTS[-1:]}, "does not stand"),
        ({"selection": "pairs"}, "was of some checks, not --all"),
        (
            {"results": tuple(r for r in RESULTS if r.group not in ("memory", "large"))},
            "lacks the checks of large, memory",
        ),
    ],
    ids=["one failed", "some not started", "nothing ran", "a selection", "a group missing"],
)
def test_a_record_that_does_not_stand_verifies_nothing(tmp_path, package, changed, why):
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
    text = gpu.markdown(recorded(tmp_path / "records", package), package)
    assert "| triton | bfloat16 | 2 | 0 | 0 | 1.25 | 2.50 |" in text
    assert "| flex | float64 | 0 | 0 | 1 | - | - |" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_the_page_says_of_gpus_what_the_newest_record_says():
    """To the word, and no word more: every number in its table is in a record."""
    text, found = " ".join(PAGE.read_text(encoding="utf-8").split()), gpu.markdown()
    assert " ".join(found.split()) in text
    for word in (UNTESTED, VERIFIED):
        assert text.count(f"**{word}**") == found.count(f"**{word}**")


def test_every_record_of_a_gpu_is_whole():
    """Where it was made, from which sources, by which commands, and every case."""
    names = "device driver cuda torch triton python numpy commit dirty sources runs seed"
    for file in RECORDS.glob("*.json"):
        found = json.loads(file.read_text(encoding="utf-8"))
        if "results" in found and found.get("environment", {}).get("cuda"):
            assert set(names.split()) <= set(found["environment"]), file.name
            assert found["summary"]["checks"] == len(found["results"])


def test_the_commands_say_it_and_run_nothing(capsys):
    for command in (lambda: main(["verify", "--status"]), lambda: gpu.main(["--status"])):
        assert command() == 0
        assert capsys.readouterr().out.strip() == verify.status()
