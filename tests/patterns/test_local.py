"""Local attention on a line: the same graphs elsewhere."""

from __future__ import annotations

import pytest
import torch
from support.extras import needs

from gnn_attention import patterns


def influence(layer, n, width=8):
    """bool [dst, src]: whose input moves whose output, by the derivatives of a layer that maps [1, n, width]
    to its like.
    """
    torch.manual_seed(0)
    jacobian = torch.autograd.functional.jacobian(layer, torch.randn(1, n, width, dtype=torch.float64))
    return jacobian[0, :, :, 0].abs().sum((1, 3)) > 0


class TestHuggingFace:
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize(
        ("n", "before", "after"), [(12, 1, 0), (12, 1, 1), (15, 2, 0), (12, 0, 0), (3, 1, 0)]
    )
    def test_local_attention_of_reformer(self, causal, n, before, after):
        """Its chunks stand in a ring: whose input moves whose output, by the layer's own derivatives."""
        transformers = needs("transformers")
        config = transformers.ReformerConfig(
            hidden_size=8,
            num_attention_heads=1,
            attention_head_size=8,
            local_attn_chunk_length=3,
            local_num_chunks_before=before,
            local_num_chunks_after=after,
            is_decoder=causal,
        )
        reformer = needs("transformers.models.reformer.modeling_reformer")
        layer = reformer.LocalSelfAttention(config).double().eval()
        expected = patterns.chunked(n, 3, before=before, after=after, causal=causal, wrap=True)
        assert torch.equal(influence(lambda x: layer(x).hidden_states, n), expected.mask())


class TestTransformerXL:
    @pytest.mark.parametrize(("segment", "memory"), [(4, 3), (4, 6), (5, 0)])
    def test_segment_by_segment(self, segment, memory):
        """Its mask of one segment over memory and segment: everything but what lies above the diagonal moved
        by the memory.
        """
        n = 20
        mask = torch.zeros(n, n, dtype=torch.bool)
        for start in range(0, n, segment):
            past = min(memory, start)
            mask[start : start + segment, start - past : start + segment] = (
                torch.ones(segment, past + segment).tril(past) > 0
            )
        assert torch.equal(patterns.segment_recurrence(n, segment, memory).mask(), mask)
