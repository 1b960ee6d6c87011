"""The small model runs along any graph on every backend, is saved and loaded, and generates text."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.bounds import assert_exact, error
from support.refusals import assert_refusals

from gnn_attention import algebra, patterns
from gnn_attention import model as lm
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.cache import KeyValueCache
from gnn_attention.convert import expressions
from gnn_attention.model.tokenizer import BytePair

TEXT = "def read(self, size=-1):\n    return self.raw.read(size)\n"
TINY = lm.Config(vocabulary_size=260, width=16, num_heads=2, head_dim=8, mlp_width=32, reach=4)
SCORES = {"induction_scores": lm.induction_scores, "previous_token_scores": lm.previous_token_scores}


@pytest.fixture(scope="module")
def shipped() -> tuple[lm.LanguageModel, BytePair, dict[str, Any]]:
    return lm.load(lm.TRAINED)


@pytest.fixture(scope="module")
def exact() -> tuple[lm.LanguageModel, torch.Tensor]:
    """Return the shipped model in float64, and tokens."""
    model, vocabulary = lm.load_trained()
    return model.double(), torch.tensor([vocabulary.encode(TEXT)])


@pytest.fixture(scope="module")
def scores(exact: Any) -> dict[str, torch.Tensor]:
    """Return the scores of the shipped model's heads in float64, on the sequences of its training report."""
    return {name: score(exact[0]) for name, score in SCORES.items()}


@pytest.fixture
def tiny() -> lm.LanguageModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return lm.LanguageModel(TINY).double()


@torch.no_grad()
def test_logits_are_equal_over_backends(exact: Any) -> None:
    model, tokens = copy.deepcopy(exact[0]), exact[1]
    assert model.backend == "auto"
    expected = model(tokens)
    # These do not support a learned score_mod, or a CPU.
    unsupported = ("mixed", "flex", "varlen")
    for backend in (*(name for name in BACKENDS if name not in unsupported),):
        model.backend = backend
        assert model.backend == backend
        assert_exact(model(tokens), expected)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["auto", "dense", "reference", "message_passing"])
def test_S2_5_what_comes_later_changes_no_bit_of_what_was_said(tiny: Any, backend: str) -> None:
    tiny.backend = backend
    tokens = torch.arange(12).view(1, 12)
    changed_tokens = tokens.clone()
    changed_tokens[0, 7] = 99
    logits, changed_logits = tiny(tokens), tiny(changed_tokens)
    assert torch.equal(logits[:, :7], changed_logits[:, :7])
    assert (logits[:, 7:] != changed_logits[:, 7:]).any(-1).all()


@torch.no_grad()
def test_any_graph_may_be_given(tiny: lm.LanguageModel) -> None:
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(tiny(tokens), tiny(tokens, patterns.causal(12)))
    graphs = [patterns.window(12, 3), patterns.full(12), patterns.strict_causal(12)]
    expected = [tiny(tokens, graph) for graph in graphs]
    # Each token attends only to itself, so its logits are a function of the token.
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


def test_the_shipped_file_is_small_and_says_how_it_was_made(shipped: Any, scores: Any) -> None:
    model, vocabulary, metadata = shipped
    assert lm.TRAINED.stat().st_size <= 2_000_000
    assert set(metadata) >= {"recipe", "seed", "training_loss", "held_out_loss", "corpus_sha256", *SCORES}
    uniform_loss = math.log(model.config.vocabulary_size)
    assert metadata["uniform_loss"] == round(uniform_loss, 4)
    assert metadata["training_loss"] < metadata["held_out_loss"] < uniform_loss / 2
    assert (model.training, len(vocabulary)) == (False, model.config.vocabulary_size)
    for name, score in scores.items():
        # The report rounds scores to four digits.
        assert error(score, torch.tensor(metadata[name], dtype=torch.float64)) <= 0.5e-4


def test_a_file_comes_back(tiny: lm.LanguageModel, tmp_path: Path) -> None:
    vocabulary = BytePair(tuple((bytes([97 + i]), b"x") for i in range(4)))
    lm.save(tmp_path / "tiny.safetensors", tiny, vocabulary, {"seed": 3, "scores": [[0.5]]})
    rng_state = torch.get_rng_state()
    result, words, metadata = lm.load(tmp_path / "tiny.safetensors")
    assert (result.config, words, metadata) == (TINY, vocabulary, {"seed": 3, "scores": [[0.5]]})
    for name, tensor in tiny.state_dict().items():
        assert torch.equal(result.state_dict()[name], tensor.half().float())
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert all(parameter.requires_grad for parameter in result.parameters())


def test_scores_of_known_heads(tiny: lm.LanguageModel) -> None:
    """A head whose bias leaves only one distance has known scores."""
    with torch.no_grad():
        for layer in tiny.layers:
            layer.score_mod.table.fill_(-100.0)
            # Head 0 attends to the previous token, head 1 to the third before, as induction does at length 4.
            layer.score_mod.table[[0, 1], [TINY.reach + 1, TINY.reach + 3]] = 100.0
    ones, zeros = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    previous = lm.previous_token_scores(tiny, samples=4)
    assert_exact(previous[:, 0], ones)
    # Of 127 receivers, 1 and 2 have no third token before and may have any weight.
    assert (previous[:, 1] <= 2 / 127).all()
    assert_exact(lm.induction_scores(tiny, length=4, samples=4), torch.stack([zeros, ones], 1))


EMPTY = torch.zeros(0, dtype=torch.int64)
WRONG_CALLS: list[tuple[Callable[[lm.LanguageModel], object], type[Exception], str]] = [
    (lambda tiny: tiny(torch.tensor([1, 2])), ValueError, r"tokens must be \[B, T\], got shape \[2\];"),
    (lambda tiny: tiny(torch.tensor([[-1, 260]])), IndexError, r"tokens must be in 0 \.\. 259, .*, got -1"),
    (lambda tiny: tiny(torch.tensor([[1, 2, 3]]), patterns.causal(4)), ValueError, "does not fit x with 3"),
    (lambda tiny: lm.LanguageModel(TINY, backend="fast")(torch.tensor([[1]])), ValueError, "backend must be"),
    (lambda tiny: lm.Config(vocabulary_size=3, num_heads=0), ValueError, "num_heads must be at least 1, got"),
    (lambda tiny: lm.generate(tiny, EMPTY, 3), ValueError, "generate needs tokens"),
]


def test_wrong_calls(tiny: lm.LanguageModel) -> None:
    assert_refusals((partial(call, tiny), error, match) for call, error, match in WRONG_CALLS)


def test_wrong_files(tiny: lm.LanguageModel, tmp_path: Path) -> None:
    path, words = tmp_path / "other.safetensors", BytePair(tuple((bytes([97 + i]), b"x") for i in range(4)))
    with pytest.raises(ValueError, match="vocabulary has 256 pieces, but the model 260"):
        lm.save(path, tiny, BytePair(), {})
    with pytest.raises(ValueError, match=r"metadata has \['config'\], which save writes itself"):
        lm.save(path, tiny, words, {"config": 1})
    assert not path.exists()
    texts, eye = {"vocabulary": BytePair().to_json(), "config": '{"vocabulary_size": 256}'}, torch.eye(2)
    for tensors, metadata, match in (
        ({"a": eye}, {}, r"other\.safetensors holds no language model: KeyError:"),
        ({"a": eye, "b": eye.clone()}, texts, "holds no language model: RuntimeError"),
    ):
        safetensors.torch.save_file(tensors, path, metadata)
        with pytest.raises(ValueError, match=match):
            lm.load(path)


@pytest.mark.slow
def test_a_model_compiles_without_being_given_a_graph() -> None:
    """A program makes the causal graph itself, and accepts other lengths and another graph."""
    torch.compiler.reset()
    trained = lm.load_trained()[0].double()
    program = torch.compile(trained, backend="eager")
    tokens = torch.arange(8).unsqueeze(0)
    for length in (8, 6, 5):
        assert_exact(program(tokens[:, :length]), trained(tokens[:, :length]))
    window = patterns.window(8, 2)
    assert_exact(program(tokens, window), trained(tokens, window))


GRAPHS = ["causal(99)", "window(99, 8) | sinks(99, 2)", "dilated(99, 6, 3)", "prefix(99, 3)", "window(99, 1)"]


def test_generate_continues_and_comes_back(tiny: lm.LanguageModel) -> None:
    tokens = torch.tensor([1, 2, 3])
    output = lm.generate(tiny, tokens, 5, seed=3)
    assert torch.equal(output[:3], tokens)
    assert len(output) == 8
    assert torch.equal(output, lm.generate(tiny, tokens, 5, seed=3))
    most_likely = lm.generate(tiny, tokens, 1, temperature=0.0)
    assert int(most_likely[-1]) == int(tiny(tokens[None])[0, -1].argmax())
    assert torch.equal(lm.generate(tiny, tokens, 1, temperature=1e-6), most_likely)


@torch.no_grad()
def is_greedy(model: lm.LanguageModel, tokens: torch.Tensor, start: int, graph: Any) -> bool:
    """Return whether each token from ``start`` on is the most likely one in a single float64 pass."""
    logits = model(tokens[None], algebra.restrict(graph, range(len(tokens))))[0, start - 1 : -1]
    first, second = logits.topk(2).values.unbind(-1)
    assert logits.dtype == torch.float64
    assert (first - second > 1e-4 * first.abs()).all()
    return torch.equal(logits.argmax(-1), tokens[start:])


@pytest.mark.parametrize("text", GRAPHS)
def test_the_same_tokens_as_without_a_cache(exact: Any, text: str) -> None:
    model, graph, prompt = exact[0], expressions.parse(text), exact[1][0, :5]
    output = lm.generate(model, prompt, 24, temperature=0.0, graph=graph)
    assert torch.equal(output[: len(prompt)], prompt)
    assert len(output) == len(prompt) + 24
    assert is_greedy(model, output, len(prompt), graph)


def test_message_passing_has_no_cache_and_generates_the_same(tiny: lm.LanguageModel) -> None:
    tokens, graph = torch.tensor([5, 9, 2]), patterns.window(30, 3)
    expected = lm.generate(tiny, tokens, 9, seed=4, graph=graph)
    tiny.backend = "message_passing"
    assert torch.equal(lm.generate(tiny, tokens, 9, seed=4, graph=graph), expected)
    needs_all = r"the message-passing path and hooks .* need all tokens at once"
    with pytest.raises(NotImplementedError, match=needs_all):
        tiny.proceed(tokens[None], KeyValueCache(graph, 2))


def test_edges_that_are_cut_stay_cut(tiny: lm.LanguageModel) -> None:
    """A hook that changes the edges of a layer changes the generated tokens."""
    tokens, graph = torch.tensor([5, 9, 2]), patterns.window(30, 6)
    expected = lm.generate(tiny, tokens, 20, temperature=0.0, graph=graph).tolist()

    def keep_self_loops(layer: torch.nn.Module, args: Any) -> Any:
        return args[0], patterns.window(args[1].num_dst, 1)

    for module in (tiny.layers[1], tiny.blocks[0]):
        hook = module.register_forward_pre_hook(keep_self_loops)
        output = lm.generate(tiny, tokens, 20, temperature=0.0, graph=graph)
        assert output.tolist() != expected
        assert is_greedy(tiny, output, 3, graph)
        with pytest.raises(NotImplementedError, match="hooks on blocks need all tokens at once"):
            lm.generate(tiny, tokens, 20, cache=KeyValueCache(graph, TINY.num_layers))
        hook.remove()
    assert lm.generate(tiny, tokens, 20, temperature=0.0, graph=graph).tolist() == expected


def test_a_cache_goes_on_where_it_was(tiny: lm.LanguageModel) -> None:
    """Two calls continue one text, although the second call gets only the new tokens."""
    tokens, graph = torch.tensor([5, 9, 2]), patterns.window(40, 6) | patterns.sinks(40, 1)
    cache = KeyValueCache(graph, TINY.num_layers)
    first = lm.generate(tiny, tokens, 5, temperature=0.0, cache=cache)
    # The last token is not yet in the cache.
    assert cache.length == 7
    turn = torch.tensor([*first[-1:].tolist(), 77, 78])
    second = lm.generate(tiny, turn, 6, temperature=0.0, cache=cache)
    assert second.tolist()[:3] == turn.tolist()
    text = torch.cat([first[:-1], turn])
    assert is_greedy(tiny, torch.cat([first[:-1], second]), len(text), graph)


def raise_error(call: Any) -> Any:
    raise ValueError("refused in the second block")


def test_wrong_arguments(tiny: lm.LanguageModel) -> None:
    """Wrong arguments raise errors, after which the cache is unchanged."""
    tokens, cache = torch.tensor([1, 2, 3]), KeyValueCache(patterns.causal(9), TINY.num_layers)
    too_small = "graph must have at least 13 tokens"
    cache_options = {"graph": patterns.window(9, 2), "cache": cache}
    cases: list[tuple[str, int, dict[str, Any]]] = [
        (rf"{too_small}, old and new, got .*causal\(9\)", 10, {"graph": patterns.causal(9)}),
        (too_small, 10, {"cache": cache}),
        (r"this is a cache of TokenGraph\(causal\(9\).*, got TokenGraph\(window\(9, 2\)", 2, cache_options),
        ("attends to sender 4, .* must have at least 5", 3, {"graph": patterns.prefix(9, 5)}),
    ]
    for message, count, options in cases:
        with pytest.raises(ValueError, match=message):
            lm.generate(tiny, tokens, count, **options)
    with pytest.raises(ValueError, match="cache must have 2 layers, like the model, got 1"):
        tiny.proceed(tokens[None], KeyValueCache(patterns.causal(9)))
    tiny.layers[1].backend = Backend("own", raise_error)
    with pytest.raises(ValueError, match="refused in the second block"):
        tiny.proceed(tokens[None], cache)
    tiny.layers[1].backend = "auto"
    assert cache.length == 0
    assert_exact(tiny.proceed(tokens[None], cache), tiny(tokens[None]))
