"""The record of guarantees and the command that measures them."""

import json
import os

import pytest

from tests.guarantees import GUARANTEES, Guarantee, Measured, Result, Results, __main__, record, runner
from tests.guarantees.__main__ import main
from tests.guarantees.guarantee import no_progress

GOOD = Result("F1", "equal", "0 mismatches", 10, True, "0 of 10", True, date="2026-11-22T10:00:00+00:00")
BAD = Result("F2", "precise", "1e-12", 10, False, "2e-12", False, failures=("case 3: off by 2e-12",))


# test_memory has shorter calls for F12.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GUARANTEES if name != "F12"])
def test_the_quick_count_holds(name):
    found = GUARANTEES[name].measure(GUARANTEES[name].quick, no_progress)
    assert found.holds, found


@pytest.mark.slow
@pytest.mark.parametrize("name", GUARANTEES)
def test_nothing_measured_does_not_hold(name):
    assert not GUARANTEES[name].measure(0, no_progress).holds


@pytest.mark.slow
def test_every_guarantee_has_a_promise_and_a_threshold():
    for name, guarantee in GUARANTEES.items():
        assert guarantee.name == name
        assert guarantee.promise
        assert guarantee.bar
        assert guarantee.quick <= guarantee.full


def test_a_record_is_read_back_and_says_what_failed():
    found = Results((GOOD, BAD), {"torch": "2.13", "date": "2026-11-22"})
    assert Results.from_json(found.to_json()) == found
    assert not found.ok
    assert "FAILS  F2: precise (in part: 10 cases)" in str(found)
    assert "failed: case 3: off by 2e-12" in str(found)
    assert str(found).endswith("2 guarantees, 1 FAILED (2026-11-22; torch 2.13)")
    assert Results((GOOD,)).ok
    assert not Results(()).ok


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"guarantees": [{}], "environment": {}}', '{"guarantees": 3, "environment": {}}'],
)
def test_another_file_is_refused(text):
    with pytest.raises(ValueError, match="expected a record of guarantees"):
        Results.from_json(text)


def test_the_newest_record_is_shown(tmp_path):
    for date, result in (("2026-11-21", BAD), ("2026-11-22", GOOD)):
        (tmp_path / f"{date}-guarantees.json").write_text(Results((result,)).to_json(), encoding="utf-8")
    assert record.readme(tmp_path).splitlines()[2] == "| F1 | equal | 0 mismatches | 0 of 10 |"
    (tmp_path / "2026-11-23-guarantees.json").write_text(Results((BAD,)).to_json(), encoding="utf-8")
    assert "**fails**: 2e-12" in record.readme(tmp_path)


def count_cases(count, tell):
    for number in range(count):
        tell(f"case {number}")
    return Measured(f"{count} cases")


def fail(count, tell):
    raise ValueError("planted")


class InThisProcess:
    """Stands for a process; its work is done here."""

    exitcode = 3

    def __init__(self, target, args):
        self.target, self.args = target, args

    def start(self):
        self.target(*self.args)

    def join(self):
        pass

    def terminate(self):
        pass


@pytest.fixture
def planted(monkeypatch):
    """Two guarantees of this file, measured in this process: one holds, one raises."""
    found = {
        name: Guarantee(name, "p", "b", 1, 5, measure)
        for name, measure in (("X0", count_cases), ("X1", fail))
    }
    monkeypatch.setattr(runner, "GUARANTEES", found)
    monkeypatch.setattr(__main__, "GUARANTEES", found)
    monkeypatch.setattr("multiprocessing.context.SpawnContext.Process", InThisProcess)
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)


def test_what_a_guarantee_raises_is_its_failure(planted):
    said = []
    found = {
        result.name: result
        for result in runner.run(["X0", "X1"], None, 1, lambda name, text: said.append((name, text)))
    }
    assert found["X1"].failures == ("ValueError: planted",)
    assert (found["X0"].holds, found["X0"].full, found["X0"].value) == (True, True, "5 cases")
    assert said == [("X0", f"case {number}") for number in range(5)]
    (part,) = runner.run(["X0"], 4)
    assert (part.count, part.full) == (4, False)


def test_a_process_that_dies_is_a_failure(monkeypatch):
    """A real process, which ends with an error before it measures."""
    monkeypatch.setattr(runner, "_measure", os.getpgid)
    (found,) = runner.run(["F1"], 1)
    assert found.failures == ("the process that measured it ended with exit code 1",)


def test_the_command_writes_each_guarantee_and_carries_on(planted, tmp_path, capsys):
    place = tmp_path / "f.json"
    assert main(["--json", str(place)]) == 1
    first = Results.from_json(place.read_text(encoding="utf-8"))
    assert [result.holds for result in first.results] == [True, False]
    capsys.readouterr()
    assert main(["--resume", str(place)]) == 1
    assert Results.from_json(place.read_text(encoding="utf-8")).results == first.results
    assert "2 guarantees, 1 FAILED" in capsys.readouterr().out
    other = {**json.loads(place.read_text(encoding="utf-8")), "environment": {"torch": "1.0"}}
    place.write_text(json.dumps(other), encoding="utf-8")
    assert main(["--resume", str(place)]) == 2
    assert "was measured with another" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("measured", "said"),
    [((), "no guarantee was written"), ((GOOD, BAD), "F1, F2 are in {place}, --resume {place} carries on")],
    ids=["nothing", "two"],
)
def test_an_interrupted_command_says_what_it_left(measured, said, monkeypatch, tmp_path, capsys):
    def run(*_):
        yield from measured
        raise KeyboardInterrupt

    place = tmp_path / "f.json"
    monkeypatch.setattr(runner, "run", run)
    assert main(["--json", str(place)]) == 130
    assert f"interrupted: {said.format(place=place)}" in capsys.readouterr().err
    assert place.exists() == bool(measured)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["F99"], "'F99' is no guarantee; expected one of F1"),
        (["--count", "0"], "--count 0: expected 1 or more"),
        (["--jobs", "0"], "--jobs 0: expected 1 or more"),
        (["--json", "no/such/folder/f.json"], "expected a folder that exists"),
    ],
)
def test_wrong_options_are_named(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_case_is_repeated_alone(capsys):
    assert main(["--case", "12"]) == 0
    assert "12: family" in capsys.readouterr().out
