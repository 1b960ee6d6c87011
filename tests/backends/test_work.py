"""What ``backend="auto"`` chooses by: estimates of a rule against its exact counts, from few pairs."""

import math
import subprocess
import sys

import pytest
import torch
from support.covering import thinned

from gnn_attention import TokenGraph, patterns
from gnn_attention.backends import dispatch
from gnn_attention.backends.call import AttentionCall, one_of
from gnn_attention.backends.plan import planner, work
from gnn_attention.graph.tiling import tiles

N = 4096


def listed(n, edges, seed=0):
    drawn = torch.randint(n, (2, edges), generator=torch.Generator().manual_seed(seed))
    return TokenGraph.from_edges(drawn, n, coalesce=True)


def permuted(n, seed=0):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


def hub(n, token, to=True, of=True):
    """Edges from all tokens to one, or from one to all, and each token's to itself."""
    return TokenGraph.from_rule(
        lambda b, h, dst, src: (to & (dst == token)) | (of & (src == token)) | (dst == src), n
    )


ZOO = {
    "strict causal": lambda: patterns.strict_causal(N),
    "encoder, decoder": lambda: patterns.encoder_decoder(2048, 2048),
    "window that a border cuts": lambda: patterns.window(N - 31, 100),
    "dilated": lambda: patterns.dilated(N, 64, 4),
    "natten": lambda: patterns.natten((64, 64), 7),
    "swin": lambda: patterns.swin((64, 64), 8, 4),
    "axial": lambda: patterns.axial((64, 64)),
    "strides": lambda: patterns.strides(N, 64),
    "longformer about the middle": lambda: patterns.longformer(N, 128, [1000, 2500], causal=False),
    "receiver in the middle": lambda: hub(N, 1777, of=False),
    "sink in the middle": lambda: hub(N, 1777, to=False),
    "global tokens | few edges": lambda: patterns.global_tokens(N, [2000]) | listed(N, 500),
    "butterfly": lambda: patterns.butterfly(N),
    "by head": lambda: patterns.fibottention(N, 8),
    "documents": lambda: patterns.documents([500, 300, 96, 1200, 1000, 600, 400]),
    "permutation": lambda: patterns.permutation(permuted(N)),
    "tree": lambda: patterns.tree([-1, *((i - 1) // 2 for i in range(1, N))]),
    "sorted blocks": lambda: patterns.sorted_blocks(N, permuted(64), 64),
    "list | window": lambda: listed(N, 40_000) | patterns.window(N, 128),
    "rows of list | window": lambda: (listed(N, 40_000) | patterns.window(N, 128)).rows(1000, 3000),
}
EDGES, TILES = 1.25, 1.6  # factors within which the estimates are
LARGE = {
    "natten in space": lambda: patterns.natten((32, 32, 16), 5),
    "longnet": lambda: patterns.longnet(16384, [2048, 4096, 8192, 16384], [1, 2, 4, 8]),
    "butterfly": lambda: patterns.butterfly(16384),
    "sink in the middle": lambda: hub(16384, 7777, to=False),
}


def check_estimate(graph, edges=EDGES):
    """The exact edges are those of ``num_edges``, the exact tiles those of ``tiling.tiles``."""
    graph = one_of(graph, 0, 0)
    assert work.is_estimated(graph)
    found, exact = work.estimate(graph), tiles(graph, planner.BLOCK)
    for estimate, truth, factor in (
        (found.edges, graph.num_edges, edges),
        (work.num_edges(graph), graph.num_edges, edges),
        (found.every.tiles, exact.num_full + exact.num_partial, TILES),
    ):
        assert truth / factor <= estimate <= truth * factor


@pytest.mark.parametrize("name", thinned(ZOO, 1))
def test_edges_and_tiles_are_within_a_factor_of_the_exact_counts(name):
    check_estimate(ZOO[name]())


@pytest.mark.parametrize("n", [1, 63, 300, 512])
def test_a_graph_of_few_pairs_is_counted(n):
    for graph in (
        patterns.window(n, 100),
        patterns.natten((n,), 1),
        patterns.no_self(n),
        patterns.dilated(n, 9, 7),
    ):
        assert not work.is_estimated(graph)
        assert work.num_edges(graph) == graph.num_edges


PROGRAM = """
from gnn_attention import patterns
from gnn_attention.backends.plan import work
for graph in patterns.butterfly(16384), patterns.natten((64, 64), 7):
    print(work.estimate(graph))
"""


def test_the_estimate_is_the_same_every_time():
    """In another process too; and the global generator of numbers is left as it was."""
    before = torch.get_rng_state()
    here = [work.estimate(make()) for make in (LARGE["butterfly"], ZOO["natten"])]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1234)
    assert [work.estimate(make()) for make in (LARGE["butterfly"], ZOO["natten"])] == here
    torch.set_rng_state(before)
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    ).stdout
    assert printed.splitlines() == [str(estimate) for estimate in here]


class Counted:
    """A rule that counts the pairs at which it is evaluated; ranges are none."""

    def __init__(self, rule):
        self.rule, self.pairs = rule, 0

    def __call__(self, b, h, dst, src):
        edge = self.rule(b, h, dst, src)
        if isinstance(dst, torch.Tensor):
            self.pairs += math.prod(torch.broadcast_shapes(b.shape, h.shape, dst.shape, src.shape))
        return edge


def call_on(graph, heads=8, dim=64):
    q = torch.empty(1, heads, graph.num_dst, dim, device="meta")
    k = torch.empty(1, heads, graph.num_src, dim, device="meta")
    return AttentionCall.checked(q, k, k, graph)


RULES = {
    "window": lambda b, h, dst, src: (src <= dst) & (dst - src < 300),
    # there is no arithmetic of ranges for a float: every range is open
    "hashed": lambda b, h, dst, src: ((dst * 7919 + src * 104729).double() * 0.618).frac() < 0.01,
}


@pytest.mark.parametrize(
    ("name", "n"),
    [*((name, n) for name in RULES for n in (600, 4096, 2**14, 2**17)), ("window", 2**20)],
)
def test_a_choice_visits_few_pairs_whatever_the_size(name, n):
    rule = Counted(RULES[name])
    graph = TokenGraph.from_rule(rule, n)
    rule.pairs = 0
    dispatch.choose(call_on(graph))
    assert 0 < rule.pairs < 2**19
