"""Checkpoints are written whole or not at all, whatever stops them, and give back what was saved."""

import io
import itertools
import json
import logging
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from support import ranks
from torch import nn

from gnn_attention.training import Checkpoints

TOLD = {"losses": [1.5], "history": [{"step": 1}], "seconds": 2.0, "recipe": "a"}


def training(seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer, torch.Generator().manual_seed(seed)


@pytest.fixture
def saved(tmp_path):
    Checkpoints(tmp_path).save(7, *training(), TOLD)
    return tmp_path / "step-00000007"


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    """At whatever write it is full."""
    left, opened = itertools.count(), Path.open

    class Stream(io.FileIO):
        def write(self, data):
            if next(left) == 0:
                raise OSError(28, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(
        Path,
        "open",
        lambda path, mode="r", *rest: Stream(path, "w") if mode == "wb" else opened(path, mode, *rest),
    )
    left = itertools.count(1)
    Checkpoints(tmp_path / "whole").save(7, *training(), TOLD)
    writes = next(left) - 1
    assert writes > 5
    for before in range(writes):
        left = itertools.count(-before)
        with pytest.raises(OSError, match=r"the checkpoint failed, rank 0: OSError: .*No space left"):
            Checkpoints(tmp_path / "cut").save(7, *training(), TOLD)
        assert not list((tmp_path / "cut").iterdir())


@pytest.fixture
def interrupts():
    """SIGINT raises KeyboardInterrupt, in a process that was started in the background too: a shell ignores it there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_comes_when_the_checkpoint_is_whole(tmp_path, monkeypatch):
    """Here in the middle of the file; the handler of before is there again."""
    opened = Path.open

    def interrupted(path, mode="r", *rest):
        if path.suffix == ".distcp":
            signal.raise_signal(signal.SIGINT)
        return opened(path, mode, *rest)

    monkeypatch.setattr(Path, "open", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path).save(7, *training(), TOLD)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path).restore(tmp_path / "step-00000007", *training(seed=1))


def interrupted_at_random(folder, count):
    """Save again and again, each time interrupted by a timer, at whatever instruction that is."""

    def stop(*arguments):
        os.kill(os.getpid(), signal.SIGINT)

    rng, taught, other, checkpoints, interrupted = (
        random.Random(0),
        training(),
        training(seed=1),
        Checkpoints(Path(folder)),
        0,
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, stop)
    # the first of a process takes several times as long as those that are to be interrupted
    checkpoints.save(0, *taught, TOLD)
    began = time.perf_counter()
    checkpoints.save(1, *taught, TOLD)
    longest = 1.2 * (time.perf_counter() - began)
    for step in range(2, count):
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, longest))
            checkpoints.save(step, *taught, TOLD)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted += 1
        assert not list(Path(folder).glob(".*"))
        assert checkpoints.record(checkpoints.newest(), {}) == TOLD
    checkpoints.restore(checkpoints.newest(), *other)
    assert torch.equal(other[0].weight, taught[0].weight)
    return interrupted


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="only Unix has timers")
@pytest.mark.slow
@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.nightly)])
def test_interrupted_anywhere(tmp_path, count):
    """The newest is whole, nothing else is left, and no other error hides the interrupt."""
    assert ranks.alone(interrupted_at_random, str(tmp_path / "saved"), count) > count / 10


def test_everything_comes_back(saved):
    model, optimizer, generator = training()
    other, its, its_generator = training(seed=1)
    checkpoints = Checkpoints(saved.parent)
    assert checkpoints.record(saved, {"recipe": "a"}) == TOLD
    checkpoints.restore(saved, other, its, its_generator)
    assert torch.equal(other.weight, model.weight)
    assert its.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.1
    assert its.param_groups[0]["betas"] == (0.9, 0.999)
    assert torch.equal(its.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert torch.equal(its_generator.get_state(), generator.get_state())


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
def test_a_damaged_checkpoint_is_named(saved, file, caplog):
    (saved / file).write_bytes((saved / file).read_bytes()[:100])
    with pytest.raises(OSError, match="step-00000007: the checkpoint failed, ") as caught:
        Checkpoints(saved.parent).restore(saved, *training())
    assert len(str(caught.value)) < 1000
    (saved / file).unlink()
    with pytest.raises(OSError, match=rf"step-00000007: the checkpoint failed, .*{file}"):
        Checkpoints(saved.parent).restore(saved, *training())
    assert not [
        record for record in caplog.records if record.levelno >= logging.WARNING and "dcp" not in record.name
    ]


@pytest.mark.parametrize(
    "told",
    [[], {**TOLD, "losses": ["a"]}, {**TOLD, "seconds": None}, {**TOLD, "history": [3]}, {"recipe": "a"}],
)
def test_what_a_checkpoint_says_is_checked(saved, told):
    (saved / "training.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match="step-00000007 is no checkpoint of a training"):
        Checkpoints(saved.parent).record(saved, {"recipe": "a"})


def test_another_training_is_named_in_short(saved):
    with pytest.raises(
        ValueError, match="is a checkpoint of another training: recipe was 'a', is 'bbb"
    ) as caught:
        Checkpoints(saved.parent).record(saved, {"recipe": "b" * 10_000})
    assert len(str(caught.value)) < 800
