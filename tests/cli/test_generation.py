"""The model goes on with a text: through a cache exactly as without one; and the command
``gnn-attention generate``.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support.bounds import assert_exact

from gnn_attention import algebra, patterns
from gnn_attention import model as lm
from gnn_attention.__main__ import main
from gnn_attention.cache import KeyValueCache
from gnn_attention.cli import generate
from gnn_attention.convert import expressions
from gnn_attention.model.tokenizer import BytePair

PROMPT, COUNT = "def read(", 24
GRAPHS = ["causal(99)", "window(99, 8) | sinks(99, 2)", "dilated(99, 6, 3)", "prefix(99, 3)", "window(99, 1)"]
TINY = lm.Config(vocabulary_size=260, width=16, num_heads=2, head_dim=8, mlp_width=32, reach=4)


@pytest.fixture(scope="module")
def shipped() -> tuple[lm.LanguageModel, BytePair]:
    model, vocabulary = lm.load_trained()
    return model.double(), vocabulary


@pytest.fixture
def tiny() -> lm.LanguageModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return lm.LanguageModel(TINY).double()


def prompt_of(vocabulary: BytePair) -> torch.Tensor:
    return torch.tensor(vocabulary.encode(PROMPT))


@torch.no_grad()
def is_greedy(model: lm.LanguageModel, tokens: torch.Tensor, start: int, graph: Any) -> bool:
    """Each token from ``start`` on is the likeliest after those before it, in one pass over all of them, in
    float64.

    No rounding, of float32 neither, decides which token is the likeliest: the next one is clearly behind it.
    """
    logits = model(tokens[None], algebra.restrict(graph, range(len(tokens))))[0, start - 1 : -1]
    first, second = logits.topk(2).values.unbind(-1)
    assert logits.dtype == torch.float64
    assert (first - second > 1e-4 * first.abs()).all()
    return torch.equal(logits.argmax(-1), tokens[start:])


@pytest.mark.parametrize("text", GRAPHS)
def test_the_same_tokens_as_without_a_cache(shipped: Any, text: str) -> None:
    model, vocabulary = shipped
    graph, prompt = expressions.parse(text), prompt_of(vocabulary)
    found = lm.generate(model, prompt, COUNT, temperature=0.0, graph=graph)
    assert torch.equal(found[: len(prompt)], prompt)
    assert len(found) == len(prompt) + COUNT
    assert is_greedy(model, found, len(prompt), graph)


@pytest.mark.parametrize("size", [1, 3, 7])
@torch.no_grad()
def test_logits_are_those_of_the_full_pass(shipped: Any, size: int) -> None:
    model, vocabulary = shipped
    tokens = torch.tensor([vocabulary.encode(PROMPT * 20)[:24], list(range(24))])
    for graph in (patterns.causal(24), patterns.window(24, 8) | patterns.sinks(24, 2)):
        cache = KeyValueCache(graph, model.config.num_layers)
        found = torch.cat([model.proceed(part, cache) for part in tokens.split(size, dim=1)], dim=1)
        assert_exact(found, model(tokens, graph))


def test_the_walk_has_no_cache_and_says_the_same(tiny: lm.LanguageModel) -> None:
    tokens, graph = torch.tensor([5, 9, 2]), patterns.window(30, 3)
    wanted = lm.generate(tiny, tokens, 9, seed=4, graph=graph)
    tiny.backend = None
    assert torch.equal(lm.generate(tiny, tokens, 9, seed=4, graph=graph), wanted)
    with pytest.raises(
        NotImplementedError,
        match=r"the message-passing path \(backend=None\) and hooks .* need all tokens at once",
    ):
        tiny.proceed(tokens[None], KeyValueCache(graph, 2))


def test_edges_that_are_cut_stay_cut(tiny: lm.LanguageModel) -> None:
    """A hook that changes what a layer hears is not passed by: the tokens are those of the changed model."""
    tokens, graph = torch.tensor([5, 9, 2]), patterns.window(30, 6)
    whole = lm.generate(tiny, tokens, 20, temperature=0.0, graph=graph).tolist()

    def hear_nobody_else(layer: torch.nn.Module, args: Any) -> Any:
        return args[0], patterns.window(args[1].num_dst, 1)

    for hooked in (tiny.layers[1], tiny.blocks[0]):
        hook = hooked.register_forward_pre_hook(hear_nobody_else)
        found = lm.generate(tiny, tokens, 20, temperature=0.0, graph=graph)
        assert found.tolist() != whole
        assert is_greedy(tiny, found, 3, graph)
        with pytest.raises(
            NotImplementedError, match="hooks on blocks or attention layers need all tokens at once"
        ):
            lm.generate(tiny, tokens, 20, cache=KeyValueCache(graph, TINY.num_layers))
        hook.remove()
    assert lm.generate(tiny, tokens, 20, temperature=0.0, graph=graph).tolist() == whole


def test_a_cache_goes_on_where_it_was(tiny: lm.LanguageModel) -> None:
    """Two turns are one text: the second is given only what is new."""
    tokens, graph = torch.tensor([5, 9, 2]), patterns.window(40, 6) | patterns.sinks(40, 1)
    cache = KeyValueCache(graph, TINY.num_layers)
    first = lm.generate(tiny, tokens, 5, temperature=0.0, cache=cache)
    assert cache.length == 7  # the last token was said and not yet heard
    turn = torch.tensor([*first[-1:].tolist(), 77, 78])
    second = lm.generate(tiny, turn, 6, temperature=0.0, cache=cache)
    assert second.tolist()[:3] == turn.tolist()
    said = torch.cat([first[:-1], turn])
    assert is_greedy(tiny, torch.cat([first[:-1], second]), len(said), graph)


def test_an_error_leaves_the_cache_of_a_model_as_it_was(
    tiny: lm.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, cache = torch.tensor([[5, 9, 2]]), KeyValueCache(patterns.causal(9), TINY.num_layers)
    with monkeypatch.context() as patched:
        patched.setattr(tiny.layers[1], "backend", "fast")
        with pytest.raises(ValueError, match="backend must be one of"):
            tiny.proceed(tokens, cache)
    assert cache.length == 0
    assert_exact(tiny.proceed(tokens, cache), tiny(tokens))


def test_wrong_arguments(tiny: lm.LanguageModel) -> None:
    tokens, cache = torch.tensor([1, 2, 3]), KeyValueCache(patterns.causal(9), TINY.num_layers)
    with pytest.raises(
        ValueError,
        match=r"graph must have the 13 tokens that there will be in the end, got TokenGraph\(causal\(9\)",
    ):
        lm.generate(tiny, tokens, 10, graph=patterns.causal(9))
    with pytest.raises(ValueError, match="graph must have the 13 tokens"):
        lm.generate(tiny, tokens, 10, cache=cache)
    with pytest.raises(
        ValueError, match=r"this is a cache of TokenGraph\(causal\(9\).*, got TokenGraph\(window\(9, 2\)"
    ):
        lm.generate(tiny, tokens, 2, graph=patterns.window(9, 2), cache=cache)
    with pytest.raises(ValueError, match="cache must have 2 layers, one for each block, got 1"):
        tiny.proceed(tokens[None], KeyValueCache(patterns.causal(9)))
    with pytest.raises(ValueError, match="attends to sender 4, which has not come: give at least 5 tokens"):
        lm.generate(tiny, tokens, 3, graph=patterns.prefix(9, 5))
    assert cache.length == 0


def test_the_command_of_the_readme(shipped: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """``gnn-attention generate "def read(" --tokens 80 --graph "window(512, 64) | sinks(512, 4)" --temperature 0 --seed 0``."""
    model, vocabulary = shipped
    graph = "window(512, 64) | sinks(512, 4)"
    assert (
        main(["generate", PROMPT, "--tokens", "80", "--graph", graph, "--temperature", "0", "--seed", "0"])
        == 0
    )
    said = capsys.readouterr()
    found = lm.generate(model, prompt_of(vocabulary), 80, temperature=0.0, graph=expressions.parse(graph))
    assert said.out == vocabulary.decode(found.tolist()) + "\n"
    assert is_greedy(model, found, len(prompt_of(vocabulary)), expressions.parse(graph))
    came = len(prompt_of(vocabulary)) + 79
    assert said.err.startswith(f"{came} tokens along {graph}: {64 + 4} senders cached, ")


def test_as_json(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", PROMPT, "--tokens", "5", "--seed", "3"]
    assert main([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["text"].startswith(PROMPT)
    assert (said["computed"], said["cached"], said["seed"]) == (
        len(said["tokens"]) - 1,
        len(said["tokens"]) - 1,
        3,
    )
    assert main([*arguments, "--json", str(tmp_path / "said.json")]) == 0
    assert json.loads((tmp_path / "said.json").read_text()) == said
    assert capsys.readouterr().out == said["text"] + "\n"


def test_another_model(tiny: lm.LanguageModel, tmp_path: Any) -> None:
    vocabulary = BytePair(tuple((bytes([97 + i]), b"x") for i in range(4)))
    lm.save(tmp_path / "tiny.safetensors", tiny.float(), vocabulary, {})
    said = generate.continued("abc", 4, file=tmp_path / "tiny.safetensors", temperature=0.0)
    assert (said["prompt_tokens"], len(said["tokens"])) == (3, 7)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["", "--tokens", "3"], "prompt must have at least one character, got none"),
        (["def", "--tokens", "-1"], "tokens must be at least 0, got -1"),
        (["def", "--graph", "windw(9, 2)"], "there is no builder 'windw'; did you mean 'window'?"),
        (
            ["def", "--graph", "causal(9)", "--tokens", "80"],
            "graph must have the 81 tokens that there will be in the end",
        ),
        (
            ["def", "--graph", "cross(200, 300)"],
            "a cache needs a graph whose receivers and senders are the same tokens",
        ),
        (["def", "--temperature", "-1"], "temperature >= 0, got 1 tokens and -1.0"),
        (["def", "--json", "no/such/file"], "--json no/such/file: expected a folder that exists"),
        (["def", "--model", "no_such_file"], "no_such_file"),
    ],
)
def test_wrong_arguments_of_the_command(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *arguments]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("gnn-attention generate: ")
    assert words in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)
