"""The model: its phases, its graphs and backends, its file, and what the trained heads do."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bounds import assert_exact, error
from support.refusals import assert_refusals

from gnn_attention import model as lm
from gnn_attention import patterns
from gnn_attention.backends import BACKENDS
from gnn_attention.model import weights
from gnn_attention.model.tokenizer import BytePair

TEXT = "def read(self, size=-1):\n    return self.raw.read(size)\n"
TINY = lm.Config(vocabulary_size=260, width=16, num_heads=2, head_dim=8, mlp_width=32, reach=4)
SCORES = {"induction_scores": lm.induction_scores, "previous_token_scores": lm.previous_token_scores}


@pytest.fixture(scope="module")
def shipped() -> tuple[lm.LanguageModel, BytePair, dict[str, Any]]:
    return lm.load(lm.TRAINED)


@pytest.fixture(scope="module")
def exact() -> tuple[lm.LanguageModel, torch.Tensor]:
    """The shipped model in float64, and tokens."""
    model, vocabulary = lm.load_trained()
    return model.double(), torch.tensor([vocabulary.encode(TEXT)])


@pytest.fixture(scope="module")
def scores(exact: Any) -> dict[str, torch.Tensor]:
    """What the shipped model's heads do, in float64, on the sequences of its training's report."""
    return {name: score(exact[0]) for name, score in SCORES.items()}


@pytest.fixture
def tiny() -> lm.LanguageModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return lm.LanguageModel(TINY)


@torch.no_grad()
def test_logits_are_equal_over_backends(exact: Any) -> None:
    model, tokens = copy.deepcopy(exact[0]), exact[1]
    assert model.backend == "auto"
    expected = model(tokens)
    others = ("mixed", "flex", "varlen")  # not for a learned score_mod, or a CPU
    for backend in (*(name for name in BACKENDS if name not in others),):
        model.backend = backend
        assert model.backend == backend
        assert_exact(model(tokens), expected)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["auto", "dense", "reference", "message_passing"])
def test_what_comes_later_changes_no_bit_of_what_was_said(tiny: Any, backend: str) -> None:
    tiny.backend = backend
    tokens = torch.arange(12).view(1, 12)
    changed = tokens.clone()
    changed[0, 7] = 99
    before, after = tiny(tokens), tiny(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


@torch.no_grad()
def test_any_graph_may_be_given(tiny: lm.LanguageModel) -> None:
    tiny, tokens = tiny.double(), torch.arange(24).view(2, 12)
    assert torch.equal(tiny(tokens), tiny(tokens, patterns.causal(12)))
    graphs = [patterns.window(12, 3), patterns.full(12), patterns.strict_causal(12)]
    expected = [tiny(tokens, graph) for graph in graphs]
    # each token attends to itself: the logits are a function of the token
    assert_exact(tiny(tokens, patterns.window(12, 1))[:, 5:6], tiny(tokens[:, 5:6]))
    tiny.backend = "message_passing"
    assert_exact([tiny(tokens, graph) for graph in graphs], expected)


@torch.no_grad()
def test_updates_sum_to_what_changed(exact: Any) -> None:
    model, tokens = exact
    states, graph = model.states(tokens), patterns.causal(tokens.shape[1])
    assert len(states) == 2 * model.config.num_layers + 1
    updates = []
    for block, state, middle in zip(model.blocks, states[::2], states[1::2], strict=False):
        updates += [block.communicate(state, graph), block.compute(middle)]
        assert_exact(block(state, graph), state + updates[-2] + updates[-1])
    assert_exact(sum(updates), states[-1] - states[0])
    logits = model.unembedding(model.norm(states[-1]))
    assert torch.equal(logits, model(tokens))


def test_generate_continues_and_comes_back(tiny: lm.LanguageModel) -> None:
    tokens = torch.tensor([1, 2, 3])
    drawn = lm.generate(tiny, tokens, 5, seed=3)
    assert torch.equal(drawn[:3], tokens)
    assert len(drawn) == 8
    assert torch.equal(drawn, lm.generate(tiny, tokens, 5, seed=3))
    likeliest = lm.generate(tiny, tokens, 1, temperature=0.0)
    assert int(likeliest[-1]) == int(tiny(tokens[None])[0, -1].argmax())
    assert torch.equal(lm.generate(tiny, tokens, 1, temperature=1e-6), likeliest)


@pytest.mark.slow
def test_the_shipped_file_is_small_and_says_how_it_was_made(shipped: Any, exact: Any, scores: Any) -> None:
    model, vocabulary, metadata = shipped
    assert lm.TRAINED.stat().st_size <= 2_000_000
    assert set(metadata) >= {"recipe", "seed", "training_loss", "held_out_loss", "corpus_sha256", *SCORES}
    nothing = math.log(model.config.vocabulary_size)
    assert metadata["uniform_loss"] == round(nothing, 4)
    assert metadata["training_loss"] < metadata["held_out_loss"] < nothing / 2
    assert not model.training
    assert len(vocabulary) == model.config.vocabulary_size
    assert {tensor.dtype for tensor in weights.load(lm.TRAINED)[0].values()} == {torch.float16}
    for name, score in SCORES.items():
        # Half of the fourth digit, and what float32, in which it was measured, may be off: twice its error on
        # fewer sequences.
        allowed = 0.5e-4 + 2 * error(score(model, samples=2), score(exact[0], samples=2))
        assert error(scores[name], torch.tensor(metadata[name], dtype=torch.float64)) <= allowed


def test_a_file_comes_back(tiny: lm.LanguageModel, tmp_path: Path) -> None:
    vocabulary = BytePair(tuple((bytes([97 + i]), b"x") for i in range(4)))
    lm.save(tmp_path / "tiny.safetensors", tiny, vocabulary, {"seed": 3, "scores": [[0.5]]})
    before = torch.get_rng_state()
    back, words, metadata = lm.load(tmp_path / "tiny.safetensors")
    assert (back.config, words, metadata) == (TINY, vocabulary, {"seed": 3, "scores": [[0.5]]})
    for name, tensor in tiny.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor.half().float())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.requires_grad for parameter in back.parameters())


def test_induction_rests_on_the_edges_to_the_token_before(shipped: Any, scores: Any) -> None:
    induction, previous = scores["induction_scores"], scores["previous_token_scores"]
    assert induction[1].max() > 0.45  # even listening gives about 0.01
    assert induction[0].max() < 0.05  # layer 0 cannot know what came before a token
    assert previous[0].max() > 0.5
    model, length = shipped[0], 64
    assert lm.induction_scores(model, length, samples=2, graph=patterns.window(2 * length, 2)).max() == 0
    # Here every edge to the token after the earlier occurrence is left; what it rests on, in layer 0, is cut.
    left = patterns.causal(2 * length) - (patterns.window(2 * length, 2) - patterns.window(2 * length, 1))
    assert lm.induction_scores(model, length, samples=4, graph=left).max() < induction.max() / 20


def test_scores_of_known_heads(tiny: lm.LanguageModel) -> None:
    """A bias that leaves one distance alone makes a head whose scores are known."""
    tiny = tiny.double()
    with torch.no_grad():
        for layer in tiny.layers:
            layer.score_mod.table.fill_(-100.0)
            # head 0 attends to the token before, head 1 to the third before, where length 4 has induction
            layer.score_mod.table[[0, 1], [TINY.reach + 1, TINY.reach + 3]] = 100.0
    ones, zeros = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    previous = lm.previous_token_scores(tiny, samples=4)
    assert_exact(previous[:, 0], ones)
    # receivers 1 and 2 have no third before: any weight there, of 127 receivers
    assert (previous[:, 1] <= 2 / 127).all()
    assert_exact(lm.induction_scores(tiny, length=4, samples=4), torch.stack([zeros, ones], 1))


EMPTY = torch.zeros(0, dtype=torch.int64)
WRONG: list[tuple[Callable[[lm.LanguageModel], object], type[Exception], str]] = [
    (lambda tiny: tiny(torch.tensor([1, 2])), ValueError, r"tokens must be \[B, T\], got shape \[2\];"),
    (lambda tiny: tiny(torch.tensor([[-1, 260]])), IndexError, r"tokens must be in 0 \.\. 259, .*, got -1"),
    (lambda tiny: tiny(torch.tensor([[1, 2, 3]]), patterns.causal(4)), ValueError, "does not fit x with 3"),
    (lambda tiny: lm.LanguageModel(TINY, backend="fast")(torch.tensor([[1]])), ValueError, "backend must be"),
    (lambda tiny: lm.Config(vocabulary_size=3, num_heads=0), ValueError, "num_heads must be at least 1, got"),
    (lambda tiny: lm.generate(tiny, EMPTY, 3), ValueError, "generate needs a first token"),
]


def test_wrong_calls(tiny: lm.LanguageModel) -> None:
    assert_refusals((partial(call, tiny), error, match) for call, error, match in WRONG)


def test_wrong_files(tiny: lm.LanguageModel, tmp_path: Path) -> None:
    path, words = tmp_path / "other.safetensors", BytePair(tuple((bytes([97 + i]), b"x") for i in range(4)))
    with pytest.raises(ValueError, match="vocabulary has 256 pieces: expected 260"):
        lm.save(path, tiny, BytePair(), {})
    with pytest.raises(ValueError, match=r"metadata has \['config'\], which save writes itself"):
        lm.save(path, tiny, words, {"config": 1})
    assert not path.exists()
    texts, eye = {"vocabulary": BytePair().to_json(), "config": '{"vocabulary_size": 256}'}, torch.eye(2)
    huge = {"config": '{"vocabulary_size": 256, "width": 2147483648}'}
    for tensors, metadata, match in (
        ({"a": eye, "b": eye}, texts | huge, r"a size of 2\*\*31 or more"),
        ({"a": eye}, {}, r"other\.safetensors holds no language model: KeyError:"),
        ({"a": eye}, texts, "its config says 2 layers, it holds 1 tensors"),
        ({"a": eye, "b": eye.long()}, texts, "its tensor 'b' is torch.int64, expected floating point"),
        ({"a": eye, "b": eye}, texts, "holds no language model: RuntimeError"),
    ):
        weights.save(path, tensors, metadata)
        with pytest.raises(ValueError, match=match):
            lm.load(path)


@pytest.mark.slow
def test_a_model_compiles_without_being_given_a_graph() -> None:
    """Its causal graph is made in between; other lengths and a graph of one's own are served too."""
    torch.compiler.reset()
    trained = lm.load_trained()[0].double()
    compiled = torch.compile(trained, backend="eager")
    tokens = torch.arange(8).unsqueeze(0)
    for length in (8, 6, 5):
        assert_exact(compiled(tokens[:, :length]), trained(tokens[:, :length]))
    window = patterns.window(8, 2)
    assert_exact(compiled(tokens, window), trained(tokens, window))
