"""Trainings are followed in a pipe: lines on stderr say how far they are."""

import re

import pytest

from examples import training
from examples.training import Corpus, compare, metrics
from examples.training.__main__ import main
from gnn_attention._support import progress
from gnn_attention.model import Config

TEXT = Corpus(
    {"a.py": "def one(x):\n    return x + 1\n" * 40}, {"b.py": "def two(x):\n    return x + 2\n" * 10}
)
SMALL = ["--steps", "2", "--batch", "2", "--length", "16", "--pieces", "260"]
LONG = {
    "train": ["train", *SMALL, "--out", "{}/weights.safetensors"],
    "compare": ["compare", "--graphs", "causal", "--seeds", "1", *SMALL, "--out", "{}/compared"],
    "reach": ["reach", "--depth", "1", "--seeds", "1", "--steps", "2"],
}


@pytest.fixture
def small(monkeypatch):
    """Little text and small models; what is shown every 5 s is shown at once."""
    config = Config(1, width=16, num_heads=2, head_dim=8, mlp_width=32, reach=4)
    for module in (training, compare):
        monkeypatch.setattr(module, "corpus", lambda: TEXT)
    monkeypatch.setattr(compare, "Config", lambda _: config)
    monkeypatch.setattr(metrics, "_WINDOWS_JUDGED", 8)
    monkeypatch.setattr(progress, "EVERY", 0.001)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_every_training_is_followed_in_a_pipe(name, small, capsys, tmp_path):
    assert main([word.format(tmp_path) for word in LONG[name]]) == 0
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if re.match(rf"{name}: .*\d+.* \[\d\d:\d\d", line)]
    assert lines
    assert not set(lines) & set(shown.out.splitlines())
