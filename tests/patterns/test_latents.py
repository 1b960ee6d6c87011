"""Graphs with extra nodes: relations, refusals, and LongT5's and the Perceiver's own layers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support.bounds import assert_sum
from support.extras import needs
from support.refusals import assert_refusals

import gnn_attention as ga
from gnn_attention import TokenGraph, patterns


class TestKin:
    """Relations between builders."""

    def test_memory_is_what_etc_adds_to_a_window(self):
        assert patterns.memory_tokens(patterns.window(9, 3, causal=False), 2, causal=False) == patterns.etc(
            9, 3, 2
        )

    def test_memory_is_what_bigbird_etc_adds_to_blocks(self):
        blocks = patterns.bigbird_etc(18, 2, 0, heads=3)
        assert patterns.memory_tokens(blocks, 4, causal=False) == patterns.bigbird_etc(18, 2, 4, heads=3)

    def test_registers(self):
        assert patterns.memory_tokens(patterns.full(6), 3, causal=False) == patterns.full(9)

    def test_memory_before_a_causal_graph_is_a_sink(self):
        assert patterns.memory_tokens(patterns.causal(6), 3) == patterns.causal(9)
        sinks = patterns.memory_tokens(patterns.window(20, 4), 3)
        assert sinks.in_degree().tolist() == [1, 2, 3] + [3 + min(token + 1, 4) for token in range(20)]

    def test_memory_of_a_graph_of_nobody(self):
        for graph in (patterns.causal(0), patterns.global_tokens(0, []), patterns.documents([])):
            assert patterns.memory_tokens(graph, 2, causal=False) == patterns.full(2)
        assert patterns.memory_tokens(patterns.causal(0), 0).num_edges == 0

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

    def test_every_token_hears_of_every_token_in_one_layer(self):
        """Through the side nodes: each token attends to all of them, and together they stand for all
        tokens.
        """
        n, mask = 19, patterns.tglobal(19, 3, 4).mask()
        assert mask[:, :n].tolist() == patterns.window(n, 3, causal=False).mask().tolist()
        assert mask[:, n:].tolist() == [[True] * 4] * n
        assert patterns.cross(n, 4) @ patterns.side_nodes(n, 4) == patterns.full(n)

    def test_side_nodes_share_out_the_tokens(self):
        assert patterns.side_nodes(19, 4).T.in_degree().tolist() == [1] * 19
        assert patterns.side_nodes(8, 1) == patterns.window(8, 1)

    def test_star_in_steps(self):
        """Any two satellites are two layers apart, through the relay; without it they would be n // 2
        apart.
        """
        satellites = slice(1, 11)
        graph = patterns.star(10)
        assert bool((graph**2).mask()[satellites, satellites].all())
        ring = graph.mask()[satellites, satellites].double()
        assert [bool((ring.matrix_power(layers) > 0).all()) for layers in (4, 5)] == [False, True]

    def test_relay_hears_satellites_alone(self):
        assert patterns.star(4).rows(0, 1).mask().tolist() == [[True] * 5 + [False] * 4]

    @pytest.mark.parametrize("m", [1, 2, 5])
    def test_inducing_points_pass_everything_on(self, m):
        there, back = patterns.isab(7, m)
        assert (there, back) == (patterns.cross(m, 7), patterns.cross(7, m))
        assert back @ there == patterns.full(7)
        assert there.num_edges + back.num_edges == 2 * 7 * m

    def test_latents_hear_everything_after_reading(self):
        reading, thinking = patterns.perceiver(9, 3)
        assert thinking @ reading == reading == patterns.isab(9, 3)[0]
        assert thinking == patterns.full(3)

    @pytest.mark.parametrize(
        "graph",
        [
            patterns.memory_tokens(patterns.window(4, 2), 1),
            patterns.tglobal(5, 2, 2),
            patterns.star(3),
            *patterns.isab(4, 2),
        ],
    )
    def test_copies(self, graph):
        assert copy.deepcopy(graph) == pickle.loads(pickle.dumps(graph)) == graph


class TestRefusals:
    def test_wrong_arguments(self):
        assert_refusals(
            [
                (
                    lambda: patterns.memory_tokens(5, 1),
                    TypeError,
                    "graph must be a TokenGraph .* got 5 of type int",
                ),
                (
                    lambda: patterns.memory_tokens(patterns.cross(2, 3), 1),
                    ValueError,
                    r"must be square, .* got TokenGraph\(cross\(2, 3\)",
                ),
                (
                    lambda: patterns.memory_tokens(patterns.causal(3).rows(1, 3), 1),
                    ValueError,
                    "must be square",
                ),
                (
                    lambda: patterns.memory_tokens(patterns.causal(6).rows(2, 6).T.rows(0, 4).T, 1),
                    ValueError,
                    "must be square, the same tokens on both sides, .* dst from 2",
                ),
                (
                    lambda: patterns.memory_tokens(patterns.causal(3), -1),
                    ValueError,
                    "m must be at least 0, got -1",
                ),
                (lambda: patterns.tglobal(-1, 2, 2), ValueError, "n must be at least 0, got -1"),
                (lambda: patterns.tglobal(5, -2, 2), ValueError, "w must be at least 0, got -2"),
                (lambda: patterns.tglobal(5, 2, 0), ValueError, "block must be at least 1, got 0"),
                (lambda: patterns.side_nodes(5, 0), ValueError, "block must be at least 1, got 0"),
                (lambda: patterns.side_nodes(5.0, 2), TypeError, "n must be an integer, got 5.0"),
                (lambda: patterns.star(-1), ValueError, "n must be at least 0, got -1"),
                (lambda: patterns.star(True), TypeError, "n must be an integer, got the bool True"),
                (lambda: patterns.isab(3, -1), ValueError, "m must be at least 0, got -1"),
                (lambda: patterns.isab("3", 1), TypeError, "n must be an integer, got '3'"),
                (lambda: patterns.perceiver(3, 1.5), TypeError, "m must be an integer, got 1.5"),
                (lambda: patterns.perceiver(-3, 1), ValueError, "n must be at least 0, got -3"),
            ]
        )


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
