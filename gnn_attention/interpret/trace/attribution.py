"""How much of a token's last state came from each token of the input: attention rollout and attention flow.

Both read a stack of layers as a layered graph, with a node for each token before the first layer and after
each. A node receives from the tokens it attends to and, through the residual stream, from itself, half and
half: the mixing ``A = 0.5 W + 0.5 I`` of a layer, W its weights, the mean over heads. Where a row of W does
not sum to 1 (an isolated receiver, a muted edge), that row of ``W + I`` is divided by its sum instead.
Rollout multiplies shares along every path and adds the paths; flow is the largest flow where shares are
capacities. Rows of A sum to 1, so rollout never exceeds flow. Source: Abnar and Zuidema 2020 (arXiv
2005.00928), section 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.backends.cpu import csr_ops
from gnn_attention.backends.plan.csr import sorted_edges
from gnn_attention.interpret.trace.layer import LayerTrace

# a capacity of 1: flows of whole numbers are exact
UNIT = 2**52


def rollout(
    layers: Sequence[LayerTrace], receivers: Iterable[int] | None = None
) -> Float[Tensor, "batch receivers tokens"]:
    """Attention rollout, rows of ``A_L ... A_2 A_1``: the share of each token in each receiver's last state.

    A muted edge brings nothing. Rows of the result sum to 1. Time is edges x receivers: pass few
    ``receivers`` of long sequences (None: all, tokens x tokens numbers).

    Raises ValueError for no layers or layers over different tokens, IndexError for an unknown receiver.

    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns, trace
    >>> layer, x = MessagePassingAttention(StandardHeads(8, 2)), torch.zeros(3, 8)
    >>> run = trace.record(layer, x, patterns.causal(3))
    >>> [round(share, 4) for share in rollout(run.layers * 2, [2])[0, 0].tolist()]
    [0.3194, 0.2361, 0.4444]
    """
    mixings = _mixings(layers)
    batch, tokens = mixings[0].own.shape
    checks.check_order("receivers", receivers)
    chosen = [
        checks.index("receivers", r, tokens) for r in (range(tokens) if receivers is None else receivers)
    ]
    last = functional.one_hot(torch.tensor(chosen, dtype=torch.int64), tokens).mT
    # share[b, 0, i, r]: how much of receiver r is token i, before the layer that is next
    share = last.to(mixings[0].own).repeat(batch, 1, 1, 1)
    for layer in reversed(mixings):
        edges, order = sorted_edges(layer.pairs[0], layer.pairs[1], tokens, tokens)
        weights = layer.brought.index_select(1, order).unsqueeze(1)
        brought = csr_ops.outgoing(weights, share, edges.tensors, 1)
        share = brought + layer.own[:, None, :, None] * share
    return share.squeeze(1).mT


def flow(layers: Sequence[LayerTrace], src: int, dst: int, sample: int = 0) -> float:
    """Attention flow: the largest flow from ``src`` before the first layer to ``dst`` after the last.

    It is at least the rollout of the same pair: a flow may use every path in full. Time grows with layers x
    edges; for short sequences. Raises as :func:`rollout` does. Computed by networkx's ``maximum_flow_value``.
    """
    import networkx

    mixings = _mixings(layers)
    batch, count = mixings[0].own.shape
    src, dst = checks.index("src", src, count), checks.index("dst", dst, count)
    sample = checks.index("sample", sample, batch)
    network = networkx.DiGraph()
    network.add_nodes_from([(0, src), (len(mixings), dst)])
    for level, layer in enumerate(mixings):
        for (sender, receiver), share in _capacities(layer, sample).items():
            network.add_edge((level, sender), (level + 1, receiver), capacity=share)
    return int(networkx.maximum_flow_value(network, (0, src), (len(mixings), dst))) / UNIT


class Mixing(NamedTuple):
    """One layer's sparse A: the share that each edge brings, and the receiver's own."""

    pairs: Int[Tensor, "2 edges"]
    brought: Float[Tensor, "batch edges"]
    own: Float[Tensor, "batch tokens"]


@torch.no_grad()
def _mixings(layers: Sequence[LayerTrace]) -> list[Mixing]:
    checks.check_order("layers", layers)
    if not isinstance(layers, Sequence) or not all(isinstance(layer, LayerTrace) for layer in layers):
        raise TypeError(f"layers must be a list of calls, as run.layers is, got {checks.described(layers)}")
    sizes = {(layer.graph.num_dst, layer.graph.num_src, len(layer.q)) for layer in layers}
    if len(sizes) != 1 or any(num_dst != num_src for num_dst, num_src, _ in sizes):
        raise ValueError(f"layers must be over the same tokens, got (dst, src, batch) {sorted(sizes)}")
    for layer in layers:
        layer.check_whole("a share of all that a token receives")
    return [_mixing(layer) for layer in layers]


def _mixing(layer: LayerTrace) -> Mixing:
    weights = layer.delivered().mean(1)
    dst = layer.edge_index[1].expand(weights.shape)
    total = weights.new_ones(len(weights), layer.graph.num_dst).scatter_add(1, dst, weights)
    return Mixing(layer.edge_index, weights / total.gather(1, dst), 1 / total)


def _capacities(layer: Mixing, sample: int) -> Counter[tuple[int, int]]:
    shares: Counter[tuple[int, int]] = Counter()
    for token, share in enumerate(layer.own[sample].tolist()):
        shares[token, token] += round(share * UNIT)
    for sender, receiver, share in zip(*layer.pairs.tolist(), layer.brought[sample].tolist(), strict=True):
        shares[sender, receiver] += round(share * UNIT)
    return shares
