"""Follow edges for many tokens at once: find the senders of tokens, and spread along edges."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph, rules
from gnn_attention.graph.edges import RuleEdges

Graphs = TokenGraph | Sequence[TokenGraph]
# A function that maps tokens to all their senders; a sender of several tokens may repeat.
SenderLookup = Callable[[Tensor], Tensor]
# Longer lists of edges, which take more than 1 GB, are refused.
MAX_EDGES = 2**26
# For at most this many steps, evaluating a rule is cheaper than listing its edges.
MAX_RULE_STEPS = 64


def check_graphs(graphs: Graphs) -> list[TokenGraph]:
    """Return a list with the graph of each layer; TypeError or ValueError for invalid graphs."""
    checks.check_order("graphs", graphs)
    # Graphs of other libraries may be iterable, so list() would accept them.
    if not isinstance(graphs, (TokenGraph, Sequence, Iterator)):
        raise TypeError(f"graphs must be a TokenGraph or a list of them, got {checks.quote(graphs)}")
    stack = [graphs] if isinstance(graphs, TokenGraph) else list(graphs)
    for index, graph in enumerate(stack):
        checks.instance(f"graphs[{index}]", graph, TokenGraph)
        if graph.varying_axes:
            raise ValueError(f"graphs: {graph!r} varies by {graph.varying_axes}: use select(batch, head)")
        if not is_square(graph):
            raise ValueError(f"graphs must be square, got {graph!r}: use @ to compose other graphs")
        if graph.frame != stack[0].frame:
            raise ValueError(f"graphs must have the same tokens, got {stack[0]!r} and {graph!r}")
    if not stack:
        raise ValueError("graphs must contain at least one graph, got an empty list")
    return stack


def is_square(graph: TokenGraph) -> bool:
    return (graph.num_dst, graph.dst_offset) == (graph.num_src, graph.src_offset)


def check_token(name: str, value: int, num_tokens: int) -> int:
    if not 0 <= checks.integer(name, value) < num_tokens:
        raise IndexError(f"{name} must be a position in 0 .. {num_tokens - 1}, got {value}")
    return value


def list_edges(graph: TokenGraph) -> Tensor:
    """Return ``graph.edge_index``; ValueError if the list would be too long."""
    if graph.num_edges > MAX_EDGES:
        raise ValueError(f"{graph!r} has {graph.num_edges} edges, too many to list: use a shorter graph")
    return graph.edge_index


def sender_lookup(graph: TokenGraph, num_steps: int | None = None) -> SenderLookup:
    """Return the fastest function that finds senders in this many steps (None if unknown)."""

    def evaluate_rule(tokens: Tensor) -> Tensor:
        rule = partial(rules.map_tokens, graph.edges.contains, tokens.sort().values, 0)
        return TokenGraph(RuleEdges(rule), len(tokens), graph.num_src).T.in_degree().nonzero().flatten()

    is_short = num_steps is not None and num_steps <= MAX_RULE_STEPS
    if graph.edges.listed() is None and (is_short or graph.num_edges > MAX_EDGES):
        return evaluate_rule
    return csr_lookup(graph)


def csr_lookup(graph: TokenGraph) -> SenderLookup:
    """Return a function that finds senders in a list of the edges, which is sorted only once."""
    src, dst = list_edges(graph)
    ptr = torch.zeros(graph.num_dst + 1, dtype=torch.int64, device="cpu")
    ptr[1:] = torch.bincount(dst, minlength=graph.num_dst).cumsum(0)
    senders: Tensor = src[dst.argsort(stable=True)]

    def slice_list(tokens: Tensor) -> Tensor:
        # Concatenate senders[ptr[t] : ptr[t + 1]] of all tokens t without a loop.
        degree = ptr[tokens + 1] - ptr[tokens]
        offset = (ptr[tokens] - degree.cumsum(0) + degree).repeat_interleave(degree)
        return senders[torch.arange(len(offset), device="cpu") + offset]

    return slice_list


def spread(lookups: Sequence[SenderLookup], start: int, num_tokens: int) -> Iterator[Tensor]:
    """Yield the tokens that layer 1, 2, ... reaches for the first time; ``lookups`` are cycled.

    The residual stream keeps what a token received, so each layer follows each edge only once.
    """
    is_reached = torch.zeros(num_tokens, dtype=torch.bool, device="cpu")
    is_reached[start] = True
    queues = [[torch.tensor([start], device="cpu")] for _ in lookups]
    num_idle_layers = 0
    for find_senders, queue in cycle(zip(lookups, queues, strict=True)):
        senders = find_senders(torch.cat(queue))
        new_tokens = torch.unique(senders[~is_reached[senders]])
        is_reached[new_tokens] = True
        queue.clear()
        for other_queue in queues:
            other_queue.append(new_tokens)
        num_idle_layers = 0 if len(new_tokens) else num_idle_layers + 1
        yield new_tokens
        if num_idle_layers == len(lookups):
            return
