"""Graphs with extra nodes: relations, and LongT5's own layers."""

from __future__ import annotations

import pytest
import torch
from support.bounds import assert_sum
from support.extras import needs

import gnn_attention as ga
from gnn_attention import TokenGraph, patterns


class TestKin:
    """Relations between builders."""

    def test_memory_of_listed_edges(self):
        ring = TokenGraph.from_edges(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3, name="ring")
        graph = patterns.memory_tokens(ring, 1, causal=False)
        assert graph.edge_index.t().tolist() == [
            [0, 0],
            [1, 0],
            [2, 0],
            [3, 0],
            [0, 1],
            [3, 1],
            [0, 2],
            [1, 2],
            [0, 3],
            [2, 3],
        ]

    def test_memory_by_head_and_sample(self):
        def rule(b, h, dst, src):
            return (src == b) | (dst == h)

        graph = patterns.memory_tokens(TokenGraph.from_rule(rule, 3, heads=2, batch=3), 1, causal=False)
        assert (graph.heads, graph.batch) == (2, 3)
        assert graph.select(2, 1).in_degree().tolist() == [4, 2, 4, 2]


def unblocked(blocked, n):
    """[blocks, size, 3 size] as they keep it, each block's keys with both neighbours, back to [n, n]."""
    blocks, size, _ = blocked.shape
    mask = torch.zeros(blocks * size, (blocks + 2) * size, dtype=blocked.dtype)
    for block in range(blocks):
        mask[block * size : (block + 1) * size, block * size : (block + 3) * size] = blocked[block]
    assert not mask[:, :size].any()
    assert not mask[:, size + n :].any()
    return mask[:n, size : size + n]


class TestLongT5:
    """transformers' helpers and its layer of transient global attention."""

    @pytest.mark.parametrize(("n", "radius"), [(16, 3), (17, 3), (19, 4), (3, 7)])
    def test_local_mask(self, n, radius):
        longt5 = needs("transformers.models.longt5.modeling_longt5")
        mask = longt5._get_local_attention_mask(torch.ones(1, n), radius + 1, "cpu")[0, 0]
        assert unblocked(mask, n).tolist() == patterns.window(n, radius + 1, causal=False).mask().tolist()

    @pytest.mark.parametrize(("n", "size"), [(16, 4), (19, 4), (7, 4), (3, 4), (0, 4), (5, 1)])
    def test_side_nodes(self, n, size):
        longt5 = needs("transformers.models.longt5.modeling_longt5")
        owner, real = longt5._make_global_fixed_block_ids(torch.ones(1, n), size)
        assert real.shape == (1, n // size)
        assert bool(real.all())
        theirs = owner[0] == torch.arange(n // size)[:, None]
        assert torch.equal(theirs, patterns.side_nodes(n, size).mask())

    @pytest.mark.parametrize("n", [16, 19])
    def test_the_layer(self, n):
        """Its weights are not 0 exactly at our edges, and its output is attention over our graph."""
        torch.manual_seed(0)
        transformers = needs("transformers")
        config = transformers.LongT5Config(
            d_model=8, d_kv=4, num_heads=2, local_radius=3, global_block_size=4, dropout_rate=0.0
        )
        longt5 = needs("transformers.models.longt5.modeling_longt5")
        layer = longt5.LongT5TransientGlobalAttention(config, has_relative_attention_bias=True).eval()
        for bias in (layer.relative_attention_bias, layer.global_relative_attention_bias):
            torch.nn.init.zeros_(bias.weight)
        x, graph = torch.randn(1, n, 8, dtype=torch.float64), patterns.tglobal(n, 4, 4)
        theirs, _, weights = layer.double()(x, mask=torch.ones(1, n), output_attentions=True)
        for head in range(2):
            local = unblocked(weights[0, :, head, :, : 3 * 4], n)
            side = weights[0, :, head, :, 3 * 4 :].flatten(0, 1)[:n]
            assert torch.equal(torch.cat([local, side], 1) > 0, graph.mask())
        sums = layer.global_input_layer_norm(patterns.side_nodes(n, 4).mask().double() @ x)
        q, k, v = (
            part.view(1, -1, 2, 4).transpose(1, 2)
            for part in (layer.q(x), *(w(torch.cat([x, sums], 1)) for w in (layer.k, layer.v)))
        )
        ours = ga.attend(q, k, v, graph, scale=1.0)
        # their softmax is in float32: sums of up to n exponentials, each of them a difference, an exponential
        # and a quotient
        largest = float((v.abs().max() * layer.o.weight.abs().sum(1).max()).detach())
        assert_sum(theirs, layer.o(ours.transpose(1, 2).reshape(1, n, 8)), n + 4, largest)
