"""Layouts of training and decoding: kin, refusals, and the same graphs elsewhere."""

from __future__ import annotations

import pytest
import torch
from support.extras import needs
from support.refusals import assert_refusals
from torch.nn.attention.flex_attention import create_mask

from gnn_attention import TokenGraph, patterns


def quarters(graph, n):
    """The four squares of a graph of noised and clean tokens: [to][from]."""
    mask = graph.mask()
    return [[mask[:n, :n], mask[:n, n:]], [mask[n:, :n], mask[n:, n:]]]


class TestBlockDiffusion:
    @pytest.mark.parametrize(("n", "block"), [(8, 4), (7, 3), (5, 1), (5, 5), (5, 9)])
    def test_its_quarters(self, n, block):
        """Noised among themselves: separate blocks. Clean to clean: block-causal. Clean to noised: what that
        adds.
        """
        (noised, to_noised), (leak, clean) = quarters(patterns.block_diffusion(n, block), n)
        sizes = [len(range(start, min(start + block, n))) for start in range(0, n, block)]
        own, past = patterns.documents(sizes, causal=False), patterns.block_causal(n, block)
        assert torch.equal(noised, own.mask())
        assert torch.equal(clean, past.mask())
        assert torch.equal(to_noised, (past - own).mask())
        assert not bool(leak.any())

    def test_single_tokens_are_a_causal_model(self):
        (noised, to_noised), (_, clean) = quarters(patterns.block_diffusion(6, 1), 6)
        assert torch.equal(noised, patterns.window(6, 1).mask())
        assert torch.equal(to_noised, patterns.strict_causal(6).mask())
        assert torch.equal(clean, patterns.causal(6).mask())

    def test_one_block_denoises_without_a_past(self):
        (noised, to_noised), _ = quarters(patterns.block_diffusion(6, 6), 6)
        assert bool(noised.all())
        assert not bool(to_noised.any())

    @pytest.mark.parametrize(("n", "block"), [(12, 4), (7, 3), (5, 1), (5, 8)])
    def test_attention_gym(self, n, block):
        masks = needs("attn_gym.masks")
        assert TokenGraph.from_rule(
            masks.generate_block_diffusion_mask(n, block), 2 * n
        ) == patterns.block_diffusion(n, block)


class TestDraftTraining:
    def test_each_draft_continues_the_prefix(self):
        graph = patterns.draft_training(3, 2, 4)
        assert graph == patterns.prefix_tree([3, 4, 4], [-1, 0, 0])
        assert graph == patterns.shared_prefix(3, [4, 4])
        assert patterns.draft_training(3, 1, 4) == patterns.causal(7)
        assert patterns.draft_training(0, 3, 2) == patterns.documents([2, 2, 2])

    @pytest.mark.parametrize(("prefix", "blocks", "block"), [(5, 3, 4), (0, 2, 3), (1, 1, 1), (4, 5, 1)])
    def test_attention_gym(self, prefix, blocks, block):
        """Its receivers are the drafts alone."""
        masks = needs("attn_gym.masks")
        rule, size = masks.generate_jetspec_training_mask_mod(prefix, block), blocks * block
        theirs = TokenGraph.from_rule(rule, size, prefix + size)
        drafts = patterns.draft_training(prefix, blocks, block).rows(prefix, prefix + size)
        assert torch.equal(theirs.mask(), drafts.mask())
        assert drafts.dst_offset == prefix


class TestMediaCross:
    def test_all_so_far_contains_the_last(self):
        last, all_of_them = (
            patterns.media_cross(9, [2, 3, 7], 2),
            patterns.media_cross(9, [2, 3, 7], 2, last=False),
        )
        assert last & all_of_them == last
        assert last.in_degree().tolist() == [0, 0, 2, 2, 2, 2, 2, 2, 2]
        assert all_of_them.in_degree().tolist() == [0, 0, 2, 4, 4, 4, 4, 6, 6]

    def test_no_image_and_an_image_at_once(self):
        assert patterns.media_cross(5, [], 3).num_edges == 0
        assert patterns.media_cross(5, [], 3).num_src == 0
        assert patterns.media_cross(5, [0], 3) == patterns.cross(5, 3)

    @pytest.mark.parametrize("media", [[1, 4], [0, 5, 6], [2]])
    def test_attention_gym(self, media):
        """It takes an interval of text for each image: from where it stands to the next."""
        intervals = torch.tensor([[start, stop] for start, stop in zip(media, [*media[1:], 9], strict=True)])
        masks = needs("attn_gym.masks")
        rule = masks.generate_vision_cross_attention_mask_mod(intervals, 3)
        theirs = create_mask(rule, 1, 1, 9, 3 * len(media), device="cpu")[0, 0]
        assert torch.equal(theirs, patterns.media_cross(9, media, 3).mask())

    @pytest.mark.parametrize("media", [[1, 4], [0, 5, 6], [2]])
    def test_idefics(self, media):
        """Hugging Face's mask of text tokens over images."""
        ids = torch.tensor([[7 if place in media else 1 for place in range(9)]])
        idefics = needs("transformers.models.idefics.processing_idefics")
        number, _ = idefics.image_attention_mask_for_packed_input_ids_pt(ids, _Tokenizer())
        theirs = idefics.incremental_to_binary_attention_mask(number, "pt", num_classes=len(media))[0].bool()
        assert torch.equal(theirs, patterns.media_cross(9, media, 1).mask())

    @pytest.mark.parametrize(("media", "same"), [([1, 4], True), ([2], True), ([0, 5, 6], False)])
    def test_mllama_lets_adjacent_images_share_their_text(self, media, same):
        ids = [7 if place in media else 1 for place in range(9)]
        tiles = 4
        mllama = needs("transformers.models.mllama.processing_mllama")
        sparse = [mllama.get_cross_attention_token_mask(ids, 7)]
        dense = mllama.convert_sparse_cross_attention_mask_to_dense(
            sparse, [[tiles] * len(media)], tiles, len(ids)
        )
        theirs = torch.from_numpy(dense[0]).flatten(1).bool()
        ours = patterns.media_cross(9, media, tiles).mask()
        assert torch.equal(theirs, ours) == same
        assert torch.equal(theirs | ours, theirs)


class _Tokenizer:
    """As much of a tokenizer as Idefics' mask asks for."""

    eos_token_id = 2

    def convert_tokens_to_ids(self, token):
        return {"<image>": 7}[token]


class TestRefusals:
    def test_wrong_arguments(self):
        assert_refusals(
            [
                (lambda: patterns.block_diffusion(-1, 2), ValueError, "n must be at least 0, got -1"),
                (lambda: patterns.block_diffusion(4, 0), ValueError, "block must be at least 1, got 0"),
                (lambda: patterns.block_diffusion(4, 2.0), TypeError, "block must be an integer, got 2.0"),
                (lambda: patterns.draft_training(-1, 2, 2), ValueError, "prefix must be at least 0, got -1"),
                (lambda: patterns.draft_training(1, -2, 2), ValueError, "blocks must be at least 0, got -2"),
                (lambda: patterns.draft_training(1, 2, 0), ValueError, "block must be at least 1, got 0"),
                (lambda: patterns.media_cross(-1, [], 2), ValueError, "n must be at least 0, got -1"),
                (lambda: patterns.media_cross(4, [1], 0), ValueError, "tokens must be at least 1, got 0"),
                (
                    lambda: patterns.media_cross(4, 1, 2),
                    TypeError,
                    r"media must be a list of text positions, got 1; one image is \[1\]",
                ),
                (
                    lambda: patterns.media_cross(4, [0.5], 2),
                    TypeError,
                    "each of media must be an integer, got 0.5",
                ),
                (
                    lambda: patterns.media_cross(4, [4], 2),
                    IndexError,
                    r"media must be text positions in 0 \.\. 3, got 4",
                ),
                (lambda: patterns.media_cross(4, [-1], 2), IndexError, r"in 0 \.\. 3, got -1"),
                (
                    lambda: patterns.media_cross(4, [2, 1], 2),
                    ValueError,
                    r"strictly increasing positions, got \[2, 1\]",
                ),
                (
                    lambda: patterns.media_cross(4, [1, 1], 2),
                    ValueError,
                    r"strictly increasing positions, got \[1, 1\]",
                ),
            ]
        )
