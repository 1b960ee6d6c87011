"""How far information travels: receptive fields, layers to reach, shortest and all paths.

Every function takes one graph, used in every layer, or a list of graphs, one for each layer, layer 1 first;
beyond its end the list is cycled. A token's own state is always carried along by the residual stream, whether
or not there is a self loop. All raise TypeError, ValueError or IndexError for wrong layers or positions.
"""

from __future__ import annotations

from itertools import islice

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.analyse._everyone import (
    check_all_pairs,
    layers_until,
    packed,
    reached_in_the_end,
    unpacked,
)
from gnn_attention.analyse._walks import Layers, senders_for, spread, stack, token
from gnn_attention.graph import TokenGraph, rules, text

TOO_MANY = 2.0**53  # below it float64 holds every integer


def receptive_field(
    graphs: Layers, receiver: int, layers: int, residual: bool = True
) -> Int[Tensor, " tokens"]:
    """The tokens whose input can influence ``receiver`` after so many layers, in increasing order.

    These are the starts of the walks that end at ``receiver``: of at most ``layers`` hops, or with
    ``residual=False`` (no own state carried along) of exactly ``layers`` hops.

    >>> from gnn_attention import patterns
    >>> receptive_field(patterns.window(16, 3), 10, 2).tolist()
    [6, 7, 8, 9, 10]
    """
    stacked = stack(graphs)
    receiver = token("receiver", receiver, stacked[0].num_dst)
    layers = checks.size("layers", layers)
    walks = [senders_for(graph, layers) for graph in stacked]
    backwards = [walks[(layers - 1 - step) % len(walks)] for step in range(len(walks))]
    reached = torch.tensor([receiver], device="cpu")
    if residual:
        steps = islice(spread(backwards, receiver, stacked[0].num_dst), layers)
        return torch.cat([reached, *steps]).sort().values
    for step in range(layers):
        reached = torch.unique(backwards[step % len(walks)](reached))
    return reached


def layers_between(graphs: Layers, src: int, dst: int) -> int | None:
    """The fewest layers after which ``dst`` has received from ``src``, 0 for itself, None if it never will.

    For a single graph the length of a shortest path.

    >>> from gnn_attention import patterns
    >>> layers_between(patterns.window(100, 4), 0, 99)
    33
    """
    stacked = stack(graphs)
    count = stacked[0].num_dst
    src, dst = token("src", src, count), token("dst", dst, count)
    if src == dst:
        return 0
    steps = enumerate(spread([senders_for(graph.T) for graph in stacked], src, count), 1)
    return next((layer for layer, new in steps if dst in new), None)


def witness(graphs: Layers, src: int, dst: int, layers: int | None = None) -> list[int] | None:
    """A shortest way of information from ``src`` to ``dst``, the token that has it after each layer, or None.

    The list begins with ``src``; a token repeated carries it in its residual stream (only where layers
    differ). With ``layers`` the way must not take more.

    >>> from gnn_attention import patterns
    >>> witness(patterns.window(9, 3), 1, 6)
    [1, 2, 4, 6]
    """
    stacked = stack(graphs)
    count = stacked[0].num_dst
    src, dst = token("src", src, count), token("dst", dst, count)
    limit = None if layers is None else checks.size("layers", layers)
    # The layer in which each token first has it.
    since = torch.full((count,), -1, device="cpu")
    since[src] = 0
    steps = islice(spread([senders_for(graph.T) for graph in stacked], src, count), limit)
    for layer, new in enumerate(steps, 1):
        since[new] = layer
        if since[dst] >= 0:
            break
    if since[dst] < 0:
        return None
    depth, path = int(since[dst]), [dst]
    backwards = [senders_for(graph, depth) for graph in stacked]
    for layer in range(depth, 0, -1):
        if since[path[-1]] == layer:
            senders = backwards[(layer - 1) % len(stacked)](torch.tensor(path[-1:], device="cpu"))
            have_it = (since[senders] >= 0) & (since[senders] < layer)
            path.append(int(senders[have_it].min()))
        else:
            path.append(path[-1])
    return path[::-1]


def diameter(graphs: Layers) -> int | None:
    """The fewest layers after which every token has received from every token, None for never.

    For a single graph the longest of all shortest paths, as in networkx. ValueError above 8192 tokens.

    >>> from gnn_attention import patterns
    >>> diameter(patterns.window(9, 3, causal=False)), diameter(patterns.causal(9))
    (4, None)
    """
    count = stack(graphs)[0].num_dst
    return layers_to_full_reach(graphs, TokenGraph.from_rule(rules.everyone, count))


def layers_to_full_reach(graphs: Layers, target: TokenGraph | None = None) -> int | None:
    """The fewest layers after which receivers have all that they may receive, None for never.

    ``target`` holds the wanted pairs: by default all, or ``src <= dst`` where no layer has another edge.
    ``layers_to_full_reach(g, ~never_hears(g))`` is the depth beyond which no receptive field grows.
    ValueError above 8192 tokens.

    >>> from gnn_attention import patterns
    >>> layers_to_full_reach(patterns.window(100, 4)), layers_to_full_reach(patterns.documents([4, 4]))
    (33, None)
    """
    stacked = stack(graphs)
    return layers_until(stacked, _target_bits("layers_to_full_reach", stacked, target))


def never_hears(graphs: Layers, target: TokenGraph | None = None) -> TokenGraph:
    """The pairs ``src -> dst`` such that dst never receives from src, however many the layers.

    ``target`` is as in :func:`layers_to_full_reach`. ValueError above 8192 tokens.

    >>> from gnn_attention import patterns
    >>> never_hears(patterns.documents([2, 2])).edge_index.t().tolist()
    [[0, 2], [1, 2], [0, 3], [1, 3]]
    """
    stacked = stack(graphs)
    wanted = _target_bits("never_hears", stacked, target)
    missing = unpacked(wanted & ~reached_in_the_end(stacked), stacked[0].num_src)
    name = f"never_hears({', '.join(text.bracketed(graph.name) for graph in stacked)})"
    return TokenGraph.from_edges(missing.nonzero().T.flip(0), stacked[0].num_dst, name=name)


def path_counts(graphs: Layers, layers: int) -> Int[Tensor, "dst src"]:
    """How many walks of exactly ``layers`` hops lead from src to dst: the product of the layers' masks.

    ValueError above 8192 tokens, and where there are 2^53 walks or more, too many to count in float64.

    >>> from gnn_attention import patterns
    >>> path_counts(patterns.causal(4), 3).tolist()
    [[1, 0, 0, 0], [3, 1, 0, 0], [6, 3, 1, 0], [10, 6, 3, 1]]
    """
    stacked = stack(graphs)
    layers, count = checks.size("layers", layers), stacked[0].num_dst
    check_all_pairs("path_counts", stacked[0], "take fewer")
    masks = [graph.mask().double() for graph in stacked]
    walks = torch.eye(count, dtype=torch.float64, device="cpu")
    for layer in range(layers):
        walks = masks[layer % len(masks)] @ walks
        if bool((walks >= TOO_MANY).any()):
            raise ValueError(
                f"layers must be fewer: 2^53 walks of {layer + 1} hops or more join a pair of tokens"
            )
    return walks.long()


def _target_bits(what: str, stacked: list[TokenGraph], target: TokenGraph | None) -> Tensor:
    check_all_pairs(what, stacked[0], "take single tokens: receptive_field or layers_between")
    if target is None:
        causal = not any(bool(graph.mask().triu(1).any()) for graph in stacked)
        target = TokenGraph.from_rule(rules.causal if causal else rules.everyone, stacked[0].num_dst)
    if stack(target)[0].frame != stacked[0].frame:
        raise ValueError(f"target must have the tokens of the graphs, got {target!r} for {stacked[0]!r}")
    return packed(target.mask())
