"""How checks are run: in processes, within a budget, carried on; and the record that is written meanwhile."""

import dataclasses
import json
import os
import subprocess
import time
from dataclasses import dataclass

import pytest

from gnn_attention import verify
from gnn_attention.__main__ import main
from gnn_attention.backends import BACKENDS, Backend, dense
from gnn_attention.verify import circumstances, processes, record
from gnn_attention.verify.check import DTYPES, Check, Settings
from gnn_attention.verify.report import Report, Result
from tests.guarantees.gpu import more_checks

FEW = {"device": "cpu", "graphs": ["causal"], "features": ["plain"], "dtypes": ["float64"], "trained": False}
FEW |= {"backends": ["dense"], "forms": []}
COMMAND = [
    *("verify", "--device=cpu", "--dtype=float64", "--backend=dense", "--no-trained", "--jobs=1"),
    "--graph=one token",
]
SOURCES = "0123"


@pytest.fixture(autouse=True)
def steady(monkeypatch):
    """Kernels that no one edits meanwhile."""
    monkeypatch.setattr(record, "sources", lambda package=None: SOURCES)


@dataclass
class Made:
    """What a made-up check comes to: it passes, ends its process, or loses its GPU."""

    number: int

    def __call__(self):
        if self.number in (7, 13):
            os._exit(3)
        message = "CUDA error: an illegal memory access" if self.number == 11 else ""
        return {"passed": not message, "message": message}


def made(count=20):
    """Made-up checks; a function of a module, since processes get it by name."""
    for number in range(count):
        yield Check("made", "none", "float32", f"check {number}", Made(number))


@pytest.mark.slow
def test_a_process_that_ends_costs_its_own_check_alone():
    """Named by its label; those after it run in another, as do those after a lost GPU."""
    found = dict(processes.results(made, range(20), jobs=2, deadline=time.time() + 600))
    assert sorted(found) == list(range(20))
    assert {number for number, result in found.items() if not result.passed} == {7, 11, 13}
    for number in (7, 11, 13):
        died = Result("made", "none", "float32", f"check {number}", passed=False, message=processes.DIED)
        assert found[number] == died


@pytest.mark.slow
def test_processes_find_what_one_finds():
    assert verify.run(**FEW).results == verify.run(**FEW, jobs=2).results


def broken():
    """Cannot be made twice: not in another process."""
    return os._exit(3) if "BROKEN" in os.environ else made(3)


@pytest.mark.slow
def test_processes_that_cannot_begin_are_no_failed_checks(monkeypatch):
    monkeypatch.setenv("BROKEN", "1")
    died = pytest.raises(RuntimeError, match="died before its first check; try jobs=1")
    with died, processes._pool(broken, 2):
        pass


def test_nothing_is_begun_after_the_deadline():
    assert list(processes.results(made, range(7), jobs=1, deadline=time.time() - 1)) == []
    assert processes._run([0, 1], time.time() - 1) == []


def names(report):
    """Which checks, in order."""
    return [(r.group, r.backend, r.dtype, r.name) for r in report.results]


@pytest.mark.slow
def test_a_run_within_a_budget_is_carried_on_to_the_same_report(monkeypatch):
    """Nothing twice, nothing left out, in the same order; a report that is not finished is not ok."""
    whole = verify.run(**FEW)
    assert whole.ok
    clock = [1000.0]
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: clock.append(clock[-1] + 1) or clock[-1])
        first = verify.run(**FEW, budget=5)
    assert 0 < len(first.results) < len(whole.results)
    assert first.not_started == len(whole.results) - len(first.results)
    assert not first.ok
    assert "NOT STARTED" in str(first)
    again = verify.run(**FEW, resumed=Report.from_json(first.to_json()))
    assert again.ok
    assert names(again) == names(whole)
    assert [run["checks"] for run in again.environment["runs"]] == [len(first.results), first.not_started]


def test_an_earlier_failure_stays():
    bad = Backend("dense", lambda call: dense.run(dataclasses.replace(call, scale=1.0)))
    earlier = verify.run(**{**FEW, "backends": [bad]})
    assert earlier.failures
    again = verify.run(**FEW, resumed=earlier)
    assert names(again) == names(earlier)
    assert len(again.failures) == len(earlier.failures)


@pytest.mark.parametrize("name", ["device", "torch", "triton", "ptxas", "sources", "seed"])
def test_a_record_of_elsewhere_is_not_carried_on(name):
    earlier = Report((), {**verify.environment("cpu"), "sources": SOURCES, "seed": 0, name: "other"})
    with pytest.raises(ValueError, match=f"the earlier record was made with other {name}"):
        verify.run(**FEW, resumed=earlier)


@pytest.mark.slow
def test_what_is_written_meanwhile_is_a_whole_record(monkeypatch):
    monkeypatch.setattr(verify, "WRITTEN_EVERY", 0.0)
    found = []
    report = verify.run(**FEW, keep=lambda so_far: found.append(json.loads(so_far.to_json())))
    assert [len(part["results"]) for part in found] == list(range(1, len(report.results) + 1))
    assert found[0]["summary"]["not_started"] == len(report.results) - 1
    assert found[-1]["summary"]["ok"]


def test_numbers_survive_the_record():
    """Four digits, and what JSON cannot say; empty names and reasons too."""
    numbers = {"output": float("nan"), "gradient": float("inf"), "error": 1.23456789}
    result = Result("attend", "", "float32", "x", passed=False, skipped="", **numbers)
    (read,) = Report.from_json(Report((result,)).to_json()).results
    assert (str(read.output), read.gradient, read.error) == ("nan", float("inf"), 1.235)
    assert (read.backend, read.skipped) == ("", "")


RESULT = {"group": "a", "backend": "b", "dtype": "c", "name": "d", "passed": True}


@pytest.mark.parametrize(
    "change",
    [
        {"results": None},
        {"results": [3]},
        {"environment": 3},
        {"summary": {"not_started": "two"}},
        {"results": [{"group": "a"}]},
        *({"results": [RESULT | wrong]} for wrong in ({"passed": 1}, {"more": 1}, {"name": 3})),
        {"results": [RESULT | {"output": 10**400}]},
    ],
)
def test_what_is_no_record_is_named(change, tmp_path):
    file = tmp_path / "record.json"
    file.write_text(json.dumps(json.loads(Report((), {"device": "CPU"}).to_json()) | change))
    with pytest.raises(ValueError, match=r"record\.json: expected a record that verify --json wrote, got"):
        Report.from_file(file)


@pytest.mark.slow
def test_the_command_carries_on(tmp_path, capsys):
    """--resume alone writes back to its file."""
    file = tmp_path / "record.json"
    assert main([*COMMAND, "--json", str(file)]) == 0
    first = json.loads(file.read_text(encoding="utf-8"))
    assert main([*COMMAND, "--backend", "rows", "--resume", str(file)]) == 0
    both = json.loads(file.read_text(encoding="utf-8"))
    assert both["results"][: len(first["results"])] == first["results"]
    assert {result["backend"] for result in both["results"]} == {"dense", "rows"}
    file.write_text("{}", encoding="utf-8")
    assert main([*COMMAND, "--resume", str(file)]) == 2
    assert f"--resume {file}: expected a record" in capsys.readouterr().err


def test_an_interrupted_command_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    """And what it says is there: the checks of before."""

    def interrupted(make, missing, jobs, deadline):
        yield next(iter(missing)), next(make())()
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "results", interrupted)
    assert main(COMMAND) == 130
    assert "interrupted: nothing was written" in capsys.readouterr().err
    file = tmp_path / "record.json"
    assert main([*COMMAND, "--json", str(file)]) == 130
    assert f"the checks so far are in {file}, --resume {file} carries on" in capsys.readouterr().err
    assert len(Report.from_file(file).results) == 1


def test_a_copy_without_a_repository_gets_its_commit_from_the_environment(tmp_path, monkeypatch):
    """Also inside of another repository. What is not committed is dirty."""
    monkeypatch.setattr(circumstances, "HERE", tmp_path / "package" / "verify")
    circumstances.HERE.mkdir(parents=True)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("GNN_ATTENTION_COMMIT", raising=False)
    found = verify.environment("cpu")
    assert (found["commit"], found["dirty"]) == (None, None)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *arguments], check=True)
    assert verify.environment("cpu")["dirty"] is False
    (tmp_path / "package" / "new.py").touch()
    found = verify.environment("cpu")
    assert len(found["commit"]) == 40
    assert found["dirty"] is True
    monkeypatch.setenv("GNN_ATTENTION_COMMIT", "0123abcd")
    found = verify.environment("cpu")
    assert (found["commit"], found["dirty"]) == ("0123abcd", None)


def test_the_assembler_in_use_is_named(tmp_path, monkeypatch):
    """By its release: another one compiles other kernels."""
    program = tmp_path / "ptxas"
    program.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.3, V13.3.73\n")
    program.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(program))
    assert circumstances.ptxas_release() == "13.3.73"
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "nowhere"))
    assert circumstances.ptxas_release() is None


@pytest.mark.slow
def test_on_a_gpu_everything_is_checked_and_what_compiles_longest_last():
    """Every backend in every dtype, TensorFloat-32 too; from a checkout, what only a GPU shows."""
    settings = Settings(device="cuda", dtypes=tuple(DTYPES), backends=tuple(BACKENDS.values()))
    checks = list(verify._in_order(settings, [*verify.GROUPS, more_checks]))
    assert len({check.label for check in checks}) == len(checks)
    groups = "attend layer forms rules dropout shapes large repeat memory operators far"
    assert {check.group for check in checks} == set(groups.split())
    for group in ("attend", "layer"):
        assert {check.dtype for check in checks if check.group == group} == set(DTYPES)
    compiled = [check.backend in BACKENDS and BACKENDS[check.backend].compiled for check in checks]
    assert compiled == sorted(compiled)
    assert {check.backend for check in checks} == {"walk", "message_passing", *BACKENDS}
