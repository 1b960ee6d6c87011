"""Compute how far information travels: receptive fields, depths, shortest paths and walks.

Every function accepts one graph for all layers, or a list with one graph for each layer, layer 1 first; a
shorter list is cycled. The residual stream keeps a token's own state even without a self loop, except in
walks of exactly n hops. All functions raise TypeError, ValueError or IndexError for wrong arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import islice

import numpy as np
import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.analyse._walks import Graphs, check_graphs, check_token, sender_lookup, spread
from gnn_attention.graph import TokenGraph, rules, text

# Functions that compute a [dst, src] table accept at most this many tokens.
MAX_TOKENS = 8192
# float64 represents every integer up to this one exactly.
MAX_WALKS = 2.0**53


def receptive_field(
    graphs: Graphs, receiver: int, layers: int, residual: bool = True
) -> Int[Tensor, " tokens"]:
    """Return the tokens whose input can influence ``receiver`` after this many layers, in increasing order.

    From each of these tokens, a walk of at most ``layers`` hops leads to ``receiver``. With
    ``residual=False`` (no residual stream), the walk must have exactly ``layers`` hops.

    >>> from gnn_attention import patterns
    >>> receptive_field(patterns.window(16, 3), 10, 2).tolist()
    [6, 7, 8, 9, 10]
    """
    stack = check_graphs(graphs)
    receiver = check_token("receiver", receiver, stack[0].num_dst)
    layers = checks.size("layers", layers)
    lookups = [sender_lookup(graph, layers) for graph in stack]
    reversed_lookups = [lookups[(layers - 1 - step) % len(lookups)] for step in range(len(lookups))]
    field = torch.tensor([receiver], device="cpu")
    if residual:
        steps = islice(spread(reversed_lookups, receiver, stack[0].num_dst), layers)
        return torch.cat([field, *steps]).sort().values
    for step in range(layers):
        field = torch.unique(reversed_lookups[step % len(lookups)](field))
    return field


def layers_between(graphs: Graphs, src: int, dst: int) -> int | None:
    """Return after how many layers ``dst`` first receives from ``src``, or None if it never does.

    For a single graph, this is the length of the shortest path. It is 0 from a token to itself.

    >>> from gnn_attention import patterns
    >>> layers_between(patterns.window(100, 4), 0, 99)
    33
    """
    stack = check_graphs(graphs)
    num_tokens = stack[0].num_dst
    src, dst = check_token("src", src, num_tokens), check_token("dst", dst, num_tokens)
    if src == dst:
        return 0
    steps = enumerate(spread([sender_lookup(graph.T) for graph in stack], src, num_tokens), 1)
    return next((layer for layer, new_tokens in steps if dst in new_tokens), None)


def witness(graphs: Graphs, src: int, dst: int, layers: int | None = None) -> list[int] | None:
    """Return a shortest path of information from ``src`` to ``dst``, or None if there is none.

    The list starts with ``src``, followed by the token that holds the information after each layer. If
    layers differ, a token may repeat, as the residual stream keeps its state. ``layers`` limits the length.

    >>> from gnn_attention import patterns
    >>> witness(patterns.window(9, 3), 1, 6)
    [1, 2, 4, 6]
    """
    stack = check_graphs(graphs)
    num_tokens = stack[0].num_dst
    src, dst = check_token("src", src, num_tokens), check_token("dst", dst, num_tokens)
    max_layers = None if layers is None else checks.size("layers", layers)
    # first_layer[t] is the layer after which token t first receives from src, or -1 if it never does.
    first_layer = torch.full((num_tokens,), -1, device="cpu")
    first_layer[src] = 0
    steps = islice(spread([sender_lookup(graph.T) for graph in stack], src, num_tokens), max_layers)
    for layer, new_tokens in enumerate(steps, 1):
        first_layer[new_tokens] = layer
        if first_layer[dst] >= 0:
            break
    if first_layer[dst] < 0:
        return None
    path = [dst]
    depth = int(first_layer[dst])
    lookups = [sender_lookup(graph, depth) for graph in stack]
    for layer in range(depth, 0, -1):
        token = path[-1]
        if first_layer[token] == layer:
            senders = lookups[(layer - 1) % len(stack)](torch.tensor([token], device="cpu"))
            is_earlier = (first_layer[senders] >= 0) & (first_layer[senders] < layer)
            token = int(senders[is_earlier].min())
        path.append(token)
    return path[::-1]


def diameter(graphs: Graphs) -> int | None:
    """Return the fewest layers after which every token has received from every token, or None.

    For a single graph, this equals networkx's diameter. ValueError for more than 8192 tokens.

    >>> from gnn_attention import patterns
    >>> diameter(patterns.window(9, 3, causal=False)), diameter(patterns.causal(9))
    (4, None)
    """
    num_tokens = check_graphs(graphs)[0].num_dst
    return layers_to_full_reach(graphs, TokenGraph.from_rule(rules.all_pairs, num_tokens))


def layers_to_full_reach(graphs: Graphs, target: TokenGraph | None = None) -> int | None:
    """Return the fewest layers after which every receiver has received from its senders in ``target``.

    Return None if that never happens. ``target`` is a graph, by default the causal one if all layers
    are causal, else the full one. For the full graph ``full``, receptive fields stop growing after
    ``layers_to_full_reach(g, ~never_hears(g, full))`` layers. ValueError for more than 8192 tokens.

    >>> from gnn_attention import patterns
    >>> layers_to_full_reach(patterns.window(100, 4)), layers_to_full_reach(patterns.documents([4, 4]))
    (33, None)
    """
    stack = check_graphs(graphs)
    return _count_layers(stack, _target_bits("layers_to_full_reach", stack, target))


def never_hears(graphs: Graphs, target: TokenGraph | None = None) -> TokenGraph:
    """Return the edges of ``target`` whose dst never receives from src, however many layers there are.

    ``target`` is as in :func:`layers_to_full_reach`. ValueError for more than 8192 tokens.

    >>> from gnn_attention import patterns
    >>> never_hears(patterns.documents([2, 2])).edge_index.t().tolist()
    [[0, 2], [1, 2], [0, 3], [1, 3]]
    """
    stack = check_graphs(graphs)
    target_bits = _target_bits("never_hears", stack, target)
    reach = reduce(_compose, [_layer_bits(graph) for graph in stack])
    while not torch.equal(reach, double_reach := _compose(reach, reach)):
        reach = double_reach
    missing_bits = (target_bits & ~reach).numpy()
    mask = torch.from_numpy(np.unpackbits(missing_bits, axis=1, count=stack[0].num_src, bitorder="little"))
    name = f"never_hears({', '.join(text.parenthesize(graph.name) for graph in stack)})"
    return TokenGraph.from_edges(mask.nonzero().T.flip(0), stack[0].num_dst, name=name)


def path_counts(graphs: Graphs, layers: int) -> Int[Tensor, "dst src"]:
    """Count the walks of exactly ``layers`` hops from src to dst, by multiplying the masks of the layers.

    ValueError for more than 8192 tokens, and for 2^53 walks or more, which float64 cannot count.

    >>> from gnn_attention import patterns
    >>> path_counts(patterns.causal(4), 3).tolist()
    [[1, 0, 0, 0], [3, 1, 0, 0], [6, 3, 1, 0], [10, 6, 3, 1]]
    """
    stack = check_graphs(graphs)
    layers = checks.size("layers", layers)
    check_all_pairs("path_counts", stack[0], "use fewer tokens")
    masks = [graph.mask().double() for graph in stack]
    walks = torch.eye(stack[0].num_dst, dtype=torch.float64, device="cpu")
    for layer in range(layers):
        walks = masks[layer % len(masks)] @ walks
        if bool((walks >= MAX_WALKS).any()):
            raise ValueError(f"layers must be at most {layer}, got {layers}: two tokens have 2^53 walks")
    return walks.long()


def _target_bits(function_name: str, stack: list[TokenGraph], target: TokenGraph | None) -> Tensor:
    check_all_pairs(function_name, stack[0], "use receptive_field or layers_between")
    if target is None:
        causal = not any(bool(graph.mask().triu(1).any()) for graph in stack)
        target = TokenGraph.from_rule(rules.causal if causal else rules.all_pairs, stack[0].num_dst)
    if check_graphs(target)[0].frame != stack[0].frame:
        raise ValueError(f"target must have the tokens of the graphs, got {target!r} for {stack[0]!r}")
    return _pack_bits(target.mask())


def check_all_pairs(name: str, graph: TokenGraph, advice: str) -> None:
    if graph.num_dst > MAX_TOKENS:
        raise ValueError(f"{name} takes at most {MAX_TOKENS} tokens, got {graph!r}: {advice}")


# Below, the reach of all tokens is a bool matrix [dst, src], packed along src into bytes.


def _count_layers(graphs: Sequence[TokenGraph], target: Int[Tensor, "dst bytes"]) -> int | None:
    """Return the fewest layers whose reach contains ``target``, using about ``2 log2(cycles)`` products."""
    layer_reach = [_layer_bits(graph) for graph in graphs]
    # A cycle runs each layer once, and cycle_reach[p] is the reach of 2^p cycles. Their number is
    # doubled until their reach contains the target, and is then bisected. Single layers are added last.
    cycle_reach = [reduce(_compose, layer_reach)]
    while bool((target & ~cycle_reach[-1]).any()):
        double_reach = _compose(cycle_reach[-1], cycle_reach[-1])
        if torch.equal(double_reach, cycle_reach[-1]):
            return None
        cycle_reach.append(double_reach)
    num_layers = 0
    reach = _pack_bits(torch.eye(len(target), dtype=torch.bool, device="cpu"))
    for power in reversed(range(len(cycle_reach) - 1)):
        longer_reach = _compose(reach, cycle_reach[power])
        if bool((target & ~longer_reach).any()):
            reach = longer_reach
            num_layers += 2**power * len(layer_reach)
    while bool((target & ~reach).any()):
        reach = _compose(reach, layer_reach[num_layers % len(layer_reach)])
        num_layers += 1
    return num_layers


def _compose(earlier: Int[Tensor, "mid bytes"], later: Int[Tensor, "dst bytes"]) -> Int[Tensor, "dst bytes"]:
    """Compute the reach of ``earlier`` followed by ``later``: the boolean ``later @ earlier``.

    A table has the union of every subset of eight rows (the method of four Russians). With 4096
    tokens, this is ten times as fast as a product of float32 matrices.
    """
    product = torch.zeros_like(earlier[:1]).repeat(len(later), 1)
    for index, bits in enumerate(later.T.int()):
        if bool(bits.any()):
            # Row k of the table is the union of the rows whose bits are set in k.
            unions = earlier.new_zeros(1, earlier.shape[1])
            for row in earlier[8 * index : 8 * (index + 1)]:
                unions = torch.cat([unions, unions | row])
            product |= unions.index_select(0, bits)
    return product


def _layer_bits(graph: TokenGraph) -> Tensor:
    return _pack_bits(graph.mask() | torch.eye(graph.num_dst, dtype=torch.bool, device="cpu"))


def _pack_bits(mask: Bool[Tensor, "dst src"]) -> Int[Tensor, "dst bytes"]:
    return torch.from_numpy(np.packbits(mask.numpy(), axis=1, bitorder="little"))
