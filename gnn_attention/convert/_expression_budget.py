"""What it takes to build a graph, estimated before it is built. ``expressions`` refuses what takes too much.

An effort of 2^26 is about a second and at most a few hundred megabytes. Only what grows faster than the numbers in a text
has an entry in ``EFFORTS``: whatever draws, compares or lists. A rule costs nothing until it is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace as Arguments
from typing import Any

from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph

__all__ = ["EFFORTS", "MOST", "MOST_PAIRS", "Effort", "of_call", "of_power", "of_product", "size"]

MOST = 2**26  # effort of one text
MOST_PAIRS = 2**24  # (dst, src), of a graph whose edges are listed

Effort = float
CALL = 2**16  # a product of two graphs that have no edges


def of_call(name: str, arguments: Mapping[str, Any]) -> Effort:
    """Of a call of a builder or of a function of graphs. Arguments of a wrong kind cost nothing: they are refused in the call."""
    estimate = EFFORTS.get(name)
    try:
        effort = sum(20 * _listed(graph) for graph in graphs(arguments.values()))
        return effort + (float(estimate(Arguments(**arguments))) if estimate else 0.0)
    except (TypeError, AttributeError, ZeroDivisionError, IndexError):
        return 0.0
    except (ValueError, OverflowError):  # numbers too large for a float
        return math.inf


def of_product(left: TokenGraph, right: TokenGraph) -> Effort:
    """Of ``left @ right``, from their edges and the most that a token hears."""
    edges = _edges(left), _edges(right)
    return math.inf if math.inf in edges else _product((left.num_dst, left.num_src, right.num_src), *edges, right.max_in_degree)


def of_power(graph: TokenGraph, hops: int) -> Effort:
    """Of ``graph ** hops``: the edges of the powers grow, at most to all pairs."""
    n, edges = graph.num_dst, _edges(graph)
    if math.isinf(edges):
        return edges
    most, effort, reached = graph.max_in_degree, 20.0 * n, float(n)
    for _ in range(hops):
        effort += _product((n, n, n), reached, edges, most)
        reached = min(reached * most, float(n * n))
    return effort


def size(graph: TokenGraph) -> int:
    """Tokens on the longer side, over all heads and samples."""
    return max(graph.num_dst, graph.num_src) * (graph.heads or 1) * (graph.batch or 1)


def graphs(values: Any) -> Iterator[TokenGraph]:
    """The graphs among some arguments, and in lists of them."""
    for value in values:
        if isinstance(value, TokenGraph):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from graphs(value)


# -- each of them, in units of about 15 nanoseconds -------------------------------------------------------------------


def _product(sizes: tuple[int, int, int], left: float, right: float, most: int) -> Effort:
    num_dst, num_mid, num_src = sizes
    walks = left * most
    dense = num_dst * num_mid * num_src / 1024
    return CALL + 2 * (left + right + 2 * min(walks, num_dst * num_src)) + min(16 * walks, dense)


def _closure(x: Arguments) -> Any:
    n = x.g.num_dst
    hops = n if x.hops is None else min(x.hops, n)
    return 2 * (hops.bit_length() + 1) * _product((n, n, n), n * n, n * n, n) + 20 * _edges(x.g)


def _k_hop(x: Arguments) -> Any:
    n, edges = x.graph.num_dst, _edges(x.graph)
    most, heard, effort = x.graph.max_in_degree, 1.0, 0.0
    for _ in range(min(x.k, n) - 1):
        heard = min(heard * (most + 1), float(n))
        effort += _product((n, n, n), edges, n * heard, int(heard)) + 20 * n * heard
    return effort + edges


def _random_senders(x: Arguments) -> Any:
    drawn = min(x.n, x.r)
    return x.n * drawn * (drawn / 2 + 50)


def _expander(x: Arguments) -> Any:
    return min(x.draws, 4) * x.n * (512 + 32 * x.d)


def _bigbird(x: Arguments) -> Any:
    blocks = x.n / x.block
    return (x.heads or 1) * (5000 + blocks * (5 * blocks + 20 * x.num_random))


def _nearest(x: Arguments) -> Any:
    n, dim = x.points.shape[-2:]
    return x.points.numel() / max(dim, 1) * (n * (10 + dim / 8) + 4 * x.k)


def _lsh(x: Arguments) -> Any:
    dim = x.vectors.shape[-1]
    return x.rounds * x.num_buckets * (2 * x.vectors.numel() / max(dim, 1) + dim)


def _routing(x: Arguments) -> Any:
    tokens = (x.q.numel() + x.k.numel()) / max(x.q.shape[-1], 1)
    return 10 * x.centroids.shape[-2] * (tokens + x.w) * (1 + x.q.shape[-1] / 64)


def _against_blocks(q: Tensor, k: Tensor, rows: int, block: int) -> Any:
    """Of the logits of tokens, or of tiles of them, against blocks."""
    dim = max(q.shape[-1], 1)
    return 10 * q.numel() / dim / rows * (k.shape[-2] / block) * (1 + dim / 8)


def _blow_up(x: Arguments) -> Any:
    sides = [(x.sizes, x.g.num_dst), (x.sizes if x.src_sizes is None else x.src_sizes, x.g.num_src)]
    lengths = [given * count if isinstance(given, int) else sum(given) for given, count in sides]
    longest = [given if isinstance(given, int) else max(given, default=0) for given, _ in sides]
    return 4 * sum(lengths) + 30 * _listed(x.g) * longest[0] * longest[1]


def _of_lists(x: Arguments, loops: bool, both: bool) -> Any:
    """Of a product of two graphs: edges of the one beside tokens of the other (``loops``), edges of the one beside edges."""
    if x.g1._listed is None or x.g2._listed is None:
        return 0
    one, other = _listed(x.g1), _listed(x.g2)
    return 30 * (loops * (one * x.g2.num_dst + x.g1.num_dst * other) + both * one * other)


EFFORTS: Mapping[str, Callable[[Arguments], Any]] = {
    # draws
    "random_senders": _random_senders,
    "expander": _expander,
    "watts_strogatz": lambda x: 500 * x.n * (1 + x.k // 2),
    "erdos_renyi": lambda x: 500 * x.n * (1 + x.p * x.n / 2),
    "bigbird": _bigbird,
    "bigbird_etc": _bigbird,
    "randn": lambda x: math.prod(abs(size) for size in x.sizes),
    # tables and lists
    "binary_partition": lambda x: 600 * x.n * x.k,
    "fibottention": lambda x: x.heads * (2000 + x.n),
    "global_tokens": lambda x: 20 * x.tokens if isinstance(x.tokens, int) else 0,
    "longformer": lambda x: 20 * x.tokens if isinstance(x.tokens, int) else 0,
    "with_self_loops": lambda x: 20 * x.graph.num_dst,
    "temporal": lambda x: 350 * x.graph.num_dst,
    "blow_up": _blow_up,
    # data
    "top_k": lambda x: 8 * x.logits.numel(),
    "block_top_k": lambda x: 8 * x.logits.numel(),
    "nearest": _nearest,
    "lsh": _lsh,
    "routing": _routing,
    "moba": lambda x: _against_blocks(x.q, x.k, 1, x.block),
    "quest": lambda x: _against_blocks(x.q, x.k, 1, x.page),
    "tile_top_k": lambda x: _against_blocks(x.q, x.k, x.tile, x.tile),
    # edges of given graphs
    "virtual_nodes": lambda x: 20 * (_edges(x.graph) + 2 * x.m * x.graph.num_dst),
    "edge_types": lambda x: 10 * _edges(x.graph) * (1 + len(x.parts)),
    "shortest_paths": lambda x: 4 * _edges(x.graph) + 800 * x.structure.num_dst**2,
    "quotient": lambda x: 30 * _edges(x.g),
    "ancestry": lambda x: 30 * _edges(x.g),
    "closure": _closure,
    "cartesian_product": lambda x: _of_lists(x, loops=True, both=False),
    "tensor_product": lambda x: _of_lists(x, loops=False, both=True),
    "strong_product": lambda x: _of_lists(x, loops=True, both=True),
    "extend": lambda x: 0 if x.g._listed is None else 20 * x.count * (x.g.num_src + x.count),
    "k_hop": _k_hop,
}


# -- helpers ----------------------------------------------------------------------------------------------------------


def _listed(graph: TokenGraph) -> int:
    return 0 if graph._listed is None else graph._listed.shape[1]


def _edges(graph: TokenGraph) -> Effort:
    """Edges that have to be listed; infinite where there are too many pairs to look at."""
    if graph._listed is not None:
        return graph._listed.shape[1]
    return graph.num_edges if size(graph) * min(graph.num_dst, graph.num_src) <= MOST_PAIRS else math.inf
