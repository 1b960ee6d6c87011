"""Theorems of ``patterns.structure``."""

import torch

from gnn_attention import TokenGraph


def graph_of_pairs(pairs, n):
    """Return a graph of (src, dst) pairs."""
    edges = torch.tensor(list(pairs), dtype=torch.int64).reshape(-1, 2).t()
    return TokenGraph.from_edges(edges, n, coalesce=True)


def ring(n):
    return graph_of_pairs(((i, (i + 1) % n) for i in range(n)), n)


def keep_edges(graph, mask):
    return TokenGraph.from_edges(graph.edge_index[:, mask], graph.num_dst)


def has_first_type_only(types):
    return types[0] & ~types[1]


ROWS = """
with_self_loops(strict_causal(n)): j <= i
    degree=i + 1; layers=once(n)
k_hop(ring(n), 4): any((i - j - hops) % n == 0 for hops in (1, 2, 3, 4))
    degree=min(n, 4); layers=steps(n - 1, 4); causal=False; sizes=(0, 1, 2, 4, 17); named_at=None
virtual_nodes(window(n, 2), 2): j in (i - 1, i) if max(i, j) < n else (i < n) != (j < n)
    degree=min(i + 1, 2) + 2 if i < n else n; layers=2 if n else None; nodes=n + 2; causal=False
temporal(full(n), [i // 3 for i in range(n)]): j - j % 3 <= i
    degree=min(n, 3 * (i // 3 + 1)); layers=once(n) if n <= 3 else None; causal=False
temporal(full(n), torch.arange(n).flip(0) * 0.5, strict=True): j > i
    degree=n - 1 - i; layers=never(n); causal=False; acyclic=True
keep_edges(full(n), has_first_type_only(edge_types(full(n), [window(n, 3), strict_causal(n)]))): i == j
    degree=1; layers=never(n); symmetric=True; named_at=None; causal=True
keep_edges(full(n), shortest_paths(full(n), ring(n) | ring(n).T) <= 2): min((i - j) % n, (j - i) % n) <= 2
    degree=min(n, 5); layers=steps(n // 2, 2); symmetric=True; named_at=None
"""
