"""A GPU run survives the death of its processes; the tests need no GPU."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from benchmarks.gpu import processes
from benchmarks.gpu.processes import Group, Lines, Task

# These tests cover benchmarks, not the library.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NUMBERS = 12


def run_task(number):
    """Return the number; at some odd ones, start another process and kill this one instead."""
    if number in (3, 5, 7):
        subprocess.Popen(["sleep", "612.5"])
        os.kill(os.getpid(), signal.SIGKILL)
    return {"number": number}


def group_of(file):
    """Return a group whose process runs this file."""
    tasks = [Task(str(n), ("even", "odd")[n % 2], partial(run_task, n)) for n in range(NUMBERS)]
    return Group(file, tasks, [sys.executable, "-W", "ignore", __file__, str(file)])


def test_after_three_deaths_tasks_of_the_kind_are_skipped(tmp_path, monkeypatch):
    """Each death fails one task and ends the processes that it started; another call resumes the group."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    group = group_of(tmp_path / "results.jsonl")
    processes.run_groups([group], 2, time.time() + 600)
    lines = Lines.read(group.file)
    assert {name for name, result in lines.results.items() if "death" in result} == {"3", "5", "7"}
    assert lines.results.keys() == {str(n) for n in range(NUMBERS)} - {"9", "11"}
    assert subprocess.run(["pgrep", "-f", "^sleep 612.5"], stdout=subprocess.DEVNULL).returncode == 1
    processes.append(group.file, task=None)
    assert [task.name for task in group.waiting] == ["9", "11"]


if __name__ == "__main__":
    sys.exit(processes.run_tasks(group_of(Path(sys.argv[1])), 60.0))
