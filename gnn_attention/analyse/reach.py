"""How far information travels: receptive fields, layers to reach, shortest and all paths.

Every function takes one graph, used in every layer, or a list of graphs, one for each layer, layer 1 first;
beyond its end the list is cycled. A token's own state is always carried along by the residual stream, whether
or not there is a self loop. All raise TypeError, ValueError or IndexError for wrong layers or positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import islice

import numpy as np
import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.analyse._walks import Layers, check_token, senders_for, spread, stack
from gnn_attention.graph import TokenGraph, rules, text

ALL_PAIRS = 8192  # tokens up to which every pair is looked at
BITS = 8  # of a word: the senders that are looked up at once
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
    receiver = check_token("receiver", receiver, stacked[0].num_dst)
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
    src, dst = check_token("src", src, count), check_token("dst", dst, count)
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
    src, dst = check_token("src", src, count), check_token("dst", dst, count)
    limit = None if layers is None else checks.size("layers", layers)
    # The layer after which each token first knows of src.
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
            earlier = (since[senders] >= 0) & (since[senders] < layer)
            path.append(int(senders[earlier].min()))
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
    return layers_to_full_reach(graphs, TokenGraph.from_rule(rules.all_pairs, count))


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
    return _layers_until(stacked, _target_bits("layers_to_full_reach", stacked, target))


def never_hears(graphs: Layers, target: TokenGraph | None = None) -> TokenGraph:
    """The pairs ``src -> dst`` such that dst never receives from src, however many the layers.

    ``target`` is as in :func:`layers_to_full_reach`. ValueError above 8192 tokens.

    >>> from gnn_attention import patterns
    >>> never_hears(patterns.documents([2, 2])).edge_index.t().tolist()
    [[0, 2], [1, 2], [0, 3], [1, 3]]
    """
    stacked = stack(graphs)
    wanted = _target_bits("never_hears", stacked, target)
    reached = _cycle([_layer(graph) for graph in stacked])
    while not torch.equal(reached, twice := _compose(reached, reached)):
        reached = twice
    words, count = (wanted & ~reached).numpy(), stacked[0].num_src
    missing = torch.from_numpy(np.unpackbits(words, axis=1, count=count, bitorder="little"))
    name = f"never_hears({', '.join(text.parenthesize(graph.name) for graph in stacked)})"
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
        target = TokenGraph.from_rule(rules.causal if causal else rules.all_pairs, stacked[0].num_dst)
    if stack(target)[0].frame != stacked[0].frame:
        raise ValueError(f"target must have the tokens of the graphs, got {target!r} for {stacked[0]!r}")
    return _pack(target.mask())


def check_all_pairs(what: str, graph: TokenGraph, instead: str) -> None:
    if graph.num_dst > ALL_PAIRS:
        most = f"looks at every pair of tokens, at most {ALL_PAIRS} tokens"
        raise ValueError(f"{what} {most}; got {graph!r}: {instead}")


# Below, what all tokens have received at once is a row of bits for each receiver, eight senders to a word.


def _layers_until(graphs: Sequence[TokenGraph], wanted: Int[Tensor, "dst words"]) -> int | None:
    """The fewest layers after which every token has received from all that is wanted, None for never.

    Twice as many cycles until they suffice, then the most that do not, then layer by layer: about
    2 log2(cycles) products, however deep it is.
    """
    layers = [_layer(graph) for graph in graphs]
    stretches = [_cycle(layers)]
    while _misses(stretches[-1], wanted):
        twice = _compose(stretches[-1], stretches[-1])
        if torch.equal(twice, stretches[-1]):
            return None
        stretches.append(twice)
    reached, count = _identity(len(wanted)), 0
    for power in reversed(range(len(stretches) - 1)):
        longer = _compose(stretches[power], reached)
        if _misses(longer, wanted):
            reached, count = longer, count + 2**power * len(layers)
    while _misses(reached, wanted):
        reached, count = _compose(layers[count % len(layers)], reached), count + 1
    return count


def _compose(later: Int[Tensor, "dst words"], earlier: Int[Tensor, "mid words"]) -> Int[Tensor, "dst words"]:
    """What every token receives by way of those that it attends to: the boolean product of packed matrices.

    All unions of eight rows are looked up in a table (the method of four Russians), at 4096 tokens some ten
    times as fast as a product of float32 matrices.
    """
    result = torch.zeros_like(earlier[:1]).repeat(len(later), 1)
    for number, chosen in enumerate(later.T.int()):
        if bool(chosen.any()):
            # row k of the table is the union of the rows whose bits are set in k
            unions = earlier.new_zeros(1, earlier.shape[1])
            for row in earlier[BITS * number : BITS * (number + 1)]:
                unions = torch.cat([unions, unions | row])
            result |= unions.index_select(0, chosen)
    return result


def _pack(mask: Bool[Tensor, "dst src"]) -> Int[Tensor, "dst words"]:
    return torch.from_numpy(np.packbits(mask.numpy(), axis=1, bitorder="little"))


def _layer(graph: TokenGraph) -> Tensor:
    return _pack(graph.mask()) | _identity(graph.num_dst)


def _cycle(layers: Sequence[Tensor]) -> Tensor:
    return reduce(lambda reached, layer: _compose(layer, reached), layers)


def _identity(tokens: int) -> Tensor:
    return _pack(torch.eye(tokens, dtype=torch.bool, device="cpu"))


def _misses(reached: Tensor, wanted: Tensor) -> bool:
    return bool((wanted & ~reached).any())
