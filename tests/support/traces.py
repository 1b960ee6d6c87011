"""Make heads, graphs and a model to trace, and compute by a dense formula what a trace must record."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from support.inputs import heads as heads
from support.inputs import randn
from torch import Tensor, nn

import gnn_attention as ga
from gnn_attention import MessagePassingAttention, patterns
from gnn_attention import model as lm
from gnn_attention.interpret import trace

BACKENDS = ["auto", "reference", "dense", "tiles", "rows"]
TINY = lm.Config(vocabulary_size=50, width=12, num_layers=3, num_heads=3, head_dim=4, mlp_width=20, reach=4)
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])
CAUSAL = patterns.causal(7)
# Receivers 0 and 4 are isolated.
EDGES = torch.tensor([[6, 0, 5, 3, 4, 0, 2, 5, 6], [2, 2, 1, 3, 1, 6, 2, 5, 5]])
LISTED = ga.convert.from_edge_index(EDGES, 7)
GRAPHS = {
    "causal": CAUSAL,
    "window": patterns.window(7, 3),
    "listed": LISTED,
    "per head": ga.algebra.per_head(CAUSAL, patterns.window(7, 2), LISTED, patterns.strict_causal(7)),
    "per sample": ga.algebra.per_sample(patterns.strict_causal(7), LISTED),
}
# Edges for interventions; if the graph varies by head, they are edges of head 2.
PAIRS = {
    "causal": [(0, 3), (2, 3), (4, 4)],
    "window": [(1, 3), (2, 2)],
    "listed": [(6, 2), (0, 2), (5, 1), (4, 1), (3, 3)],
    "per head": [(0, 2), (5, 5)],
    "per sample": [(0, 2), (0, 6)],
}
KINDS = {"cut": trace.cut, "mute": trace.mute}


def redraw(module: Any, seed: int = 0) -> Any:
    """Convert a module to float64, and draw all of its parameters at random, biases and norms included."""
    for number, parameter in enumerate(module.double().parameters()):
        parameter.data = randn(*parameter.shape, seed=100 * seed + number) / 2
    return module


def new_model(backend: Any = "auto") -> lm.LanguageModel:
    """Return a model of three small layers in float64 with random position biases."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = lm.LanguageModel(TINY, backend).double()
        for layer in model.layers:
            nn.init.normal_(next(layer.score_mod.parameters()))
    return model


def record(heads: Any, x: Any, graph: Any, *score_mod: Any, **options: Any) -> trace.LayerTrace:
    """Record one call of a layer with these heads."""
    return trace.record(MessagePassingAttention(heads, *score_mod), x, graph, **options).layers[0]


class Dense(NamedTuple):
    """All tensors of attention, computed by its dense formula in float64."""

    logits: Tensor  # [B, H, dst, src]
    weights: Tensor
    messages: Tensor  # [B, H, src, width]
    carried: Tensor  # [B, H, dst, src, width]
    update: Tensor


def dense(heads: Any, x: Any, graph: Any, cut=None, mute=None, cap=None, bias=None) -> Dense:
    """Compute attention; ``cut`` and ``mute`` are bool ``[H, dst, src]``, and ``bias`` is ``[H, E]``."""
    group = heads.num_heads // heads.num_kv_heads
    parameters = (heads.W_K, heads.W_V, heads.b_K, heads.b_V)
    W_K, W_V, b_K, b_V = (parameter.repeat_interleave(group, 0) for parameter in parameters)
    q = torch.einsum("btw,hwd->bhtd", x, heads.W_Q) + heads.b_Q[:, None]
    k = torch.einsum("btw,hwd->bhtd", x, W_K) + b_K[:, None]
    logits = q @ k.mT / math.sqrt(heads.head_dim)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    if bias is not None:
        table = torch.zeros(heads.num_heads, graph.num_dst, graph.num_src, dtype=x.dtype)
        table[:, graph.edge_index[1], graph.edge_index[0]] = bias
        logits = logits + table
    mask = graph.mask() if cut is None else graph.mask() & ~cut
    masked_logits = logits.masked_fill(~mask, -math.inf)
    has_in_edges = mask.any(-1, keepdim=True)
    weights = torch.where(has_in_edges, masked_logits, 0.0).softmax(-1).masked_fill(~mask, 0.0)
    messages = (torch.einsum("btw,hwd->bhtd", x, W_V) + b_V[:, None]) @ heads.W_O
    factors = weights if mute is None else weights.masked_fill(mute, 0.0)
    carried = factors.unsqueeze(-1) * messages.unsqueeze(2)
    return Dense(masked_logits, weights, messages, carried, carried.sum((1, 3)) + heads.b_O)


def cells(pairs: list[tuple[int, int]], heads: Any = None) -> Tensor:
    """Return a mask ``[4, 7, 7]`` that is True for the pairs, in some or in all heads."""
    mask = torch.zeros(4, 7, 7, dtype=torch.bool)
    for src, dst in pairs:
        mask[list(range(4)) if heads is None else heads, dst, src] = True
    return mask


def take(matrix: Tensor, pairs: Tensor) -> Tensor:
    """Return the entries of pairs, ``[B, E, H, ...]``, in a matrix ``[B, H, dst, src, ...]``."""
    return matrix[:, :, pairs[1], pairs[0]].transpose(1, 2)


def one_edge(src: int, dst: int) -> ga.TokenGraph:
    return ga.convert.from_edge_index(torch.tensor([[src], [dst]]), 7)
