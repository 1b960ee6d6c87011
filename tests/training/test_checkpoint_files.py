"""Checkpoints hold no pickle of ours, and one from a stranger is refused or read, never run."""

import io
import itertools
import json
import pickle
import random
import signal
import time
import zipfile
from pathlib import Path

import pytest
import torch
from support import ranks
from torch import nn

from gnn_attention.training import Checkpoints, checkpoint_format
from gnn_attention.training.checkpoint_format import INDEX

TOLD = {"losses": [1.5], "history": [{"step": 1}], "seconds": 2.0, "recipe": "a"}


def training(seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer, torch.Generator().manual_seed(seed)


@pytest.fixture
def kept(tmp_path):
    Checkpoints(tmp_path).save(7, *training(), TOLD)
    return tmp_path / "step-00000007"


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    """At whatever tensor it is full; nothing is left."""
    left, opened = itertools.count(), Path.open

    class Stream(io.FileIO):
        def write(self, data):
            if next(left) == 0:
                raise OSError(28, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(
        Path, "open", lambda path, mode="r", *rest: Stream(path, "w") if mode == "wb" else opened(path, mode, *rest)
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


def interrupted_at_random(folder, count):
    """Save again and again, each time interrupted by a timer, at whatever instruction that is."""

    def stop(*arguments):
        raise KeyboardInterrupt

    rng, taught, other, checkpoints, interrupted = random.Random(0), training(), training(seed=1), Checkpoints(Path(folder)), 0
    signal.signal(signal.SIGALRM, stop)
    began = time.perf_counter()
    checkpoints.save(0, *taught, TOLD)
    longest = 1.2 * (time.perf_counter() - began)
    for step in range(1, count):
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, longest))
            checkpoints.save(step, *taught, TOLD)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted += 1
        assert not list(Path(folder).glob(".*"))
        assert checkpoints.told(checkpoints.newest(), {}) == TOLD
    checkpoints.restore(checkpoints.newest(), *other)
    assert torch.equal(other[0].weight, taught[0].weight)
    return interrupted


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="only Unix has timers")
@pytest.mark.slow
@pytest.mark.parametrize("count", [60, 300, pytest.param(3000, marks=pytest.mark.nightly)])
def test_interrupted_anywhere(tmp_path, count):
    """The one before is whole, nothing else is left, and no other error hides the interrupt.

    In a process of its own: an interrupt between two instructions of torch.no_grad() leaves gradients off for good.
    """
    assert ranks.alone(interrupted_at_random, str(tmp_path / "kept"), count) > count / 10


def test_only_what_is_seen_of_a_tensor_is_written(tmp_path):
    """One row of a large table is not the table."""
    table = torch.arange(30_000.0).view(3000, 10)
    found = checkpoint_format._saved(table[7])
    assert found.getbuffer().nbytes < 3000
    found.seek(0)
    assert torch.equal(torch.load(found, weights_only=True), table[7])


def test_everything_comes_back(kept):
    model, optimizer, generator = training()
    other, its, its_generator = training(seed=1)
    checkpoints = Checkpoints(kept.parent)
    assert checkpoints.told(kept, {"recipe": "a"}) == TOLD
    checkpoints.restore(kept, other, its, its_generator)
    assert torch.equal(other.weight, model.weight)
    assert its.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.1
    assert its.param_groups[0]["betas"] == (0.9, 0.999)
    assert torch.equal(its.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert torch.equal(its_generator.get_state(), generator.get_state())


def test_the_files_are_tensors_and_json(kept):
    assert sorted(path.name for path in kept.iterdir()) == ["__0_0.distcp", INDEX, "training.json"]
    assert set(json.loads((kept / INDEX).read_text())) == {"entries", "places"}


class Payload:
    def __reduce__(self):
        return exec, ("import pathlib; pathlib.Path('was_run').touch()",)


def test_a_pickle_in_a_checkpoint_is_not_run(kept, tmp_path, monkeypatch):
    """In the place of torch's index, of ours, and of what is no tensor."""
    monkeypatch.chdir(tmp_path)
    hostile = pickle.dumps(Payload())
    (kept / ".metadata").write_bytes(hostile)
    Checkpoints(tmp_path).restore(kept, *training())
    torch.save(Payload(), kept / "hostile")
    found = json.loads((kept / INDEX).read_text())
    size = (kept / "hostile").stat().st_size
    with zipfile.ZipFile(kept / "hostile") as file:
        assert b"exec" in file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))
    for name in ("optimizer.param_groups.0.lr", "model.weight"):
        places = [[*place[:2], "hostile", 0, size] if place[0] == name else place for place in found["places"]]
        (kept / INDEX).write_text(json.dumps({**found, "places": places}))
        with pytest.raises(
            OSError, match=r"step-00000007: the checkpoint failed, .* is damaged: it holds something else than numbers"
        ):
            Checkpoints(tmp_path).restore(kept, *training())
    (kept / INDEX).write_bytes(hostile)
    with pytest.raises(OSError, match=r"index\.json is damaged"):
        Checkpoints(tmp_path).restore(kept, *training())
    assert not (tmp_path / "was_run").exists()


def place(number, value):
    def change(found):
        found["places"][0][number] = value

    return change


def entry(name, value):
    def change(found):
        found["entries"]["model.weight"][name] = value

    return change


def exchanged(one, other):
    def change(found):
        where = {place[0]: place[2:] for place in found["places"]}
        found["places"] = [[*place[:2], *(where[other] if place[0] == one else place[2:])] for place in found["places"]]

    return change


CHANGES = {
    "a file above": (place(2, "../training.json"), r"places\[0\] is no place in a file of this folder"),
    "a file that is not there": (place(2, "other"), r"places\[0\] is no place in a file of this folder"),
    "a long name": (place(2, "a" * 9999), r"places\[0\] is no place in a file of this folder"),
    "a name with a zero": (place(2, "a\0b"), r"places\[0\] is no place in a file of this folder"),
    "an end outside": (place(4, 2**40), r"places\[0\] ends outside its file"),
    "a negative start": (place(3, -1), r"places\[0\] is no place in a file of this folder"),
    "no place": (lambda found: found.update(places=[]), "it gives no place to"),
    "an unknown dtype": (entry("dtype", "object"), "entry 'model.weight' has \"object\" for 'dtype'"),
    "a size of another": (entry("size", [9, 9]), "damaged|mismatch|[Ss]ize"),
    "a part outside": (entry("chunks", [[[0, 0], [9, 9]]]), "entry 'model.weight' has a part outside its size"),
    "parts that are none": (entry("chunks", [3]), "entry 'model.weight' has a part that is no offsets and sizes"),
    "a number in the place of a list": (
        exchanged("optimizer.param_groups.0.params", "optimizer.param_groups.0.lr"),
        "it is 0.1, expected",
    ),
    "no entries": (lambda found: found.pop("entries"), "it has no 'entries'"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_damaged_index_is_named(kept, change):
    found = json.loads((kept / INDEX).read_text())
    CHANGES[change][0](found)
    (kept / INDEX).write_text(json.dumps(found))
    with pytest.raises(OSError, match=rf"step-00000007: the checkpoint failed, .*({CHANGES[change][1]})"):
        Checkpoints(kept.parent).restore(kept, *training())


@pytest.mark.parametrize(
    "told", [[], {**TOLD, "losses": ["a"]}, {**TOLD, "seconds": None}, {**TOLD, "history": [3]}, {"recipe": "a"}]
)
def test_what_a_checkpoint_tells_is_checked(kept, told):
    (kept / "training.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match="step-00000007 is no checkpoint of a training"):
        Checkpoints(kept.parent).told(kept, {"recipe": "a"})


def test_another_training_is_named_in_short(kept):
    with pytest.raises(ValueError, match="is a checkpoint of another training: recipe was 'a', is 'bbb") as caught:
        Checkpoints(kept.parent).told(kept, {"recipe": "b" * 10_000})
    assert len(str(caught.value)) < 800
