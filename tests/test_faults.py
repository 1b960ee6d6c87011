"""Known faults are planted in the library, one at a time: its tests and its public checks must fail.

Each fault is a change of the source (``support.faults``), planted in a fork of this process. What fails with
a fault must pass without one. The properties of ``test_equality`` find the same faults.
"""

import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch
from support.faults import PLANTED, planted_here

import gnn_attention as ga

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]
# by which file of the suite each fault must be found
FOUND_BY = {
    "mask transposed": "graph/test_graph",
    "scale dropped": "test_attend",
    "grouped heads tiled instead of repeated": "test_attend",
    "b_Q dropped in the merged form": "heads/test_heads",
    "b_V added to receivers without in-edges": "layer/test_layer",
    "duplicate edges counted twice": "graph/test_graph",
    "decode rows aligned top-left": "graph/test_graph",
    "the graph ignored": "test_attend",
}
CHECKS = {
    "device": "cpu",
    "dtypes": ["float64"],
    "graphs": ["causal", "window", "strict_causal", "decode rows", "listed"],
    "features": ["plain", "alibi", "edge bias"],
}


def in_a_fork(work, fault, output):
    """Exit code of ``work()`` in a fork with the fault in it (None: without one)."""

    def run():
        torch.set_num_threads(1)
        with output.open("w") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        if fault is None:
            sys.exit(work())
        with planted_here(fault):
            sys.exit(work())

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    return process.exitcode


class Failed:
    """A plugin that writes down which test failed."""

    def __init__(self, place):
        self.place = place

    def pytest_runtest_logreport(self, report):
        """Its name, in a file that outlives the fork."""
        if report.failed:
            self.place.write_text(report.nodeid)


def suite(place, *tests):
    """Tests up to the first that fails, in this process."""
    options = f"-x -q -p no:cacheprovider -p no:xdist -c {ROOT / 'pyproject.toml'} --rootdir {ROOT}".split()
    return lambda: pytest.main([*options, *tests], plugins=[Failed(place)])


def test_every_fault_has_its_file():
    assert set(FOUND_BY) == set(PLANTED)


@pytest.mark.parametrize("fault", PLANTED)
def test_the_suite_fails_on_every_planted_fault(fault, tmp_path):
    """And the test that fails passes without the fault."""
    failed, output = tmp_path / "failed", tmp_path / "output"
    file = str(ROOT / "tests" / f"{FOUND_BY[fault]}.py")
    code = in_a_fork(suite(failed, file), fault, output)
    assert code == pytest.ExitCode.TESTS_FAILED, output.read_text()[-3000:]
    again = str(ROOT / failed.read_text())
    code = in_a_fork(suite(tmp_path / "none", again), None, output)
    assert code == pytest.ExitCode.OK, output.read_text()[-3000:]


def checks():
    """1 as soon as a public check fails, else 0."""

    def stop(*checks):
        if not (checks[-1].passed or checks[-1].skipped):
            print(checks[-1])
            sys.exit(1)

    report = ga.verify.run(**CHECKS, progress=stop)
    print(report)
    return 0 if report.ok else 1


@pytest.mark.parametrize("fault", [None, *PLANTED])
def test_verify_fails_on_every_planted_fault(fault, tmp_path):
    """The public checks alone catch each of them too; without a fault all pass."""
    output = tmp_path / "output"
    expected = 0 if fault is None else 1
    assert in_a_fork(checks, fault, output) == expected, output.read_text()[-3000:]
