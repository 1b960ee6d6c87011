"""The estimates by which ``auto`` chooses are close to exact counts, and read few pairs."""

import math

import pytest
import torch
from support.covering import thin

from gnn_attention import TokenGraph, patterns
from gnn_attention.analyse import tile_counts
from gnn_attention.backends import dispatch
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.plan import planner
from gnn_attention.graph.tiling import tiles

N = 4096


def random_list(n, edges, seed=0):
    ends = torch.randint(n, (2, edges), generator=torch.Generator().manual_seed(seed))
    return TokenGraph.from_edges(ends, n, coalesce=True)


def draw_permutation(n, seed=0):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


ZOO = {
    "strict causal": lambda: patterns.strict_causal(N),
    "window that a border cuts": lambda: patterns.window(N - 31, 100),
    "natten": lambda: patterns.natten((64, 64), 7),
    "global tokens | few edges": lambda: patterns.global_tokens(N, [0]) | random_list(N, 500),
    "butterfly": lambda: patterns.butterfly(N),
    "sorted blocks": lambda: patterns.sorted_blocks(N, draw_permutation(64), 64),
    "list | window": lambda: random_list(N, 40_000) | patterns.window(N, 128),
}


@pytest.mark.parametrize("name", thin(ZOO, 1))
def test_edges_and_tiles_are_within_a_factor_of_the_exact_counts(name):
    """The exact counts are ``graph.num_edges`` and those of ``tiling.tiles``."""
    graph = ZOO[name]()
    assert tile_counts.is_estimated(graph)
    estimate = tile_counts.estimate(graph, planner.TILE_SIZE, planner.MIN_FILL)
    exact_tiles = tiles(graph, planner.TILE_SIZE)
    assert graph.num_edges / 1.25 <= estimate.num_edges <= graph.num_edges * 1.25
    num_tiles = exact_tiles.num_full + exact_tiles.num_partial
    assert num_tiles / 1.6 <= estimate.num_tiles <= num_tiles * 1.6


class CountingRule:
    """A rule that counts the pairs at which it is evaluated; intervals do not count."""

    def __init__(self, rule):
        self.rule, self.pairs = rule, 0

    def __call__(self, b, h, dst, src):
        edge = self.rule(b, h, dst, src)
        if isinstance(dst, torch.Tensor):
            self.pairs += math.prod(torch.broadcast_shapes(b.shape, h.shape, dst.shape, src.shape))
        return edge


def make_call(graph, heads=8, dim=64):
    q = torch.empty(1, heads, graph.num_dst, dim, device="meta")
    k = torch.empty(1, heads, graph.num_src, dim, device="meta")
    return AttentionCall.from_arguments(q, k, k, graph)


RULES = {
    "window": lambda b, h, dst, src: (src <= dst) & (dst - src < 300),
    # Intervals of floats are not supported, so that no interval decides.
    "hashed": lambda b, h, dst, src: ((dst * 7919 + src * 104729).double() * 0.618).frac() < 0.01,
}


@pytest.mark.parametrize(
    ("name", "n"),
    [*((name, n) for name in RULES for n in (600, 4096, 2**14, 2**17)), ("window", 2**20)],
)
def test_a_choice_visits_few_pairs_whatever_the_size(name, n):
    rule = CountingRule(RULES[name])
    graph = TokenGraph.from_rule(rule, n)
    rule.pairs = 0
    dispatch.choose(make_call(graph))
    assert 0 < rule.pairs < 2**19
