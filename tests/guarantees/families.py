"""Random cases draw from families of graphs, each with its definition in plain Python as the truth."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import torch

from gnn_attention import convert, patterns
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph

Definition = Callable[[int, int, int, int], bool]  # is_edge(sample, head, dst, src)
DefinedGraph = tuple[TokenGraph, Definition]
Family = Callable[[random.Random, int, int, int], DefinedGraph]  # (rng, tokens, samples, heads)


def _window(rng: random.Random, n: int, batch: int, heads: int) -> DefinedGraph:
    w = rng.randint(0, n + 1)
    return patterns.window(n, w), lambda b, h, i, j: 0 <= i - j < w


def _band(rng: random.Random, n: int, batch: int, heads: int) -> DefinedGraph:
    w = rng.randint(1, max(1, n // 3))
    return patterns.window(n, w, causal=False), lambda b, h, i, j: abs(i - j) < w


def _dilated(rng: random.Random, n: int, batch: int, heads: int) -> DefinedGraph:
    w, step = rng.randint(1, 9), rng.randint(1, 7)
    return patterns.dilated(n, w, step), lambda b, h, i, j: 0 <= i - j < w * step and (i - j) % step == 0


def _sinks(rng: random.Random, n: int, batch: int, heads: int) -> DefinedGraph:
    w, s = rng.randint(1, 20), rng.randint(0, min(n, 5))
    graph = patterns.window(n, w) | patterns.sinks(n, s)
    return graph, lambda b, h, i, j: 0 <= i - j < w or (j < s and j <= i)


def _prefix(rng: random.Random, n: int, batch: int, heads: int) -> DefinedGraph:
    p = rng.randint(0, n)
    return patterns.prefix(n, p), lambda b, h, i, j: j < p or j <= i


def _documents(rng: random.Random, n: int, batch: int, heads: int) -> DefinedGraph:
    cuts = sorted(rng.randint(0, n) for _ in range(rng.randint(0, 6)))
    bounds = [0, *cuts, n]
    owner = [sum(cut <= i for cut in cuts) for i in range(n)]
    graph = patterns.documents([stop - start for start, stop in itertools.pairwise(bounds)])
    return graph, lambda b, h, i, j: owner[i] == owner[j] and j <= i


def _tree(rng: random.Random, n: int, batch: int, heads: int) -> DefinedGraph:
    parents = [rng.randint(-1, i - 1) for i in range(n)]
    lines: list[set[int]] = []
    for i, parent in enumerate(parents):
        lines.append({i} | (lines[parent] if parent >= 0 else set()))
    return patterns.tree(parents), lambda b, h, i, j: j in lines[i]


def _blocks(rng: random.Random, n: int, batch: int, heads: int) -> DefinedGraph:
    block = rng.randint(1, max(1, n // 2))
    return patterns.block_causal(n, block), lambda b, h, i, j: j // block <= i // block


def _globals(rng: random.Random, n: int, batch: int, heads: int) -> DefinedGraph:
    hubs = sorted(rng.sample(range(n), min(n, rng.randint(0, 3))))
    return patterns.global_tokens(n, hubs), lambda b, h, i, j: j <= i and (i in hubs or j in hubs)


def _windows_by_head(rng: random.Random, n: int, batch: int, heads: int) -> DefinedGraph:
    def rule(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        return (src <= dst) & (dst - src <= 2 * h)

    return TokenGraph.from_rule(rule, n, heads=heads, name="by head"), lambda b, h, i, j: 0 <= i - j <= 2 * h


def _suffixes_by_sample(rng: random.Random, n: int, batch: int, heads: int) -> DefinedGraph:
    def rule(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        return (src <= dst) & (src >= 3 * b)

    return TokenGraph.from_rule(rule, n, batch=batch, name="by sample"), lambda b, h, i, j: 3 * b <= j <= i


def _fixed_family(make: Callable[[int], TokenGraph], definition: Definition) -> Family:
    return lambda rng, n, batch, heads: (make(n), definition)


FAMILIES: dict[str, Family] = {
    "full": _fixed_family(patterns.full, lambda b, h, i, j: True),
    "causal": _fixed_family(patterns.causal, lambda b, h, i, j: j <= i),
    "strict causal": _fixed_family(patterns.strict_causal, lambda b, h, i, j: j < i),
    "anti-causal": _fixed_family(patterns.anti_causal, lambda b, h, i, j: j >= i),
    "no self": _fixed_family(patterns.no_self, lambda b, h, i, j: i != j),
    "self": _fixed_family(patterns.self_loops, lambda b, h, i, j: i == j),
    "window": _window,
    "band": _band,
    "dilated": _dilated,
    "window and sinks": _sinks,
    "prefix": _prefix,
    "documents": _documents,
    "tree": _tree,
    "blocks": _blocks,
    "globals": _globals,
    "powers of two": _fixed_family(
        patterns.log_sparse, lambda b, h, i, j: i == j or (j < i and (i - j) & (i - j - 1) == 0)
    ),
    "by head": _windows_by_head,
    "by sample": _suffixes_by_sample,
}
VARYING = ("by head", "by sample")

# The definition of a graph that varies by sample or head is read for each of them, so such graphs stay small.
MAX_VARYING_TOKENS = 60


def draw_family(rng: random.Random, n: int, batch: int, heads: int) -> DefinedGraph:
    names = [name for name in FAMILIES if name not in VARYING or (n <= MAX_VARYING_TOKENS and batch)]
    return FAMILIES[rng.choice(names)](rng, n, batch, heads)


OPERATIONS: dict[str, tuple[Callable[[TokenGraph, TokenGraph], TokenGraph], Callable[[bool, bool], bool]]] = {
    "|": (lambda a, b: a | b, lambda a, b: a or b),
    "&": (lambda a, b: a & b, lambda a, b: a and b),
    "-": (lambda a, b: a - b, lambda a, b: a and not b),
    "^": (lambda a, b: a ^ b, lambda a, b: a != b),
}


def draw_mixture(rng: random.Random, n: int, batch: int, heads: int) -> DefinedGraph:
    """Combine two families by one of the four operations on edge sets."""
    (left_graph, left), (right_graph, right) = (draw_family(rng, n, batch, heads) for _ in range(2))
    combine_graphs, combine_bools = OPERATIONS[rng.choice(list(OPERATIONS))]
    graph = combine_graphs(left_graph, right_graph)
    return graph, lambda b, h, i, j: combine_bools(left(b, h, i, j), right(b, h, i, j))


def draw_rows(rng: random.Random, n: int, batch: int, heads: int) -> DefinedGraph:
    """Draw some rows of a graph of a family, as in decoding; its definition takes absolute positions."""
    graph, definition = draw_family(rng, n, batch, heads)
    start = rng.randint(0, n)
    return graph.rows(start, rng.randint(start, n)), definition


def draw_edge_list(rng: random.Random, n: int) -> tuple[TokenGraph, list[tuple[int, int]]]:
    """Return a graph of at most ``n`` receivers, and the shuffled pairs ``(src, dst)`` it was built from."""
    num_dst, share = rng.choice([n, rng.randint(0, n)]), rng.choice([0.01, 0.1, 0.5, 0.9])
    pairs = [(j, i) for i in range(num_dst) for j in range(n) if rng.random() < share]
    rng.shuffle(pairs)
    edge_index = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t()
    return convert.from_edge_index(edge_index, num_dst, n), pairs


def draw_mask(rng: random.Random, n: int, batch: int, heads: int) -> DefinedGraph:
    """Draw a bool mask with more or fewer receivers than senders."""
    num_dst, share = rng.randint(0, n + 5), rng.random()
    table = [[rng.random() < share for _ in range(n)] for _ in range(num_dst)]
    mask = torch.tensor(table, dtype=torch.bool).reshape(num_dst, n)
    return convert.from_mask(mask), lambda b, h, i, j: table[i][j]


MAKERS = {"family": draw_family, "mixed": draw_mixture, "rows": draw_rows, "table": draw_mask}
