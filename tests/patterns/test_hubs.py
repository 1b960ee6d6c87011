"""Graphs with hubs: relations, random blocks, and the same graphs in transformers."""

from __future__ import annotations

import numpy
import pytest
import torch
from support.bounds import assert_exact, assert_sum, error
from support.extras import needs

import gnn_attention as ga
from gnn_attention import patterns


def by_blocks(graph, size):
    """The mask of blocks of a graph whose blocks attend to each other as a whole."""
    mask = graph.mask()
    coarse = mask[..., ::size, ::size]
    spread = coarse.repeat_interleave(size, -1).repeat_interleave(size, -2)
    assert torch.equal(spread[..., : graph.num_dst, : graph.num_src], mask)
    return coarse


class TestKin:
    """Relations between builders."""

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

    def test_random_blocks_are_spread_evenly(self):
        """Over many heads every allowed block is drawn about as often: 3 of 11 for a block amid 16."""
        heads = 400
        blocks = by_blocks(patterns.bigbird(32, 2, heads=heads), 2)
        often = blocks[:, 8].float().mean(0)
        allowed = [column for column in range(1, 15) if abs(column - 8) > 1]
        spread = (3 / 11 * 8 / 11 / heads) ** 0.5
        assert (often[allowed] - 3 / 11).abs().max() < 4 * spread


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class TestLongformer:
    """transformers' Longformer layer, distinguished by derivatives and by its output."""

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
    def test_its_edges(self, window, tokens):
        x = torch.randn(1, 24, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        output = self.run(self.layer(window), x, tokens)
        rows = [
            torch.autograd.grad(row.square().sum(), x, retain_graph=True)[0][0].abs().sum(-1) > 0
            for row in output[0]
        ]
        expected = patterns.longformer(24, window // 2 + 1, tokens, causal=False)
        assert torch.equal(torch.stack(rows), expected.mask())

    def test_its_output(self):
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
