"""The whole GPU run, rehearsed on a CPU: what a call leaves, the next carries on."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.extras import needs

from benchmarks import gpu_run
from benchmarks.gpu import archives, groups, outcome
from benchmarks.gpu.groups import Lines

needs("triton")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    """By every process, whatever directory it is started in."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    # set by the call, for its processes
    for name in ("TRITON_CACHE_DIR", "TRITON_DISABLE_LINE_INFO"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def call(out, *options, seconds=1.0):
    """Exit code of a call of the rehearsal."""
    return gpu_run.main(["--trial", "--jobs", "2", "--out", str(out), "--seconds", str(seconds), *options])


def test_a_call_begins_plans_and_sums_up_whatever_the_time(tmp_path, capsys):
    archive = tmp_path / "all.tar.gz"
    out = tmp_path / "out"
    assert call(out, "--cache", str(tmp_path / "missing.tar.gz"), "--archive", str(archive)) == 0
    said = capsys.readouterr().out
    assert "No such file" in said
    assert "all are compiled here" in said
    for phase in gpu_run.CHECKED:
        assert f"\n{phase} " in said
        assert f"\n{phase}: 0 of " in (out / "summary.txt").read_text()
    assert f"\n{(out / 'plan-1.txt').read_text()}" in said
    place = json.loads((out / "place.json").read_text())
    assert place["trial"] is True
    (made,) = place["calls"]
    assert {"date", "command", "seconds", "clocks", "clocks_after", "ready", "compiled"} == made.keys()
    assert archives.members(archive).keys() == {file.name for file in out.iterdir()}
    assert len(place["core"]) == 64


def test_a_folder_of_another_place_is_refused(tmp_path, capsys):
    assert call(tmp_path / "first") == 0
    place = json.loads((tmp_path / "first" / "place.json").read_text())
    (tmp_path / "first" / "place.json").write_text(json.dumps(place | {"torch": "1.0"}))
    assert call(tmp_path / "second", "--earlier", str(tmp_path / "first")) == 2
    assert "the earlier results were made with another torch; begin a new folder" in capsys.readouterr().err


def killed(process, out, results):
    """What a call has written that is killed in the middle of a check, after so many results."""
    file, until = out / "first.all.jsonl", time.time() + 300
    lines = Lines(file)
    # what is carried on is whole once the place is there
    while time.time() < until and not (
        (out / outcome.PLACE).exists() and lines.last and len(lines.results) >= results
    ):
        time.sleep(0.1)
        lines = Lines.read(file)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return Lines.read(file)


@pytest.mark.parametrize("deaths", [(1,), pytest.param((0, 1, 2), marks=pytest.mark.nightly)])
def test_killed_in_the_middle_of_a_check_it_is_carried_on(tmp_path, deaths):
    """Its processes die after as many results; nothing that was written is run again or lost."""
    command = groups.python("-m", "benchmarks.gpu_run", "--trial", "--jobs", "1", "--seconds", "300")
    found = Lines(tmp_path)
    for number, results in enumerate((*deaths, 4)):
        out, earlier = tmp_path / str(number), tmp_path / str(number - 1)
        given = ["--out", str(out), *(["--earlier", str(earlier)] if number else [])]
        process = subprocess.Popen(
            [*command, *given], cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL
        )
        # each dies in another check: one that was begun twice without a result has failed
        found = killed(process, out, max(results, len(found.begun)))
    written = [line for line in (out / "first.all.jsonl").read_text().splitlines() if "begin" not in line]
    assert len(written) == len(found.results) >= 4
    assert [result.message for result in found.results.values() if not result.passed] == []
