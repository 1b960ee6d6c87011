"""The soak: memory, files, memos and results while everything goes on; and faults that are seen."""

import functools
import json
import random
import sys
import types

import pytest

from tests.guarantees import endurance, memos

pytestmark = pytest.mark.slow  # a guarantee is measured: by default those of test_guarantees alone

ALIVE = 100_000  # graphs that all tests together hold


def last(works, seconds=0.3):
    return list(endurance.soak(seconds, works))[-1]


def test_memory_that_grows_is_reported():
    leak = []
    state = last({"leak": lambda rng: leak.append(b"x" * 2**20)})
    assert endurance._growth(state["memory"])[0].startswith("memory grew from ")
    assert endurance._growth([100.0] * 8 + [102.5] * 8)
    assert not endurance._growth([100.0] * 8 + [101.5] * 8)
    assert endurance._growth([100.0, float("nan"), float("nan"), float("nan")])
    assert endurance._growth([100.0]) == ["only 1 samples of the memory"]


@pytest.mark.parametrize("work", [lambda rng: "differs", lambda rng: 1 / 0])
def test_a_wrong_result_is_reported(work):
    assert last({"a work": work}, 0.05)["wrong"][0].startswith("round 0, a work: ")


def test_every_work_gives_nothing_wrong_and_can_fail(monkeypatch):
    for name, work in endurance.WORKS.items():
        assert work(random.Random(name)) is None, name
    assert endurance._equality(endurance._draws(2), random.Random(0)) is None
    monkeypatch.setattr(endurance, "attend", lambda *arguments, **options: None)
    assert "nothing was raised" in {endurance._errors(random.Random(seed)) for seed in range(20)}
    monkeypatch.setattr(
        endurance, "generate", lambda model, tokens, count, *rest, **more: tokens.repeat(count)[: count + 4]
    )
    assert endurance._decoding(random.Random(0)) == "decoding differs from the full pass"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import sys; sys.exit('no memory')", "the process died: exit code 1, no memory"),
        ("import os; os._exit(0)", "the process died: exit code 0, no word of it"),
        ("import os; open(os.environ['TMPDIR'] + '/left', 'w'); print(LINE)", "a file was left: left"),
    ],
)
def test_a_process_that_dies_or_leaves_files_is_reported(monkeypatch, program, expected):
    state = {"operations": 1, "judged": 0, "memory": [1.0] * 8, "wrong": []}
    state |= {"ended": True, "seconds": 1.0, "memos": 3}
    popen = endurance.subprocess.Popen
    command = [sys.executable, "-c", program.replace("LINE", repr(json.dumps(state)))]
    monkeypatch.setattr(endurance.subprocess, "Popen", lambda _, **options: popen(command, **options))
    assert endurance.measure(1, lambda text: None).failures == (expected,)


def test_every_memo_of_the_package_is_counted_and_bounded():
    found = dict(memos.memos())
    assert {
        "gnn_attention.backends.cpu.csr_primitives._cache",
        "gnn_attention.graph.intervals.table_bounds._grids",
        "gnn_attention.backends.cost_model.costs",
    } <= set(found)
    assert memos.counted(ALIVE)[1] == []


def test_a_memo_without_bounds_is_reported(monkeypatch):
    module = types.ModuleType("gnn_attention.faulty")

    @functools.cache
    def memo(number):
        return number

    memo.__module__ = module.__name__
    module.memo = memo
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for number in range(100):
        memo(number)
    assert memos.counted(ALIVE)[1] == ["gnn_attention.faulty.memo holds 100 entries, expected at most 16"]
