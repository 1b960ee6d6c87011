"""What eight threads use at once: one object of each kind, made from a case's own chance, and a call for each
thread.

A call returns tensors that depend on the object and on the thread's number alone, so that they can be
compared bit for bit. Graphs are as the builders return them: nothing is worked out about them yet.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gnn_attention import convert, patterns, score_mods
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import BACKENDS
from gnn_attention.cache import KeyValueCache
from gnn_attention.graph import TokenGraph, tiling
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.heads.lazy import LazyHeads
from gnn_attention.interpret import trace
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.model import Config, LanguageModel, generate
from tests.guarantees.families import any_family
from tests.guarantees.llama import llama

WIDTH, HEADS = 12, 4
FORMS = (lambda heads: heads, FactoredHeads.of, MergedHeads.of)
EAGER = tuple(name for name, backend in BACKENDS.items() if not backend.compiled)
ROUTES = (
    "message_passing",
    "auto",
    "dense",
    "rows",
    "mixed",
    "reference",
)  # of a layer; all hold any plain graph


@dataclass(frozen=True, eq=False)
class Shared:
    """``call(thread)`` is what a thread computes, ``state()`` what must be afterwards as it was before."""

    call: Callable[[int], list[Tensor]]
    state: Callable[[], object] = lambda: None


def _graph_of(rng: random.Random, least: int = 8, most: int = 90) -> TokenGraph:
    """A plain graph of any family, or its edges as a list; at times with plans of several parts."""
    n = rng.choice([rng.randint(least, most), rng.randint(least, most), 3 * most])
    graph = any_family(rng, n, 0, HEADS)[0]
    while graph.heads is not None or graph.batch is not None:
        graph = any_family(rng, n, 0, HEADS)[0]
    return convert.from_edge_index(graph.edge_index.clone(), n, n) if rng.random() < 0.25 else graph


def _states(thread: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(thread))


def _with_gradients(out: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(out, wanted, _states(99, *out.shape), allow_unused=True)
    return [
        out.detach(),
        *(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)),
    ]


def _graph(rng: random.Random) -> Shared:
    """What can be computed of a graph, by each thread in another order, and graphs made of it."""
    graph, other = _graph_of(rng), None
    other = patterns.window(graph.num_dst, 3)
    queries: list[Callable[[], Tensor]] = [
        lambda: graph.edge_index,
        lambda: graph.mask(),
        lambda: graph.in_degree(),
        lambda: torch.tensor(
            [graph.num_edges, graph.max_in_degree, graph.is_full(), graph.is_causal(), graph.has_empty_rows]
        ),
        lambda: (graph | other).edge_index,
        lambda: (graph - other).T.mask(),
        lambda: (graph @ other).edge_index,
        lambda: graph.rows(1, graph.num_dst).in_degree(),
        lambda: tiling.tiles(graph, 16).table(),
        lambda: torch.tensor([graph == other, graph == graph & graph]),
    ]

    def call(thread: int) -> list[Tensor]:
        found = {
            number: queries[number]()
            for number in random.Random(thread).sample(range(len(queries)), len(queries))
        }
        return [found[number] for number in range(len(queries))]

    return Shared(call)


def _attend(rng: random.Random) -> Shared:
    """One graph through every backend at once, forward and backward, with whatever is added to the logits."""
    graph, learned = _graph_of(rng), score_mods.RelativeBias(HEADS, 4)
    nn.init.normal_(learned.table)
    mod = rng.choice(
        [None, score_mods.alibi(score_mods.alibi_slopes(HEADS)), score_mods.softcap(5.0), learned]
    )
    bias = _states(1, HEADS, graph.num_edges) if rng.random() < 0.3 else None
    sinks = _states(2, HEADS) if rng.random() < 0.3 else None
    names = ["auto", *EAGER]

    def call(thread: int) -> list[Tensor]:
        q = _states(10, 1, HEADS, graph.num_dst, 8).requires_grad_()
        k, v = (_states(seed, 1, 2, graph.num_src, 8).requires_grad_() for seed in (11, 12))
        options: dict[str, Any] = {"score_mod": mod, "bias": bias, "sink_logits": sinks, "return_info": True}
        try:
            out, info = attend(q, k, v, graph, backend=names[thread % len(names)], **options)
        except NotImplementedError:
            out, info = attend(q, k, v, graph, backend="auto", **options)
        return [*_with_gradients(out, [q, k, v]), info.lse.detach(), info.weights().detach()]

    return Shared(call)


def _layer(rng: random.Random) -> Shared:
    """One layer, in any form and on any way through it, over one graph."""
    graph = _graph_of(rng, most=40)
    heads = rng.choice(FORMS)(StandardHeads(WIDTH, HEADS, num_kv_heads=2, bias=True))
    layer = MessagePassingAttention(heads, backend="message_passing")
    layer.backend = rng.choice(ROUTES)
    given = graph.edge_index if rng.random() < 0.3 else graph

    def call(thread: int) -> list[Tensor]:
        x = _states(thread, graph.num_src, WIDTH).requires_grad_()
        out, (_, weights) = layer(x, given, return_attention_weights=True)
        return [weights.detach(), *_with_gradients(out, [x, *layer.parameters()])]

    return Shared(call, lambda: layer.backend)


def _lazy(rng: random.Random) -> Shared:
    """A layer whose heads learn their widths from whichever thread comes first."""
    graph = _graph_of(rng, most=40)
    layer = MessagePassingAttention(LazyHeads(HEADS, 3), backend=rng.choice(ROUTES))

    def call(thread: int) -> list[Tensor]:
        out = layer(_states(thread, graph.num_src, WIDTH), graph)
        return _with_gradients(out, list(layer.parameters()))

    return Shared(call)


def _model_of(rng: random.Random) -> LanguageModel:
    config = Config(vocabulary_size=20, width=WIDTH, num_layers=2, num_heads=HEADS, head_dim=3, mlp_width=16)
    model = LanguageModel(config).eval()
    model.backend = rng.choice(["auto", "dense", "rows", "reference"])
    return model


def _tokens(thread: int, count: int) -> Tensor:
    return torch.randint(20, (2, count), generator=torch.Generator().manual_seed(thread))


def _model(rng: random.Random) -> Shared:
    model, graph = _model_of(rng), _graph_of(rng, most=40)

    def call(thread: int) -> list[Tensor]:
        return _with_gradients(model(_tokens(thread, graph.num_dst), graph), list(model.parameters()))

    return Shared(call)


def _decoding(rng: random.Random) -> Shared:
    """One model decodes eight texts, in a cache for each over one graph; and all fork one cache."""
    model, n = _model_of(rng), rng.randint(12, 20)
    graph = patterns.window(n, rng.randint(2, n)) | patterns.sinks(n, 2)
    first = KeyValueCache(graph, model.config.num_layers)
    with torch.no_grad():
        model.proceed(_tokens(50, 3), first)

    def call(thread: int) -> list[Tensor]:
        with torch.no_grad():
            alone = generate(
                model, _tokens(thread, 4)[0], n - 8, cache=KeyValueCache(graph, model.config.num_layers)
            )
            return [alone, model.proceed(_tokens(thread, 5), first.fork())]

    return Shared(call)


def _traced(rng: random.Random) -> Shared:
    """One model recorded by all, some with an edge cut or muted; or recorded by some and used by others."""
    model, graph = _model_of(rng), patterns.causal(rng.randint(6, 20))
    model.backend, alone = rng.choice(["auto", "dense"]), rng.random() < 0.5

    def call(thread: int) -> list[Tensor]:
        tokens = _tokens(thread, graph.num_dst)
        if not alone and thread % 2:
            return [model(tokens, graph).detach()]
        surgeries = {1: [trace.cut([(0, 1)], layers=0)], 2: [trace.mute([(1, 2)], layers=1)]}
        run = trace.record(model, tokens, graph, surgery=surgeries.get(thread % 4, []) if alone else [])
        weights = (layer.weights() for layer in run.layers)
        return [x.detach() for x in (run.output, *weights, *run.states)]

    return Shared(call, lambda: _hooks_of(model))


def _hooks_of(model: nn.Module) -> object:
    return [
        (name, repr(getattr(part, "backend", None)), len(part._forward_hooks), len(part._forward_pre_hooks))
        for name, part in model.named_modules()
    ]


def _hugging_face(rng: random.Random) -> Shared:
    """A Hugging Face model under ``use_graph``, in every thread with another graph, layers recomputed."""
    huggingface = importlib.import_module("gnn_attention.huggingface")
    model = llama(20, 16, 2, 4, attn_implementation="gnn_attention").train()
    if rng.random() < 0.7:
        old = model.gradient_checkpointing_enable
        enable = getattr(model, "activation_checkpointing_enable", None) or old
        enable({"use_reentrant": False})
    n = rng.randint(8, 24)

    def call(thread: int) -> list[Tensor]:
        with huggingface.use_graph(model, patterns.window(n, 1 + thread % 4)):
            out = model(_tokens(thread, n), use_cache=False).last_hidden_state
            return _with_gradients(out, list(model.parameters()))

    return Shared(call)


KINDS: dict[str, Callable[[random.Random], Shared]] = {
    "graph": _graph,
    "attend": _attend,
    "layer": _layer,
    "lazy heads": _lazy,
    "model": _model,
    "decoding": _decoding,
    "trace": _traced,
    "use_graph": _hugging_face,
}
