"""The suite ``start``: programs in fresh processes, and their targets."""

import json
import subprocess

import pytest

from benchmarks import start

pytestmark = pytest.mark.slow  # the measuring of speed is tested, not what is measured


def test_a_ratio_is_that_of_the_least_times(monkeypatch):
    """With made-up times of two rounds: 2.5 over 2 is within 1.3, 2.75 over 2 is not."""
    times = {
        "import torch": [1.0, 1.5],
        "import gnn_attention": [2.0, 3.0],
        "gnn-attention --help": [4.0, 2.5],
        "gnn-attention graphs": [2.75, 2.75],
        "gnn-attention draw causal(6)": [2.0, 5.0],
    }
    names = {tuple(arguments): name for name, arguments in start.PROGRAMS.items()}
    monkeypatch.setattr(start, "seconds_of", lambda arguments: times[names[arguments]].pop(0))
    rounds = []
    record = start.run_start(2, rounds.append)
    assert rounds == ["round 1", "round 2"]
    assert [case["ratio"] for case in record["cases"]] == [0.5, 1.0, 1.25, 1.375, 1.0]
    assert [(row["value"], row["met"]) for row in record["targets"]] == [
        (1.25, True),
        (1.375, False),
        (1.0, True),
    ]
    assert json.loads(json.dumps(record)) == record
    shown = start.text(record)
    assert "| gnn-attention --help         | 2.50     | 3.25      | 1.25                    |" in shown
    assert "at most 1.3 times the time of import gnn_attention" in shown


def test_every_program_runs():
    for arguments in start.PROGRAMS.values():
        assert start.seconds_of(arguments) > 0


def test_a_program_that_fails_has_no_time():
    with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        start.seconds_of(["-c", "raise SystemExit(3)"])
