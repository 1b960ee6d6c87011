"""How the checks are run: by several processes, within a budget, carried on; and the record that is kept meanwhile."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from gnn_attention import verify
from gnn_attention.__main__ import main
from gnn_attention.backends import BACKENDS, Backend, dense
from gnn_attention.verify import processes, record
from gnn_attention.verify.check import DTYPES, Check, Settings
from gnn_attention.verify.report import Report, Result

FEW = {"device": "cpu", "graphs": ["causal"], "features": ["plain"], "dtypes": ["float64"], "backends": ["dense"], "forms": []}
FEW["trained"] = False


@dataclass
class Made:
    """What a made-up check comes to: it passes, dies, or loses its GPU."""

    number: int
    folder: str

    def __call__(self):
        ends = {7: "die", 11: "lose", 13: "die once"}.get(self.number, "")
        if ends == "die" or (ends == "die once" and first_time(self.folder)):
            os._exit(3)
        message = "CUDA error: an illegal memory access" if ends == "lose" else ""
        return {"passed": not message, "message": message}


def first_time(folder):
    """True once for a folder."""
    mark = Path(folder) / "mark"
    seen = mark.exists()
    mark.touch()
    return not seen


def made(folder, count=20):
    """Made-up checks; a function of a module, since processes get it by name."""
    for number in range(count):
        yield Check("made", "none", "float32", f"check {number}", Made(number, folder))


@pytest.fixture(autouse=True)
def steady(monkeypatch):
    """Kernels that nobody edits meanwhile."""
    monkeypatch.setattr(record, "sources", lambda package=None: {"kernels/rows.py": "0"})


def names(report):
    """Which checks, in order."""
    return [(r.group, r.backend, r.dtype, r.name) for r in report.results]


def test_every_check_has_a_name_of_its_own():
    """By which it is found again in a record."""
    found = [(c.group, c.backend, c.dtype, c.name) for c in verify.checks(device="cpu", trained=False)]
    assert len(set(found)) == len(found) > 5_000


def test_a_run_within_a_budget_is_carried_on_to_the_same_report(monkeypatch):
    """Nothing twice, nothing left out, in the same order; a report that is not finished is not ok."""
    whole = verify.run(**FEW)
    assert whole.ok
    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock.append(clock[-1] + 1) or clock[-1])
    first = verify.run(**FEW, budget=5)
    assert 0 < len(first.results) < len(whole.results)
    assert first.not_started == len(whole.results) - len(first.results)
    assert not first.ok
    assert "NOT STARTED" in str(first)
    monkeypatch.undo()
    monkeypatch.setattr(record, "sources", lambda package=None: {"kernels/rows.py": "0"})
    again = verify.run(**FEW, resumed=Report.from_json(first.to_json()))
    assert again.ok
    assert names(again) == names(whole)
    assert [run["checks"] for run in again.environment["runs"]] == [len(first.results), first.not_started]


def test_what_failed_is_not_run_until_it_passes():
    """An earlier failure stays."""
    bad = Backend("dense", lambda call: dense.run(dataclasses.replace(call, scale=1.0)))
    earlier = verify.run(**{**FEW, "backends": [bad]})
    assert earlier.failures
    again = verify.run(**FEW, resumed=earlier)
    assert names(again) == names(earlier)
    assert len(again.failures) == len(earlier.failures)


@pytest.mark.parametrize("name", ["device", "torch", "triton", "sources", "seed"])
def test_a_record_of_elsewhere_is_not_carried_on(name):
    """Another machine, other versions, other kernels, another seed."""
    earlier = Report((), {**verify.environment("cpu"), "sources": {"kernels/rows.py": "0"}, "seed": 0, name: "other"})
    with pytest.raises(ValueError, match=f"the earlier record was made with other {name}"):
        verify.run(**FEW, resumed=earlier)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jobs": 0}, "jobs must be at least 1, got 0"),
        ({"budget": 0.0}, "budget must be a number of seconds above 0, got 0.0"),
        ({"jobs": 2, "backends": [Backend("mine", dense.run)]}, "2 processes take backends by name"),
    ],
)
def test_amounts_are_refused_by_name(options, message):
    """Before anything is run."""
    with pytest.raises(ValueError, match=message):
        verify.run(**{**FEW, **options})


def test_what_is_kept_meanwhile_is_a_whole_record(monkeypatch):
    """A killed run leaves what it had, as JSON."""
    monkeypatch.setattr(verify, "KEPT_EVERY", 0.0)
    texts = []
    report = verify.run(**FEW, keep=lambda so_far: texts.append(so_far.to_json()))
    kept = [json.loads(text) for text in texts]
    assert [len(found["results"]) for found in kept] == list(range(1, len(report.results) + 1))
    assert kept[0]["summary"]["not_started"] == len(report.results) - 1
    assert kept[-1]["summary"]["ok"]


def test_numbers_survive_the_record():
    """Four digits, and what JSON cannot say."""
    result = Result("attend", "dense", "float32", "x", passed=False, output=float("nan"), gradient=float("inf"), error=1.23456789)
    (read,) = Report.from_json(Report((result,)).to_json()).results
    assert (str(read.output), read.gradient, read.error) == ("nan", float("inf"), 1.235)


@pytest.mark.slow
def test_a_process_that_dies_costs_its_own_check_alone(tmp_path):
    """Check 7 always dies and has failed; 13 dies once and passes; 11 loses its GPU, and those after it run elsewhere."""
    make = functools.partial(made, str(tmp_path))
    found = dict(processes.results(make, range(20), jobs=2, deadline=time.time() + 600))
    assert sorted(found) == list(range(20))
    assert sorted(number for number, result in found.items() if not result.passed) == [7, 11]
    assert found[7].message == "the process that ran it died"
    assert "CUDA error" in found[11].message


@pytest.mark.slow
def test_processes_find_what_one_finds():
    """The same results in the same order."""
    one, two = verify.run(**FEW), verify.run(**FEW, jobs=2)
    assert one.results == two.results


def test_nothing_is_begun_after_the_deadline(tmp_path):
    """Neither here nor in other processes."""
    make = functools.partial(made, str(tmp_path))
    for jobs in (1, 2):
        assert list(processes.results(make, range(7), jobs, deadline=time.time() - 1)) == []


def test_the_command_carries_on(tmp_path, capsys):
    """--resume alone writes back to its file; what is no record is named."""
    file = tmp_path / "record.json"
    few = [
        "verify",
        "--device",
        "cpu",
        "--graph",
        "one token",
        "--dtype",
        "float64",
        "--backend",
        "dense",
        "--no-trained",
        "--jobs",
        "1",
    ]
    assert main([*few, "--json", str(file)]) == 0
    first = json.loads(file.read_text(encoding="utf-8"))
    assert main([*few, "--backend", "rows", "--resume", str(file)]) == 0
    both = json.loads(file.read_text(encoding="utf-8"))
    assert both["results"][: len(first["results"])] == first["results"]
    assert {result["backend"] for result in both["results"]} == {"dense", "rows"}
    file.write_text("{}", encoding="utf-8")
    assert main([*few, "--resume", str(file)]) == 2
    assert f"--resume {file}: expected a record" in capsys.readouterr().err


def test_an_interrupted_command_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    """And what it says is there: the checks of before."""

    def interrupted(make, missing, jobs, deadline):
        yield next(iter(missing)), next(make())()
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "results", interrupted)
    few = ["verify", "--device", "cpu", "--graph", "one token", "--no-trained", "--jobs", "1"]
    assert main(few) == 130
    assert "interrupted: nothing was written" in capsys.readouterr().err
    file = tmp_path / "record.json"
    assert main([*few, "--json", str(file)]) == 130
    assert f"the checks so far are in {file}, --resume {file} carries on" in capsys.readouterr().err
    assert len(Report.from_file(file).results) == 1


def test_settings_name_the_usual_backends():
    """On a CPU neither what is compiled nor what runs on GPUs alone."""
    assert {check.backend for check in verify.checks(device="cpu", trained=False)}.isdisjoint({"flex", "varlen", "triton"})
    assert Settings().device == "cpu"


def test_a_copy_without_a_repository_is_told_its_commit(tmp_path, monkeypatch):
    """By the environment; nobody knows whether it was changed since. In a repository, what is not committed is dirty."""
    circumstances = sys.modules["gnn_attention.verify.circumstances"]
    monkeypatch.setattr(circumstances, "HERE", tmp_path / "package" / "verify")
    circumstances.HERE.mkdir(parents=True)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("GNN_ATTENTION_COMMIT", "0123abcd")
    found = verify.environment("cpu")
    assert (found["commit"], found["dirty"]) == ("0123abcd", None)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *arguments], check=True)
    assert verify.environment("cpu")["dirty"] is False
    (tmp_path / "package" / "new.py").touch()
    found = verify.environment("cpu")
    assert len(found["commit"]) == 40
    assert found["dirty"] is True


@pytest.mark.slow
def test_on_a_gpu_everything_is_checked_and_what_compiles_longest_last():
    """Every backend in every dtype, TensorFloat-32 among them, each check by a name of its own."""
    settings = Settings(device="cuda", dtypes=tuple(DTYPES), backends=tuple(BACKENDS.values()))
    found = list(verify._all_checks(settings, trained=False))
    assert len({(c.group, c.backend, c.dtype, c.name) for c in found}) == len(found)
    groups = {"attend", "layer", "forms", "rules", "dropout", "large", "repeat", "memory", "operators"}
    assert {check.group for check in found} == groups
    for group in groups - {"forms", "rules", "dropout", "memory", "operators"}:
        assert {check.dtype for check in found if check.group == group} == set(DTYPES)
    order = list(dict.fromkeys(check.backend for check in found))
    assert set(order) == {"walk", *BACKENDS}
    assert order[-1] == "flex"
    own = [order.index(name) for name in order if name.startswith("triton")]
    assert own == list(range(len(order) - 1 - len(own), len(order) - 1))
