"""The model goes on with a text: through a cache exactly as without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.bounds import assert_exact

from gnn_attention import algebra, patterns
from gnn_attention import model as lm
from gnn_attention.backends import Backend
from gnn_attention.cache import KeyValueCache
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
    """Each token from ``start`` on is clearly the likeliest after those before it, in one pass in float64."""
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


def test_the_walk_has_no_cache_and_says_the_same(tiny: lm.LanguageModel) -> None:
    tokens, graph = torch.tensor([5, 9, 2]), patterns.window(30, 3)
    wanted = lm.generate(tiny, tokens, 9, seed=4, graph=graph)
    tiny.backend = "message_passing"
    assert torch.equal(lm.generate(tiny, tokens, 9, seed=4, graph=graph), wanted)
    needs_all = r"the message-passing path and hooks .* need all tokens at once"
    with pytest.raises(NotImplementedError, match=needs_all):
        tiny.proceed(tokens[None], KeyValueCache(graph, 2))


def test_edges_that_are_cut_stay_cut(tiny: lm.LanguageModel) -> None:
    """A hook that changes the edges of a layer acts: the tokens are those of the changed model."""
    tokens, graph = torch.tensor([5, 9, 2]), patterns.window(30, 6)
    whole = lm.generate(tiny, tokens, 20, temperature=0.0, graph=graph).tolist()

    def itself_alone(layer: torch.nn.Module, args: Any) -> Any:
        return args[0], patterns.window(args[1].num_dst, 1)

    for hooked in (tiny.layers[1], tiny.blocks[0]):
        hook = hooked.register_forward_pre_hook(itself_alone)
        found = lm.generate(tiny, tokens, 20, temperature=0.0, graph=graph)
        assert found.tolist() != whole
        assert is_greedy(tiny, found, 3, graph)
        with pytest.raises(NotImplementedError, match="hooks on blocks need all tokens at once"):
            lm.generate(tiny, tokens, 20, cache=KeyValueCache(graph, TINY.num_layers))
        hook.remove()
    assert lm.generate(tiny, tokens, 20, temperature=0.0, graph=graph).tolist() == whole


def test_a_cache_goes_on_where_it_was(tiny: lm.LanguageModel) -> None:
    """Two turns are one text: the second is given only what is new."""
    tokens, graph = torch.tensor([5, 9, 2]), patterns.window(40, 6) | patterns.sinks(40, 1)
    cache = KeyValueCache(graph, TINY.num_layers)
    first = lm.generate(tiny, tokens, 5, temperature=0.0, cache=cache)
    assert cache.length == 7  # the last token is not yet in the cache
    turn = torch.tensor([*first[-1:].tolist(), 77, 78])
    second = lm.generate(tiny, turn, 6, temperature=0.0, cache=cache)
    assert second.tolist()[:3] == turn.tolist()
    text = torch.cat([first[:-1], turn])
    assert is_greedy(tiny, torch.cat([first[:-1], second]), len(text), graph)


def refuse(call: Any) -> Any:
    raise ValueError("refused in the second block")


def test_wrong_arguments(tiny: lm.LanguageModel) -> None:
    """They leave the cache as it was."""
    tokens, cache = torch.tensor([1, 2, 3]), KeyValueCache(patterns.causal(9), TINY.num_layers)
    few, cached = "graph must have the 13 tokens", {"graph": patterns.window(9, 2), "cache": cache}
    wrong: list[tuple[str, int, dict[str, Any]]] = [
        (rf"{few} that there will be in the end, got .*causal\(9\)", 10, {"graph": patterns.causal(9)}),
        (few, 10, {"cache": cache}),
        (r"this is a cache of TokenGraph\(causal\(9\).*, got TokenGraph\(window\(9, 2\)", 2, cached),
        ("attends to sender 4, which has not come: give at least 5", 3, {"graph": patterns.prefix(9, 5)}),
    ]
    for message, count, options in wrong:
        with pytest.raises(ValueError, match=message):
            lm.generate(tiny, tokens, count, **options)
    with pytest.raises(ValueError, match="cache must have 2 layers, one for each block, got 1"):
        tiny.proceed(tokens[None], KeyValueCache(patterns.causal(9)))
    tiny.layers[1].backend = Backend("own", refuse)
    with pytest.raises(ValueError, match="refused in the second block"):
        tiny.proceed(tokens[None], cache)
    tiny.layers[1].backend = "auto"
    assert cache.length == 0
    assert_exact(tiny.proceed(tokens[None], cache), tiny(tokens[None]))
