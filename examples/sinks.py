"""Which tokens take more than their share of attention, in every head of a model.

>>> import torch
>>> from gnn_attention import model as lm
>>> trained, vocabulary = lm.load_trained()
>>> found = sinks(trained, torch.tensor([vocabulary.encode("def f(x): return x")]))
>>> found.weight.shape == found.ratio.shape, found.over(4.0).shape[1]  # layer, head and token of each
(True, 3)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.interpret.trace import LayerTrace, record

__all__ = ["MeanWeights", "sinks"]


@dataclass(frozen=True, eq=False)
class MeanWeights:
    """The mean weight of each token by layer and head, and that of uniform weights on the same edges."""

    weight: Float[Tensor, "layers heads tokens"]
    uniform: Float[Tensor, "layers heads tokens"]

    @property
    def ratio(self) -> Float[Tensor, "layers heads tokens"]:
        """How many times its share a token takes."""
        return self.weight / self.uniform

    def over(self, times: float = 8.0) -> Int[Tensor, "sinks 3"]:
        """``(layer, head, token)`` of all that take more than ``times`` their share, in this order."""
        return (self.ratio > times).nonzero()


@torch.no_grad()
def sinks(model: nn.Module, ids: Int[Tensor, "batch tokens"], **inputs: Any) -> MeanWeights:
    """The mean weight that each token gets from the receivers that may attend to it, by layer and head.

    A *sink* has a ``ratio`` far above 1. ``model`` is one that ``trace.record`` takes; the texts have one
    length and no padding; ``inputs`` go to the model beside ``ids``. Graphs of ``use_graph`` count. A
    token to which no receiver may attend has NaN. The weights of a layer, tokens x tokens, are made one
    layer at a time. Sources: arXiv 2309.17453, 2504.02732.
    """
    means = [_means(layer) for layer in record(model, ids, **inputs).layers]
    weight, uniform = (torch.stack(part) for part in zip(*means, strict=True))
    return MeanWeights(weight, uniform)


def _means(layer: LayerTrace) -> tuple[Tensor, Tensor]:
    weights = layer.dense(layer.weights())  # [batch, heads, dst, src]
    edges = layer.graph.mask(weights.device).expand_as(weights).to(weights)
    uniform = edges / edges.sum(-1, keepdim=True).clamp(min=1.0)
    receivers = edges.sum((0, 2))
    return weights.sum((0, 2)) / receivers, uniform.sum((0, 2)) / receivers
