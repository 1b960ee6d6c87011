"""``patterns.blocks``: its builders are related, and attention-gym selects the same tiles."""

from __future__ import annotations

import pytest
import torch
from support.extras import needs

from gnn_attention import patterns
from gnn_attention.patterns import blocks


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class TestKin:
    @pytest.mark.parametrize("n", [11, 12])
    def test_all_blocks_are_the_past(self, n):
        logits = numbers(n, 3)
        assert (
            blocks.block_top_k(logits, 4, 3) == blocks.block_top_k(logits, 4, 9, 2, 3) == patterns.causal(n)
        )
        assert blocks.moba(numbers(n, 2), numbers(n, 2), 4, 3) == patterns.causal(n)
        assert blocks.quest(numbers(n, 2), numbers(n, 2), 4, 3) == patterns.causal(n)

    def test_blocks_of_one_token_are_top_k(self):
        logits = numbers(9, 9)
        assert blocks.block_top_k(logits, 1, 3, local=0) == patterns.top_k(logits, 3)
        q, k = numbers(9, 4), numbers(9, 4, seed=1)
        assert blocks.quest(q, k, 1, 3) == patterns.top_k(q @ k.T, 3)

    def test_the_bound_of_a_page_is_above_its_logits(self):
        """Therefore the page of a single outlier is always selected."""
        q, k = numbers(16, 3).abs(), numbers(16, 3, seed=1) * 0.1
        k[5] = 9.0
        assert bool(blocks.quest(q, k, 4, 1).mask()[5:, 5].all())

    def test_quest_does_not_look_ahead(self):
        """Row i is the graph of a decoding step, so later keys do not change it."""
        q, k = numbers(14, 3), numbers(14, 3, seed=1)
        later_keys = torch.cat([k[:9], 100 * k[9:]])
        assert blocks.quest(q, k, 4, 2).rows(0, 9) == blocks.quest(q, later_keys, 4, 2).rows(0, 9)
        assert blocks.quest(q, k, 4, 2) != blocks.quest(q, later_keys, 4, 2)

    def test_tiles_of_one_token_are_top_k(self):
        q, k = numbers(5, 4), numbers(8, 4, seed=1)
        assert blocks.tile_top_k(q, k, 1, 3) == patterns.top_k(q @ k.T, 3, causal=False)
        assert blocks.tile_top_k(q, k, 3, 9) == patterns.cross(5, 8)

    def test_a_short_tile_has_the_mean_of_its_tokens(self):
        """The last tile holds one token: its mean is that token's 3, not a third of it."""
        k = torch.tensor([2.0, 2.0, 2.0, 3.0]).unsqueeze(1)
        assert blocks.tile_top_k(torch.ones(1, 1), k, 3, 1).edge_index.tolist() == [[3], [0]]


@pytest.mark.parametrize("top", [1, 2, 4])
def test_attention_gym_selects_the_same_tiles(top):
    """Video sparse attention has the tiles of ``compute_vsa_topk_indices`` in its BlockMask."""
    q, k = numbers(2, 3, 16, 4), numbers(2, 3, 16, 4, seed=1)
    vsa = needs("attn_gym.masks.vsa")
    mask = vsa.create_vsa_block_mask(vsa.compute_vsa_topk_indices(q, k, 4, top), 4, 4).to_dense()
    graph = blocks.tile_top_k(q, k, 4, top)
    assert torch.equal(graph.mask(), mask.bool().repeat_interleave(4, -1).repeat_interleave(4, -2))
