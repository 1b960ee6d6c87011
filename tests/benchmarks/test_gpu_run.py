"""The run of a GPU, without one: processes that die."""

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

pytestmark = pytest.mark.slow  # the measuring of speed is tested, not what is measured

ROOT = Path(__file__).parents[2]
NUMBERS = 12


def run_task(number):
    """Some of the odd tasks end their process, with one that they started; the others are done."""
    if number in (3, 5, 7):
        subprocess.Popen(["sleep", "612.5"])
        os.kill(os.getpid(), signal.SIGKILL)
    return {"number": number}


def group_of(file):
    """Its process is this file."""
    tasks = [Task(str(n), ("even", "odd")[n % 2], partial(run_task, n)) for n in range(NUMBERS)]
    return Group(file, tasks, [sys.executable, "-W", "ignore", __file__, str(file)])


def test_three_deaths_leave_out_the_tasks_of_a_kind(tmp_path, monkeypatch):
    """Each costs the task that it was at, and ends what its process started; a further call goes on."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    group = group_of(tmp_path / "results.jsonl")
    processes.run_groups([group], 2, time.time() + 600)
    found = Lines.read(group.file)
    assert {name for name, result in found.results.items() if "death" in result} == {"3", "5", "7"}
    assert found.results.keys() == {str(n) for n in range(NUMBERS)} - {"9", "11"}
    assert subprocess.run(["pgrep", "-f", "^sleep 612.5"], stdout=subprocess.DEVNULL).returncode == 1
    processes.append(group.file, task=None)
    assert [task.name for task in group.waiting] == ["9", "11"]


if __name__ == "__main__":
    sys.exit(processes.run_tasks(group_of(Path(sys.argv[1])), 60.0))
