"""How much of what a token knows in the end came from which token in the beginning: attention rollout and attention flow.

Both read a stack of layers as a layered graph, with a node for each token before the first layer and after each layer. A node
hears the tokens it attended to and, through the residual stream, itself: half and half. These shares are the mixing
``A = 0.5 W + 0.5 I`` of a layer, W its weights, the mean over heads. Rollout multiplies shares along every path and adds the
paths; flow is the largest flow where shares are capacities. Rows of A sum to 1, so rollout never exceeds flow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.backends.cpu import csr_ops
from gnn_attention.backends.plan.csr import sorted_edges

__all__ = ["Mixing", "largest_flow", "rolled_out"]

UNIT = 2**52  # a capacity of 1: flows of whole numbers are exact


@dataclass(frozen=True, eq=False)
class Mixing:
    """One layer's ``A``, sparse: what each edge brings to its receiver, and what the receiver keeps of itself.

    ``A = W + I``, each row divided by its sum: ``0.5 W + 0.5 I`` where weights sum to 1. Who hears nobody keeps everything.
    """

    pairs: Int[Tensor, "2 edges"]
    brought: Float[Tensor, "batch edges"]
    kept: Float[Tensor, "batch tokens"]

    @classmethod
    def of(cls, pairs: Int[Tensor, "2 edges"], weights: Float[Tensor, "batch edges"], tokens: int) -> Mixing:
        """From the weights of a layer's edges, the mean over heads.

        >>> mixing = Mixing.of(torch.tensor([[0, 1], [1, 1]]), torch.tensor([[0.25, 0.75]]), 2)
        >>> mixing.brought.tolist(), mixing.kept.tolist()
        ([[0.125, 0.375]], [[1.0, 0.5]])
        """
        dst = pairs[1].expand(weights.shape)
        total = weights.new_ones(weights.shape[0], tokens).scatter_add(1, dst, weights)
        return cls(pairs, weights / total.gather(1, dst), 1 / total)


def rolled_out(layers: Sequence[Mixing], receivers: Int[Tensor, " receivers"]) -> Float[Tensor, "batch receivers tokens"]:
    """Rows of ``A_L ... A_2 A_1``: from the receivers back to the first layer, in time of edges x receivers."""
    batch, tokens = layers[-1].kept.shape
    count = len(receivers)
    share = layers[-1].kept.new_zeros(tokens, count)  # share[i, r]: how much of receiver r is token i, at the layer that is next
    share[receivers, torch.arange(count, device=share.device)] = 1.0
    share = share.repeat(batch, 1, 1, 1)
    for layer in reversed(layers):
        listed, order = sorted_edges(layer.pairs[0], layer.pairs[1], tokens, tokens)
        weights = layer.brought.index_select(1, order).unsqueeze(1)
        told = csr_ops.outgoing(weights, share, csr_ops.tensors_of(listed), 1)
        share = told + layer.kept[:, None, :, None] * share
    return share.squeeze(1).mT


def largest_flow(layers: Sequence[Mixing], src: int, dst: int, sample: int) -> float:
    """The maximum flow from token ``src`` below the first layer to token ``dst`` above the last; at most 1."""
    import networkx

    network = networkx.DiGraph()
    network.add_nodes_from([(0, src), (len(layers), dst)])
    for level, layer in enumerate(layers):
        for (sender, receiver), share in _capacities(layer, sample).items():
            network.add_edge((level, sender), (level + 1, receiver), capacity=share)
    return int(networkx.maximum_flow_value(network, (0, src), (len(layers), dst))) / UNIT


def _capacities(layer: Mixing, sample: int) -> Counter[tuple[int, int]]:
    """The entries of A, (sender, receiver) -> share, in units of 1 / UNIT."""
    found: Counter[tuple[int, int]] = Counter()
    for token, share in enumerate(layer.kept[sample].tolist()):
        found[token, token] += round(share * UNIT)
    for sender, receiver, share in zip(*layer.pairs.tolist(), layer.brought[sample].tolist(), strict=True):
        found[sender, receiver] += round(share * UNIT)
    return found
