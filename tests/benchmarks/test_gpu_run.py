"""The run of a GPU, without one: processes that die, its graphs and peers, and a rehearsal on a CPU."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.extras import needs

from benchmarks.checked import Checked
from benchmarks.gpu import methods, processes
from benchmarks.gpu.processes import Group, Lines, Task
from benchmarks.gpu.workloads import WORKLOADS
from gnn_attention import convert

pytestmark = pytest.mark.slow  # the measuring of speed is tested, not what is measured

ROOT = Path(__file__).parents[2]
NUMBERS = 12


def run_task(number):
    """Some of the odd tasks end their process, with one that they started; the others are done."""
    if number in (3, 5, 7):
        subprocess.Popen(["sleep", "600"])
        os.kill(os.getpid(), signal.SIGKILL)
    return {"number": number}


def group_of(file, run=run_task):
    """Its process is this file."""
    tasks = [Task(str(n), ("even", "odd")[n % 2], lambda n=n: run(n)) for n in range(NUMBERS)]
    return Group(file, tasks, [sys.executable, "-W", "ignore", __file__, str(file)])


def test_three_deaths_leave_out_the_tasks_of_a_kind(tmp_path, monkeypatch):
    """Each costs the task that it was at, and ends what its process started; a further call goes on."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ["PYTHONPATH"]])
    )
    group = group_of(tmp_path / "results.jsonl")
    processes.run_groups([group], 2, time.time() + 600)
    found = Lines.read(group.file)
    assert {name for name, result in found.results.items() if "death" in result} == {"3", "5", "7"}
    assert found.results.keys() == {str(n) for n in range(NUMBERS)} - {"9", "11"}
    assert group.waiting == []
    sleeping = subprocess.run(["pgrep", "-f", "^sleep 600"], capture_output=True, text=True).stdout.split()
    groups = {os.getpgid(int(one)) for one in sleeping}
    assert os.getpgrp() not in groups
    processes.append(group.file, task=None)
    assert [task.name for task in group.waiting] == ["9", "11"]


@pytest.mark.parametrize(
    ("name", "tokens", "receivers", "senders", "degree"),
    [
        ("random1m", 300, 300, 300, 32),
        ("clusters", 4500, 4500, 4500, 492),
        ("mesh", 40_320, 192 * 210, 640 * 847, 25),
        ("chosen32k", 300, 300, 300, 64),
    ],
)
def test_graphs_have_distinct_edges_of_the_degree_that_they_promise(name, tokens, receivers, senders, degree):
    graph = replace(WORKLOADS[name], tokens=tokens).graph()
    src, dst = graph.edge_index
    assert (graph.num_dst, graph.num_src) == (receivers, senders)
    assert torch.equal(torch.bincount(dst), torch.full((receivers,), degree))
    assert len(torch.unique(dst * senders + src)) == receivers * degree
    assert 0 <= int(src.min()) <= int(src.max()) < senders
    if name == "clusters":
        inside = (src // 2048 == dst // 2048)[dst < 4096]  # the last community is moved to the end
        assert inside.double().mean() == pytest.approx(0.9, abs=0.01)


def test_anemoi_is_given_edges_by_receiver_and_their_order_by_sender(monkeypatch):
    """A stand-in that reads both, as its kernels do, is right on a bipartite graph."""

    def conv(query, key, value, vectors, by_receiver, by_sender):
        (src, first), (first_of_src, ids, dst_of_src) = by_receiver, by_sender
        dst = torch.arange(len(query)).repeat_interleave(first.diff())
        assert torch.equal(dst, dst_of_src)
        assert torch.equal(torch.arange(len(key)).repeat_interleave(first_of_src.diff()), src[ids])
        edges = torch.zeros(len(query), len(key), dtype=torch.bool)
        edges[dst, src] = True
        logits = torch.einsum("ihd,jhd->hij", query, key) * query.shape[-1] ** -0.5
        weights = logits.masked_fill(~edges, -torch.inf).softmax(-1).nan_to_num(0.0)
        return torch.einsum("hij,jhd->ihd", weights, value)

    stub = SimpleNamespace(graph_transformer_attention_conv=conv)
    monkeypatch.setitem(sys.modules, methods.ANEMOI_MODULE, stub)
    workload = replace(WORKLOADS["mesh"], tokens=30, heads=2, dim=16, dtype=torch.float64)
    edges = workload.graph().edge_index
    order = torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(0))
    # the last receiver and the last sender have no edge
    graph = convert.from_edge_index(edges[:, order], int(edges[1].max()) + 2, int(edges[0].max()) + 2)
    problem = workload.problem(graph)
    assert Checked(problem).verdict(methods._anemoi(problem), backward=True).passed


def test_a_rehearsal_that_is_killed_is_carried_on_to_the_end(tmp_path):
    """With an interpreted kernel: nothing is run again, and nothing is left running."""
    needs("triton")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.gpu_run",
        "--trial",
        "--jobs",
        "2",
        "--out",
        tmp_path,
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    file = tmp_path / "results.jsonl"
    killed = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    while killed.poll() is None and len(Lines.read(file).results) < 4:
        time.sleep(0.2)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    time.sleep(1.0)
    before = Lines.read(file).results
    time.sleep(1.0)
    assert Lines.read(file).results == before
    assert subprocess.run(command, cwd=ROOT, env=environment).returncode == 0
    after = Lines.read(file).results
    assert before.items() <= after.items()
    assert not any("death" in result for result in after.values())
    summary = (tmp_path / "summary.txt").read_text()
    assert "rows bfloat16: 1 of 1 checks, all passed" in summary
    assert "12 of 12 checks have a result" in summary
    assert "| auto again " in summary


if __name__ == "__main__":
    sys.exit(processes.run_tasks(group_of(Path(sys.argv[1])), 60.0))
