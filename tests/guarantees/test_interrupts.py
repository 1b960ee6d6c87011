"""What an interrupted command leaves, and what its processes and temporary files come to."""

import importlib
import inspect
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from benchmarks import process
from gnn_attention import StandardHeads, patterns, verify
from gnn_attention.verify import processes

pytestmark = pytest.mark.slow


def test_the_package_installs_no_handler_and_an_ended_command_is_not_interrupted():
    program = """
import signal
before = signal.getsignal(signal.SIGINT)
import gnn_attention
from gnn_attention.__main__ import main, run
assert main(["graphs", "causal"]) == 0
assert signal.getsignal(signal.SIGINT) is before
import sys
sys.argv = ["gnn-attention", "graphs", "causal"]
assert run() == 0
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_processes_of_checks_ignore_interrupts_and_end_with_us():
    """A terminal sends Ctrl-C to all of them; we end them."""
    before = set(multiprocessing.active_children())
    checks = list(itertools.islice(verify.checks("cpu"), 40))
    running = processes.results(checks, jobs=2)
    next(running)
    children = set(multiprocessing.active_children()) - before
    for child in children:
        os.kill(child.pid, signal.SIGINT)
    next(running)
    assert all(child.is_alive() for child in children)
    running.close()
    for child in children:
        child.join(10)
        assert not child.is_alive()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="only Linux kills a child with its parent")
def test_a_fork_of_the_benchmark_dies_with_the_process_that_made_it():
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            process.in_a_fork(lambda: os.write(writing, str(os.getpid()).encode()) and time.sleep(60))
        finally:
            os._exit(1)
    innermost = int(os.read(reading, 100))
    os.kill(middle, signal.SIGKILL)
    os.waitpid(middle, 0)
    until = time.monotonic() + 10
    while Path(f"/proc/{innermost}/stat").exists() and time.monotonic() < until:
        if Path(f"/proc/{innermost}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.02)
    assert time.monotonic() < until


@pytest.fixture
def new_classes(tmp_path, monkeypatch):
    """Classes of layers that torch_geometric has not rendered yet, and a new temporary folder."""
    name, folder = f"layers_{tmp_path.name}", tmp_path / "temporary"
    lines = [f"class New{number}(MessagePassingAttention):\n    pass\n" for number in range(5)]
    head = "from gnn_attention import MessagePassingAttention\n\n"
    (tmp_path / f"{name}.py").write_text(head + "\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return [getattr(importlib.import_module(name), f"New{number}") for number in range(5)]


def test_a_layer_leaves_no_temporary_file(new_classes):
    """torch_geometric writes two for every class in every process."""
    layer = new_classes[0](StandardHeads(4, 1))
    assert layer.propagate.__module__.endswith("_New0_propagate")
    assert list(Path(tempfile.gettempdir()).iterdir()) == []
    assert "def propagate" in inspect.getsource(layer.propagate.__func__)
    assert layer(torch.ones(3, 4), patterns.causal(3)).shape == (3, 4)


def test_first_layers_of_a_class_in_several_threads(new_classes):
    """The second found the module of the first before its functions were there, and went on without them."""
    for kind in new_classes:
        start, made = threading.Barrier(8), []

        def make(kind=kind, start=start, made=made):
            start.wait()
            made.append(kind(StandardHeads(4, 1)).propagate.__module__)

        threads = [threading.Thread(target=make) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert made == [f"{kind.__module__}_{kind.__name__}_propagate"] * 8
        assert kind._orig_propagate is not kind._jinja_propagate
