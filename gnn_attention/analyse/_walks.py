"""Walks along edges, many tokens at once: the senders of some tokens, and what spreads along edges."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph, rules
from gnn_attention.graph.edges import RuleEdges

Layers = TokenGraph | Sequence[TokenGraph]
# All senders of some tokens; one that sends to several of them may be repeated.
Senders = Callable[[Tensor], Tensor]
MOST_EDGES = 2**26  # edges that are listed: 1 GB
FEW_STEPS = 64  # for so few a rule is evaluated rather than its edges listed


def stack(graphs: Layers) -> list[TokenGraph]:
    """The layers' graphs as a list; TypeError or ValueError unless plain, square and of the same tokens."""
    wanted = "graphs must be a TokenGraph or a list of them, layer 1 first"
    checks.check_order("graphs", graphs)
    # graphs of other libraries are iterable, too
    if not isinstance(graphs, (TokenGraph, Sequence, Iterator)):
        raise TypeError(f"{wanted}; got {checks.quote(graphs)}")
    layers = [graphs] if isinstance(graphs, TokenGraph) else list(graphs)
    for number, graph in enumerate(layers):
        if not isinstance(graph, TokenGraph):
            raise TypeError(f"{wanted}; got {type(graph).__name__} as number {number}")
        if graph.varying_axes:
            hint = "take one with select(batch, head), or join several by |"
            raise ValueError(f"graphs must be plain, but {graph!r} differs by {graph.varying_axes}: {hint}")
        if not is_square(graph):
            expected = "graphs of layers, whose senders and receivers are the same tokens"
            raise ValueError(f"graphs must be {expected}, got {graph!r}; compose others by @ first")
        if graph.frame != layers[0].frame:
            raise ValueError(f"graphs must have the same tokens, got {layers[0]!r} and {graph!r}")
    if not layers:
        raise ValueError("graphs must hold at least one layer's graph, got an empty list")
    return layers


def is_square(graph: TokenGraph) -> bool:
    return (graph.num_dst, graph.dst_offset) == (graph.num_src, graph.src_offset)


def check_token(name: str, value: int, count: int) -> int:
    if not 0 <= checks.position(name, value) < count:
        raise IndexError(f"{name} must be a position in 0 .. {count - 1}, got {value}")
    return value


def edges_of(graph: TokenGraph) -> Tensor:
    """``graph.edge_index``; ValueError where the list would be too long."""
    if graph.num_edges > MOST_EDGES:
        listed = f"at most {MOST_EDGES} are listed to walk along them"
        raise ValueError(f"{graph!r} has {graph.num_edges} edges, {listed}: take a shorter or sparser graph")
    return graph.edge_index


def senders_for(graph: TokenGraph, steps: int | None = None) -> Senders:
    """The senders in a graph, as lists where many (or unknown, None) ``steps`` are to be walked."""
    few = steps is not None and steps <= FEW_STEPS
    if graph.edges.listed() is None and (few or graph.num_edges > MOST_EDGES):
        return partial(_senders_by_rule, graph)
    return senders_of(graph)


def senders_of(graph: TokenGraph) -> Senders:
    """The senders in a graph whose edges are listed, once for all steps."""
    src, dst = edges_of(graph)
    first = torch.zeros(graph.num_dst + 1, dtype=torch.int64, device="cpu")
    first[1:] = torch.bincount(dst, minlength=graph.num_dst).cumsum(0)
    return partial(_listed_senders, first, src[dst.argsort(stable=True)])


def _listed_senders(first: Tensor, senders: Tensor, tokens: Tensor) -> Tensor:
    """``senders[first[t] : first[t + 1]]`` of every token t."""
    begin, count = first[tokens], first[tokens + 1] - first[tokens]
    skipped = (begin - count.cumsum(0) + count).repeat_interleave(count)
    return senders[torch.arange(len(skipped), device="cpu") + skipped]


def _senders_by_rule(graph: TokenGraph, tokens: Tensor) -> Tensor:
    """The rule is evaluated for all tokens together."""
    rule = partial(rules.map_tokens, graph.edges.contains, tokens.sort().values, 0)
    return TokenGraph(RuleEdges(rule), len(tokens), graph.num_src).T.in_degree().nonzero().flatten()


def spread(layers: Sequence[Senders], start: int, tokens: int) -> Iterator[Tensor]:
    """The tokens reached for the first time in layer 1, 2, ...; own states stay (the residual stream).

    The layers are cycled until none can reach anything; each token is passed on once by each of them.
    """
    seen = torch.zeros(tokens, dtype=torch.bool, device="cpu")
    seen[start] = True
    waiting, quiet = [[torch.tensor([start], device="cpu")] for _ in layers], 0
    for senders_in_layer, queue in cycle(zip(layers, waiting, strict=True)):
        senders = senders_in_layer(torch.cat(queue))
        new = torch.unique(senders[~seen[senders]])
        seen[new] = True
        queue.clear()
        for other in waiting:
            other.append(new)
        quiet = 0 if len(new) else quiet + 1
        yield new
        if quiet == len(layers):
            return
