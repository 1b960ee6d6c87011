"""Checkpoints are written whole or not at all, whatever stops them, and give back what was saved."""

import json
import logging
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from examples.training import Checkpoints

RECORD = {"losses": [1.5], "history": [{"step": 1}], "seconds": 2.0, "recipe": "a"}


def training(seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer, torch.Generator().manual_seed(seed)


@pytest.fixture
def saved(tmp_path):
    Checkpoints(tmp_path).save(7, *training(), RECORD)
    return tmp_path / "step-00000007"


@pytest.mark.parametrize("kind", [".distcp", ".metadata"])
def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch, kind):
    """Whichever file finds it full."""
    opened = Path.open

    def full(path, mode="r", *rest):
        if mode != "r" and kind in path.name:
            raise OSError(28, "No space left on device")
        return opened(path, mode, *rest)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match=r"the checkpoint failed, rank 0: OSError: .*No space left"):
        Checkpoints(tmp_path).save(7, *training(), RECORD)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def interrupts():
    """SIGINT raises KeyboardInterrupt, also in a process that a shell started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_comes_when_the_checkpoint_is_whole(tmp_path, monkeypatch):
    opened = Path.open

    def interrupted(path, mode="r", *rest):
        if path.suffix == ".distcp":
            signal.raise_signal(signal.SIGINT)
        return opened(path, mode, *rest)

    monkeypatch.setattr(Path, "open", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path).save(7, *training(), RECORD)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path).restore(tmp_path / "step-00000007", *training(seed=1))


def test_everything_comes_back(saved):
    model, optimizer, generator = training()
    other, its, its_generator = training(seed=1)
    checkpoints = Checkpoints(saved.parent)
    assert checkpoints.record(saved, {"recipe": "a"}) == RECORD
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
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [record for record in warnings if "dcp" not in record.name]


WRONG = ({"losses": ["a"]}, {"seconds": None}, {"history": [3]})


def test_wrong_records(saved):
    for record in ("{", "[]", '{"recipe": "a"}', *(json.dumps(RECORD | wrong) for wrong in WRONG)):
        (saved / "training.json").write_text(record)
        with pytest.raises(ValueError, match="step-00000007 is no checkpoint of a training"):
            Checkpoints(saved.parent).record(saved, {"recipe": "a"})


def test_another_training_is_named_in_short(saved):
    other = "is a checkpoint of another training: recipe was 'a', is 'bbb"
    with pytest.raises(ValueError, match=other) as caught:
        Checkpoints(saved.parent).record(saved, {"recipe": "b" * 10_000})
    assert len(str(caught.value)) < 800
