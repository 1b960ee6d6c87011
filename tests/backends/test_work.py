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
from gnn_attention.backends.cost_model import costs
from gnn_attention.backends.plan import planner, work
from gnn_attention.graph.tiling import tiles

N = 4096


def listed(n, edges, seed=0):
    drawn = torch.randint(n, (2, edges), generator=torch.Generator().manual_seed(seed))
    return TokenGraph.from_edges(drawn, n, coalesce=True)


def buckets(n, number, seed=0):
    return torch.randint(number, (n,), generator=torch.Generator().manual_seed(seed))


def permuted(n, seed=0):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


def hub(n, token, to=True, of=True):
    """Edges from all tokens to one, or from one to all, and each token's to itself."""
    return TokenGraph.from_rule(
        lambda b, h, dst, src: (to & (dst == token)) | (of & (src == token)) | (dst == src), n
    )


ZOO = {
    "no self": lambda: patterns.no_self(N),
    "anti-causal": lambda: patterns.anti_causal(N),
    "strict causal": lambda: patterns.strict_causal(N),
    "encoder, decoder": lambda: patterns.encoder_decoder(2048, 2048),
    "window": lambda: patterns.window(N, 256),
    "window that a border cuts": lambda: patterns.window(N - 31, 100),
    "dilated": lambda: patterns.dilated(N, 64, 4),
    "chunked": lambda: patterns.chunked(N, 256),
    "natten": lambda: patterns.natten((64, 64), 7),
    "natten in space": lambda: patterns.natten((16, 16, 16), 5),
    "swin": lambda: patterns.swin((64, 64), 8, 4),
    "haloed blocks": lambda: patterns.haloed_blocks((64, 64), 8, 2),
    "axial": lambda: patterns.axial((64, 64)),
    "sliding tiles": lambda: patterns.sliding_tile((64, 64), 8, 3),
    "frames": lambda: patterns.svg_spatial(16, 252, 2, prompt=64),
    "strides": lambda: patterns.strides(N, 64),
    "summaries": lambda: patterns.summary_tokens(N, 64, 4),
    "sparse, strided": lambda: patterns.sparse_strided(N, 64),
    "sinks": lambda: patterns.sinks(N, 4),
    "longformer": lambda: patterns.longformer(N, 128, [0, 100], causal=False),
    "star": lambda: patterns.star(N // 2),
    "star about the middle": lambda: hub(N, 1777),
    "receiver in the middle": lambda: hub(N, 1777, of=False),
    "sink in the middle": lambda: hub(N, 1777, to=False),
    "global tokens": lambda: patterns.global_tokens(N, [0, 2000]),
    "global tokens in the middle": lambda: patterns.global_tokens(N, range(100, N, 700), causal=False),
    "block of global tokens": lambda: patterns.global_tokens(N, range(2000, 2100)),
    "longformer about the middle": lambda: patterns.longformer(N, 128, [1000, 2500], causal=False),
    "global tokens | few edges": lambda: patterns.global_tokens(N, [2000]) | listed(N, 500),
    "window | few edges": lambda: patterns.window(N, 128) | listed(N, 500),
    "log-sparse": lambda: patterns.log_sparse(N),
    "butterfly": lambda: patterns.butterfly(N),
    "hypercube": lambda: patterns.hypercube(12),
    "torus": lambda: patterns.torus(64, 64),
    "longnet": lambda: patterns.longnet(N, [256, 1024, 4096], [1, 4, 16]),
    "by head": lambda: patterns.fibottention(N, 8),
    "prefix": lambda: patterns.prefix(N, 512),
    "documents": lambda: patterns.documents([500, 300, 96, 1200, 1000, 600, 400]),
    "permutation": lambda: patterns.permutation(permuted(N)),
    "tree": lambda: patterns.tree([-1, *((i - 1) // 2 for i in range(1, N))]),
    "clusters": lambda: patterns.clusters(buckets(N, 32).tolist()),
    "sorted blocks": lambda: patterns.sorted_blocks(N, permuted(64), 64),
    "list | window": lambda: listed(N, 40_000) | patterns.window(N, 128),
    "reversed list | window": lambda: listed(N, 40_000).T | patterns.window(N, 128),
    "window - list": lambda: patterns.window(N, 256) - listed(N, 40_000),
    "rows of list | window": lambda: (listed(N, 40_000) | patterns.window(N, 128)).rows(1000, 3000),
}
EDGES, TILES = 1.25, 1.6  # factors within which the estimates are
DRAWN = 1.5  # of edges where columns of tiles are drawn too

LARGE = {
    "natten": lambda: patterns.natten((128, 128), 7),
    "natten in space": lambda: patterns.natten((32, 32, 16), 5),
    "swin": lambda: patterns.swin((128, 128), 8, 4),
    "longnet": lambda: patterns.longnet(16384, [2048, 4096, 8192, 16384], [1, 2, 4, 8]),
    "sliding tiles": lambda: patterns.sliding_tile((128, 128), 8, 3),
    "butterfly": lambda: patterns.butterfly(16384),
    "hypercube": lambda: patterns.hypercube(14),
    "global tokens": lambda: patterns.global_tokens(16384, [0, 7000, 9000]),
    "star about the middle": lambda: hub(16384, 7777),
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


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_so_they_are_where_columns_are_drawn_too(name):
    check_estimate(LARGE[name](), DRAWN)


@pytest.mark.parametrize("n", [1, 63, 300, 512])
def test_a_graph_of_few_pairs_is_counted(n):
    """Its runs of tiles are those of the cut into boxes, tile by tile."""
    for graph in (
        patterns.window(n, 100),
        patterns.natten((n,), 1),
        patterns.no_self(n),
        patterns.dilated(n, 9, 7),
    ):
        assert not work.is_estimated(graph)
        assert work.num_edges(graph) == graph.num_edges
        runs, exact = planner.divided(graph, 64, 0.0)[0], tiles(graph, 64)
        kinds = torch.zeros(exact.rows, exact.columns, dtype=torch.uint8)
        for row, first, stop, full in zip(
            *(part.tolist() for part in (runs.row, runs.first, runs.stop, runs.full)), strict=True
        ):
            kinds[row, first:stop] = 2 if full else 1
        assert torch.equal(kinds, exact.table()[0, 0])
        mask = graph.mask().double()
        inside = [
            mask[64 * r : 64 * r + 64, 64 * c : 64 * c + 64].sum()
            for r, c in zip(runs.row, runs.first, strict=True)
        ]
        some = ~runs.full
        assert runs.edges[some].tolist() == [int(x) for x, y in zip(inside, some, strict=True) if y]


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


def seconds_by(graph, count, monkeypatch):
    """Estimated seconds of each backend, by the sample or by exact counts."""
    with monkeypatch.context() as patch:
        if count:
            patch.setattr(work, "is_estimated", lambda graph: False)
        works = {"dense": work.dense_work(graph), **{name: make(graph) for name, make in work.WORK.items()}}
    return {name: costs().seconds(works[name], heads=8) for name in ("dense", "tiles", "rows", "mixed")}


def check_choice(graph, monkeypatch):
    graph = one_of(graph, 0, 0)
    about, exact = (seconds_by(graph, count, monkeypatch) for count in (False, True))
    assert exact[min(about, key=about.get)] <= 1.3 * min(exact.values())


@pytest.mark.parametrize("name", thinned(ZOO, 1))
def test_the_choice_is_that_of_exact_counts_or_as_good(name, monkeypatch):
    check_choice(ZOO[name](), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_so_it_is_for_16384_tokens(name, monkeypatch):
    check_choice(LARGE[name](), monkeypatch)
