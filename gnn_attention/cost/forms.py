"""Exact costs of attention without running it: forms of weights, a graph, a published model.

A pass costs ``receivers * receive + senders * send + edges * (logit + weighting) + receivers * collect``
multiply-accumulates, with the rates of ``rate_table``: work, not time. A graph enters by its number of edges.

For heads as thin as usual the order of seed S1.22 holds: with an edge or more, any number of tokens and any
grouping, ``head_dim + value_dim < width`` implies standard < factored < merged, since factored - standard =
``tokens width (H - G)(D + V) + H edges (2 width - D - V)`` and merged - factored =
``2 tokens H width (width - D - V)``. Where ``D + V`` is more, merged is the cheaper of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from gnn_attention import patterns
from gnn_attention._support import checks
from gnn_attention.cost.configs import ModelSizes, config
from gnn_attention.cost.graph_cost import most_cached
from gnn_attention.cost.rate_table import FORMS, LATENT_FORMS, LatentSizes, Rates, Sizes, rates
from gnn_attention.distributed.partition import Partition
from gnn_attention.distributed.rank_plan import Plan, plan
from gnn_attention.graph import TokenGraph


@dataclass(frozen=True)
class Macs:
    """Multiply-accumulates by what they are for (twice as many floating point operations).

    ``receive``: queries or patterns; ``send``: keys and values, or messages; ``logits`` and ``weighting``: on
    the edges; ``collect``: the output matrix, 0 where the heads send messages.
    """

    receive: int = 0
    send: int = 0
    logits: int = 0
    weighting: int = 0
    collect: int = 0

    @property
    def projections(self) -> int:
        """What the matrices take, whatever the graph."""
        return self.receive + self.send + self.collect

    @property
    def edges(self) -> int:
        """What the edges take: in proportion to their number."""
        return self.logits + self.weighting

    @property
    def total(self) -> int:
        """All of it."""
        return self.projections + self.edges

    def __add__(self, other: Macs) -> Macs:
        return Macs(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(Macs)))


@dataclass(frozen=True)
class FormCost:
    """What one form of attention costs over one graph: one layer, or the sum of several.

    ``macs``: all receivers in one pass. ``step``: decoding, the last receiver alone with the others in the
    cache. ``parameters`` are counted, all else is in bytes: ``activations`` (queries or patterns, keys and
    values or messages, and mixtures), ``weights`` (of all edges, if a backend writes them out), and for each
    way to cache a sender ``cache_per_token`` and ``cache``, that of the most senders of the graph.
    """

    form: str
    macs: Macs
    step: Macs
    parameters: int
    itemsize: int
    activations: int
    weights: int
    cache_per_token: Mapping[str, int]
    cache: Mapping[str, int]

    @property
    def parameter_bytes(self) -> int:
        """The parameters in bytes."""
        return self.parameters * self.itemsize

    def __add__(self, other: FormCost) -> FormCost:
        """Both layers; ValueError for layers of another form or dtype."""
        if (self.form, self.itemsize) != (other.form, other.itemsize):
            given = f"{self.form!r} of {self.itemsize} bytes and {other.form!r} of {other.itemsize}"
            raise ValueError(f"only costs of one form and dtype are added up, got {given}")
        numbers = ("macs", "step", "parameters", "activations", "weights")
        summed: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in numbers}
        for name in ("cache_per_token", "cache"):
            ways = getattr(other, name)
            summed[name] = {way: size + ways[way] for way, size in getattr(self, name).items()}
        return replace(self, **summed)

    def __mul__(self, layers: int) -> FormCost:
        return sum([self] * (checks.size("layers", layers, 1) - 1), start=self)


def of_form(
    form: str,
    width: int,
    num_heads: int,
    head_dim: int | None = None,
    value_dim: int | None = None,
    num_kv_heads: int | None = None,
    tokens: int | None = None,
    graph: TokenGraph | None = None,
    dtype: torch.dtype = torch.float32,
) -> FormCost:
    """The cost of a layer of "standard", "factored" or "merged" heads, over ``graph`` or ``causal(tokens)``.

    Sizes are those of :class:`gnn_attention.StandardHeads`, without biases. With neither tokens nor graph:
    one token with a self loop. ValueError for an unknown form, for tokens and graph at once, for a graph of
    another number of heads.

    >>> step = {form: of_form(form, 4096, 1, head_dim=128, tokens=8192).step.total for form in FORMS}
    >>> {form: round(macs / step["standard"], 1) for form, macs in step.items()}
    {'standard': 1.0, 'factored': 16.5, 'merged': 24.0}
    """
    sizes = Sizes.of(width, num_heads, head_dim, value_dim, num_kv_heads)
    if tokens is not None and graph is not None:
        raise ValueError(f"give tokens or graph, not both: got tokens={tokens} and {graph!r}")
    if graph is None:
        graph = patterns.causal(1 if tokens is None else checks.size("tokens", tokens, 1))
    return of_sizes(form, sizes, graph, dtype)


def of_sizes(
    form: str, sizes: Sizes | LatentSizes, graph: TokenGraph, dtype: torch.dtype = torch.float32
) -> FormCost:
    """The cost of a layer of heads of these sizes over a graph; raises as :func:`of_form`.

    The forms of :class:`LatentSizes` are "expanded" (a key and a value for each head) and "latent".

    >>> of_sizes("latent", config("deepseek-v3").heads, patterns.causal(10)).cache_per_token
    {'latent, rotated key': 2304}
    """
    rate, size = rates(form, sizes), checks.instance("dtype", dtype, torch.dtype).itemsize
    checks.instance("graph", graph, TokenGraph)
    if graph.heads not in (None, sizes.num_heads):
        found = f"{graph!r} differs by head and has {graph.heads} of them"
        raise ValueError(f"{found}, the heads are {sizes.num_heads}")
    samples, receivers, senders = graph.batch or 1, graph.num_dst, graph.num_src
    heads = 1 if graph.heads else sizes.num_heads  # heads for each edge that is counted
    in_edges = int(graph.in_degree()[..., -1:].sum()) * heads
    per_sender = {name: numbers * size * samples for name, numbers in rate.cache.items()}
    return FormCost(
        form=form,
        macs=_macs(rate, samples * receivers, samples * senders, graph.num_edges * heads),
        step=_macs(rate, samples, samples, in_edges) if receivers else Macs(),
        parameters=rate.parameters,
        itemsize=size,
        activations=samples * (receivers * rate.received + senders * rate.sent) * size,
        weights=graph.num_edges * heads * size,
        cache_per_token=per_sender,
        cache={name: part * most_cached(graph) for name, part in per_sender.items()},
    )


def of_config(
    model: str | ModelSizes,
    tokens: int = 8192,
    graph: TokenGraph | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, FormCost]:
    """What all attention layers of a model cost together, for each of its forms.

    ``model`` is a name of :data:`CONFIGS` or sizes; its layers attend as :func:`graphs_of` says, or all of
    them along ``graph``. Rotations and norms between ``W_Q`` and ``W_K`` are left out. ValueError for an
    unknown name, with the nearest.

    >>> of_config("llama-3-8b")["standard"].cache_per_token
    {'key, value': 131072}
    """
    model = config(model) if isinstance(model, str) else model
    layers = graphs_of(model, tokens) if graph is None else [(graph, model.layers)]
    found = {}
    for form in FORMS if isinstance(model.heads, Sizes) else LATENT_FORMS:
        first, *others = (of_sizes(form, model.heads, each, dtype) * count for each, count in layers)
        found[form] = sum(others, start=first)
    return found


def graphs_of(model: ModelSizes, tokens: int) -> list[tuple[TokenGraph, int]]:
    """The graphs of a model's layers over so many tokens, each with the number of its layers.

    >>> [(graph.name, layers) for graph, layers in graphs_of(config("gemma-3-4b"), 8192)]
    [('window(8192, 1024)', 29), ('causal(8192)', 5)]
    """
    tokens, found = checks.size("tokens", tokens, 1), []
    if model.window is not None:
        found.append((patterns.window(tokens, model.window), model.window_layers))
    if model.layers > model.window_layers:
        found.append((patterns.causal(tokens), model.layers - model.window_layers))
    return found


def of_ranks(
    model: str | ModelSizes,
    world_size: int,
    tokens: int = 8192,
    graph: TokenGraph | None = None,
    dtype: torch.dtype = torch.bfloat16,
    partition: Partition | str = "contiguous",
) -> list[tuple[Plan, int]]:
    """A model on ranks that share the tokens: a plan for each graph, with its number of layers.

    ``partition`` as in :func:`gnn_attention.distributed.plan`. Latent heads are planned in their
    expanded form, with a key and a value for each head. Raises as :func:`of_config` and ``plan``.

    >>> [(found, layers)] = of_ranks("llama-3-8b", 64, graph=patterns.window(100_000, 512))
    >>> layers, found.ranks[9].halo
    (32, 511)
    """
    model = config(model) if isinstance(model, str) else model
    sizes = model.heads
    heads: dict[str, Any] = {"heads": sizes.num_heads, "value_dim": sizes.value_dim, "dtype": dtype}
    if isinstance(sizes, Sizes):
        heads |= {"dim": sizes.head_dim, "kv_heads": sizes.num_kv_heads}
    else:
        heads |= {"dim": sizes.content_dim + sizes.rotary_dim}
    layers = graphs_of(model, tokens) if graph is None else [(graph, model.layers)]
    for each, _ in layers:
        checks.instance("graph", each, TokenGraph)
    heads["partition"] = partition
    return [(plan(each, world_size, batch=each.batch or 1, **heads), count) for each, count in layers]


def _macs(rate: Rates, receivers: int, senders: int, edges: int) -> Macs:
    of_edges = edges * rate.logit, edges * rate.weighting
    return Macs(receivers * rate.receive, senders * rate.send, *of_edges, receivers * rate.collect)
