"""Find the tokens that receive more attention than their share, in every head of a model.

>>> import torch
>>> from gnn_attention import model as lm
>>> trained, vocabulary = lm.load_trained()
>>> means = sinks(trained, torch.tensor([vocabulary.encode("def f(x): return x")]))
>>> means.weight.shape == means.ratio.shape, means.over(4.0).shape[1]  # (layer, head, token)
(True, 3)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.interpret.trace import LayerTrace, record


@dataclass(frozen=True, eq=False)
class MeanWeights:
    """The mean weight of each token by layer and head, and its mean for uniform weights on the same edges."""

    weight: Float[Tensor, "layers heads tokens"]
    uniform: Float[Tensor, "layers heads tokens"]

    @property
    def ratio(self) -> Float[Tensor, "layers heads tokens"]:
        """The weight of each token as a multiple of its share."""
        return self.weight / self.uniform

    def over(self, times: float = 8.0) -> Int[Tensor, "sinks 3"]:
        """Return ``(layer, head, token)`` of all tokens whose ratio is above ``times``, in this order."""
        return (self.ratio > times).nonzero()


@torch.no_grad()
def sinks(model: nn.Module, ids: Int[Tensor, "batch tokens"], **inputs: Any) -> MeanWeights:
    """Return the mean weight of each token over the receivers that have an edge from it, by layer and head.

    A *sink* has a ``ratio`` far above 1. ``trace.record`` must accept ``model``; the texts have equal
    lengths and no padding; ``inputs`` are passed to the model with ``ids``. Graphs of ``use_graph`` apply.
    A token without out-edges has NaN. One layer's weights, tokens x tokens, are in memory at a time.
    Sources: arXiv 2309.17453, 2504.02732.
    """
    means = [_mean_weights(layer) for layer in record(model, ids, **inputs).layers]
    weight, uniform = (torch.stack(layers) for layers in zip(*means, strict=True))
    return MeanWeights(weight, uniform)


def _mean_weights(layer: LayerTrace) -> tuple[Tensor, Tensor]:
    # The weights are [batch, heads, dst, src].
    weights = layer.dense(layer.weights())
    edges = layer.graph.mask(weights.device).expand_as(weights).to(weights)
    uniform = edges / edges.sum(-1, keepdim=True).clamp(min=1.0)
    receivers = edges.sum((0, 2))
    return weights.sum((0, 2)) / receivers, uniform.sum((0, 2)) / receivers
