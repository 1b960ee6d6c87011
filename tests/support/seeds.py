"""What the tests of the five texts share: heads with drawn parameters, and attention in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gnn_attention as ga
from gnn_attention import FactoredHeads, MergedHeads, MessagePassingAttention, StandardHeads
from gnn_attention import model as lm

# asymmetric: 0 -> 2 but not 2 -> 0; its edges in no order, no isolated row
LISTED = ga.convert.from_edge_index(torch.tensor([[0, 3, 1, 3, 2, 4, 0], [2, 1, 1, 0, 4, 3, 4]]), 5)


@pytest.fixture(params=["message_passing", "reference", "dense"], ids=["walk", "reference", "dense"])
def way(request: pytest.FixtureRequest) -> str | None:
    """Edge by edge as torch_geometric walks, and two backends (``attend`` has no walk: "auto")."""
    way: str | None = request.param
    return way


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Numbers from N(0, 1) in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def redrawn(module: nn.Module, seed: int = 1) -> Any:
    """The module in float64 with every parameter drawn anew (biases, norms and tables too), frozen."""
    for number, parameter in enumerate(module.double().requires_grad_(False).parameters()):
        parameter.copy_(drawn(*parameter.shape, seed=100 * seed + number) / 2)
    return module


def heads_with(width: int = 12, num_heads: int = 3, seed: int = 1, **sizes: Any) -> StandardHeads:
    heads: StandardHeads = redrawn(StandardHeads(width, num_heads, **sizes), seed)
    return heads


def forms(heads: StandardHeads, *side: str) -> tuple[Any, Any]:
    """The two forms with patterns and messages."""
    return FactoredHeads.of(heads, *side), MergedHeads.of(heads, *side)


def model_with(num_layers: int = 2) -> lm.LanguageModel:
    """A small language model whose every parameter is drawn."""
    sizes = {"width": 12, "num_heads": 3, "head_dim": 4, "mlp_width": 8, "reach": 3}
    model: lm.LanguageModel = redrawn(
        lm.LanguageModel(lm.Config(vocabulary_size=9, num_layers=num_layers, **sizes))
    )
    return model


def run(heads: Any, x: Any, graph: ga.TokenGraph, way: str = "message_passing") -> Tensor:
    """The update of the layer."""
    update: Tensor = MessagePassingAttention(heads, backend=way)(x, graph)
    return update


def run_with_weights(
    heads: Any, x: Any, graph: ga.TokenGraph, way: str = "message_passing"
) -> tuple[Tensor, Tensor]:
    """The update, and the weights ``[heads, E]``."""
    layer = MessagePassingAttention(heads, backend=way)
    update, (edge_index, weights) = layer(x, graph, return_attention_weights=True)
    assert torch.equal(edge_index, graph.edge_index)
    return update, weights.T


def softmaxed(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """``softmax(q k^T / sqrt(d))`` over the pairs of the mask ``[dst, src]``, in plain torch."""
    logits = q @ k.mT * q.shape[-1] ** -0.5
    return (logits if mask is None else logits.masked_fill(~mask, -torch.inf)).softmax(-1)


def weights_of(heads: StandardHeads, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """``[heads, dst, src]``."""
    return softmaxed(x @ heads.W_Q, x @ heads.W_K, mask)


def update_of(heads: StandardHeads, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The update by the standard form: ``sum_h softmax(q k^T / sqrt(d)) v W_O``."""
    return (weights_of(heads, x, mask) @ (x @ heads.W_V) @ heads.W_O).sum(0)


def ungrouped(heads: StandardHeads) -> StandardHeads:
    """With a key and a value head for each query head."""
    group = heads.num_heads // heads.num_kv_heads
    W_K, W_V = (W.repeat_interleave(group, dim=0) for W in (heads.W_K, heads.W_V))
    return StandardHeads.from_arrays(heads.W_Q, W_K, W_V, heads.W_O)


def table_of(weights: Tensor, graph: ga.TokenGraph) -> Tensor:
    """Weights of edges ``[..., E]`` as a table ``[..., dst, src]``, 0 elsewhere."""
    src, dst = graph.edge_index
    table = weights.new_zeros(*weights.shape[:-1], graph.num_dst, graph.num_src)
    table[..., dst, src] = weights
    return table


def differ(a: Tensor, b: Tensor) -> bool:
    """True if the two are further apart than any rounding."""
    return bool((a - b).abs().max() > 1e-3)
