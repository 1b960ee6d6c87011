"""Costs equal torch's count of operations, sizes of real heads and caches, and counts of masks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gnn_attention import TokenGraph, algebra, attend, cost, patterns
from gnn_attention.analyse.cost import FORMS, Macs
from gnn_attention.cache import KeyValueCache, PatternMessageCache
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads

GROUPED = {"width": 24, "num_heads": 6, "head_dim": 5, "value_dim": 3, "num_kv_heads": 2}
HEADS: dict[str, Callable[[StandardHeads], nn.Module]] = {
    "standard": lambda heads: heads,
    "factored": FactoredHeads.of,
    "merged": MergedHeads.of,
}
each_form = pytest.mark.parametrize("form", FORMS)


def make_heads(form: str) -> Any:
    return HEADS[form](StandardHeads(**GROUPED))


def count_macs(function: Callable[..., Any], *arguments: Any) -> tuple[int, Any]:
    """Return the multiply-accumulates, which are half of the operations that torch counts, and the result."""
    with FlopCounterMode(display=False) as counter:
        result = function(*arguments)
    assert counter.get_total_flops() % 2 == 0
    return counter.get_total_flops() // 2, result


class TestForms:
    @each_form
    @pytest.mark.parametrize(("num_dst", "num_src"), [(1, 1), (9, 9), (4, 11)])
    def test_torch_counts_the_same(self, form, num_dst, num_src):
        """Each part of a pass costs what torch counts: the heads' methods, logits and weighted sums."""
        heads, graph = make_heads(form), patterns.cross(num_dst, num_src)
        receive, q = count_macs(heads.receive, torch.randn(1, num_dst, 24))
        send, (k, v) = count_macs(heads.send, torch.randn(1, num_src, 24))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        logits, weights = count_macs(torch.matmul, q, k.mT)
        weighting, mixtures = count_macs(torch.matmul, weights, v)
        collect, _ = count_macs(heads.collect, mixtures)
        result = cost.of_form(form, **GROUPED, graph=graph)
        assert result.macs == Macs(receive, send, logits, weighting, collect)

    @each_form
    def test_parameters_are_those_of_the_heads(self, form):
        """The factored and the merged form have the same parameters."""
        expected = sum(p.numel() for p in make_heads(form).parameters())
        assert cost.of_form(form, **GROUPED).parameters == expected

    @each_form
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_activations_are_the_bytes_that_are_made(self, form, dtype):
        """Each storage of q, k, v and the mixtures counts once; the storage of the states does not count."""
        heads, graph = make_heads(form).to(dtype), patterns.cross(4, 9)
        x_dst, x_src = torch.randn(2, 4, 24, dtype=dtype), torch.randn(2, 9, 24, dtype=dtype)
        q, (k, v) = heads.receive(x_dst), heads.send(x_src)
        mixtures = attend(q, k, v, graph, scale=heads.scale)
        states = {x.untyped_storage().data_ptr() for x in (x_dst, x_src)}
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in (q, k, v, mixtures)}
        expected = sum(size for storage, size in storages.items() if storage not in states)
        assert 2 * cost.of_form(form, **GROUPED, graph=graph, dtype=dtype).activations == expected

    @each_form
    @pytest.mark.parametrize(
        "build", [patterns.causal, lambda n: patterns.window(n, 4), lambda n: patterns.sinks(n, 2)]
    )
    def test_a_pass_is_the_sum_of_its_steps(self, form, build):
        """Decoding token by token costs as much as one pass."""
        steps = [cost.of_form(form, **GROUPED, graph=build(n)).step for n in range(1, 12)]
        assert sum(steps, start=Macs()) == cost.of_form(form, **GROUPED, graph=build(11)).macs

    @each_form
    def test_graphs_that_differ_by_head_or_sample(self, form):
        """Each head has its own edges, and each sample its own tokens."""
        graphs = [patterns.window(9, 2), patterns.causal(9), patterns.full(9)]
        costs = [cost.of_form(form, 12, 3, graph=graph) for graph in graphs]
        by_head = cost.of_form(form, 12, 3, graph=algebra.per_head(*graphs))
        by_sample = cost.of_form(form, 12, 3, graph=algebra.per_sample(*graphs))
        assert 3 * by_head.macs.edges == sum(single.macs.edges for single in costs)
        assert by_head.macs.total - by_head.macs.edges == costs[0].macs.total - costs[0].macs.edges
        assert by_sample.macs == costs[0].macs + costs[1].macs + costs[2].macs
        assert by_sample.step == costs[0].step + costs[1].step + costs[2].step
        assert by_sample.activations == 3 * by_head.activations == 3 * costs[0].activations
        with pytest.raises(ValueError, match="graph must have 2 heads or none, got 3"):
            cost.of_form(form, 12, 2, graph=algebra.per_head(*graphs))

    def test_wrong_arguments_are_named(self):
        graph, form = patterns.causal(3), partial(cost.of_form, "merged", 8)
        calls: dict[str, Callable[[], object]] = {
            "form must be one of 'standard', 'factored', 'merged', got 'm'": lambda: cost.of_form("m", 8, 2),
            "tokens must be at least 1, got 0": lambda: form(2, tokens=0),
            "pass tokens or graph, not both": lambda: form(2, tokens=3, graph=graph),
            "graph must be a TokenGraph, got 3 of type int": lambda: form(2, graph=3),
            "graph must be a TokenGraph, got .* of type str": lambda: cost.of_graph("window(3, 2)"),
        }
        for message, call in calls.items():
            with pytest.raises((TypeError, ValueError), match=message):
                call()


sizes_of_heads = st.builds(
    lambda width, groups, each, head_dim, value_dim: (width, groups * each, head_dim, value_dim, groups),
    *(st.integers(1, most) for most in (64, 4, 4, 40, 40)),
)
graphs = st.builds(patterns.window, st.integers(1, 40), st.integers(1, 40))


class TestOrder:
    """If head_dim + value_dim < width, then standard < factored < merged (seed S1.22)."""

    @pytest.mark.slow
    @settings(max_examples=100, deadline=None)
    @given(sizes=sizes_of_heads, graph=graphs)
    def test_the_differences(self, sizes, graph):
        """The differences follow from the module's table of costs; for thin heads they are positive."""
        d, H, D, V, G = sizes
        pair = D + V
        standard, factored, merged = (cost.of_form(form, *sizes, graph=graph).macs.total for form in FORMS)
        tokens, edges = graph.num_dst, int(graph.mask().sum())
        assert factored - standard == tokens * d * (H - G) * pair + H * edges * (2 * d - pair)
        assert merged - factored == 2 * tokens * H * d * (d - pair)
        assert pair >= d or standard < factored < merged


class TestCaches:
    """Costs equal the bytes of real caches, whose first chunk takes no spare rows if autograd is on."""

    GRAPH = patterns.window(11, 4) | patterns.sinks(11, 1)

    @pytest.mark.parametrize("form", ["factored", "merged"])
    def test_patterns_and_messages(self, form):
        convert = {"factored": FactoredHeads.of, "merged": MergedHeads.of}[form]
        result = cost.of_form(form, **GROUPED, graph=self.GRAPH)
        for kind, side, keep in (
            ("pattern, message", "sender", "messages"),
            ("state, message", "receiver", "messages"),
            ("state and a 1", "receiver", "states"),
        ):
            cache = PatternMessageCache(convert(StandardHeads(**GROUPED), side=side), self.GRAPH, keep)
            cache.update(torch.randn(1, 11, 24))
            assert cache.nbytes == 11 * result.cache_per_token[kind]

    def test_layers_and_samples(self):
        """There are two layers, and each sample has its own graph."""
        graph = algebra.per_sample(patterns.window(11, 3), patterns.causal(11))
        heads, cache, x = StandardHeads(**GROUPED), KeyValueCache(graph, layers=2), torch.randn(2, 11, 24)
        for layer in range(2):
            cache.update(heads, x, layer)
        result = cost.of_form("standard", **GROUPED, graph=graph)
        assert cache.nbytes == 2 * 11 * result.cache_per_token["key, value"]


def max_cached_senders(graph: TokenGraph) -> int:
    """Return the most senders in a cache, if each chunk is as short as its receivers allow."""
    mask = graph.mask()
    while mask.dim() > 2:
        mask = mask.any(0)
    largest = start = 0
    while start < len(mask):
        stop = start + 1
        while any(mask[start:stop, stop:].flatten().tolist()):
            stop += 1
        largest = max(largest, int(mask[start:, :stop].any(0).sum()))
        start = stop
    return largest


LISTED = TokenGraph.from_edges(torch.tensor([[0, 3, 1, 3, 2, 4, 0], [2, 1, 1, 0, 4, 3, 4]]), 6)
GRAPHS = [
    *(patterns.causal(13), patterns.full(7), patterns.causal(1), LISTED, LISTED.T, patterns.strict_causal(9)),
    *(patterns.window(13, 4), patterns.window(13, 4, causal=False), patterns.causal(0)),
    *(patterns.dilated(13, 3, 2), patterns.documents([4, 0, 1, 6])),
    *(patterns.tree([-1, 0, 0, 1, 3, 1, 2]), patterns.causal(6) - patterns.causal(6)),
    *(patterns.causal(12).rows(5, 9), patterns.cross(4, 9), patterns.cross(9, 4)),
    algebra.per_head(patterns.window(9, 2), patterns.sinks(9, 3)),
    algebra.per_sample(patterns.full(5), patterns.causal(5), patterns.window(5, 1)),
    *(patterns.window(n, w) | patterns.sinks(n, s) for n, w, s in ((13, 3, 2), (300, 20, 3))),
]


class TestGraphs:
    @pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
    def test_counts_are_those_of_the_mask(self, graph):
        mask, result = graph.mask(), cost.of_graph(graph)
        masks = mask.flatten(0, -3) if mask.dim() > 2 else mask.unsqueeze(0)
        dst = torch.arange(graph.num_dst).unsqueeze(1) + graph.dst_offset
        src = torch.arange(graph.num_src) + graph.src_offset
        assert result.edges == int(mask.sum())
        assert result.full == mask.numel()
        assert result.causal == len(masks) * int((src <= dst).sum())
        if graph.num_dst == graph.num_src:
            assert result.cached == max_cached_senders(graph)
        else:
            assert result.cached == int(masks.any(0).any(0).sum())

    def test_shares(self):
        result = cost.of_graph(patterns.window(8, 2))
        assert (result.edges, result.causal, result.full, result.of_causal) == (15, 36, 64, 15 / 36)

    def test_many_tokens_are_not_listed(self):
        """The first w tokens have w (w + 1) / 2 edges, later ones w each and up to 4 from sinks outside."""
        n, w = 200_000, 4096
        graph = patterns.window(n, w) | patterns.sinks(n, 4)
        result = cost.of_graph(graph)
        assert result.edges == w * (w + 1) // 2 + (n - w) * w + (1 + 2 + 3) + 4 * (n - w - 3)
        assert (result.cached, result.causal, result.full) == (w + 4, n * (n + 1) // 2, n * n)
