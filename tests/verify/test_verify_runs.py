"""Checks run in several processes, and an interrupted run continues from its record."""

import dataclasses
import json
import multiprocessing
import os
import sys
from dataclasses import dataclass

import pytest

from gnn_attention import verify
from gnn_attention.__main__ import main
from gnn_attention.backends import Backend, dense
from gnn_attention.verify import groups, processes
from gnn_attention.verify.measure import judge_condition
from gnn_attention.verify.report import Check, Report, Result

OPTIONS = {"device": "cpu", "backends": ["dense"], "only": "attend: documents, plain"}


@dataclass
class FakeRun:
    """A made-up check that passes, or ends its process."""

    number: int

    def __call__(self):
        if self.number in (7, 13):
            os._exit(3)
        return judge_condition(True)


@pytest.mark.slow
def test_a_process_that_ends_costs_its_own_check_alone():
    """The failure has the label of its check, and the next checks run in another process."""
    checks = [Check("made", "none", "float32", f"check {number}", FakeRun(number)) for number in range(20)]
    results = {result.name: result for result in processes.run_checks(checks, jobs=2)}
    assert sorted(results) == sorted(check.name for check in checks)
    failures = {name: result.message for name, result in results.items() if not result.passed}
    assert failures == dict.fromkeys(("check 7", "check 13"), processes.PROCESS_DIED)


@pytest.mark.slow
def test_processes_find_what_one_finds():
    single, parallel = verify.run(**OPTIONS), verify.run(**OPTIONS, jobs=2)
    assert labels(parallel) == labels(single)
    assert parallel.ok
    assert single.ok


def test_another_process_takes_a_backend_by_its_name():
    """Checks pass on a name, so that the other process resolves it as users' calls do, or a Backend."""
    backend_object = Backend("dense", dense.run)
    for backend, argument in (("dense", "dense"), (backend_object, backend_object)):
        assert argument in next(verify.checks("cpu", [backend])).run.args


def test_processes_that_cannot_begin_are_no_failed_checks(monkeypatch):
    monkeypatch.setattr(processes, "_initialise_process", sys.exit)
    check = Check("made", "none", "float32", "check 0", FakeRun(0))
    with pytest.raises(RuntimeError, match="died before its first check; try jobs=1"):
        next(processes.run_checks([check] * 9, jobs=2))


def test_an_interrupt_before_the_first_check_ends_the_processes(monkeypatch):
    submit = processes._submit

    def interrupt(pool, parts):
        submit(pool, parts)
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "_submit", interrupt)
    check = Check("made", "none", "float32", "check 0", FakeRun(0))
    with pytest.raises(KeyboardInterrupt):
        next(processes.run_checks([check] * 9, jobs=2))
    assert not multiprocessing.active_children()


def labels(report):
    """Return group, backend, dtype and name of each result in order."""
    return [(r.group, r.backend, r.dtype, r.name) for r in report.results]


def read_back(report, folder):
    """Write a report to a file, and return the report that is read from it."""
    file = folder / "record.json"
    file.write_text(report.to_json())
    return Report.from_file(file)


def test_an_interrupted_run_is_carried_on_to_the_same_report(tmp_path):
    """No check runs twice or is left out, the order is the same, and an unfinished report is not ok."""
    reports = []

    def stop(report):
        reports.append(report)
        if len(report.results) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify.run(**OPTIONS, progress=stop)
    first = reports[-1]
    assert (len(first.results), first.ok, "NOT STARTED" in str(first)) == (3, False, True)
    second = verify.run(**OPTIONS, resumed=read_back(first, tmp_path))
    assert second.ok
    assert labels(second) == labels(verify.run(**OPTIONS))


def test_an_earlier_failure_stays():
    bad_backend = Backend("dense", lambda call: dense.run(dataclasses.replace(call, scale=1.0)))
    earlier_report = verify.run(**{**OPTIONS, "backends": [bad_backend]})
    assert earlier_report.failures
    second = verify.run(**OPTIONS, resumed=earlier_report)
    assert labels(second) == labels(earlier_report)
    assert len(second.failures) == len(earlier_report.failures)


@pytest.mark.parametrize("name", ["device", "torch", "sources"])
def test_a_record_of_elsewhere_is_not_carried_on(name):
    earlier_report = Report((), {**verify.environment("cpu"), name: "other"})
    with pytest.raises(ValueError, match=f"the earlier record has another {name}"):
        verify.run(**OPTIONS, resumed=earlier_report)


def test_a_number_that_is_not_finite_is_none_in_a_record(tmp_path):
    """JSON has no NaN or inf; the check still counts as failed."""
    check = Check("made", "none", "float32", "check", lambda: judge_condition(False))
    report = Report((check(),))
    assert read_back(report, tmp_path) == report
    assert (report.results[0].share, report.ok) == (None, False)


ALONE = "attend: one token, plain, inputs x1 ["
COMMAND = ["verify", "--device=cpu", "--only", ALONE]


def test_the_command_carries_on(tmp_path, capsys):
    """Without --json, --resume writes the new results to the file that it reads."""
    file = tmp_path / "record.json"
    assert main([*COMMAND, "--backend", "dense", "--json", str(file)]) == 0
    first = json.loads(file.read_text(encoding="utf-8"))
    assert main([*COMMAND, "--backend", "dense", "--backend", "rows", "--resume", str(file)]) == 0
    combined = json.loads(file.read_text(encoding="utf-8"))
    assert combined["results"][: len(first["results"])] == first["results"]
    assert {result["backend"] for result in combined["results"]} == {"dense", "rows"}
    file.write_text("{}", encoding="utf-8")
    assert main([*COMMAND, "--resume", str(file)]) == 2
    assert f"verify: {file}: expected a record" in capsys.readouterr().err


def test_an_interrupted_command_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    """It names the record, which has the results of the checks before the interrupt."""

    def interrupt(device, *, progress, **options):
        progress(Report((Result("a", "b", "c", "d", passed=True),), {}, 1))
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "run", interrupt)
    assert main(COMMAND) == 130
    assert "interrupted: nothing was written" in capsys.readouterr().err
    file = tmp_path / "record.json"
    assert main([*COMMAND, "--json", str(file)]) == 130
    assert f"the checks are in {file}; continue with --resume {file}" in capsys.readouterr().err
    assert len(Report.from_file(file).results) == 1


@pytest.mark.slow
def test_on_a_gpu_every_backend_is_checked_and_what_compiles_comes_last(monkeypatch):
    monkeypatch.setattr(verify, "_resolve_device", str)
    monkeypatch.setattr(groups, "unsupported_reason", lambda *call: None)
    checks = list(verify.checks("cuda"))
    compiled = [verify.BACKENDS[check.backend].compiled for check in checks]
    assert compiled == sorted(compiled)
    assert {check.backend for check in checks} == set(verify.BACKENDS)
