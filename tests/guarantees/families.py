"""Families of graphs for random cases, each with its definition in plain Python: the truth."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import torch

from gnn_attention import convert, patterns
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph

Definition = Callable[[int, int, int, int], bool]  # (sample, head, dst, src): is there an edge?
Defined = tuple[TokenGraph, Definition]
Chance = random.Random
Family = Callable[[Chance, int, int, int], Defined]  # (chance, tokens, samples, heads)


def _window(rng: Chance, n: int, batch: int, heads: int) -> Defined:
    w = rng.randint(0, n + 1)
    return patterns.window(n, w), lambda b, h, i, j: 0 <= i - j < w


def _band(rng: Chance, n: int, batch: int, heads: int) -> Defined:
    w = rng.randint(1, max(1, n // 3))
    return patterns.window(n, w, causal=False), lambda b, h, i, j: abs(i - j) < w


def _dilated(rng: Chance, n: int, batch: int, heads: int) -> Defined:
    w, step = rng.randint(1, 9), rng.randint(1, 7)
    return patterns.dilated(n, w, step), lambda b, h, i, j: 0 <= i - j < w * step and (i - j) % step == 0


def _sinks(rng: Chance, n: int, batch: int, heads: int) -> Defined:
    w, s = rng.randint(1, 20), rng.randint(0, min(n, 5))
    graph = patterns.window(n, w) | patterns.sinks(n, s)
    return graph, lambda b, h, i, j: 0 <= i - j < w or (j < s and j <= i)


def _prefix(rng: Chance, n: int, batch: int, heads: int) -> Defined:
    p = rng.randint(0, n)
    return patterns.prefix(n, p), lambda b, h, i, j: j < p or j <= i


def _documents(rng: Chance, n: int, batch: int, heads: int) -> Defined:
    cuts = sorted(rng.randint(0, n) for _ in range(rng.randint(0, 6)))
    bounds = [0, *cuts, n]
    owner = [sum(cut <= i for cut in cuts) for i in range(n)]
    graph = patterns.documents([stop - start for start, stop in itertools.pairwise(bounds)])
    return graph, lambda b, h, i, j: owner[i] == owner[j] and j <= i


def _tree(rng: Chance, n: int, batch: int, heads: int) -> Defined:
    parents = [rng.randint(-1, i - 1) for i in range(n)]
    lines: list[set[int]] = []
    for i, parent in enumerate(parents):
        lines.append({i} | (lines[parent] if parent >= 0 else set()))
    return patterns.tree(parents), lambda b, h, i, j: j in lines[i]


def _blocks(rng: Chance, n: int, batch: int, heads: int) -> Defined:
    block = rng.randint(1, max(1, n // 2))
    return patterns.block_causal(n, block), lambda b, h, i, j: j // block <= i // block


def _globals(rng: Chance, n: int, batch: int, heads: int) -> Defined:
    hubs = sorted(rng.sample(range(n), min(n, rng.randint(0, 3))))
    return patterns.global_tokens(n, hubs), lambda b, h, i, j: j <= i and (i in hubs or j in hubs)


def _by_head(rng: Chance, n: int, batch: int, heads: int) -> Defined:
    def rule(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        return (src <= dst) & (dst - src <= 2 * h)

    return TokenGraph.from_rule(rule, n, heads=heads, name="by head"), lambda b, h, i, j: 0 <= i - j <= 2 * h


def _by_sample(rng: Chance, n: int, batch: int, heads: int) -> Defined:
    def rule(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        return (src <= dst) & (src >= 3 * b)

    return TokenGraph.from_rule(rule, n, batch=batch, name="by sample"), lambda b, h, i, j: 3 * b <= j <= i


def _plain(make: Callable[[int], TokenGraph], definition: Definition) -> Family:
    return lambda rng, n, batch, heads: (make(n), definition)


FAMILIES: dict[str, Family] = {
    "full": _plain(patterns.full, lambda b, h, i, j: True),
    "causal": _plain(patterns.causal, lambda b, h, i, j: j <= i),
    "strict causal": _plain(patterns.strict_causal, lambda b, h, i, j: j < i),
    "anti-causal": _plain(patterns.anti_causal, lambda b, h, i, j: j >= i),
    "no self": _plain(patterns.no_self, lambda b, h, i, j: i != j),
    "self": _plain(patterns.self_loops, lambda b, h, i, j: i == j),
    "window": _window,
    "band": _band,
    "dilated": _dilated,
    "window and sinks": _sinks,
    "prefix": _prefix,
    "documents": _documents,
    "tree": _tree,
    "blocks": _blocks,
    "globals": _globals,
    "powers of two": _plain(
        patterns.log_sparse, lambda b, h, i, j: i == j or (j < i and (i - j) & (i - j - 1) == 0)
    ),
    "by head": _by_head,
    "by sample": _by_sample,
}
VARYING = ("by head", "by sample")

# beyond it no graph that differs by sample or head is drawn: its definition is read for each of them
LONG = 60


def any_family(rng: Chance, n: int, batch: int, heads: int) -> Defined:
    names = [name for name in FAMILIES if name not in VARYING or (n <= LONG and batch)]
    return FAMILIES[rng.choice(names)](rng, n, batch, heads)


OPERATIONS: dict[str, tuple[Callable[[TokenGraph, TokenGraph], TokenGraph], Callable[[bool, bool], bool]]] = {
    "|": (lambda one, other: one | other, lambda one, other: one or other),
    "&": (lambda one, other: one & other, lambda one, other: one and other),
    "-": (lambda one, other: one - other, lambda one, other: one and not other),
    "^": (lambda one, other: one ^ other, lambda one, other: one != other),
}


def mixed(rng: Chance, n: int, batch: int, heads: int) -> Defined:
    """Two families joined by one of the four operations on sets of edges."""
    (one, first), (other, second) = (any_family(rng, n, batch, heads) for _ in range(2))
    graphs, words = OPERATIONS[rng.choice(list(OPERATIONS))]
    return graphs(one, other), lambda b, h, i, j: words(first(b, h, i, j), second(b, h, i, j))


def some_rows(rng: Chance, n: int, batch: int, heads: int) -> Defined:
    """Some receivers of a family, over all its senders: decoding. Receivers are absolute positions."""
    graph, definition = any_family(rng, n, batch, heads)
    start = rng.randint(0, n)
    return graph.rows(start, rng.randint(start, n)), definition


def shuffled_list(rng: Chance, n: int, batch: int, heads: int) -> tuple[TokenGraph, list[tuple[int, int]]]:
    """Edges ``(src, dst)`` in no order, between as many or fewer receivers; with the list."""
    num_dst, share = rng.choice([n, rng.randint(0, n)]), rng.choice([0.01, 0.1, 0.5, 0.9])
    listed = [(j, i) for i in range(num_dst) for j in range(n) if rng.random() < share]
    rng.shuffle(listed)
    edge_index = torch.tensor(listed, dtype=torch.int64).reshape(-1, 2).t()
    return convert.from_edge_index(edge_index, num_dst, n), listed


def cross_table(rng: Chance, n: int, batch: int, heads: int) -> Defined:
    """A bool mask with more or fewer receivers than senders."""
    num_dst, share = rng.randint(0, n + 5), rng.random()
    table = [[rng.random() < share for _ in range(n)] for _ in range(num_dst)]
    mask = torch.tensor(table, dtype=torch.bool).reshape(num_dst, n)
    return convert.from_mask(mask), lambda b, h, i, j: table[i][j]
