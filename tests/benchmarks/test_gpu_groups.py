"""Checks in processes: whatever dies costs one check, is named, and the rest goes on."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import groups
from benchmarks.gpu.groups import FINISHED, GONE, LATE, Group, Lines
from gnn_attention.verify import Check

pytestmark = pytest.mark.slow
COUNT = 12
WHOLE = {number: f"made: {number} [none, float32]" for number in range(COUNT)}


def outcome(number):
    """What check ``number`` does: some end their process, one loses its GPU, one fails."""
    if number == 3:
        os._exit(9)
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 7:
        return {"passed": False, "message": "AcceleratorError: CUDA error: an illegal memory access"}
    return {"passed": number != 9, "message": "" if number != 9 else "expected 0, came 1"}


def made(run=outcome):
    """The checks, one of which counts for nothing unless its memory is poisoned."""
    return [Check("made", "none", "float32", str(n), lambda n=n: run(n)) for n in range(COUNT)]


def a_group(file, kind="outcome"):
    """Its process is this file."""
    return Group(
        "made", file, made(), lambda until: groups.python(__file__, kind, str(file), str(until)), 1.0
    )


def passed(file):
    """Numbers of the checks that passed, and that did not."""
    found = Lines.read(file).results
    assert set(found) <= set(WHOLE.values())
    return [n for n, label in WHOLE.items() if label in found and found[label].passed], [
        n for n, label in WHOLE.items() if label in found and not found[label].passed
    ]


@pytest.fixture(autouse=True)
def _as_root(monkeypatch):
    """Processes find this checkout."""
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))


def test_a_death_costs_one_check_and_is_named(tmp_path):
    said = []
    assert groups.run([a_group(tmp_path / "made.jsonl")], 2, time.time() + 600, said.append)
    good, bad = passed(tmp_path / "made.jsonl")
    assert (good, bad) == ([0, 1, 2, 4, 6, 8, 10, 11], [3, 5, 7, 9])
    found = Lines.read(tmp_path / "made.jsonl").results
    assert found[WHOLE[3]].message == "its process ended with 9"
    assert found[WHOLE[5]].message == f"its process ended with {-signal.SIGKILL}"
    assert said == [f"made: its process ended with {code} at {WHOLE[n]}" for n, code in ((3, 9), (5, -9))]


def test_a_process_that_answers_nothing_is_ended(tmp_path):
    group, said = a_group(tmp_path / "made.jsonl", "asleep"), []
    assert groups.run([group], 1, time.time() + 600, said.append, patience=15.0)
    assert passed(tmp_path / "made.jsonl")[1] == [2]


def test_a_group_whose_process_cannot_begin_is_given_up(tmp_path):
    group, said = a_group(tmp_path / "made.jsonl", "unknown"), []
    assert not groups.run([group], 1, time.time() + 60, said.append)
    assert said == ["made: its process ended with 1"]
    assert "KeyError" in (tmp_path / "made.log").read_text()


def test_what_a_file_holds_is_not_run_again_and_a_cut_line_is_nothing(tmp_path):
    file = tmp_path / "made.jsonl"
    ran = []

    def run(number):
        ran.append(number)
        return {"passed": True}

    assert groups.work(made(run)[:4], file, time.time() + 60) == FINISHED
    with file.open("a") as text:
        text.write('{"begin": "made: 4 [none, float32]"}\n{"group": "ma')
    assert Lines.read(file).unanswered == WHOLE[4]
    assert groups.work(made(run), file, time.time() - 1) == LATE
    assert groups.work(made(run), file, time.time() + 60) == FINISHED
    assert ran == list(range(COUNT))


def test_a_check_begun_twice_without_a_result_has_failed(tmp_path):
    file = tmp_path / "made.jsonl"
    file.write_text('{"begin": "made: 0 [none, float32]"}\n' * 2)
    assert groups.work(made(lambda number: {"passed": True}), file, time.time() + 60) == FINISHED
    assert passed(file)[1] == [0]


def test_a_lost_gpu_ends_the_process_after_its_result(tmp_path):
    file = tmp_path / "made.jsonl"
    lost = {"passed": False, "message": "RuntimeError: CUDA error: device-side assert triggered"}
    assert groups.work(made(lambda number: lost), file, time.time() + 60) == GONE
    assert passed(file) == ([], [0])


def test_memory_without_values_is_poisoned(tmp_path):
    """A kernel that writes nothing gets no numbers by luck."""
    program = f"""
import sys, torch, time
from pathlib import Path
from benchmarks.gpu import groups
from gnn_attention.verify import Check
def run():
    lucky = torch.ones(1000); del lucky
    return {{"passed": bool(torch.empty(1000).isnan().all() and torch.ones(3).new_empty(5).isnan().all())}}
check, file = Check("made", "none", "float32", "0", run), Path({str(tmp_path / "made.jsonl")!r})
groups.work([check], file, time.time() + 60)
"""
    groups.subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
    assert passed(tmp_path / "made.jsonl")[0] == [0]


if __name__ == "__main__":
    kinds = {
        "outcome": outcome,
        "asleep": lambda number: time.sleep(60 if number == 2 else 0) or {"passed": True},
    }
    sys.exit(groups.work(made(kinds[sys.argv[1]]), Path(sys.argv[2]), float(sys.argv[3])))
