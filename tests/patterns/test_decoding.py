"""Layouts of training and decoding: the same graphs elsewhere."""

from __future__ import annotations

import pytest
import torch
from support.extras import needs

from gnn_attention import patterns


def quarters(graph, n):
    """The four squares of a graph of noised and clean tokens: [to][from]."""
    mask = graph.mask()
    return [[mask[:n, :n], mask[:n, n:]], [mask[n:, :n], mask[n:, n:]]]


class TestMediaCross:
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
