"""A training lowers the loss, is reproducible, resumes from checkpoints and has a command."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import asdict, fields, replace

import pytest
import torch
from support.refusals import assert_refusals

from examples.training import Checkpoint, Corpus, Recipe, corpus, metrics, recipe, train, trainer
from examples.training.__main__ import main
from gnn_attention.model import language_model as lm

SIZES = lm.Config(vocabulary_size=1, width=16, num_heads=2, head_dim=8, mlp_width=32, reach=4)
SHORT = Recipe(steps=20, batch=4, length=16, pieces=280, warmup=2, precision="float32")
CORPUS = Corpus(
    {"a.py": "def one(x):\n    return x + 1\n" * 40}, {"b.py": "def two(x):\n    return x + 2\n" * 10}
)


@pytest.fixture(autouse=True)
def short_reports(monkeypatch):
    """Use few windows and short sequences, because reports take most of the time."""
    monkeypatch.setattr(metrics, "_REPORT_WINDOWS", 16)
    monkeypatch.setattr(metrics, "_HISTORY_WINDOWS", 8)
    for name in ("induction_scores", "previous_token_scores"):
        monkeypatch.setattr(metrics, name, functools.partial(getattr(lm, name), length=8, samples=2))


def test_the_corpus_is_split_by_the_names_of_its_files(tmp_path):
    """A file keeps its part if its content changes; tests, generated files and other text are left out."""
    for name in ("one.py", "two/three.py", "test/four.py", "_sysconfigdata_here.py", "note.txt", "five.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    text = corpus(tmp_path)
    assert set(text.training) | set(text.held_out) == {"one.py", "two/three.py", "five.py"}
    (tmp_path / "one.py").write_text("another content\n")
    changed = corpus(tmp_path)
    assert (changed.training.keys(), changed.held_out.keys()) == (text.training.keys(), text.held_out.keys())


def test_a_share_of_the_windows_repeats_a_stretch():
    tokens = torch.arange(5000)
    for repeats, low, high in ((0.0, 0, 0), (0.25, 70, 130), (1.0, 400, 400)):
        settings, generator = Recipe(batch=400, length=32), torch.Generator().manual_seed(0)
        window = recipe.windows(tokens, settings, repeats, generator)
        steps = window.diff(dim=1)
        # A token is the one before plus 1, or minus n - 1 where a stretch of n tokens starts again.
        back = steps.amin(1)
        assert low <= int((back < 0).sum()) <= high
        assert ((back == 1) | ((back <= -3) & (back >= -15))).all()
        assert ((steps == 1) | (steps == back.unsqueeze(1))).all()


@pytest.mark.parametrize(("precision", "gain"), [("float32", 0.3), ("bfloat16", 0.0)])
def test_training_lowers_the_loss_and_is_reproducible(precision, gain):
    """The global generator of torch stays unchanged; another seed gives another model."""
    settings, before = replace(SHORT, steps=30, precision=precision), torch.get_rng_state()
    model, vocabulary, report = train(settings, CORPUS, SIZES)
    assert report["held_out_loss"] < math.log(len(vocabulary)) - gain
    assert (report["steps"], report["tokens_seen"]) == (30, 30 * 4 * 16)
    other, _, _ = train(replace(settings, steps=1, seed=1), CORPUS, SIZES)
    assert not torch.equal(other.embedding.weight, model.embedding.weight)
    again, words, _ = train(settings, CORPUS, SIZES)
    assert torch.equal(torch.get_rng_state(), before)
    assert words == vocabulary
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
        assert torch.equal(tensor, tensor.half().float())


def test_minutes_limit_the_training():
    _, _, report = train(replace(SHORT, steps=10**9), CORPUS, SIZES, minutes=0.002)
    assert 1 <= report["steps"] < 10**9
    assert report["command"].endswith("--minutes 0.002")


def test_the_defaults_made_the_shipped_weights():
    _, _, metadata = lm.load(lm.TRAINED)
    # The recipe in the file is older than its field "graph".
    assert {"graph": "", **metadata["recipe"]} == asdict(Recipe())
    assert metadata["steps"] == Recipe().steps


class StoppedError(Exception):
    pass


def losses_of(checkpoint=None, stop=None, settings=SHORT):
    """Return the losses and parameters of a training that stops after step ``stop``."""
    losses = []

    def watch(step, loss):
        losses.append(loss)
        if step == stop:
            raise StoppedError

    model, _, _ = train(settings, CORPUS, SIZES, watch=watch, checkpoint=checkpoint)
    return losses, model.state_dict()


class TestCheckpoint:
    def test_a_resumed_training_is_identical(self, tmp_path):
        """Losses and parameters agree bit by bit; the seconds before the interruption are counted."""
        expected, parameters = losses_of()
        checkpoint = Checkpoint(tmp_path / "saved.pt", every=6)
        with pytest.raises(StoppedError):
            losses_of(checkpoint, stop=15)
        state = torch.load(checkpoint.file, weights_only=True)
        state["record"]["seconds"] = 1000.0
        torch.save(state, checkpoint.file)
        losses, resumed = losses_of(checkpoint)
        assert losses == expected[12:]
        assert all(torch.equal(parameters[name], resumed[name]) for name in parameters)
        assert [file.name for file in tmp_path.iterdir()] == ["saved.pt"]
        _, _, report = train(SHORT, CORPUS, SIZES, checkpoint=checkpoint)
        assert 1000 < report["seconds"] < 1100
        assert losses_of(checkpoint)[0] == []

    def test_other_files_are_refused(self, tmp_path):
        checkpoint = Checkpoint(tmp_path / "saved.pt", every=2)
        losses_of(checkpoint, settings=replace(SHORT, steps=2))
        with pytest.raises(ValueError, match=r"saved\.pt is a checkpoint of another training, whose recipe"):
            losses_of(checkpoint)
        content = checkpoint.file.read_bytes()
        for damaged in (content[:100], content[: len(content) // 2], b"", b"{}"):
            checkpoint.file.write_bytes(damaged)
            with pytest.raises(ValueError, match=r"saved\.pt is not a checkpoint of a training: "):
                losses_of(checkpoint)
        with pytest.raises(ValueError, match="expected a folder that exists"):
            Checkpoint(tmp_path / "missing" / "saved.pt")


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "corpus", lambda: CORPUS)
    words = ["--out", str(tmp_path / "new.safetensors"), "--steps", "3", "--pieces", "270", "--length", "16"]
    return lambda *options: main(["train", *words, *options])


@pytest.mark.slow
def test_the_command_writes_a_file_and_reports(command, tmp_path, capsys):
    assert command() == 0
    output = capsys.readouterr().out
    for text in ("3 steps", "induction, layer 1", "previous token, layer 0", "def read(self, size=-1):"):
        assert text in output
    model, vocabulary, metadata = lm.load(tmp_path / "new.safetensors")
    assert model.config.vocabulary_size == len(vocabulary) == 270
    assert metadata["command"] == "python -m examples.training train --steps 3 --length 16 --pieces 270"
    assert [path.name for path in tmp_path.iterdir()] == ["new.safetensors"]
    options = {field.name: metadata["recipe"][field.name] for field in fields(Recipe)}
    assert options == asdict(Recipe(steps=3, pieces=270, length=16))
    assert json.loads(json.dumps(metadata)) == metadata


def test_an_interrupted_command_names_its_checkpoint(command, tmp_path, monkeypatch, capsys):
    def step(fit, *_):
        fit.losses.append(1.0)
        if len(fit.losses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(trainer._Fit, "step", step)
    saved = ["--checkpoint", f"{tmp_path}/saved.pt", "--every"]
    for options, code, message in (
        ([*saved, "10"], 130, "interrupted: nothing was written"),
        ([*saved, "2"], 130, f"interrupted: the same command resumes from {tmp_path}/saved.pt"),
        (["--heads", "2"], 2, "need several ranks: use torchrun"),
        (["--batch", "0"], 2, "batch must be at least 1, got 0"),
        (["--out", f"{tmp_path}/none/new.safetensors"], 2, "expected a folder that exists"),
    ):
        assert command(*options) == code
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new.safetensors").exists()


def test_wrong_recipes_and_texts(tmp_path):
    long = replace(SHORT, length=4096)
    assert_refusals(
        [
            (lambda: Recipe(rate=0.0), ValueError, r"rate must be positive, got 0\.0"),
            (lambda: Recipe(repeats=1.5), ValueError, r"from 0 to 1 and decay at least 0, got 1\.5 and"),
            (lambda: Recipe(precision="float8"), ValueError, "one of 'float32', 'bfloat16', got 'float8'"),
            (lambda: Recipe(graph=3), TypeError, "graph must be an expression such as 'causal.128.', got 3"),
            (lambda: Recipe(graph="causal(9)"), ValueError, "graph must have length = 128 tokens"),
            (lambda: corpus(tmp_path), ValueError, r"root must be a folder with \*\.py files"),
            (lambda: train(long, CORPUS, SIZES), ValueError, "must have more than length = 4096 tokens"),
        ]
    )
