"""Results of figures: what holds, what is said of it, what is read back, and the command that measures them."""

import json
import os

import pytest

from gnn_attention import figures
from gnn_attention.__main__ import main
from gnn_attention.figures import FIGURES, Figure, Measured, Result, Results, _command, _running, _table, results

pytestmark = pytest.mark.slow  # a guarantee is measured: by default those of test_figures alone

GOOD = Result("F1", "equal", "0 mismatches", 10, True, "0 of 10", True, date="2026-11-22T01:02:03+00:00")
BAD = Result("F2", "exact", "1e-12", 10, True, "2e-12", False, ("case 7: 2e-12",), ("case 9: no transformers",))


def test_names_are_those_of_the_table():
    assert all(name == figure.name for name, figure in FIGURES.items())
    assert all(figure.quick <= figure.full for figure in FIGURES.values())
    assert all(figure.promise and figure.bar for figure in FIGURES.values())


@pytest.mark.parametrize(
    ("measured", "holds"), [(Measured("0"), True), (Measured("1", ("a",)), False), (Measured("0", (), ("no tool",)), False)]
)
def test_a_skipped_case_is_not_a_passed_one(measured, holds):
    assert measured.holds is holds


def test_the_last_result_of_a_name_counts():
    found = Results((BAD, GOOD)).with_result(Result("F2", "exact", "1e-12", 10, True, "1e-13", True)).sorted(["F1", "F2"])
    assert [result.name for result in found.results] == ["F1", "F2"]
    assert found.ok
    assert not Results((BAD, GOOD)).ok
    assert not Results(()).ok


def test_what_is_printed_names_the_cases():
    said = str(Results((GOOD, BAD), {"torch": "2.13", "date": "2026-11-22"}))
    assert "FAILS  F2" in said
    assert "failed: case 7: 2e-12" in said
    assert "skipped: case 9: no transformers" in said
    assert said.endswith("2 figures, 1 FAILED (2026-11-22; torch 2.13)")
    assert "(in part: 10 cases)" in str(Result("F1", "equal", "0", 10, False, "0 of 10", True))


def test_json_is_read_back():
    found = Results.from_json(Results((GOOD, BAD), {"torch": "2.13"}).to_json())
    assert found.results == (GOOD, BAD)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"figures": 3, "environment": {}}',
        '{"figures": [{}], "environment": {}}',
        json.dumps({"figures": [{**json.loads(Results((GOOD,)).to_json())["figures"][0], "holds": "yes"}], "environment": {}}),
        "[" * 100_000,
    ],
    ids=["empty", "list", "number", "no fields", "wrong type", "deep"],
)
def test_another_file_is_refused_by_name(text):
    with pytest.raises(ValueError, match="expected figures that verify --figures --json wrote"):
        Results.from_json(text)


def test_the_readme_shows_the_newest(tmp_path):
    for date, result in (("2026-11-20", BAD), ("2026-11-22", GOOD)):
        (tmp_path / f"{date}-figures.json").write_text(Results((result,)).to_json(), encoding="utf-8")
    assert results.readme(tmp_path).splitlines()[2] == "| F1 | equal | 0 mismatches | 0 of 10 |"
    (tmp_path / "2026-11-23-figures.json").write_text(Results((BAD,)).to_json(), encoding="utf-8")
    assert "**fails**: 2e-12" in results.readme(tmp_path)


def raise_(count, tell):
    raise ValueError("planted")


def tell_all(count, tell):
    for number in range(count):
        tell(f"case {number}")
    return Measured(f"{count} told")


class Now:
    """A process that is none: what it would do happens here."""

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
    """Figures of this file, measured in this process."""

    def plant(*measures):
        found = {f"X{number}": Figure(f"X{number}", "p", "b", 1, 5, measure) for number, measure in enumerate(measures)}
        monkeypatch.setattr(_running, "FIGURES", found)
        monkeypatch.setattr(_command, "FIGURES", found)
        monkeypatch.setattr("multiprocessing.context.SpawnContext.Process", Now)
        monkeypatch.setattr("torch.set_num_threads", lambda threads: None)  # of another thread, and for good
        return found

    return plant


def test_what_a_figure_raises_is_its_failure(planted):
    told = []
    names = list(planted(raise_, tell_all))
    found = {result.name: result for result in _running.run(names, None, 1, lambda name, text: told.append((name, text)))}
    assert found["X0"].failures == ("ValueError: planted",)
    assert found["X1"].holds
    assert found["X1"].full
    assert found["X1"].value == "5 told"
    assert told == [("X1", f"case {number}") for number in range(5)]


def test_fewer_cases_are_a_part(planted):
    (found,) = _running.run(list(planted(tell_all)), 4)
    assert (found.count, found.full) == (4, False)


def test_a_process_that_dies_is_a_failure(monkeypatch):
    """A real process, in which something of another kind is called: it ends with an error."""
    monkeypatch.setattr(_running, "_measure", os.getpgid)
    (found,) = _running.run(["F1"], 1)
    assert found.failures == ("the process that measured it ended with exit code 1",)


def test_the_command_writes_each_figure_and_carries_on(planted, tmp_path, capsys):
    place = tmp_path / "f.json"
    planted(tell_all, raise_)
    assert main(["verify", "--figures", "--json", str(place)]) == 1
    first = Results.from_json(place.read_text(encoding="utf-8"))
    assert [result.holds for result in first.results] == [True, False]
    capsys.readouterr()
    assert main(["verify", "--figures", "--resume", str(place)]) == 1
    assert Results.from_json(place.read_text(encoding="utf-8")).results == first.results
    assert "2 figures, 1 FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("measured", "said"),
    [((), "no figure was written"), ((GOOD, BAD), "F1, F2 are in {place}, --resume {place} carries on")],
    ids=["nothing", "two"],
)
def test_an_interrupted_command_says_what_it_left(measured, said, monkeypatch, tmp_path, capsys):
    def run(*_):
        yield from measured
        raise KeyboardInterrupt

    place = tmp_path / "f.json"
    monkeypatch.setattr(_running, "run", run)
    assert main(["verify", "--figures", "--json", str(place)]) == 130
    assert f"interrupted: {said.format(place=place)}" in capsys.readouterr().err
    assert place.exists() == bool(measured)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--count", "3"], "--count belongs to --figures"),
        (["--figures", "--count", "0"], "--count 0: expected 1 or more"),
        (["--figures", "--jobs", "0"], "--jobs 0: expected 1 or more"),
        (["--figures", "--backend", "dense"], "--backend belongs to the checks"),
        (["--figures", "--json", "no/such/folder/f.json"], "expected a folder that exists"),
    ],
)
def test_wrong_options_are_named(arguments, message, capsys):
    assert main(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_another_version_begins_a_new_record(planted, tmp_path, capsys):
    planted(tell_all)
    place = tmp_path / "f.json"
    place.write_text(Results((GOOD,), {"torch": "1.0"}).to_json(), encoding="utf-8")
    assert main(["verify", "--figures", "--resume", str(place)]) == 2
    assert "was measured with another" in capsys.readouterr().err


def test_a_case_is_repeated_alone(capsys):
    assert main(["verify", "--case", "12"]) == 0
    assert "12: family" in capsys.readouterr().out
    assert figures.Draw(12).kind == "family"
    assert _table.FIGURES["F1"] is FIGURES["F1"]
