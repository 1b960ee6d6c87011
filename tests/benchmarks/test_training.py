"""The suite ``training``: both methods learn the same, and the record compares them."""

import json
from functools import partial

import pytest
import torch
from support.bounds import assert_exact

import gnn_attention as ga
from benchmarks import training
from examples.training import Corpus, train

pytestmark = pytest.mark.slow  # the measuring of speed is tested, not what is measured

READ, LOOP = "def read(self, size=-1):\n    return self.buffer.read(size)\n", "for line in text:\n    pass\n"
TEXT = Corpus({"a.py": READ * 40}, {"b.py": LOOP * 30})


@pytest.fixture
def in_this_process(monkeypatch):
    """On a little text, without processes."""
    monkeypatch.setattr(training, "train", partial(train, text=TEXT))
    call = lambda module, function, arguments, **options: getattr(training, function)(**arguments)  # noqa: E731
    monkeypatch.setattr(training.process, "in_a_process", call)


def test_the_peer_is_attention():
    """With the learned biases of the model, and their gradients."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 40, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = ga.score_mods.RelativeBias(4, 5).double()
    torch.nn.init.normal_(bias.table)
    wanted = [q, k, v, bias.table]
    found = [
        ([out], torch.autograd.grad(out.sin().sum(), wanted))
        for backend in training.METHODS.values()
        for out in [ga.attend(q, k, v, ga.patterns.window(40, 7), score_mod=bias, backend=backend)]
    ]
    for ours, theirs in zip(*found, strict=True):
        assert_exact(ours, theirs)


@pytest.mark.slow
def test_both_methods_learn_the_same(in_this_process):
    shown = []
    record = training.run_training(tokens=64, steps=3, progress=shown.append)
    assert [run["method"] for run in record["runs"]] == ["auto", "SDPA mask"]
    ours, theirs = record["runs"]
    apart = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    assert record["apart"] == apart < 2e-3
    assert record["faster"] == theirs["seconds"] / ours["seconds"]
    assert record["recipe"]["graph"] == "window(64, 64)"
    assert shown == ["3 steps on 64 tokens, auto", "3 steps on 64 tokens, SDPA mask"]
    assert json.loads(json.dumps(record)) == record
