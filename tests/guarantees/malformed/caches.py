"""Malformed use of caches and of language models."""

# mypy: disable-error-code="arg-type"
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from gnn_attention._support.shapes import Tensor
from gnn_attention.cache import KeyValueCache, PatternMessageCache
from gnn_attention.heads import FactoredHeads
from gnn_attention.model import Config, LanguageModel, generate
from gnn_attention.patterns import anti_causal, causal, cross, window
from tests.guarantees.malformed.case import Case, Of, Subject
from tests.guarantees.malformed.layers import heads_of_two, numbers, update_of, window_of

Attributes = Any


def _cache() -> Attributes:
    cache, heads = KeyValueCache(window(10, 2)), heads_of_two()
    with torch.no_grad():
        cache.update(heads, numbers(1, 5, 8)[:, :3])
    return SimpleNamespace(cache=cache, heads=heads, x=numbers(1, 5, 8))


def _goes_on(o: Attributes) -> Tensor:
    with torch.no_grad():
        out: Tensor = o.cache.update(o.heads, o.x[:, 3:])[0]
    return out


CACHE = Subject("cache", _cache, _goes_on, lambda o: update_of(o.heads, o.x[0], window_of(5)).detach()[3:])


def _of_caches() -> list[Case]:
    of = Of(CACHE)

    rows = torch.zeros(1, 2, 2, 4)
    return [
        of.type("^graph must", "got int", lambda _: KeyValueCache(3)),
        of.value("a cache needs a graph", r"cross\(2, 3\)", lambda _: KeyValueCache(cross(2, 3))),
        of.value("^layers must", "got 0", lambda _: KeyValueCache(causal(3), 0)),
        of.value("^k must", r"\[2, 2, 4\]", lambda o: o.cache.append(rows[0], rows)),
        of.type("^k must", "torch.int64", lambda o: o.cache.append(rows.long(), rows)),
        of.value("k and v must agree", r"\[1, 2, 1, 4\]", lambda o: o.cache.append(rows, rows[:, :, :1])),
        of.value(
            "^k|like|before",
            r"\[2, 2, 2, 4\]|2",
            lambda o: o.cache.append(rows.repeat(2, 1, 1, 1), rows.repeat(2, 1, 1, 1)),
        ),
        of.value(
            "dtype|like|before", "torch.float64", lambda o: o.cache.append(rows.double(), rows.double())
        ),
        of.value(
            "no room",
            "10 receivers",
            lambda o: o.cache.append(rows.repeat(1, 1, 5, 1), rows.repeat(1, 1, 5, 1)),
        ),
        of.value("a chunk must", "got none", lambda o: o.cache.append(rows[:, :, :0], rows[:, :, :0])),
        of.index("^layer must", "got 1", lambda o: o.cache.append(rows, rows, layer=1)),
        of.type("^layer must", "'0'", lambda o: o.cache.append(rows, rows, layer="0")),
        of.value("q", "got 2", lambda o: o.cache.attend(rows)),
        of.value("no new tokens|append", "layer 0", lambda _: KeyValueCache(causal(3)).attend(rows)),
        of.value(
            "attends to sender 2",
            "has not come",
            lambda _: KeyValueCache(anti_causal(3)).append(rows[:, :, :1], rows[:, :, :1]),
        ),
        of.value("^x must", r"\[1, 2, 7\]", lambda o: o.cache.update(o.heads, torch.zeros(1, 2, 7))),
        of.type("^heads must", "got NoneType", lambda o: o.cache.update(None, torch.zeros(1, 2, 8))),
        of.type("^score_mod must", "got float", lambda o: o.cache.update(o.heads, o.x[:, 3:], 0, 1.0)),
        of.value(r"^rewind\(4\)", "3 tokens", lambda o: o.cache.rewind(4)),
        of.type("^length must", "'2'", lambda o: o.cache.rewind("2")),
        of.index("^index must", r"got \[1\]", lambda o: o.cache.reorder([1])),
        of.type("index", "float", lambda o: o.cache.reorder(torch.zeros(1))),
        of.value("this is a cache of", r"causal\(10\)", lambda o: o.cache.check_graph(causal(10))),
        of.type("^heads must", "got StandardHeads", lambda o: PatternMessageCache(o.heads, causal(3))),
        of.value(
            "^keep must",
            "got 'none'",
            lambda o: PatternMessageCache(FactoredHeads.of(o.heads), causal(3), keep="none"),
        ),
    ]


def _model() -> Attributes:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SimpleNamespace(
            model=LanguageModel(
                Config(11, width=8, num_layers=1, num_heads=2, head_dim=4, mlp_width=8)
            ).eval()
        )


def _logits(o: Attributes) -> Tensor:
    with torch.no_grad():
        out: Tensor = o.model(torch.tensor([[1, 2, 3]]))
    return out


def _layer_by_layer(o: Attributes) -> Tensor:
    """The same from the block's parts in plain torch; its table of distances is zero."""
    model, block = o.model, o.model.blocks[0]
    with torch.no_grad():
        state = model.embedding(torch.tensor([1, 2, 3]))
        update = update_of(
            block.attention.heads, block.attention_norm(state), torch.ones(3, 3).tril().bool()
        ).float()
        state = state + update
        out: Tensor = model.unembedding(model.norm(state + block.mlp(block.mlp_norm(state))))
    return out[None]


MODEL = Subject("model", _model, _logits, _layer_by_layer)


def _of_models() -> list[Case]:
    of = Of(MODEL)

    one = torch.tensor([1])
    return [
        of.type("^tokens must", "torch.float32", lambda o: o.model(torch.ones(1, 3))),
        of.value("^tokens must", r"\[3\]", lambda o: o.model(torch.ones(3).long())),
        of.index(r"^tokens must be in 0 \.\. 10", r"11 \.\. 11", lambda o: o.model(torch.tensor([[11]]))),
        of.type("^tokens must", "got str", lambda o: o.model("def")),
        of.value("does not fit", r"causal\(4\)", lambda o: o.model(torch.ones(1, 3).long(), causal(4))),
        of.type("graph", "got 'causal", lambda o: o.model(torch.ones(1, 3).long(), "causal(3)")),
        of.value("^width must", "got 0", lambda _: Config(11, width=0)),
        of.type("^vocabulary_size must", "'11'", lambda _: Config("11")),
        of.type("^config must", "got 3", lambda _: LanguageModel(3)),
        of.value("^count must", "got -1", lambda o: generate(o.model, one, -1)),
        of.value("first token", "got 0 tokens", lambda o: generate(o.model, one[:0], 1)),
        of.value("temperature", "-1", lambda o: generate(o.model, one, 1, temperature=-1.0)),
        of.type("^temperature must", "'hot'", lambda o: generate(o.model, one, 1, temperature="hot")),
        of.type("^tokens must", "got list", lambda o: generate(o.model, [1], 1)),
        of.value(
            "^graph must have the 3 tokens",
            r"causal\(2\)",
            lambda o: generate(o.model, one, 2, graph=causal(2)),
        ),
        of.value(
            "^cache must have 1 layers",
            "got 2",
            lambda o: o.model.proceed(one[None], KeyValueCache(causal(3), 2)),
        ),
        of.type("^cache must", "got 3", lambda o: o.model.proceed(one[None], 3)),
    ]


def cases() -> list[Case]:
    return [*_of_caches(), *_of_models()]
