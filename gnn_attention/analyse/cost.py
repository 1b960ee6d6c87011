"""Compute the exact cost of a layer from its form and its graph, without running the layer.

A pass over a graph needs ``receivers * receive + senders * send + edges * (logit + weighting) +
receivers * collect`` multiply-accumulates. They count work, not time. The costs per item are:

======== ============================ ========================= ======= =========================
form     receiver                     sender                    edge    cached per sender
======== ============================ ========================= ======= =========================
standard query and output `dH(D + V)` key and value `dG(D + V)` `D + V` key and value `G(D + V)`
factored pattern `2dHD`               message `2dHV`            `2d`    pattern and message `2Hd`
merged   pattern `Hd^2`               message `Hd^2`            `2d`    pattern and message `2Hd`
======== ============================ ========================= ======= =========================

d is the width, H and G are the numbers of query and of key/value heads, D and V the widths of keys and values
(sources S1.5, S1.14, S1.21, S1.22 of docs/sources.md). Biases, norms, rotations and the softmax are left out.
If ``D + V < d``, standard costs least and merged most. If ``D + V > d``, merged costs less than factored.
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
    """Multiply-accumulates by purpose; each is two floating point operations.

    ``receive`` is for queries or patterns, ``send`` for keys and values or messages, ``logits`` and
    ``weighting`` for the edges, and ``collect`` for the output matrix of the standard form.
    """

    receive: int = 0
    send: int = 0
    logits: int = 0
    weighting: int = 0
    collect: int = 0

    @property
    def edges(self) -> int:
        """Multiply-accumulates on the edges, which are proportional to the number of edges."""
        return self.logits + self.weighting

    @property
    def total(self) -> int:
        """The sum of all five fields."""
        return self.receive + self.send + self.edges + self.collect

    def __add__(self, other: Macs) -> Macs:
        return Macs(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Macs)))


@dataclass(frozen=True)
class FormCost:
    """The cost of one form of a layer on one graph.

    ``macs`` counts one pass over all receivers, and ``step`` only the last receiver, with the others
    in the cache. ``parameters`` is a number of scalars. The other sizes are in bytes: ``activations``
    (queries or patterns, keys and values or messages, weighted sums), ``weights`` (of all edges, if a
    backend stores them), and ``cache_per_token`` and the largest ``cache`` for each cache layout.
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


class _UnitCosts(NamedTuple):
    macs: Macs
    parameters: int
    scalars_per_receiver: int
    scalars_per_sender: int
    cache_scalars: Mapping[str, int]


def _unit_costs(form: str, d: int, H: int, D: int, V: int, G: int) -> _UnitCosts:
    parameters, key_value = d * (H + G) * (D + V), G * (D + V)
    if form == "standard":
        macs = Macs(receive=d * H * D, send=d * key_value, logits=D, weighting=V, collect=H * V * d)
        return _UnitCosts(macs, parameters, H * (D + V), key_value, {"key, value": key_value})
    # Patterns and messages are as wide as the states, so heads are summed without a matrix. A
    # group of heads shares its values but not W_O, so every query head has its own messages.
    if form == "factored":
        macs = Macs(receive=2 * d * H * D, send=2 * d * H * V, logits=d, weighting=d)
    else:
        macs = Macs(receive=H * d * d, send=H * d * d, logits=d, weighting=d)
        parameters = 2 * H * d * d
    cache_scalars = {"pattern, message": 2 * H * d, "state, message": d + H * d, "state and a 1": d + 1}
    return _UnitCosts(macs, parameters, 2 * H * d, H * d, cache_scalars)


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
    """Compute the cost of a layer of "standard", "factored" or "merged" heads.

    The layer runs on ``graph`` or ``causal(tokens)``, by default on one token with a self loop. Sizes
    are those of :class:`gnn_attention.StandardHeads`. ValueError for an unknown form, if both ``tokens``
    and ``graph`` are given, and if the graph has another number of heads. For a Llama 3 8B head (S1.12):

    >>> step = {form: of_form(form, 4096, 1, head_dim=128, tokens=8192).step.total for form in FORMS}
    >>> {form: round(macs / step["standard"], 1) for form, macs in step.items()}
    {'standard': 1.0, 'factored': 16.5, 'merged': 24.0}
    """
    if tokens is not None and graph is not None:
        raise ValueError(f"pass tokens or graph, not both: got tokens={tokens} and {graph!r}")
    if graph is None:
        num_tokens = 1 if tokens is None else checks.size("tokens", tokens, 1)
        graph = TokenGraph.from_rule(rules.causal, num_tokens, name=f"causal({num_tokens})")
    sizes = head_sizes(width, num_heads, head_dim, value_dim, num_kv_heads)
    unit = _unit_costs(checks.choice("form", form, FORMS), *sizes)
    itemsize = checks.instance("dtype", dtype, torch.dtype).itemsize
    checks.instance("graph", graph, TokenGraph)
    if graph.heads not in (None, num_heads):
        raise ValueError(f"graph must have {num_heads} heads or none, got {graph.heads} in {graph!r}")
    num_samples = graph.batch or 1
    num_receivers, num_senders = num_samples * graph.num_dst, num_samples * graph.num_src
    heads_per_edge = 1 if graph.heads else num_heads
    num_edges = graph.num_edges * heads_per_edge
    num_last_edges = int(graph.in_degree()[..., -1:].sum()) * heads_per_edge
    cache_per_token = {kind: n * itemsize * num_samples for kind, n in unit.cache_scalars.items()}
    num_scalars = num_receivers * unit.scalars_per_receiver + num_senders * unit.scalars_per_sender
    return FormCost(
        form=form,
        macs=_multiply(unit.macs, num_receivers, num_senders, num_edges),
        step=_multiply(unit.macs, num_samples, num_samples, num_last_edges) if num_receivers else Macs(),
        parameters=unit.parameters,
        itemsize=itemsize,
        activations=num_scalars * itemsize,
        weights=num_edges * itemsize,
        cache_per_token=cache_per_token,
        cache={kind: size * most_cached(graph) for kind, size in cache_per_token.items()},
    )


def _multiply(unit: Macs, num_receivers: int, num_senders: int, num_edges: int) -> Macs:
    receive, collect = num_receivers * unit.receive, num_receivers * unit.collect
    logits, weighting = num_edges * unit.logits, num_edges * unit.weighting
    return Macs(receive, num_senders * unit.send, logits, weighting, collect)


@dataclass(frozen=True)
class GraphCost:
    """Edge counts of a graph, the causal graph and the full graph, over all samples and heads.

    ``cached`` is the largest number of senders in the cache while decoding, if each sender leaves after
    its last receiver. For a graph between two sequences, it is the number of senders with an edge.
    :func:`gnn_attention.graph.tiling.tiles` counts the tiles that a block-sparse kernel visits.
    """

    name: str
    edges: int
    causal: int
    full: int
    cached: int

    @property
    def of_causal(self) -> float:
        """The number of edges, divided by the number of edges of the causal graph."""
        return self.edges / self.causal if self.causal else 1.0


def of_graph(graph: TokenGraph) -> GraphCost:
    """Count the edges and the cached senders of a graph, without listing the edges of a rule.

    >>> from gnn_attention import patterns
    >>> cost = of_graph(patterns.window(100_000, 4096) | patterns.sinks(100_000, 4))
    >>> cost.edges, round(1 / cost.of_causal), cost.cached
    (401597050, 12, 4100)
    """
    checks.instance("graph", graph, TokenGraph)
    num_slices = (graph.batch or 1) * (graph.heads or 1)
    # In the causal graph, each receiver has one more in-edge than the receiver before it.
    first_degree = graph.dst_offset - graph.src_offset + 1
    causal_degrees = torch.arange(first_degree, first_degree + graph.num_dst, device="cpu")
    return GraphCost(
        name=graph.name,
        edges=graph.num_edges,
        causal=num_slices * int(causal_degrees.clamp(0, graph.num_src).sum()),
        full=num_slices * graph.num_dst * graph.num_src,
        cached=most_cached(graph),
    )


def most_cached(graph: TokenGraph) -> int:
    """Return the largest number of senders cached at once, if no token enters before its senders."""
    last_dst = memoized(last_receivers, graph)
    if (graph.num_dst, graph.dst_offset) != (graph.num_src, graph.src_offset):
        return int((last_dst >= 0).sum())
    if not graph.num_src:
        return 0
    # A chunk of tokens ends where no token so far attends to a later one. All tokens of a chunk
    # enter together. In a causal graph, every token is a chunk.
    positions = torch.arange(graph.num_src, device="cpu")
    is_chunk_end = memoized(last_senders, graph).cummax(0).values <= positions
    chunk_index = is_chunk_end.cumsum(0) - is_chunk_end.long()
    enter_index, leave_index = chunk_index[last_dst >= 0], chunk_index[last_dst[last_dst >= 0]] + 1
    change = torch.zeros(graph.num_src + 1, dtype=torch.int64, device="cpu")
    change.index_add_(0, enter_index, torch.ones_like(enter_index))
    change.index_add_(0, leave_index, -torch.ones_like(leave_index))
    return int(change.cumsum(0).max())
