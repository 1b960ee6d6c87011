"""Graphs with hubs: relations, random blocks, refusals, and the same graphs in attention-gym and
transformers.
"""

from __future__ import annotations

import copy
import pickle

import networkx
import numpy
import pytest
import torch
from support.bounds import assert_exact, assert_sum, error
from support.extras import needs
from support.refusals import assert_refusals

import gnn_attention as ga
from gnn_attention import TokenGraph, convert, patterns


def by_blocks(graph, size):
    """The mask of blocks of a graph whose blocks attend to each other as a whole."""
    mask = graph.mask()
    coarse = mask[..., ::size, ::size]
    spread = coarse.repeat_interleave(size, -1).repeat_interleave(size, -2)
    assert torch.equal(spread[..., : graph.num_dst, : graph.num_src], mask)
    return coarse


class TestKin:
    """Relations between builders."""

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("tokens", [2, [5, 0], []])
    def test_longformer_is_a_window_and_global_tokens(self, tokens, causal):
        both = patterns.window(11, 3, causal=causal) | patterns.global_tokens(11, tokens, causal=causal)
        assert patterns.longformer(11, 3, tokens, causal=causal) == both

    def test_longformer_halves(self):
        one_sided, both = patterns.longformer(11, 3, [4]), patterns.longformer(11, 3, [4], causal=False)
        assert one_sided | one_sided.T == both
        assert both & patterns.causal(11) == one_sided

    def test_etc_is_longformer_with_tokens_in_front(self):
        assert patterns.etc(9, 3, 2) == patterns.longformer(11, 3, 2, causal=False)
        assert patterns.etc(0, 3, 4) == patterns.full(4)
        assert patterns.etc(6, 2, 0) == patterns.window(6, 2, causal=False)

    def test_one_global_token_owning_everything_is_no_restriction(self):
        assert patterns.etc(7, 2, 1, owner=[0] * 7) == patterns.etc(7, 2, 1)

    def test_owners_only_take_edges_of_global_receivers(self):
        lost = patterns.etc(8, 3, 2) - patterns.etc(8, 3, 2, owner=[0, 1] * 4)
        assert lost.in_degree().tolist() == [4, 4] + [0] * 8

    def test_bigbird_etc_without_tokens_in_front_is_a_window_of_blocks_and_random_ones(self):
        chunks = patterns.bigbird_etc(12, 3, 0, num_random=0)
        assert by_blocks(chunks, 3).tolist() == patterns.window(4, 2, causal=False).mask().tolist()
        assert patterns.bigbird_etc(12, 3, 0, num_random=1).num_edges > chunks.num_edges

    def test_bigbird_of_single_tokens_is_longformer_and_random_edges(self):
        assert patterns.bigbird(9, 1, num_random=0) == patterns.longformer(9, 2, [0, 8], causal=False)

    def test_enough_random_blocks_are_everyone(self):
        assert patterns.bigbird(17, 2, num_random=99) == patterns.full(17)
        assert patterns.bigbird_etc(17, 2, 1, num_random=99) == patterns.full(18)

    @pytest.mark.parametrize(
        "build", [patterns.bigbird, lambda *args, **kw: patterns.bigbird_etc(*args, 1, **kw)]
    )
    def test_random_blocks(self, build):
        """Each head draws its own, the seed decides, one more random block only adds edges."""
        graph = build(48, 2, num_random=3, heads=4, seed=7)
        assert graph == build(48, 2, num_random=3, heads=4, seed=7)
        assert graph.select(0, 0) == build(48, 2, num_random=3, seed=7)
        assert graph.select(0, 0) != build(48, 2, num_random=3, seed=8)
        masks = [graph.select(0, head).mask() for head in range(4)]
        assert not any(torch.equal(masks[a], masks[b]) for a in range(4) for b in range(a))
        more, fewer = build(48, 2, num_random=4, seed=7), build(48, 2, num_random=3, seed=7)
        assert (fewer - more).num_edges == 0
        assert more.num_edges > fewer.num_edges

    def test_global_random_state_is_left_alone(self):
        torch.manual_seed(3)
        expected = torch.rand(2)
        torch.manual_seed(3)
        patterns.bigbird(32, 2, seed=11)
        assert torch.equal(torch.rand(2), expected)

    def test_random_blocks_are_spread_evenly(self):
        """Over many heads every allowed block is drawn about as often: 3 of 11 for a block amid 16."""
        heads = 400
        blocks = by_blocks(patterns.bigbird(32, 2, heads=heads), 2)
        often = blocks[:, 8].float().mean(0)
        allowed = [column for column in range(1, 15) if abs(column - 8) > 1]
        spread = (3 / 11 * 8 / 11 / heads) ** 0.5
        assert (often[allowed] - 3 / 11).abs().max() < 4 * spread

    def test_random_blocks_shorten_the_way(self):
        """A window of three blocks alone needs a layer for each block; three random ones each make it a small
        world.
        """
        line, small_world = (
            convert.to_networkx(patterns.bigbird_etc(200, 1, 0, num_random=num_random))
            for num_random in (0, 3)
        )
        assert networkx.diameter(line) == 199
        assert networkx.diameter(small_world) < 10

    @pytest.mark.parametrize(
        "graph", [patterns.bigbird(20, 2, heads=2), patterns.bigbird_etc(20, 2, 1), patterns.etc(6, 2, 1)]
    )
    def test_copies(self, graph):
        assert copy.deepcopy(graph) == pickle.loads(pickle.dumps(graph)) == graph

    def test_a_graph_by_head_joins_one_that_is_not(self):
        joined = patterns.bigbird(20, 2, num_random=1, heads=3) & patterns.causal(20)
        assert joined.select(0, 2) == patterns.bigbird(20, 2, num_random=1, heads=3).select(
            0, 2
        ) & patterns.causal(20)

    def test_names_say_what_is_not_default(self):
        assert patterns.bigbird(8, 2).name == "bigbird(8, 2)"
        assert (
            patterns.bigbird(8, 2, 1, heads=2, seed=4).name == "bigbird(8, 2, num_random=1, heads=2, seed=4)"
        )
        assert patterns.bigbird_etc(8, 2, 1, seed=3).name == "bigbird_etc(8, 2, 1, seed=3)"
        assert len(patterns.etc(90, 2, 1, owner=[0] * 90).name) < 40

    def test_the_callers_owners_are_not_held(self):
        owner = [0, 1, 1]
        graph = patterns.etc(3, 1, 2, owner=owner)
        owner[0] = 1
        assert graph == patterns.etc(3, 1, 2, owner=torch.tensor([0, 1, 1]))


class TestRefusals:
    def test_wrong_arguments(self):
        assert_refusals(
            [
                (lambda: patterns.longformer(-1, 2, []), ValueError, "n must be at least 0, got -1"),
                (lambda: patterns.longformer(4, -1, 1), ValueError, "w must be at least 0, got -1"),
                (lambda: patterns.longformer(4, 1.0, 1), TypeError, "w must be an integer, got 1.0"),
                (
                    lambda: patterns.longformer(4, 2, [4]),
                    IndexError,
                    r"tokens must be positions in 0 \.\. 3, got 4",
                ),
                (
                    lambda: patterns.longformer(4, 2, 5),
                    IndexError,
                    r"tokens must be positions in 0 \.\. 3, got 4",
                ),
                (lambda: patterns.etc(-4, 2, 1), ValueError, "n must be at least 0, got -4"),
                (lambda: patterns.etc(4, -2, 1), ValueError, "w must be at least 0, got -2"),
                (lambda: patterns.etc(4, 2, -1), ValueError, "num_global must be at least 0, got -1"),
                (
                    lambda: patterns.etc(4, 2, 1, owner=0),
                    TypeError,
                    "owner must be a sequence .* each of the 4 long ones, got 0",
                ),
                (
                    lambda: patterns.etc(4, 2, 1, owner=[0]),
                    ValueError,
                    "for each of the 4 long ones, got 1 of them",
                ),
                (
                    lambda: patterns.etc(2, 2, 1, owner=[0, 1]),
                    IndexError,
                    r"owner must hold global tokens in 0 \.\. 0, got 1",
                ),
                (
                    lambda: patterns.etc(2, 2, 1, owner=[0, -1]),
                    IndexError,
                    r"owner must hold global tokens in 0 \.\. 0, got -1",
                ),
                (
                    lambda: patterns.etc(2, 2, 1, owner=[0, 0.0]),
                    TypeError,
                    "each of owner must be an integer, got 0.0",
                ),
                (lambda: patterns.bigbird(-8, 2), ValueError, "n must be at least 0, got -8"),
                (lambda: patterns.bigbird(8, 0), ValueError, "block must be at least 1, got 0"),
                (lambda: patterns.bigbird(8, 2, -1), ValueError, "num_random must be at least 0, got -1"),
                (lambda: patterns.bigbird(8, 2, heads=0), ValueError, "heads must be at least 1, got 0"),
                (lambda: patterns.bigbird(8, 2, heads=2.0), TypeError, "heads must be an integer, got 2.0"),
                (lambda: patterns.bigbird(8, 2, seed=-4), ValueError, "seed must be at least 0, got -4"),
                (lambda: patterns.bigbird(8, 2, seed=0.5), TypeError, "seed must be an integer, got 0.5"),
                (lambda: patterns.bigbird_etc(8, 2, -1), ValueError, "num_global must be at least 0, got -1"),
                (lambda: patterns.bigbird_etc(8, 0, 1), ValueError, "block must be at least 1, got 0"),
                (
                    lambda: patterns.bigbird_etc(8, 2, 1, num_random=True),
                    TypeError,
                    "num_random must be an integer, got the bool",
                ),
            ]
        )


class TestAttentionGym:
    @pytest.mark.parametrize("radius", [0, 1, 4])
    @pytest.mark.parametrize("tokens", [[], [0], [3, 9]])
    def test_global_sliding_window(self, radius, tokens):
        is_global = torch.zeros(17, dtype=torch.bool)
        is_global[tokens] = True
        masks = needs("attn_gym.masks.global_sliding_window")
        theirs = TokenGraph.from_rule(masks.generate_global_sliding_window(radius, is_global), 17)
        assert theirs == patterns.longformer(17, radius + 1, tokens, causal=False)


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class TestLongformer:
    """transformers' Longformer layer, told apart by derivatives and by its output."""

    @staticmethod
    def layer(window):
        torch.manual_seed(0)
        transformers = needs("transformers")
        config = transformers.LongformerConfig(
            hidden_size=8, num_attention_heads=2, attention_window=[window], attention_probs_dropout_prob=0.0
        )
        longformer = needs("transformers.models.longformer.modeling_longformer")
        layer = longformer.LongformerSelfAttention(config, 0).eval()
        for word in ("query", "key", "value"):
            getattr(layer, f"{word}_global").load_state_dict(getattr(layer, word).state_dict())
        return layer

    @staticmethod
    def run(layer, x, tokens):
        mask = torch.zeros(1, x.shape[1], dtype=x.dtype)
        mask[:, tokens] = 10_000.0
        return layer(
            x, mask, is_index_masked=mask < 0, is_index_global_attn=mask > 0, is_global_attn=bool(tokens)
        )[0]

    @pytest.mark.parametrize("window", [4, 8])
    @pytest.mark.parametrize("tokens", [[], [0], [2, 11]])
    def test_who_hears_whom(self, window, tokens):
        x = torch.randn(1, 24, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        output = self.run(self.layer(window), x, tokens)
        rows = [
            torch.autograd.grad(row.square().sum(), x, retain_graph=True)[0][0].abs().sum(-1) > 0
            for row in output[0]
        ]
        expected = patterns.longformer(24, window // 2 + 1, tokens, causal=False)
        assert torch.equal(torch.stack(rows), expected.mask())

    def test_what_they_hear(self):
        """With the same weights for global tokens as for others, their layer is attention over our graph."""
        layer, x = self.layer(4).double(), numbers(1, 24, 8)
        q, k, v = (
            getattr(layer, word)(x).view(1, 24, 2, 4).transpose(1, 2) for word in ("query", "key", "value")
        )
        ours = ga.attend(q, k, v, patterns.longformer(24, 3, [2, 11], causal=False))
        theirs = self.run(layer, x, [2, 11])
        # their softmax is in float32: sums of up to 24 exponentials, each of them a difference, an
        # exponential and a quotient
        assert_sum(theirs, ours.transpose(1, 2).reshape(1, 24, 8), 24 + 4, float(v.detach().abs().max()))


class TestBigBird:
    """transformers' block-sparse BigBird layer, in evaluation and in training."""

    @staticmethod
    def layer(size, num_random):
        torch.manual_seed(0)
        transformers = needs("transformers")
        config = transformers.BigBirdConfig(
            hidden_size=8,
            num_attention_heads=2,
            block_size=size,
            num_random_blocks=num_random,
            max_position_embeddings=4096,
        )
        big_bird = needs("transformers.models.big_bird.modeling_big_bird")
        return big_bird.BigBirdBlockSparseAttention(config, seed=5).eval()

    @staticmethod
    def run(layer, x):
        big_bird = needs("transformers.models.big_bird.modeling_big_bird")
        masks = big_bird.BigBirdModel.create_masks_for_block_sparse_attn(
            torch.ones(x.shape[:2], dtype=x.dtype), layer.block_size
        )
        blocked, band, rows, columns = masks
        return layer(x, band, rows, columns, blocked, blocked)

    @pytest.mark.parametrize(("n", "size", "num_random"), [(36, 4, 1), (36, 4, 3), (60, 3, 2)])
    def test_evaluation_has_no_random_blocks(self, n, size, num_random):
        _, weights = self.run(self.layer(size, num_random), torch.randn(1, n, 8))
        graph = patterns.bigbird(n, size, num_random=0)
        assert all(torch.equal(head > 0, graph.mask()) for head in weights[0])

    @pytest.mark.parametrize("num_random", [1, 3])
    def test_evaluation_counts_block_0_again(self, num_random):
        """Every random block is a copy of block 0, and the softmax counts the copies: a multiplicity, not an
        edge.
        """
        n, size = 36, 4
        layer, x = self.layer(size, num_random).double(), numbers(1, n, 8)
        q, k, v = (
            getattr(layer, word)(x).view(1, n, 2, 4).transpose(1, 2) for word in ("query", "key", "value")
        )
        graph = patterns.bigbird(n, size, num_random=0)
        src, dst = graph.edge_index
        again = (src < size) & (dst >= size) & (dst < n - size)
        theirs = self.run(layer, x)[0]
        ours = [
            ga.attend(q, k, v, graph, bias=again * torch.tensor(factor, dtype=torch.float64).log())
            .transpose(1, 2)
            .reshape(1, n, 8)
            for factor in (1.0 + num_random, 1.0)
        ]
        assert_exact(theirs, ours[0])
        assert error(theirs, ours[1]) > 1e-3  # another graph, not a rounding

    @pytest.mark.parametrize(("n", "size", "num_random"), [(60, 3, 2), (44, 2, 3)])
    def test_training_draws_as_many_blocks(self, n, size, num_random):
        """Its random blocks are blocks that ours may be: new to the row, as many, other ones in other
        heads.
        """
        layer = self.layer(size, num_random).train()
        state = numpy.random.get_state()
        _, weights = self.run(layer, torch.randn(1, n, 8))
        numpy.random.set_state(state)
        theirs = weights[0] > 0
        base = patterns.bigbird(n, size, num_random=0).mask()
        assert bool((theirs | ~base).all())
        ours = patterns.bigbird(n, size, num_random=num_random, heads=2)
        assert torch.equal(theirs.sum(-1), ours.in_degree())
        assert not torch.equal(theirs[0], theirs[1])
        first = (2 * num_random + 5) * size
        assert not (theirs & ~base)[..., first:].any()  # they draw from the first blocks alone
        assert (ours.mask() & ~base)[..., first:].any()
