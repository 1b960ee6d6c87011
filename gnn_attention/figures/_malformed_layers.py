"""Malformed heads, layers, caches and language models."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from gnn_attention._shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.cache import KeyValueCache, PatternMessageCache
from gnn_attention.figures._malformed_case import Case, Subject
from gnn_attention.general import BothEnds, PairwiseMessages, StaticNodes
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.latent_heads import LatentHeads
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.lazy_heads import LazyHeads
from gnn_attention.model import Config, LanguageModel, generate
from gnn_attention.patterns import anti_causal, causal, cross, window
from gnn_attention.rotary import Rotary

__all__ = ["cases"]

Error = type[BaseException]
Attributes = Any


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _heads(**options: Any) -> StandardHeads:
    """Two heads of four channels, the same numbers each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return StandardHeads(8, 2, **options)


def _update(heads: StandardHeads, x: Tensor, wanted: Tensor) -> Tensor:
    """The formula of attention for one sequence ``[T, 8]``, pairs as a mask, in float64."""
    found = torch.zeros(len(wanted), 8, dtype=torch.float64)
    assert heads.W_O is not None
    for W_Q, W_K, W_V, W_O in zip(heads.W_Q, heads.W_K, heads.W_V, heads.W_O, strict=True):
        q, k, v = (x.double() @ matrix.double() for matrix in (W_Q, W_K, W_V))
        found += (q @ k.mT * heads.scale).masked_fill(~wanted, -torch.inf).softmax(-1) @ v @ W_O.double()
    return found


def _window(n: int) -> Tensor:
    """Everyone hears itself and the one before, read off the definition."""
    distance = torch.arange(n).unsqueeze(1) - torch.arange(n)
    return (distance == 0) | (distance == 1)


# -- heads ------------------------------------------------------------------------------------------------------------


def _through_heads(heads: Any) -> Tensor:
    x = _numbers(1, 5, 8)
    out: Tensor = heads.collect(attend(heads.receive(x), *heads.send(x), window(5, 2), scale=heads.scale))
    return out[0].detach()


HEADS = Subject("heads", _heads, _through_heads, lambda heads: _update(heads, _numbers(5, 8), _window(5)).detach())


def _of_heads() -> list[Case]:
    def case(what: str, error: Error, argument: str, came: str, bad: Any) -> Case:
        return Case(HEADS, what, error, argument, came, bad)

    eye = torch.eye(4)[None]
    return [
        case("no width", ValueError, "^width must", "got 0", lambda _: StandardHeads(0, 2)),
        case("a width text", TypeError, "^width must", "got '8'", lambda _: StandardHeads("8", 2)),
        case("a width that does not split", ValueError, "give head_dim", "width 8 .* num_heads 3", lambda _: StandardHeads(8, 3)),
        case("half a head", TypeError, "^num_heads must", "got 2.5", lambda _: StandardHeads(8, 2.5)),
        case("groups that do not fit", ValueError, "num_kv_heads", "got 4 and 3", lambda _: StandardHeads(8, 4, num_kv_heads=3)),
        case("a negative head_dim", ValueError, "^head_dim must", "got -4", lambda _: StandardHeads(8, 2, head_dim=-4)),
        case("rotary True", TypeError, "^rotary must", "got bool", lambda _: StandardHeads(8, 2, rotary=True)),
        case(
            "rotary of an odd dim", ValueError, "head_dim must be even", "got 3", lambda _: StandardHeads(6, 2, rotary=Rotary())
        ),
        case("a rotary base of 0", ValueError, "^base must", "got 0.0", lambda _: Rotary(0.0)),
        case("a rotary base text", TypeError, "^base must", "got '10000'", lambda _: Rotary("10000")),
        case("states of another width", ValueError, "^x must", r"\[1, 5, 7\]", lambda heads: heads.receive(_numbers(1, 5, 7))),
        case("states in float64", ValueError, "^x must", "torch.float64", lambda heads: heads.send(_numbers(1, 5, 8).double())),
        case("a list of states", TypeError, "^x must", "got list", lambda heads: heads.receive([[0.0] * 8])),
        case(
            "a layout that is none",
            ValueError,
            "^layout must",
            "'rows'",
            lambda _: StandardHeads.from_arrays(eye, eye, eye, layout="rows"),
        ),
        case(
            "arrays of integers", TypeError, "^W_Q must", "torch.int64", lambda _: StandardHeads.from_arrays(eye.long(), eye, eye)
        ),
        case(
            "an array that is none", TypeError, "^W_K must", "got 'keys'", lambda _: StandardHeads.from_arrays(eye, "keys", eye)
        ),
        case(
            "arrays of other sizes",
            ValueError,
            "W_Q and W_K",
            "4 and 3",
            lambda _: StandardHeads.from_arrays(eye, eye[..., :3], eye),
        ),
        case(
            "no MultiheadAttention", TypeError, "^attention must", "got Linear", lambda _: StandardHeads.from_mha(nn.Linear(2, 2))
        ),
        case(
            "factored of a Linear", TypeError, "FactoredHeads.of needs", "got Linear", lambda _: FactoredHeads.of(nn.Linear(2, 2))
        ),
        case(
            "merged rotary heads",
            ValueError,
            "cannot hold rotary",
            "MergedHeads",
            lambda _: MergedHeads.of(_heads(rotary=Rotary())),
        ),
        case("a side that is none", ValueError, "^side must", "got 'left'", lambda heads: MergedHeads.of(heads, side="left")),
        case("an odd rotary_dim", ValueError, "rotary_dim must be even", "got 3", lambda _: LatentHeads(8, 2, 4, 3, 6)),
        case("a latent rotary text", TypeError, "^rotary must", "got str", lambda _: LatentHeads(8, 2, 4, 2, 6, rotary="yes")),
        case("lazy heads without heads", ValueError, "^num_heads must", "got 0", lambda _: LazyHeads(0, 4)),
    ]


# -- layers -----------------------------------------------------------------------------------------------------------


def _layer(**options: Any) -> Attributes:
    return SimpleNamespace(layer=MessagePassingAttention(_heads(), **options), x=_numbers(5, 8), graph=window(5, 2))


def _good_layer(o: Attributes) -> Tensor:
    out: Tensor = o.layer(o.x, o.graph).detach()
    return out


def _truth_of_layer(o: Attributes) -> Tensor:
    return _update(o.layer.heads, o.x, _window(5)).detach()


WALK = Subject("layer", _layer, _good_layer, _truth_of_layer, compiled=True)
AUTO = Subject("layer with a backend", lambda: _layer(backend="auto"), _good_layer, _truth_of_layer, compiled=True)
EDGES = [[0, 0, 1, 1, 2, 2, 3, 3, 4], [0, 1, 1, 2, 2, 3, 3, 4, 4]]  # the window as a list


def _listed(change: Any) -> Any:
    edges = torch.tensor(EDGES)
    return lambda o: o.layer(o.x, change(edges))


def _of_states() -> list[Case]:
    def case(what: str, error: Error, argument: str, came: str, bad: Any) -> Case:
        return Case(WALK, what, error, argument, came, bad)

    found = [
        case("states of one axis", ValueError, "^x must", r"got \[8\]", lambda o: o.layer(o.x[0], o.graph)),
        case("states of four axes", ValueError, "^x must", r"\[1, 1, 5, 8\]", lambda o: o.layer(o.x[None, None], o.graph)),
        case("states of another width", ValueError, "^x must", r"\[1, 5, 6\]", lambda o: o.layer(o.x[:, :6], o.graph)),
        case("states in float64", ValueError, "^x must", "torch.float64", lambda o: o.layer(o.x.double(), o.graph)),
        case("states of integers", ValueError, "^x must", "torch.int64", lambda o: o.layer(o.x.long(), o.graph)),
        case("a list of states", TypeError, "^x must", "got list|got float", lambda o: o.layer(o.x.tolist(), o.graph)),
        case("three states", TypeError, "^x must", "Tensor, Tensor, Tensor", lambda o: o.layer((o.x, o.x, o.x), o.graph)),
        case("a pair of unlike axes", ValueError, "^x must", r"\[1, 5, 8\]", lambda o: o.layer((o.x, o.x[None]), o.graph)),
        case("no graph", TypeError, "needs one graph", "got none", lambda o: o.layer(o.x)),
        case(
            "two graphs",
            TypeError,
            "needs one graph",
            "got both",
            lambda o: o.layer(o.x, o.graph, edge_index=torch.tensor(EDGES)),
        ),
        case("a longer graph", ValueError, "does not fit x", r"window\(6, 2\)", lambda o: o.layer(o.x, window(6, 2))),
        case("a graph text", TypeError, "expected a torch_geometric Data", "got str", lambda o: o.layer(o.x, "causal(5)")),
        case(
            "a dense mask", TypeError, "expected a torch_geometric", "torch.bool", lambda o: o.layer(o.x, torch.ones(5, 5).bool())
        ),
        case(
            "a bias of other edges", ValueError, "^bias must", r"got \[4\]", lambda o: o.layer(o.x, o.graph, bias=torch.ones(4))
        ),
        case("a bias list", TypeError, "^bias must", "got list", lambda o: o.layer(o.x, o.graph, bias=[0.0])),
    ]
    return [replace(one, subject=AUTO) if number % 2 else one for number, one in enumerate(found)]


def _of_lists() -> list[Case]:
    def case(what: str, error: Error, argument: str, came: str, change: Any, subject: Subject = AUTO) -> Case:
        return Case(subject, what, error, argument, came, _listed(change))

    return [
        case("a float edge list", TypeError, "expected a torch_geometric", "torch.float32", lambda e: e.float()),
        case("an edge list in columns", ValueError, r"^edge_index must have shape \[2, E\]", r"\[9, 2\]", lambda e: e.t()),
        case("an edge list of one axis", ValueError, r"^edge_index must have shape", r"\[9\]", lambda e: e[0]),
        case("a negative edge", IndexError, r"^edge_index\[0, 0\]", "= -1", lambda e: e - 1),
        case("an edge out of range", IndexError, r"^edge_index\[0, 8\]", "= 5", lambda e: e + 1),
        case(
            "an edge twice",
            ValueError,
            "^edge_index holds 1 duplicate",
            "0 -> 0 stands at 0 and 9",
            lambda e: torch.cat([e, e[:, :1]], 1),
        ),
        case("unsigned edges", TypeError, "^edge_index must", "torch.uint8", lambda e: e.to(torch.uint8)),
        case("a float edge list walked", TypeError, "expected a torch_geometric", "torch.float32", lambda e: e.float(), WALK),
        case("a negative edge walked", IndexError, r"^edge_index", "= -1|-1", lambda e: e - 1, WALK),
        case("an edge list in columns walked", ValueError, r"^edge_index must have shape", r"\[9, 2\]", lambda e: e.t(), WALK),
    ]


def _of_layers() -> list[Case]:
    def case(what: str, error: Error, argument: str, came: str, bad: Any) -> Case:
        return Case(LAYERS, what, error, argument, came, bad)

    return [
        case("heads that are a number", TypeError, "^heads must", "got int", lambda _: MessagePassingAttention(3)),
        case(
            "heads that are a torch module",
            TypeError,
            "^heads must",
            "got Linear",
            lambda _: MessagePassingAttention(nn.Linear(2, 2)),
        ),
        case("dropout of 2", ValueError, "^dropout must", "got 2", lambda _: MessagePassingAttention(_heads(), dropout=2)),
        case(
            "a score_mod number",
            TypeError,
            "^score_mod must",
            "got float",
            lambda _: MessagePassingAttention(_heads(), score_mod=1.0),
        ),
        case(
            "an unknown backend",
            ValueError,
            "^backend must",
            "got 'fast'",
            lambda _: MessagePassingAttention(_heads(), backend="fast"),
        ),
        case("a backend number", TypeError, "^backend must", "got int", lambda _: MessagePassingAttention(_heads(), backend=3)),
        case(
            "a walk where heads differ",
            NotImplementedError,
            "the walk .* needs one edge list",
            "varies",
            lambda o: o.layer(o.x, TokenGraph.from_rule(lambda b, h, dst, src: src + h <= dst, 5, heads=2)),
        ),
        case("a message that is none", TypeError, "^message must", "got None", lambda _: PairwiseMessages(None)),
        case(
            "an unknown normaliser",
            ValueError,
            "^normaliser must",
            "'hard'",
            lambda _: PairwiseMessages(BothEnds(8, 4, 8), normaliser="hard"),
        ),
        case("no nodes' messages", TypeError, "^messages must", "got list", lambda _: StaticNodes(torch.eye(2), [[1.0]])),
        case("messages of other nodes", ValueError, "messages", r"\[3, 3\]", lambda _: StaticNodes(torch.eye(2), torch.eye(3))),
        case("hidden of 0", ValueError, "^hidden must", "got 0", lambda _: BothEnds(8, 0, 8)),
    ]


LAYERS = Subject("a layer", _layer, _good_layer, _truth_of_layer)


# -- caches -----------------------------------------------------------------------------------------------------------


def _cache() -> Attributes:
    """Three of ten tokens came."""
    cache, heads = KeyValueCache(window(10, 2)), _heads()
    with torch.no_grad():
        cache.update(heads, _numbers(1, 5, 8)[:, :3])
    return SimpleNamespace(cache=cache, heads=heads, x=_numbers(1, 5, 8))


def _goes_on(o: Attributes) -> Tensor:
    with torch.no_grad():
        out: Tensor = o.cache.update(o.heads, o.x[:, 3:])[0]
    return out


CACHE = Subject("cache", _cache, _goes_on, lambda o: _update(o.heads, o.x[0], _window(5)).detach()[3:])


def _of_caches() -> list[Case]:
    def case(what: str, error: Error, argument: str, came: str, bad: Any) -> Case:
        return Case(CACHE, what, error, argument, came, bad)

    rows = torch.zeros(1, 2, 2, 4)
    return [
        case("a cache of no graph", TypeError, "^graph must", "got int", lambda _: KeyValueCache(3)),
        case(
            "a cache of a cross graph",
            ValueError,
            "a cache needs a graph",
            r"cross\(2, 3\)",
            lambda _: KeyValueCache(cross(2, 3)),
        ),
        case("a cache of no layers", ValueError, "^layers must", "got 0", lambda _: KeyValueCache(causal(3), 0)),
        case("keys of three axes", ValueError, "^k must", r"\[2, 2, 4\]", lambda o: o.cache.append(rows[0], rows)),
        case("keys of integers", TypeError, "^k must", "torch.int64", lambda o: o.cache.append(rows.long(), rows)),
        case(
            "values of other tokens",
            ValueError,
            "k and v must agree",
            r"\[1, 2, 1, 4\]",
            lambda o: o.cache.append(rows, rows[:, :, :1]),
        ),
        case(
            "other samples than before",
            ValueError,
            "^k|like|before",
            r"\[2, 2, 2, 4\]|2",
            lambda o: o.cache.append(rows.repeat(2, 1, 1, 1), rows.repeat(2, 1, 1, 1)),
        ),
        case(
            "another dtype than before",
            ValueError,
            "dtype|like|before",
            "torch.float64",
            lambda o: o.cache.append(rows.double(), rows.double()),
        ),
        case(
            "too many tokens",
            ValueError,
            "no room",
            "10 receivers",
            lambda o: o.cache.append(rows.repeat(1, 1, 5, 1), rows.repeat(1, 1, 5, 1)),
        ),
        case("no token", ValueError, "a chunk must", "got none", lambda o: o.cache.append(rows[:, :, :0], rows[:, :, :0])),
        case("a layer that is none", IndexError, "^layer must", "got 1", lambda o: o.cache.append(rows, rows, layer=1)),
        case("a layer text", TypeError, "^layer must", "'0'", lambda o: o.cache.append(rows, rows, layer="0")),
        case("queries of other tokens", ValueError, "q", "got 2", lambda o: o.cache.attend(rows)),
        case("an early question", ValueError, "no new tokens|append", "layer 0", lambda _: KeyValueCache(causal(3)).attend(rows)),
        case(
            "a future sender",
            ValueError,
            "hears sender 2",
            "has not come",
            lambda _: KeyValueCache(anti_causal(3)).append(rows[:, :, :1], rows[:, :, :1]),
        ),
        case(
            "states of another width",
            ValueError,
            "^x must",
            r"\[1, 2, 7\]",
            lambda o: o.cache.update(o.heads, torch.zeros(1, 2, 7)),
        ),
        case(
            "heads that are none", TypeError, "^heads must", "got NoneType", lambda o: o.cache.update(None, torch.zeros(1, 2, 8))
        ),
        case(
            "a score_mod number", TypeError, "^score_mod must", "got float", lambda o: o.cache.update(o.heads, o.x[:, 3:], 0, 1.0)
        ),
        case("too far back", ValueError, r"^rewind\(4\)", "3 tokens", lambda o: o.cache.rewind(4)),
        case("back by a text", TypeError, "^length must", "'2'", lambda o: o.cache.rewind("2")),
        case("a sample that is none", IndexError, "^index must", r"got \[1\]", lambda o: o.cache.reorder([1])),
        case("samples of floats", TypeError, "index", "float", lambda o: o.cache.reorder(torch.zeros(1))),
        case("another graph", ValueError, "this is a cache of", r"causal\(10\)", lambda o: o.cache.check_graph(causal(10))),
        case(
            "patterns of StandardHeads",
            TypeError,
            "^heads must",
            "got StandardHeads",
            lambda o: PatternMessageCache(o.heads, causal(3)),
        ),
        case(
            "keep nothing",
            ValueError,
            "^keep must",
            "got 'none'",
            lambda o: PatternMessageCache(FactoredHeads.of(o.heads), causal(3), keep="none"),
        ),
    ]


# -- language models --------------------------------------------------------------------------------------------------


def _model() -> Attributes:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SimpleNamespace(
            model=LanguageModel(Config(11, width=8, num_layers=1, num_heads=2, head_dim=4, mlp_width=8)).eval()
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
        heard = _update(block.attention.heads, block.attention_norm(state), torch.ones(3, 3).tril().bool()).float()
        state = state + heard
        out: Tensor = model.unembedding(model.norm(state + block.mlp(block.mlp_norm(state))))
    return out[None]


MODEL = Subject("model", _model, _logits, _layer_by_layer)


def _of_models() -> list[Case]:
    def case(what: str, error: Error, argument: str, came: str, bad: Any) -> Case:
        return Case(MODEL, what, error, argument, came, bad)

    one = torch.tensor([1])
    return [
        case("float tokens", TypeError, "^tokens must", "torch.float32", lambda o: o.model(torch.ones(1, 3))),
        case("tokens of one axis", ValueError, "^tokens must", r"\[3\]", lambda o: o.model(torch.ones(3).long())),
        case(
            "a token that is none",
            IndexError,
            r"^tokens must be in 0 \.\. 10",
            r"11 \.\. 11",
            lambda o: o.model(torch.tensor([[11]])),
        ),
        case("a text", TypeError, "^tokens must", "got str", lambda o: o.model("def")),
        case("a longer graph", ValueError, "does not fit", r"causal\(4\)", lambda o: o.model(torch.ones(1, 3).long(), causal(4))),
        case("a graph text", TypeError, "graph", "got str", lambda o: o.model(torch.ones(1, 3).long(), "causal(3)")),
        case("no width", ValueError, "^width must", "got 0", lambda _: Config(11, width=0)),
        case("a vocabulary text", TypeError, "^vocabulary_size must", "'11'", lambda _: Config("11")),
        case("no configuration", TypeError, "^config must", "got 3", lambda _: LanguageModel(3)),
        case("fewer than no tokens", ValueError, "^count must", "got -1", lambda o: generate(o.model, one, -1)),
        case("nothing to begin with", ValueError, "first token", "got 0 tokens", lambda o: generate(o.model, one[:0], 1)),
        case("a cold temperature", ValueError, "temperature", "-1", lambda o: generate(o.model, one, 1, temperature=-1.0)),
        case(
            "a temperature text", TypeError, "^temperature must", "'hot'", lambda o: generate(o.model, one, 1, temperature="hot")
        ),
        case("tokens in a list", TypeError, "^tokens must", "got list", lambda o: generate(o.model, [1], 1)),
        case(
            "a short graph",
            ValueError,
            "^graph must have the 3 tokens",
            r"causal\(2\)",
            lambda o: generate(o.model, one, 2, graph=causal(2)),
        ),
        case(
            "a cache of other layers",
            ValueError,
            "^cache must have 1 layers",
            "got 2",
            lambda o: o.model.proceed(one[None], KeyValueCache(causal(3), 2)),
        ),
        case("a cache that is none", TypeError, "^cache must", "got 3", lambda o: o.model.proceed(one[None], 3)),
    ]


def cases() -> list[Case]:
    """Of heads, layers, caches and language models."""
    parts = (_of_heads, _of_states, _of_lists, _of_layers, _of_caches, _of_models)
    return [case for part in parts for case in part()]
