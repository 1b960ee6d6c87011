"""Exact counts, without running anything, of what a form of the weights and a graph cost.

A pass over a graph costs ``receivers * receive + senders * send + edges * (logit + weighting) + receivers *
collect`` multiply-accumulates, which is work and not time. The graph enters by its number of edges:

======== ============================= ============================= ========= ==========================
form     a receiver                    a sender                      an edge   cached per sender
======== ============================= ============================= ========= ==========================
standard query and output `dH(D + V)`  key and value `dG(D + V)`     `D + V`   key and value `G(D + V)`
factored pattern `2dHD`                message `2dHV`                `2d`      pattern and message `2Hd`
merged   pattern `Hd^2`                message `Hd^2`                `2d`      the same
======== ============================= ============================= ========= ==========================

d is the width, H and G are the numbers of query and of key/value heads, D and V the widths of keys and values
(seeds S1.5, S1.14, S1.21). Biases, norms, rotations and the softmax are left out: they are few in comparison.

If ``D + V < d``, then standard < factored < merged for every graph with an edge (seed S1.22): factored costs
``tokens d (H - G)(D + V) + H edges (2d - D - V)`` more than standard, and merged ``2 tokens H d (d - D - V)``
more than factored. If ``D + V > d``, merged is cheaper than factored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from gnn_attention._support import checks
from gnn_attention.graph import TokenGraph, memoized, rules
from gnn_attention.graph.liveness import last_receivers, last_senders
from gnn_attention.heads.standard import head_sizes

__all__ = ["FORMS", "FormCost", "GraphCost", "Macs", "most_cached", "of_form", "of_graph"]


@dataclass(frozen=True)
class Macs:
    """Multiply-accumulates by what they are for; each is two floating point operations.

    ``receive`` makes queries or patterns, ``send`` keys and values or messages, ``logits`` and ``weighting``
    are on the edges, and ``collect`` is the output matrix, which only the standard form has.
    """

    receive: int = 0
    send: int = 0
    logits: int = 0
    weighting: int = 0
    collect: int = 0

    @property
    def edges(self) -> int:
        """What the edges take, in proportion to their number."""
        return self.logits + self.weighting

    @property
    def total(self) -> int:
        """The sum of all five."""
        return self.receive + self.send + self.edges + self.collect

    def __add__(self, other: Macs) -> Macs:
        return Macs(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(Macs)))


@dataclass(frozen=True)
class FormCost:
    """What a layer in one form of the weights costs over one graph.

    ``macs`` counts all receivers in one pass, ``step`` the last receiver alone, with the others in the cache.
    ``parameters`` is a number, all else is in bytes: ``activations`` (queries or patterns, keys and values or
    messages, and mixtures), ``weights`` (of all edges, if a backend writes them out), and for each way to
    cache a sender ``cache_per_token`` and ``cache``, which holds the most senders of the graph.
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


FORMS = ("standard", "factored", "merged")


class _Rates(NamedTuple):
    # multiply-accumulates of a receiver, a sender, and an edge of a head
    macs: Macs
    parameters: int
    # numbers that are made for a receiver and a sender, and those that a cache keeps of a sender
    received: int
    sent: int
    cache: Mapping[str, int]


def _rates(form: str, d: int, H: int, D: int, V: int, G: int) -> _Rates:
    factors, sent = d * (H + G) * (D + V), G * (D + V)
    if form == "standard":
        macs = Macs(receive=d * H * D, send=d * sent, logits=D, weighting=V, collect=H * V * d)
        return _Rates(macs, factors, H * (D + V), sent, {"key, value": sent})
    # Patterns and messages are as wide as the states, and heads are summed without a matrix. Values are
    # shared by a group of heads and W_O is not: every query head has messages of its own.
    if form == "factored":
        macs, parameters = Macs(receive=2 * d * H * D, send=2 * d * H * V, logits=d, weighting=d), factors
    else:
        macs, parameters = Macs(receive=H * d * d, send=H * d * d, logits=d, weighting=d), 2 * H * d * d
    cache = {"pattern, message": 2 * H * d, "state, message": d + H * d, "state and a 1": d + 1}
    return _Rates(macs, parameters, 2 * H * d, H * d, cache)


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

    Sizes are those of :class:`gnn_attention.StandardHeads`. Without tokens and graph it is one token with a
    self loop. Raises ValueError for an unknown form, for tokens and graph at once, and for a graph of another
    number of heads. An example with a head of Llama 3 8B (seed S1.12):

    >>> step = {form: of_form(form, 4096, 1, head_dim=128, tokens=8192).step.total for form in FORMS}
    >>> {form: round(macs / step["standard"], 1) for form, macs in step.items()}
    {'standard': 1.0, 'factored': 16.5, 'merged': 24.0}
    """
    if tokens is not None and graph is not None:
        raise ValueError(f"give tokens or graph, not both: got tokens={tokens} and {graph!r}")
    if graph is None:
        count = 1 if tokens is None else checks.size("tokens", tokens, 1)
        graph = TokenGraph.from_rule(rules.causal, count, name=f"causal({count})")
    sizes = head_sizes(width, num_heads, head_dim, value_dim, num_kv_heads)
    rate = _rates(checks.choice("form", form, FORMS), *sizes)
    size = checks.instance("dtype", dtype, torch.dtype).itemsize
    checks.instance("graph", graph, TokenGraph)
    if graph.heads not in (None, num_heads):
        raise ValueError(f"graph must have {num_heads} heads or none, got {graph.heads} in {graph!r}")
    samples, receivers, senders = graph.batch or 1, graph.num_dst, graph.num_src
    heads_of_an_edge = 1 if graph.heads else num_heads
    edges = graph.num_edges * heads_of_an_edge
    edges_of_last = int(graph.in_degree()[..., -1:].sum()) * heads_of_an_edge
    per_sender = {way: numbers * size * samples for way, numbers in rate.cache.items()}
    return FormCost(
        form=form,
        macs=_macs(rate.macs, samples * receivers, samples * senders, edges),
        step=_macs(rate.macs, samples, samples, edges_of_last) if receivers else Macs(),
        parameters=rate.parameters,
        itemsize=size,
        activations=samples * (receivers * rate.received + senders * rate.sent) * size,
        weights=edges * size,
        cache_per_token=per_sender,
        cache={way: part * most_cached(graph) for way, part in per_sender.items()},
    )


def _macs(one: Macs, receivers: int, senders: int, edges: int) -> Macs:
    of_edges = edges * one.logits, edges * one.weighting
    return Macs(receivers * one.receive, senders * one.send, *of_edges, receivers * one.collect)


@dataclass(frozen=True)
class GraphCost:
    """Counts of a graph over all samples and heads, with those of the causal and full graph of its tokens.

    ``cached``: the most senders in the cache while decoding, each until its last receiver has come; of a
    graph between two sequences, the senders with an edge. What a block-sparse kernel visits is in
    :func:`gnn_attention.graph.tiling.tiles`.
    """

    name: str
    edges: int
    causal: int
    full: int
    cached: int

    @property
    def of_causal(self) -> float:
        """Edges as a share of those of the causal graph; what is missing to 1 is saved."""
        return self.edges / self.causal if self.causal else 1.0


def of_graph(graph: TokenGraph) -> GraphCost:
    """Counts of a graph, without listing the pairs of a structured one; TypeError for no graph.

    >>> from gnn_attention import patterns
    >>> cost = of_graph(patterns.window(100_000, 4096) | patterns.sinks(100_000, 4))
    >>> cost.edges, round(1 / cost.of_causal), cost.cached
    (401597050, 12, 4100)
    """
    checks.instance("graph", graph, TokenGraph)
    copies = (graph.batch or 1) * (graph.heads or 1)
    first = graph.dst_offset - graph.src_offset + 1  # how many senders the first receiver attends to
    counts = torch.arange(first, first + graph.num_dst, device="cpu")
    return GraphCost(
        name=graph.name,
        edges=graph.num_edges,
        causal=copies * int(counts.clamp(0, graph.num_src).sum()),
        full=copies * graph.num_dst * graph.num_src,
        cached=most_cached(graph),
    )


def most_cached(graph: TokenGraph) -> int:
    """The most senders in a cache when each token comes as soon as all its senders have come."""
    last = memoized(last_receivers, graph)
    if (graph.num_dst, graph.dst_offset) != (graph.num_src, graph.src_offset):
        return int((last >= 0).sum())
    if not graph.num_src:
        return 0
    place = torch.arange(graph.num_src, device="cpu")
    # closed: all senders of the tokens so far have come; a chunk comes at once, a token in a causal graph
    closed = memoized(last_senders, graph).cummax(0).values <= place
    chunk = closed.cumsum(0) - closed.long()
    comes, leaves = chunk[last >= 0], chunk[last[last >= 0]] + 1
    change = torch.zeros(graph.num_src + 1, dtype=torch.int64, device="cpu")
    change.index_add_(0, comes, torch.ones_like(comes)).index_add_(0, leaves, -torch.ones_like(leaves))
    return int(change.cumsum(0).max())
