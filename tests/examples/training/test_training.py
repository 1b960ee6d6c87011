"""Training: its corpus, that it learns, that it repeats, and the command."""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from support.refusals import assert_refusals

from examples.training import metrics
from examples.training import trainer as training
from gnn_attention._support import progress
from gnn_attention.model import language_model as lm

SIZES = lm.Config(vocabulary_size=1, width=16, num_heads=2, head_dim=8, mlp_width=32, reach=4)
SHORT = training.Recipe(steps=20, batch=4, length=16, pieces=280, warmup=2, precision="float32")
QUICK = replace(SHORT, steps=2)
CORPUS = training.Corpus(
    {"a.py": "def one(x):\n    return x + 1\n" * 40}, {"b.py": "def two(x):\n    return x + 2\n" * 10}
)


@pytest.fixture(autouse=True)
def judged_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of trainings take most of the time here: fewer windows, shorter sequences."""
    monkeypatch.setattr(metrics, "_WINDOWS_JUDGED", 16)
    monkeypatch.setattr(metrics, "_WINDOWS_LOOKED_AT", 8)
    for name in ("induction_scores", "previous_token_scores"):
        monkeypatch.setattr(metrics, name, functools.partial(getattr(lm, name), length=8, samples=2))


@functools.cache
def standard_library() -> training.Corpus:
    return training.corpus()


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    training.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.slow
def test_the_corpus_is_the_standard_library_split_by_file() -> None:
    text = standard_library()
    names = set(text.training) | set(text.held_out)
    assert names >= {"ast.py", "asyncio/locks.py", "json/decoder.py"}
    assert not set(text.training) & set(text.held_out)
    assert 0.02 < len(text.held_out) / len(names) < 0.12
    skipped = {"test", "tests", "site-packages", "idlelib"}
    assert not [name for name in names if skipped & set(name.split("/"))]
    assert list(text.training) == sorted(text.training)


def test_the_split_knows_only_names(tmp_path: Path) -> None:
    for name in ("one.py", "two/three.py", "test/four.py", "_sysconfigdata_here.py", "note.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    text = training.corpus(tmp_path)
    assert set(text.training) | set(text.held_out) == {"one.py", "two/three.py"}
    whole = standard_library()
    (tmp_path / (chosen := next(iter(whole.held_out)))).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / chosen).write_text("another content\n")
    assert training.corpus(tmp_path).held_out == {chosen: "another content\n"}


def test_a_share_of_the_windows_repeats_itself() -> None:
    tokens = torch.arange(5000)
    for repeats, low, high in ((0.0, 0, 0), (0.25, 70, 130), (1.0, 400, 400)):
        recipe, generator = training.Recipe(batch=400, length=32), torch.Generator().manual_seed(0)
        window = training.windows(tokens, recipe, repeats, generator)
        steps = window.diff(dim=1)
        # text goes on by 1; where a stretch of n tokens begins again, back by n - 1
        back = steps.amin(1)
        assert low <= int((back < 0).sum()) <= high
        assert ((back == 1) | ((back <= -3) & (back >= -15))).all()
        assert ((steps == 1) | (steps == back.unsqueeze(1))).all()


@pytest.mark.parametrize(("precision", "gain"), [("float32", 0.3), ("bfloat16", 0.0)])
def test_training_lowers_the_loss_and_comes_back(precision: str, gain: float) -> None:
    """Torch's generator is left alone; another seed is another model."""
    recipe, before = replace(SHORT, steps=30, precision=precision), torch.get_rng_state()
    model, vocabulary, report = training.train(recipe, CORPUS, SIZES)
    assert report["held_out_loss"] < math.log(len(vocabulary)) - gain
    assert (report["steps"], report["tokens_seen"]) == (30, 30 * 4 * 16)
    other, _, _ = training.train(replace(recipe, steps=1, seed=1), CORPUS, SIZES)
    assert not torch.equal(other.embedding.weight, model.embedding.weight)
    again, words, _ = training.train(recipe, CORPUS, SIZES)
    assert torch.equal(torch.get_rng_state(), before)
    assert words == vocabulary
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
        assert torch.equal(tensor, tensor.half().float())


def test_minutes_end_it() -> None:
    _, _, report = training.train(replace(SHORT, steps=10**9), CORPUS, SIZES, minutes=0.002)
    assert 1 <= report["steps"] < 10**9
    assert report["command"].endswith("--minutes 0.002")


def test_progress_is_shown_only_with_the_option(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.001)
    monkeypatch.setattr(training, "_STEPS_BETWEEN_LOOKS", 10)
    _, _, report = training.train(SHORT, CORPUS, SIZES, progress=True)
    form = r"train: .*\| (\d+)/20 \[.* steps/s, loss \d\.\d{3}, [\d,]+ tokens/s(.*)\]"
    found = re.findall(form, capsys.readouterr().err)
    assert all(("held_out_loss" in note) == (int(step) >= 10) for step, note in found if step != "10")
    assert {int(step) < 10 for step, _ in found} == {True, False}
    assert [look["step"] for look in report["history"]] == [10, 20]
    training.train(QUICK, CORPUS, SIZES, progress=False)
    # stderr is no terminal here
    training.train(QUICK, CORPUS, SIZES)
    assert capsys.readouterr().err == ""


def test_the_rate_rises_and_falls() -> None:
    recipe = training.Recipe(steps=100, warmup=9, rate=1.0)
    rates = [training.rate(recipe, step, step / 100) for step in range(100)]
    assert_exact(rates[0], 0.1)
    assert rates.index(max(rates)) in (9, 10)
    # a hundredth before the end of a half cosine from 1 to 0.1
    assert_exact(rates[-1], 0.55 - 0.45 * math.cos(math.pi / 100))
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))


def test_the_defaults_made_the_shipped_weights() -> None:
    _, _, metadata = lm.load(lm.TRAINED)
    # older than the field
    recipe = {"graph": "", **metadata["recipe"]}
    assert recipe == asdict(training.Recipe())
    assert metadata["command"] == "gnn-attention train"
    assert metadata["steps"] == training.Recipe().steps
    args = parse()
    assert {field.name: getattr(args, field.name) for field in fields(training.Recipe)} == recipe


@pytest.mark.slow
def test_the_command_writes_a_file_and_reports(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(training, "corpus", lambda: CORPUS)
    out = tmp_path / "new.safetensors"
    assert training.run(parse("--out", str(out), "--steps", "3", "--pieces", "270", "--length", "16")) == 0
    said = capsys.readouterr().out
    for part in ("3 steps", "induction, layer 1", "previous token, layer 0", "def read(self, size=-1):"):
        assert part in said
    model, vocabulary, metadata = lm.load(out)
    assert model.config.vocabulary_size == len(vocabulary) == 270
    assert metadata["command"] == "python -m examples.training train --steps 3 --length 16 --pieces 270"
    assert [path.name for path in tmp_path.iterdir()] == ["new.safetensors"]
    for words, reason in (
        (["--out", str(tmp_path / "missing" / "new.safetensors")], "expected a folder that exists"),
        (["--out", str(out), "--batch", "0"], "batch must be at least 1, got 0"),
    ):
        assert training.run(parse(*words)) == 2
        assert reason in capsys.readouterr().err


def test_wrong_recipes_and_texts(tmp_path: Path) -> None:
    recipe, train = training.Recipe, training.train
    long = replace(SHORT, length=4096)
    assert_refusals(
        [
            (lambda: recipe(steps=0), ValueError, "steps must be at least 1, got 0"),
            (lambda: recipe(rate=0.0), ValueError, r"rate must be positive, got 0\.0"),
            (lambda: recipe(repeats=1.5), ValueError, r"a share from 0 to 1 and decay at least 0, got 1\.5"),
            (lambda: recipe(precision="float8"), ValueError, "one of 'float32', 'bfloat16', got 'float8'"),
            (lambda: recipe(graph=3), TypeError, "graph must be an expression such as 'causal.128.', got 3"),
            (lambda: training.corpus(tmp_path), ValueError, r"holds no \*\.py files"),
            (lambda: train(SHORT, training.Corpus(3, {})), TypeError, "a mapping from file names"),
            (lambda: train(long, CORPUS, SIZES), ValueError, "expected more than length = 4096"),
            (lambda: train(SHORT, CORPUS, SIZES, minutes=0.0), ValueError, "minutes must be positive, got 0"),
        ]
    )
