"""Follow edges for many tokens at once: find the senders of tokens, and spread along edges."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph, rules
from gnn_attention.graph.edges import RuleEdges

Layers = TokenGraph | Sequence[TokenGraph]
# A function that maps tokens to all their senders; a sender of several tokens may repeat.
SenderLookup = Callable[[Tensor], Tensor]
# Longer lists of edges, which take more than 1 GB, are refused.
MAX_EDGES = 2**26
# For at most this many steps, evaluating a rule is cheaper than listing its edges.
MAX_RULE_STEPS = 64


def stack(graphs: Layers) -> list[TokenGraph]:
    """Return the graph of each layer as a list; TypeError or ValueError unless they can be stacked."""
    checks.check_order("graphs", graphs)
    # Graphs of other libraries may be iterable, so list() would accept them.
    if not isinstance(graphs, (TokenGraph, Sequence, Iterator)):
        raise TypeError(f"graphs must be a TokenGraph or a list of them, got {checks.quote(graphs)}")
    layers = [graphs] if isinstance(graphs, TokenGraph) else list(graphs)
    for index, graph in enumerate(layers):
        checks.instance(f"graphs[{index}]", graph, TokenGraph)
        if graph.varying_axes:
            raise ValueError(f"graphs: {graph!r} varies by {graph.varying_axes}: use select(batch, head)")
        if not is_square(graph):
            raise ValueError(f"graphs must be square, got {graph!r}: compose graphs of other tokens by @")
        if graph.frame != layers[0].frame:
            raise ValueError(f"graphs must have the same tokens, got {layers[0]!r} and {graph!r}")
    if not layers:
        raise ValueError("graphs must hold at least one layer's graph, got an empty list")
    return layers


def is_square(graph: TokenGraph) -> bool:
    return (graph.num_dst, graph.dst_offset) == (graph.num_src, graph.src_offset)


def check_token(name: str, value: int, count: int) -> int:
    if not 0 <= checks.integer(name, value) < count:
        raise IndexError(f"{name} must be a position in 0 .. {count - 1}, got {value}")
    return value


def list_edges(graph: TokenGraph) -> Tensor:
    """Return ``graph.edge_index``; ValueError if the list would be too long."""
    if graph.num_edges > MAX_EDGES:
        raise ValueError(f"{graph!r} has {graph.num_edges} edges, too many to list: take a shorter graph")
    return graph.edge_index


def sender_lookup(graph: TokenGraph, steps: int | None = None) -> SenderLookup:
    """Return the fastest function that finds senders for this many ``steps`` (None if unknown)."""

    def evaluate_rule(tokens: Tensor) -> Tensor:
        rule = partial(rules.map_tokens, graph.edges.contains, tokens.sort().values, 0)
        return TokenGraph(RuleEdges(rule), len(tokens), graph.num_src).T.in_degree().nonzero().flatten()

    is_short = steps is not None and steps <= MAX_RULE_STEPS
    if graph.edges.listed() is None and (is_short or graph.num_edges > MAX_EDGES):
        return evaluate_rule
    return sender_lookup_in_list(graph)


def sender_lookup_in_list(graph: TokenGraph) -> SenderLookup:
    """Return a function that finds senders in a list of the edges, which is sorted only once."""
    src, dst = list_edges(graph)
    ptr = torch.zeros(graph.num_dst + 1, dtype=torch.int64, device="cpu")
    ptr[1:] = torch.bincount(dst, minlength=graph.num_dst).cumsum(0)
    senders: Tensor = src[dst.argsort(stable=True)]

    def slice_list(tokens: Tensor) -> Tensor:
        # Concatenate senders[ptr[t] : ptr[t + 1]] of all tokens t without a loop.
        count = ptr[tokens + 1] - ptr[tokens]
        shift = (ptr[tokens] - count.cumsum(0) + count).repeat_interleave(count)
        return senders[torch.arange(len(shift), device="cpu") + shift]

    return slice_list


def spread(layers: Sequence[SenderLookup], start: int, tokens: int) -> Iterator[Tensor]:
    """Yield the tokens that layer 1, 2, ... reaches for the first time; layers are cycled.

    The residual stream keeps what a token received, so each layer follows each edge only once.
    """
    is_reached = torch.zeros(tokens, dtype=torch.bool, device="cpu")
    is_reached[start] = True
    queues = [[torch.tensor([start], device="cpu")] for _ in layers]
    idle_layers = 0
    for find_senders, queue in cycle(zip(layers, queues, strict=True)):
        senders = find_senders(torch.cat(queue))
        new_tokens = torch.unique(senders[~is_reached[senders]])
        is_reached[new_tokens] = True
        queue.clear()
        for other_queue in queues:
            other_queue.append(new_tokens)
        idle_layers = 0 if len(new_tokens) else idle_layers + 1
        yield new_tokens
        if idle_layers == len(layers):
            return
