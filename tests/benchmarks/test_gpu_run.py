"""The run of a GPU, without one: processes that die, its graphs, and a rehearsal on a CPU."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support.extras import needs

from benchmarks.gpu import processes
from benchmarks.gpu.processes import Group, Lines, Task
from benchmarks.gpu.workloads import WORKLOADS

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


SIZES = {"random1m": (300, 300, 32), "clusters": (4500, 4500, 492), "mesh": (40_320, 640 * 847, 25)}


@pytest.mark.parametrize("name", SIZES)
def test_graphs_have_distinct_edges_of_the_degree_that_they_promise(name):
    tokens, senders, degree = SIZES[name]
    graph = replace(WORKLOADS[name], tokens=tokens).graph()
    src, dst = graph.edge_index
    assert (graph.num_dst, graph.num_src) == (tokens, senders)
    assert torch.equal(torch.bincount(dst), torch.full((tokens,), degree))
    assert len(torch.unique(dst * senders + src)) == tokens * degree
    assert 0 <= int(src.min()) <= int(src.max()) < senders


def test_a_rehearsal_that_is_killed_is_carried_on_to_the_end(tmp_path):
    """With an interpreted kernel: nothing is run again, and nothing is left running."""
    needs("triton")
    options = f"-W ignore -m benchmarks.gpu_run --trial --jobs 2 --out {tmp_path}"
    command = [sys.executable, *options.split()]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    file = tmp_path / "results.jsonl"
    killed = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    while killed.poll() is None and len(Lines.read(file).results) < 2:
        time.sleep(0.2)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    time.sleep(1.0)
    before = Lines.read(file).results
    time.sleep(3.0)
    assert Lines.read(file).results == before
    assert subprocess.run(command, cwd=ROOT, env=environment).returncode == 0
    after = Lines.read(file).results
    assert before.items() <= after.items()
    summary = (tmp_path / "summary.txt").read_text()
    for line in (
        "rows bfloat16: 1 of 1 checks, all passed",
        "6 of 6 checks have a result",
        "| auto again ",
    ):
        assert line in summary


if __name__ == "__main__":
    sys.exit(processes.run_tasks(group_of(Path(sys.argv[1])), 60.0))
