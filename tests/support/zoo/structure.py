"""Theorems of ``patterns.structure``."""

import torch
from support.zoo.row import Row, band, never, once, steps, triangle

from gnn_attention import TokenGraph, patterns


def listed(pairs, n):
    """A graph from (src, dst) pairs."""
    return TokenGraph.from_edges(
        torch.tensor(list(pairs), dtype=torch.int64).reshape(-1, 2).t(), n, coalesce=True
    )


def chain(n):
    return listed(((i - 1, i) for i in range(1, n)), n)


def ring(n):
    return listed(((i, (i + 1) % n) for i in range(n)), n)


def only(graph, kept):
    return TokenGraph.from_edges(graph.edge_index[:, kept], graph.num_dst)


def loops_by_type(n):
    graph = patterns.full(n)
    near, before = patterns.edge_types(graph, [patterns.window(n, 3), patterns.strict_causal(n)])
    return only(graph, near & ~before)


def within_two(n):
    graph, both_ways = patterns.full(n), ring(n) | ring(n).T
    return only(graph, patterns.shortest_paths(graph, both_ways) <= 2)


ROWS = [
    Row(
        "with_self_loops",
        lambda n: patterns.with_self_loops(patterns.strict_causal(n)),
        lambda n, i, j: j <= i,
        triangle,
        lambda n, i: i + 1,
        layers=once,
    ),
    Row(
        "with_self_loops on a ring",
        lambda n: patterns.with_self_loops(ring(n)),
        lambda n, i, j: j in (i, (i - 1) % n),
        lambda n: 2 * n - (n == 1),
        lambda n, i: min(n, 2),
        layers=lambda n: max(n - 1, 0),
        causal=False,
        named_at=None,
    ),
    Row(
        "k_hop",
        lambda n: patterns.k_hop(patterns.window(n, 2), 3),
        lambda n, i, j: 0 <= i - j <= 3,
        lambda n: band(n, 4),
        lambda n, i: min(i + 1, 4),
        layers=lambda n: steps(n - 1, 3),
    ),
    Row(
        "k_hop of a chain",
        lambda n: patterns.k_hop(chain(n), 3),
        lambda n, i, j: i - j in (1, 2, 3),
        lambda n: band(n, 4) - n,
        lambda n, i: min(i, 3),
        layers=lambda n: steps(n - 1, 3),
        named_at=None,
    ),
    Row(
        "k_hop round a ring",
        lambda n: patterns.k_hop(ring(n), 4),
        lambda n, i, j: any((i - j - hops) % n == 0 for hops in (1, 2, 3, 4)),
        lambda n: n * min(n, 4),
        lambda n, i: min(n, 4),
        layers=lambda n: steps(n - 1, 4),
        causal=False,
        sizes=(0, 1, 2, 4, 17),
        named_at=None,
    ),
    Row(
        "virtual_nodes",
        lambda n: patterns.virtual_nodes(patterns.window(n, 2), 2),
        lambda n, i, j: j in (i - 1, i) if max(i, j) < n else (i < n) != (j < n),
        lambda n: band(n, 2) + 4 * n,
        lambda n, i: min(i + 1, 2) + 2 if i < n else n,
        layers=lambda n: 2 if n else None,
        causal=False,
        nodes=lambda n: (n + 2, n + 2),
    ),
    Row(
        "temporal",
        lambda n: patterns.temporal(patterns.full(n), [i // 3 for i in range(n)]),
        lambda n, i, j: j - j % 3 <= i,
        lambda n: 9 * triangle(n // 3) + n % 3 * n,
        lambda n, i: min(n, 3 * (i // 3 + 1)),
        layers=lambda n: once(n) if n <= 3 else None,
        causal=False,
    ),
    Row(
        "temporal, strict and backwards",
        lambda n: patterns.temporal(patterns.full(n), torch.arange(n).flip(0) * 0.5, strict=True),
        lambda n, i, j: j > i,
        lambda n: triangle(n) - n,
        lambda n, i: n - 1 - i,
        layers=never,
        causal=False,
        acyclic=True,
    ),
    Row(
        "edge_types",
        loops_by_type,
        lambda n, i, j: i == j,
        lambda n: n,
        lambda n, i: 1,
        layers=never,
        symmetric=True,
        named_at=None,
    ),
    Row(
        "shortest_paths",
        within_two,
        lambda n, i, j: min((i - j) % n, (j - i) % n) <= 2,
        lambda n: n * min(n, 5),
        lambda n, i: min(n, 5),
        layers=lambda n: steps(n // 2, 2),
        causal=False,
        symmetric=True,
        named_at=None,
    ),
]
